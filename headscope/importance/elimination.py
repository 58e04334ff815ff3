"""Taking sets of features away greedily, each time those that cost least once the others have made up for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def eliminate(inverse: Tensor, cost: Tensor, widths: Sequence[int]) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    """Take block after block away, each time the one that adds least to E.

    E(r) = tr(M_rr (P_rr)⁻¹) of blocks r and j is E(r) + tr(M'_jj (P'_jj)⁻¹), where P' and M' are what is left when r is
    eliminated from P, and from M by the same steps on rows and columns. So a step costs two products, and all steps
    together a few times what one inverse costs.

    Args:
        inverse, cost: P and M, float64, (columns, columns), symmetric; P positive definite.
        widths: Columns of each block, in order.

    Returns:
        The blocks in the order in which they go, and E of the first k for k = 0 … all, float64, never falling.
    """
    left = list(range(len(widths)))
    order: list[int] = []
    losses = [0.0]
    while left:
        ends = np.cumsum([widths[u] for u in left])
        spans = [slice(end - widths[u], end) for u, end in zip(left, ends.tolist(), strict=True)]
        factors = [torch.linalg.cholesky(inverse[s, s]) for s in spans]
        added = [float(torch.cholesky_solve(cost[s, s], f).trace()) for s, f in zip(spans, factors, strict=True)]
        place = int(np.argmin(added))
        order.append(left.pop(place))
        losses.append(losses[-1] + max(added[place], 0.0))
        inverse, cost = _without(inverse, cost, spans[place], factors[place])
    return tuple(order), np.array(losses)


def _without(inverse: Tensor, cost: Tensor, gone: slice, factor: Tensor) -> tuple[Tensor, Tensor]:
    """What eliminating a block leaves of P and M; `factor` is the Cholesky factor of P's block."""
    kept = torch.ones(len(inverse), dtype=torch.bool, device=inverse.device)
    kept[gone] = False
    across = inverse[gone][:, kept]
    solved = torch.cholesky_solve(across, factor)
    half = solved.mT @ (cost[gone][:, kept] - cost[gone, gone] @ solved / 2)
    return inverse[kept][:, kept] - solved.mT @ across, cost[kept][:, kept] - half - half.mT


def rising(steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest steps that never fall, in the least-squares sense: neighbours that do share their mean.

    Their sums are the largest convex curve below the sums of `steps`, so sorting by them keeps an order of removal.
    """
    pools: list[tuple[float, int]] = []
    for step in steps.tolist():
        total, count = step, 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            before, number = pools.pop()
            total, count = total + before, count + number
        pools.append((total, count))
    return np.array([total / count for total, count in pools for _ in range(count)])
