"""How far apart heads of two models are, from their rows on the same tokens.

The distance is the one of the type `similarity`: the root of the mean over rows of the Jensen-Shannon divergence, in
units of log 2 (Endres and Schindelin, 2003, IEEE Transactions on Information Theory 49: a metric). Clark et al. (2019,
"What Does BERT Look At?", section 6) sum over the rows of a text, and the sum grows with the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.comparison.assignment import assign
from headscope.comparison.result import Between, Match
from headscope.comparison.rows import Kept, Row
from headscope.heads.catalogue.similarity import pair_divergences
from headscope.heads.catalogue.similarity_rows import SUMS, scaled

Spot = tuple[int, int]
"""A layer and a head."""

Rows = Mapping[Row, Mapping[Spot, Tensor]]
"""Weights of each head, float32 (key,), by row."""

# Two matchings whose sums of distances differ by less are as good: heads then stay where they are.
_STAY = 1e-9


@dataclass(frozen=True)
class StackRows:
    """The rows of one stack that both models have.

    Attributes:
        stack: As the first model calls it.
        rows: The same row in both.
        heads_a, heads_b: All heads that the rows may have, in the order of layer and head.
    """

    stack: str
    rows: tuple[tuple[dict[Spot, Tensor], dict[Spot, Tensor]], ...]
    heads_a: tuple[Spot, ...]
    heads_b: tuple[Spot, ...]


def shared_rows(stack: str, a: Rows, b: Rows, heads_a: Sequence[Spot], heads_b: Sequence[Spot]) -> StackRows:
    """The rows of the same place in both models, of these heads."""
    both = tuple((_only(a[row], heads_a), _only(b[row], heads_b)) for row in a if row in b)
    return StackRows(stack, tuple(pair for pair in both if all(pair)), tuple(heads_a), tuple(heads_b))


def _only(row: Mapping[Spot, Tensor], heads: Sequence[Spot]) -> dict[Spot, Tensor]:
    return {spot: row[spot] for spot in heads if spot in row}


def by_spot(kept: Kept, stack: str, name: str, heads: Mapping[int, Sequence[int]]) -> dict[Row, dict[Spot, Tensor]]:
    """A stack's rows, with the weights of each head.

    Args:
        name: What to call the stack.
        heads: By layer, the heads along the first axis of the kept weights.
    """
    return {
        replace(row, stack=name): {
            (layer, head): weights[i] for layer, weights in layers.items() for i, head in enumerate(heads[layer])
        }
        for row, layers in kept.items()
        if row.stack == stack
    }


def same_places(rows: StackRows) -> dict[Spot, float]:
    """The distance of each head to the head of the same number in the other model, exactly 0 where rows are equal.

    Heads that only one of them has, or of which no row says anything, are left out.
    """
    spots = [spot for spot in rows.heads_a if spot in set(rows.heads_b)]
    sums, counts = np.zeros(len(spots)), np.zeros(len(spots), dtype=int)
    for a, b in rows.rows:
        here = [i for i, spot in enumerate(spots) if spot in a and spot in b]
        if here:
            p, q = (scaled(_stacked([row[spots[i]] for i in here], _width(a, b))) for row in (a, b))
            found = divergence(p, q).numpy()
            said = np.isfinite(found)
            sums[here] += np.where(said, found, 0.0)
            counts[here] += said
    return {spot: math.sqrt(s / n) for spot, s, n in zip(spots, sums.tolist(), counts.tolist(), strict=True) if n}


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of rows that sum to one, float64 (..., key), in units of log 2; NaN where one is NaN.

    As the mean of p log (2p / (p + q)) and q log (2q / (p + q)), which gives exactly 0 where rows are equal.
    """
    both = p + q
    halves = (torch.xlogy(w, torch.where(both == 0, 1.0, 2 * w / both)).sum(dim=-1) / 2 for w in (p, q))
    return sum(halves, torch.zeros(())).clamp(min=0) / math.log(2)


def between(rows: StackRows, same: Mapping[Spot, float]) -> Between:
    """Distances of all heads of one model to all of the other.

    Fewer rows than there are where pairs x rows x keys would pass 2^34; one of them at least. In float32 a distance
    below 1e-3 cannot be told from 0, so those of `same` are put in.
    """
    place_a, place_b = ({spot: i for i, spot in enumerate(heads)} for heads in (rows.heads_a, rows.heads_b))
    shape = len(place_a), len(place_b)
    sums, counts = np.zeros(shape), np.zeros(shape, dtype=int)
    left, used = 2 * SUMS / max(1, sum(shape)) ** 2, 0
    for a, b in rows.rows:
        width = _width(a, b)
        if used and left < width:
            break
        left, used = left - width, used + 1
        p, q = (scaled(_stacked(list(row.values()), width)) for row in (a, b))
        said = [~part[:, 0].isnan() for part in (p, q)]
        index_a, index_b = (
            np.array([place[spot] for spot, known in zip(row, ok.tolist(), strict=True) if known], dtype=int)
            for place, row, ok in zip((place_a, place_b), (a, b), said, strict=True)
        )
        found = pair_divergences(torch.cat([p[said[0]], q[said[1]]]))[: len(index_a), len(index_a) :]
        sums[np.ix_(index_a, index_b)] += found
        counts[np.ix_(index_a, index_b)] += 1
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.sqrt(sums / counts)
    for spot, known in same.items():
        distance[place_a[spot], place_b[spot]] = known
    return Between(rows.stack, rows.heads_a, rows.heads_b, distance.astype(np.float32), used)


def matching(found: Between) -> list[Match]:
    """Each head of the model with fewer heads gets one of the other's, so that the sum of distances is least.

    Heads of all layers may be paired. Where nothing is lost by it, heads stay where they are. Pairs of which no row
    says anything are left out.
    """
    distance: NDArray[np.float64] = found.distance.astype(np.float64)
    place_b = {spot: i for i, spot in enumerate(found.heads_b)}
    # Pairs that could not be measured are taken last.
    cost = np.where(np.isnan(distance), 2.0, distance)
    for i, spot in enumerate(found.heads_a):
        if spot in place_b:
            cost[i, place_b[spot]] -= _STAY
    return [
        Match(found.stack, found.heads_a[i], found.heads_b[j], float(distance[i, j]))
        for i, j in zip(*assign(cost), strict=True)
        if not np.isnan(distance[i, j])
    ]


def _width(a: Mapping[Spot, Tensor], b: Mapping[Spot, Tensor]) -> int:
    return max(len(weights) for row in (a, b) for weights in row.values())


def _stacked(rows: Sequence[Tensor], width: int) -> Tensor:
    """Float64 (row, width), with zeros behind the end of each."""
    result = torch.zeros(len(rows), width, dtype=torch.float64)
    for i, row in enumerate(rows):
        result[i, : len(row)] = row
    return result
