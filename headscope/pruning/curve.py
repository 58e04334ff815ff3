"""The curve: how much is lost against how much is removed, by method, with and without a repair."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from headscope.capture.evaluation import evaluating
from headscope.capture.outputs import Output, find_outputs
from headscope.errors import InputError, ModelError
from headscope.importance.allocate import allocate, check_room, count_of, units_in
from headscope.importance.command import UNITS
from headscope.importance.examples import Source, read_examples
from headscope.importance.loss import Losses, measure
from headscope.importance.methods import method_named
from headscope.importance.texts import Data
from headscope.models.describe import describe
from headscope.models.loading import LoadedModel
from headscope.models.selection import check_count
from headscope.models.versions import versions
from headscope.models.whole import whole_model
from headscope.pruning.choosing import Say, measured_without, scores_by
from headscope.pruning.curve_result import Curve, Point
from headscope.pruning.guide import REPAIR_TOKENS, Guide, Roles, deal_roles
from headscope.pruning.repairing import interval
from headscope.pruning.zeroing import as_heads, zeroed_copy
from headscope.repair.repair import repair as repair_model

SHARES = (0.1, 0.2, 0.3, 0.5)
METHODS = ("random", "gradient", "reconstruction", "surgeon")
# Random choices that make the band.
SEEDS = 5


def prune_curve(
    model: str | PathLike[str] | PreTrainedModel | None = None,
    data: Source | None = None,
    *,
    text_column: str = "text",
    methods: Sequence[str] = METHODS,
    shares: Sequence[float] = SHARES,
    unit: str = "head",
    repair: Source | bool = False,
    repair_mlp: bool = False,
    repair_tokens: int = REPAIR_TOKENS,
    min_per_layer: int = 1,
    seeds: int = SEEDS,
    max_length: int | None = None,
    batch_size: int | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    revision: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    report: Say | None = None,
) -> Curve:
    """Measure what removing heads costs: for each method and share, with a repair and without.

    Heads are zeroed, which loses what removing them loses. Scores, refits and the losses reported each have texts of
    their own.

    Args:
        model, data: As in `head_importance`.
        methods: Names of importance methods. `random` is a band over `seeds` choices.
        shares: Of heads or groups that go.
        unit: `head` or `kv-group`.
        repair: Whether to show each method with a repair as well, or the texts for it. Where the model cannot be
            refitted, a warning says so.
        Others: As in `prune`.

    Raises:
        InputError, ModelError, ResourceError: As `prune`.
    """
    chosen = [method_named(name) for name in dict.fromkeys(methods)]
    if unit not in UNITS:
        raise InputError(f"unit is {unit!r}", f"It is {' or '.join(UNITS)}.")
    if data is None:
        raise InputError("a curve needs texts", "Give --data FILE.")
    check_count("seeds", seeds)
    check_count("min_per_layer", min_per_layer)
    if not chosen or not shares or not all(0 < s < 1 for s in shares):
        raise InputError("a curve needs methods, and shares between 0 and 1", "give at least one of each")
    examples = read_examples(data, text_column=text_column)
    guide = Guide(
        method=next((m for m in chosen if m.needs_data), chosen[0]),
        unit=unit,
        min_per_layer=min_per_layer,
        repair=repair is not False,
        repair_mlp=repair_mlp,
        data=examples,
        repair_data=examples if isinstance(repair, bool) else read_examples(repair, text_column=text_column),
        repair_tokens=repair_tokens,
        max_length=max_length,
        batch_size=batch_size,
        seed=seed,
    )
    options = {"revision": revision, "device": device, "dtype": dtype, "device_map": device_map}
    loaded = whole_model(model, tokenizer, processor, options | {"trust_remote_code": trust_remote_code})
    with evaluating(loaded.model):
        return _curve(loaded, guide, [m.name for m in chosen], shares, unit, seeds, report or (lambda line: None))


def _curve(
    loaded: LoadedModel, guide: Guide, names: Sequence[str], shares: Sequence[float], unit: str, seeds: int, say: Say
) -> Curve:
    roles = deal_roles(loaded, guide)
    judge = roles.report
    assert judge is not None  # there are texts
    outputs = find_outputs(loaded.model)
    counts = {share: count_of(outputs, unit, share) for share in shares}
    check_room(outputs, unit, max(counts.values()), guide.min_per_layer)
    refits, notes = _refits(loaded, outputs, roles, guide, unit)
    base = measure(loaded.model, judge.batches, judge.loss)
    points: list[Point] = []
    for name in names:
        numbers = range(seeds) if name == "random" else (guide.seed,)
        scored = [
            scores_by(loaded.model, outputs, method_named(name), roles.ranking, unit, guide.seed + i, say)
            for i in numbers
        ]
        for share, count in counts.items():
            plans = [allocate(outputs, s, count, unit=unit, min_per_layer=guide.min_per_layer) for s in scored]
            for refit in refits:
                found = [measured_without(loaded.model, plan, judge, guide, refit, say) for plan in plans]
                point = _point(name, refit is not None, share, count, found, base)
                say(f"{name}{' repaired' * point.repaired} {share:.0%}: {point.added:+.4f}")
                points.append(point)
    return Curve(
        model=describe(loaded),
        loss=judge.loss.kind,
        unit=unit,
        units=units_in(outputs, unit),
        base=base.mean,
        points=tuple(points),
        sizes=roles.sizes,
        seed=guide.seed,
        versions=versions(),
        warnings=(*loaded.warnings, *notes),
    )


def _refits(
    loaded: LoadedModel, outputs: Sequence[Output], roles: Roles, guide: Guide, unit: str
) -> tuple[tuple[Data | None, ...], tuple[str, ...]]:
    """What is refitted on: nothing, and the texts for it, if a trial shows that the model can be; else a note."""
    if roles.repair is None:
        return (None,), ()
    after, _ = zeroed_copy(loaded.model, as_heads({o.name: u[0].heads for o in outputs if len(u := o.units(unit)) > 1}))
    try:
        repair_model(loaded.model, after, roles.repair.batches[:1], mlp=guide.repair_mlp)
    except ModelError as error:
        return (None,), (f"measured without a repair: {error.message}",)
    return (None, roles.repair), ()


def _point(name: str, repaired: bool, share: float, count: int, found: Sequence[Losses], base: Losses) -> Point:
    """One choice has an interval over texts, several a band from the least to the most."""
    if len(found) == 1:
        return Point(name, repaired, share, count, *interval(found[0], base), seeds=1)
    added = np.array([losses.added(base)[0] for losses in found])
    return Point(name, repaired, share, count, float(added.mean()), float(added.min()), float(added.max()), len(added))
