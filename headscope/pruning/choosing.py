"""Which heads go: the cheapest ones by their scores, as many as asked for, or as many as a bound on the loss allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from headscope.capture.outputs import Output, find_outputs
from headscope.errors import InputError
from headscope.importance.allocate import allocate, count_of, most_of, units_in
from headscope.importance.loss import Losses, measure
from headscope.importance.method import LayerScores, Method, Task
from headscope.importance.scores import scored_from
from headscope.importance.texts import Data
from headscope.models.loading import LoadedModel
from headscope.pruning.guide import Guide, Roles
from headscope.pruning.zeroing import zeroed_copy
from headscope.repair.repair import repair

Heads = dict[str, tuple[int, ...]]
"""Heads by the name of the first layer whose module they are in."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """Which heads go.

    Attributes:
        heads: By `stack.layer`, in original numbers.
        method, unit: What they were chosen by.
        count, of: Units that go, and how many there were.
        predicted: The loss that the method says will be added, in nats; None where it says nothing.
    """

    heads: Heads
    method: str
    unit: str
    count: int
    of: int
    predicted: float | None


def choose(loaded: LoadedModel, guide: Guide, roles: Roles, unit: str, say: Say) -> Choice:
    """Choose heads.

    Args:
        unit: `head` or `kv-group`.
        say: Called with lines for the user.

    Raises:
        InputError: So many cannot go, or scores do not fit the model.
    """
    outputs = find_outputs(loaded.model)
    of = units_in(outputs, unit)
    if guide.until_drop is not None:
        if not most_of(outputs, unit, guide.min_per_layer):
            raise InputError(f"no {unit} can go where each layer keeps {guide.min_per_layer}", "keep fewer")
        scored = _scored(loaded.model, outputs, guide, roles.ranking, unit, say)
        count = _most_under(loaded.model, outputs, scored, guide, roles, unit, say)
        if not count:
            raise InputError(
                f"without a single {unit} more than {guide.until_drop:.3g} is lost", "allow more with --until-drop"
            )
        heads = allocate(outputs, scored, count, unit=unit, min_per_layer=guide.min_per_layer)
    else:
        count = count_of(outputs, unit, guide.drop or 0.0)
        if not count:
            raise InputError(f"{guide.drop} of {of} units is less than one", "give a larger --drop")
        heads, scored = _in_steps(loaded.model, guide, roles, unit, count, say)
    name = guide.scores.method if guide.scores is not None else guide.method.name if guide.method else ""
    return Choice(heads, name, unit, count, of, _predicted(outputs, scored, heads, unit))


def measured_without(
    model: PreTrainedModel, heads: Mapping[str, tuple[int, ...]], data: Data, guide: Guide, refit: Data | None, say: Say
) -> Losses:
    """The losses on some texts of a copy that lacks heads, refitted where there are texts to refit on."""
    if not any(heads.values()):
        return measure(model, data.batches, data.loss)
    after, _ = zeroed_copy(model, heads)
    if refit is not None:
        repair(model, after, refit.batches, mlp=guide.repair_mlp, report=say)
    return measure(after, data.batches, data.loss)


# ------------------------------------------------------------------ scores
def _scored(
    model: PreTrainedModel, outputs: tuple[Output, ...], guide: Guide, data: Data | None, unit: str, say: Say
) -> Mapping[str, LayerScores]:
    if guide.scores is not None:
        return scored_from(guide.scores, outputs, unit)
    if guide.method is None:
        raise InputError("there are no scores to choose heads by", "give --scores or --method")
    return scores_by(model, outputs, guide.method, data, unit, guide.seed, say)


def scores_by(
    model: PreTrainedModel,
    outputs: tuple[Output, ...],
    method: Method,
    data: Data | None,
    unit: str,
    seed: int,
    say: Say,
) -> Mapping[str, LayerScores]:
    """The scores of one kind of unit by output name."""
    task = Task(model, outputs, data, (unit,), seed=seed, report=say)
    return {name: scores for (_, name), scores in method.score(task).items()}


def _in_steps(
    model: PreTrainedModel, guide: Guide, roles: Roles, unit: str, count: int, say: Say
) -> tuple[Heads, Mapping[str, LayerScores]]:
    """Choose a part, take it out of a copy, score what is left anew, and so on."""
    gone: Heads = {}
    work, scored = model, None
    for step in range(1, guide.steps + 1):
        part = count * step // guide.steps - count * (step - 1) // guide.steps
        if not part:
            continue
        if gone:
            work, _ = zeroed_copy(model, gone)
            if roles.repair is not None:
                repair(model, work, roles.repair.batches, mlp=guide.repair_mlp, report=say)
        outputs = find_outputs(work)
        found = _scored(work, outputs, guide, roles.ranking, unit, say)
        scored = scored or found
        more = allocate(outputs, found, part, unit=unit, min_per_layer=guide.min_per_layer)
        gone = {name: (*gone.get(name, ()), *more.get(name, ())) for name in dict.fromkeys((*gone, *more))}
    return {name: tuple(sorted(heads)) for name, heads in gone.items() if heads}, scored or {}


def _predicted(outputs: tuple[Output, ...], scored: Mapping[str, LayerScores], heads: Heads, unit: str) -> float | None:
    """The sum of what layers' curves say for as many units as each loses."""
    total = 0.0
    for output in outputs:
        gone = sum(set(u.heads) <= set(heads.get(output.name, ())) for u in output.units(unit))
        losses = scored[output.name].losses if output.name in scored else None
        if losses is None:
            return None
        total += float(losses[gone])
    return total


# ------------------------------------------------------------------ as many as a bound allows
def _most_under(
    model: PreTrainedModel,
    outputs: tuple[Output, ...],
    scored: Mapping[str, LayerScores],
    guide: Guide,
    roles: Roles,
    unit: str,
    say: Say,
) -> int:
    """The largest number of units whose loss on the selection texts stays under the bound, by halving.

    The loss is taken to grow with their number, as it does but for noise.
    """
    data = roles.selection
    if data is None or guide.until_drop is None:
        return 0
    bound = guide.until_drop if data.loss.kind == "output" else math.log1p(guide.until_drop)
    before = measure(model, data.batches, data.loss)
    low, high = 0, most_of(outputs, unit, guide.min_per_layer) + 1
    while high - low > 1:
        # Losses grow fast with the share: what is sought is mostly near the lower end.
        middle = max(low + 1, min(high - 1, low + (high - low) // (4 if low == 0 else 2)))
        heads = allocate(outputs, scored, middle, unit=unit, min_per_layer=guide.min_per_layer)
        added, error = measured_without(model, heads, data, guide, roles.repair, say).added(before)
        say(f"{middle} of {units_in(outputs, unit)} units: {added:+.4f} on the selection texts (± {1.96 * error:.4f})")
        low, high = (middle, high) if added < bound else (low, middle)
    return low
