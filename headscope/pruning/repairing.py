"""A repair that has to show that it helps, and what was lost in the end."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headscope.capture.outputs import find_outputs
from headscope.importance.loss import Losses, measure
from headscope.importance.texts import Data
from headscope.pruning.choosing import Choice, Say
from headscope.pruning.guide import ENOUGH_FOR_REPAIR, Roles
from headscope.pruning.outcome import Chosen, RefitLayer, RepairOutcome
from headscope.pruning.zeroing import as_heads, zeroed_copy
from headscope.repair.repair import check_repair, repair


def repaired(
    original: PreTrainedModel, after: PreTrainedModel, roles: Roles, mlp: bool, say: Say
) -> tuple[RepairOutcome | None, tuple[str, ...]]:
    """Refit a pruned model in place; if it does not lose less on the selection texts then, it is left as it was.

    Returns:
        What came of it, and warnings.
    """
    refit, judge = roles.repair, roles.selection
    if refit is None or judge is None:
        return None, ()
    before = measure(after, judge.batches, judge.loss)
    kept = [(p, p.detach().clone()) for p in _refittable(after, mlp)]
    report = repair(original, after, refit.batches, mlp=mlp, report=say)
    now = measure(after, judge.batches, judge.loss)
    applied = now.mean < before.mean
    if not applied:
        with torch.no_grad():
            for parameter, weight in kept:
                parameter.copy_(weight)
    word = "less" if applied else "no less"
    reason = f"the selection texts lose {word} with it: {now.mean:.4f}, {before.mean:.4f} without"
    layers = tuple(
        RefitLayer(r.name, r.ridge if r.kept else None, r.error_before, r.error_after) for r in report.layers
    )
    return RepairOutcome(applied, reason, mlp, refit.texts, refit.tokens, layers, before.mean, now.mean), _notes(
        refit.tokens, mlp
    )


def check_repairable(original: PreTrainedModel, refit: Data | None, mlp: bool) -> None:
    """Refuse models that cannot be repaired before anything is scored.

    Raises:
        ModelError: Says why.
    """
    if refit is not None:
        some = {o.name: u[0].heads for o in find_outputs(original) if len(u := o.units("head")) > 1}
        after, _ = zeroed_copy(original, as_heads(some))
        check_repair(original, after, refit.batches[0], mlp=mlp)


def _notes(tokens: int, mlp: bool) -> tuple[str, ...]:
    notes = []
    if tokens < ENOUGH_FOR_REPAIR:
        notes.append(f"refitted on {tokens:,} tokens: {ENOUGH_FOR_REPAIR:,} or more, varied, carry over better")
    if mlp:
        notes.append("refitted down projections help on text like the repair texts only")
    return tuple(notes)


def _refittable(model: PreTrainedModel, mlp: bool) -> list[nn.Parameter]:
    """The weights that a repair may change."""
    modules = model.modules() if mlp else (o.module for o in find_outputs(model))
    return [p for m in modules if isinstance(m, nn.Linear | Conv1D) for p in m.parameters(recurse=False)]


def outcome(choice: Choice, original: PreTrainedModel, after: PreTrainedModel | None, roles: Roles) -> Chosen:
    """What was chosen, and what it costs on texts that nothing was chosen on; `after` is None if not proved."""
    added: tuple[float | None, float | None, float | None] = (None, None, None)
    judge = roles.report
    if judge is not None and after is not None:
        before, now = (measure(model, judge.batches, judge.loss) for model in (original, after))
        added = interval(now, before)
    return Chosen(
        method=choice.method,
        unit=choice.unit,
        count=choice.count,
        of=choice.of,
        predicted=choice.predicted,
        loss=None if judge is None else judge.loss.kind,
        measured=added[0],
        low=added[1],
        high=added[2],
        sizes=roles.sizes,
    )


def interval(now: Losses, before: Losses) -> tuple[float, float, float]:
    """The loss that is added, and its 95 % interval over texts (normal)."""
    mean, error = now.added(before)
    return mean, mean - 1.96 * error, mean + 1.96 * error
