"""How near our numbers are to the model's: near enough to tell a scheme, and near enough to pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.models.weights import HeadWeights
from headscope.proof.record import SiteRecord

# Relative to the largest value: what tells a scheme that is ours from one that is not.
MATCH = {torch.float64: 2e-4, torch.float32: 2e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# From the finest to the coarsest.
_DTYPES = tuple(MATCH)


@dataclass(frozen=True)
class Tolerance:
    """How far our numbers may be from the model's: absolute on weights, relative to the largest value on outputs."""

    weights: float
    output: float


# float32 differs by the order of summation, half precision by the rounding of queries, keys, scores and values.
TOLERANCES = {
    torch.float64: Tolerance(1e-5, 1e-4),
    torch.float32: Tolerance(1e-5, 1e-4),
    torch.float16: Tolerance(2.5e-3, 5e-3),
    torch.bfloat16: Tolerance(2e-2, 4e-2),
}


def allowed(dtype: torch.dtype, reach: float) -> Tolerance:
    """How far numbers may be off where scores are as large as `reach`.

    A score s is off by up to eps / 2 * s when it is rounded, and queries and keys were rounded before. A weight w moves
    by w * (1 - w), a quarter at most, of what its scores move. In all, tiny models of 27 families were off by up to a
    third of eps * s in half precision; half of it is allowed. Sums in float32 are rounded more often than once.
    """
    fixed = TOLERANCES[dtype]
    digits = torch.finfo(dtype).eps * reach / (2 if dtype in (torch.float16, torch.bfloat16) else 1)
    return Tolerance(max(fixed.weights, digits), max(fixed.output, digits))


def coarsest(dtypes: set[torch.dtype]) -> torch.dtype:
    """The dtype of fewest digits among those that attention is computed in; float32 if there is none."""
    return max((d for d in dtypes if d in _DTYPES), key=_DTYPES.index, default=torch.float32)


def working_dtype(record: SiteRecord, weights: HeadWeights) -> torch.dtype:
    """What a site computes in: the coarsest of its projections and its attention weights.

    Models in half precision may keep norms, softmax or single modules in float32, which does not bring back the digits
    that were lost before.
    """
    call = record.call
    given: list[Tensor] = [] if call.arguments is None else [call.arguments.query, call.arguments.key]
    return coarsest({t.dtype for t in (weights.query, weights.value, call.weights, *given)})


def close(ours: NDArray[np.float64], theirs: NDArray[np.float64], dtype: torch.dtype) -> bool:
    """Whether two arrays agree as well as numbers of a dtype can."""
    largest = max(float(np.abs(theirs).max(initial=0.0)), 1e-6)
    return bool(np.abs(ours - theirs).max(initial=0.0) <= MATCH[dtype] * largest)
