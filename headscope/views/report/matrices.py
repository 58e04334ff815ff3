"""Attention matrices small enough for a page: square roots in eight bits, pooled where there are too many."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.results import AttentionMap
from headscope.views.pooling import pooled
from headscope.views.text import token_label

# All matrices together, before base64 adds a third.
MOST_BYTES = 2 * 2**20
# Fewer rows and columns show nothing.
_FEWEST_CELLS = 16
_MOST_CELLS = 128
_LONGEST_TOKEN = 24
LEVELS = 255


@dataclass(frozen=True)
class Matrices:
    """What the page has of the matrices.

    Attributes:
        maps: One a layer, ready for JSON: `weights` has each head's rows one after the other, a byte a cell, as base64;
            a weight is `scales[head] * (byte / 255) ** 2`.
        axes: Lists of token labels, which maps name by number: most layers have the same.
        error: What a weight is off by at most.
        bytes: Of all cells, before base64.
        tile: The largest side of a tile, in tokens; 1 where nothing is pooled.
    """

    maps: tuple[dict[str, Any], ...]
    axes: tuple[tuple[str, ...], ...]
    error: float
    bytes: int
    tile: int


def cells_allowed(heads: int) -> int:
    """Rows and columns at which all heads' matrices stay within `MOST_BYTES`: between 16 and 128."""
    return min(max(isqrt(MOST_BYTES // max(heads, 1)), _FEWEST_CELLS), _MOST_CELLS)


def compact(maps: Sequence[AttentionMap]) -> Matrices:
    """The matrices of all layers, each with at most `cells_allowed` rows and columns."""
    most = cells_allowed(sum(len(found.heads) for found in maps))
    small = [pooled(found, most) for found in maps]
    axes: dict[tuple[str, ...], int] = {}
    records = tuple(_record(found, axes) for found in small)
    worst = max((scale for record in records for scale in record["scales"]), default=0.0)
    return Matrices(
        records,
        tuple(axes),
        # Rounding moves a root by half a step at most, and the slope of its square is 2 at most.
        worst / LEVELS,
        sum(found.weights.size for found in small),
        max((found.tile for found in small), default=1),
    )


def _record(found: AttentionMap, axes: dict[tuple[str, ...], int]) -> dict[str, Any]:
    scales = _largest(found.weights)
    return {
        "stack": found.stack,
        "layer": found.layer,
        "heads": list(found.heads),
        "queries": _axis(found.queries, axes),
        "keys": _axis(found.keys, axes),
        "tile": found.tile,
        "scales": scales.tolist(),
        "weights": base64.b64encode(roots(found.weights, scales).tobytes()).decode("ascii"),
    }


def _axis(labels: Sequence[str], axes: dict[tuple[str, ...], int]) -> int:
    return axes.setdefault(tuple(token_label(label, _LONGEST_TOKEN) for label in labels), len(axes))


def _largest(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """(heads,): each head's largest weight, 1 for a head that has none."""
    largest = np.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0).max(axis=(1, 2), initial=0.0)
    return np.where(largest > 0, largest, 1).astype(np.float32)


def roots(weights: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """uint8, (heads, query, key): square roots of weights over their scale, in 255 steps; 0 for what is no number."""
    shares = np.clip(np.nan_to_num(weights, nan=0.0) / scales[:, None, None], 0, 1)
    steps: NDArray[np.uint8] = np.rint(LEVELS * np.sqrt(shares)).astype(np.uint8)
    return steps
