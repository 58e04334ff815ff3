"""The comparison of a rebuilt site with what the model computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headscope.capture.feed import Axis
from headscope.proof.plan import Plan
from headscope.proof.rebuild import Rebuilt
from headscope.proof.record import SiteRecord
from headscope.results import SiteCheck


@dataclass(frozen=True)
class Tolerance:
    """How far our numbers may be from the model's: absolute on weights, relative to the largest value on outputs."""

    weights: float
    output: float


# float32 differs by the order of summation. Half precisions differ by the rounding of scores before the softmax: a
# score of 16 is off by up to 2^-4 in bfloat16 (8 bits), which moves a weight by as much of itself.
TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-4),
    torch.float64: Tolerance(1e-5, 1e-4),
    torch.float16: Tolerance(1e-2, 2e-2),
    torch.bfloat16: Tolerance(6e-2, 6e-2),
}


def compare(plan: Plan, record: SiteRecord, rebuilt: Rebuilt, query: Axis, backend: str) -> SiteCheck:
    """Compare the real rows of a rebuilt site with the model's."""
    tolerance = TOLERANCES[record.call.weights.dtype]
    valid = query.valid.cpu().numpy()
    theirs = record.call.weights.detach().double().cpu().numpy()
    by_cell = np.abs(rebuilt.weights - theirs) * valid[:, None, :, None]
    _, head, row, column = (int(i) for i in np.unravel_index(int(by_cell.argmax()), by_cell.shape))
    weights_off = float(by_cell.max())
    context, context_scale = _context_difference(plan, record, rebuilt, valid)
    absolute, relative = _output_difference(plan, record, rebuilt, valid, context, context_scale)
    passed = weights_off <= tolerance.weights and relative <= tolerance.output
    if weights_off <= tolerance.weights and not passed and context is not None:
        head = int(context.max(axis=(0, 2, 3)).argmax())
    return SiteCheck(
        stack=record.site.stack,
        layer=record.site.layer,
        backend=backend,
        max_abs_weights=weights_off,
        max_abs_output=absolute,
        rel_output=relative,
        positions=plan.positions,
        mask="own" if plan.mask.own else "model",
        passed=bool(passed and np.isfinite(weights_off) and np.isfinite(absolute)),
        worst_head=head,
        worst_position=(row, column),
    )


def _context_difference(
    plan: Plan, record: SiteRecord, rebuilt: Rebuilt, valid: NDArray[np.bool_]
) -> tuple[NDArray[np.float64] | None, float]:
    """|ours - theirs| of each head's result, (batch, head, query, dim), and the largest of theirs."""
    theirs = None
    if record.call.arguments is not None:
        theirs = record.call.arguments.context.detach().double().cpu().numpy()
    elif record.merged is not None:
        theirs = record.merged.detach().double().cpu().numpy()
    batch, heads, rows, dim = rebuilt.context.shape
    if theirs is None or theirs.size != rebuilt.context.size:
        return None, 0.0
    theirs = theirs.reshape(batch, rows, heads, dim).swapaxes(1, 2)
    return np.abs(rebuilt.context - theirs) * valid[:, None, :, None], float(np.abs(theirs).max())


def _output_difference(
    plan: Plan,
    record: SiteRecord,
    rebuilt: Rebuilt,
    valid: NDArray[np.bool_],
    context: NDArray[np.float64] | None,
    context_scale: float,
) -> tuple[float, float]:
    """Largest difference of the site's output, absolute and relative to the output's largest value.

    Where something lies between heads and projection, both sides of it are compared, and the worse one counts.
    """
    found: list[tuple[float, float]] = []
    ours = rebuilt.projected if plan.between else rebuilt.output
    if ours is not None and record.output is not None:
        theirs = record.output.detach().double().cpu().numpy().reshape(ours.shape)
        found.append((float((np.abs(ours - theirs) * valid[..., None]).max()), float(np.abs(theirs).max())))
    if context is not None and (plan.between or not found):
        found.append((float(context.max()), context_scale))
    if not found:
        return 0.0, 0.0
    absolute, scale = max(found, key=lambda pair: pair[0] / max(pair[1], 1e-12))
    return absolute, absolute / max(scale, 1e-12)
