"""The comparison of a rebuilt site with what the model computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headscope.capture.feed import Axis
from headscope.errors import ModelError
from headscope.models.weights import HeadWeights
from headscope.proof.closeness import Tolerance, allowed, working_dtype
from headscope.proof.plan import Plan
from headscope.proof.rebuild import Rebuilt
from headscope.proof.record import SiteRecord
from headscope.results import SiteCheck

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """|ours - theirs| on real rows, and the largest of theirs there."""

    cells: Array
    scale: float

    @staticmethod
    def between(ours: Array, theirs: Array, real: NDArray[np.bool_]) -> Difference:
        """Compare two arrays where `real`, which broadcasts to them, is True; padding may hold anything, NaN too."""
        cells = np.where(real, np.abs(ours - theirs), 0.0)
        return Difference(cells, float(np.abs(np.where(real, theirs, 0.0)).max(initial=0.0)))

    @property
    def absolute(self) -> float:
        """The largest difference; NaN if there is one."""
        return float(self.cells.max(initial=0.0))

    @property
    def relative(self) -> float:
        """The largest difference in units of the largest value."""
        return self.absolute / max(self.scale, 1e-12)


def compare(
    plan: Plan,
    record: SiteRecord,
    rebuilt: Rebuilt,
    query: Axis,
    backend: str,
    current: Callable[[], HeadWeights],
) -> SiteCheck:
    """Compare the real rows of a rebuilt site with the model's.

    Args:
        query: What the rows are.
        current: Gives the model's present weights, asked for only to name the head of a difference in the output.
    """
    dtype = working_dtype(record, plan.weights)
    tolerance = allowed(dtype, rebuilt.reach)
    real = query.valid.cpu().numpy()
    weights = Difference.between(rebuilt.weights, _array(record.call.weights), real[:, None, :, None])
    context = _context(plan, record, rebuilt, real)
    output = _output(plan, record, rebuilt, real, context)
    same_weights = weights.absolute <= tolerance.weights
    passed = same_weights and (output is None or output.relative <= tolerance.output)
    _, head, row, column = (int(i) for i in np.unravel_index(int(weights.cells.argmax()), weights.cells.shape))
    in_output = same_weights and not passed
    return SiteCheck(
        stack=record.site.stack,
        layer=record.site.layer,
        backend=backend,
        max_abs_weights=weights.absolute,
        allowed_weights=tolerance.weights,
        max_abs_output=None if output is None else output.absolute,
        rel_output=None if output is None else output.relative,
        allowed_output=tolerance.output,
        positions=plan.positions,
        mask="own" if plan.mask.own else "model",
        passed=passed,
        worst_head=_head_of_output(context, tolerance, plan, current) if in_output else head,
        worst_position=(row, column),
    )


def _context(plan: Plan, record: SiteRecord, rebuilt: Rebuilt, real: NDArray[np.bool_]) -> Difference | None:
    """The heads' results, (batch, head, query, dim): as they are projected, else from the attention function."""
    theirs = record.merged
    if record.call.arguments is not None and (plan.between or theirs is None):
        theirs = record.call.arguments.context
    if theirs is None or theirs.numel() != rebuilt.context.size:
        return None
    batch, heads, rows, dim = rebuilt.context.shape
    by_head = _array(theirs).reshape(batch, rows, heads, dim).swapaxes(1, 2)
    return Difference.between(rebuilt.context, by_head, real[:, None, :, None])


def _output(
    plan: Plan, record: SiteRecord, rebuilt: Rebuilt, real: NDArray[np.bool_], context: Difference | None
) -> Difference | None:
    """The site's output; the heads' results where it has none of its own; None where neither can be compared.

    Where something lies between heads and projection, both sides of it are compared, and the worse one counts.
    """
    found = []
    ours = rebuilt.projected if plan.between else rebuilt.output
    if ours is not None and record.output is not None:
        found.append(Difference.between(ours, _array(record.output).reshape(ours.shape), real[..., None]))
    if context is not None and (plan.between or not found):
        found.append(context)
    return max(found, key=lambda difference: difference.relative, default=None)


def _head_of_output(
    context: Difference | None, tolerance: Tolerance, plan: Plan, current: Callable[[], HeadWeights]
) -> int | None:
    """The head that makes outputs differ where weights do not: by its result, else by its part of the projection."""
    if context is None or context.relative <= tolerance.output:
        return _changed_output(plan, current)
    return int(context.cells.max(axis=(0, 2, 3)).argmax())


def _changed_output(plan: Plan, current: Callable[[], HeadWeights]) -> int | None:
    """The head whose output weights are furthest from the plan's; None where all are as they were."""
    try:
        now = current().output
    except ModelError:  # no longer plain projections
        return None
    before = plan.weights.output
    if now is None or before is None or now.shape != before.shape:
        return None
    off = np.abs(_array(now) - _array(before)).max(axis=(1, 2))
    return int(off.argmax()) if off.max() > 0 else None


def _array(tensor: Tensor) -> Array:
    found: Array = tensor.detach().double().cpu().numpy()
    return found
