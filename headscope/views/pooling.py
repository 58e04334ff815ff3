"""Making attention maps smaller: means and largest weights of square tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headscope.results import AttentionMap, tile_labels


def pooled(attention: AttentionMap, cells: int) -> AttentionMap:
    """The same map with at most `cells` rows and columns; of a pooled map, tiles are put together.

    Means are weighted by the tiles' sizes, so that they are means over the whole matrix's tiles.
    """
    step = -(-max(attention.weights.shape[1:]) // cells)
    if step <= 1:
        return attention
    queries, keys = attention.tokens or attention.weights.shape[1:]
    tile = attention.tile * step
    old, new = (_sizes(queries, t)[:, None] * _sizes(keys, t) for t in (attention.tile, tile))
    peak = attention.weights if attention.peak is None else attention.peak
    return replace(
        attention,
        weights=np.stack([_reduced(np.add, head * old, step) / new for head in attention.weights]),
        peak=np.stack([_reduced(np.fmax, head, step) for head in peak]),
        queries=tile_labels(queries, tile),
        keys=tile_labels(keys, tile),
        tile=tile,
        tokens=(queries, keys),
    )


def _sizes(count: int, tile: int) -> NDArray[np.float32]:
    """(tiles,): how many of `count` tokens are in each tile."""
    return np.minimum(tile, count - np.arange(0, count, tile)).astype(np.float32)


def _reduced(function: np.ufunc, matrix: NDArray[np.float32], step: int) -> NDArray[np.float32]:
    """Every `step` × `step` cells made one."""
    rows, columns = (np.arange(0, n, step) for n in matrix.shape)
    return function.reduceat(function.reduceat(matrix, columns, axis=1), rows, axis=0)
