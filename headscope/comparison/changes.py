"""What of one model goes with what of the other: stacks, rows on the same tokens, heads of the same number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from headscope.comparison.distances import Spot, StackRows, by_spot, shared_rows
from headscope.comparison.result import HeadChange
from headscope.comparison.rows import Row
from headscope.comparison.side import Side, Ways, stacks_of
from headscope.errors import InputError
from headscope.heads.labels import spread
from headscope.heads.moments import Moments
from headscope.results import HeadRecord, Spread


def in_pairs(a: Side, b: Side, ways: Ways) -> tuple[list[StackRows], list[str]]:
    """The rows on the same tokens, stack by stack, and what does not compare.

    Raises:
        InputError: The models have no stack in common.
    """
    stacks = stacks_of(a.axes, b.axes)
    if not stacks:
        raise InputError(
            f"there is nothing to compare: one model has {', '.join(a.axes)}, the other {', '.join(b.axes)}",
            "name a stack of each with --stack, or give models of the same kind",
        )
    found, notes = [], []
    for theirs, stack in stacks.items():
        rows_a, rows_b = _rows(a, stack, stack, ways), _rows(b, theirs, stack, ways)
        unlike = _unlike(a, b, stack, theirs)
        kept = {row: heads for row, heads in rows_a.items() if row.text not in unlike}
        shared = shared_rows(stack, kept, rows_b, _spots(a, stack), _spots(b, theirs))
        if shared.rows:
            found.append(shared)
        notes += _note(stack, len(unlike), a.texts, bool(shared.rows))
    missing = [s for s in a.axes if s not in stacks.values()] + [s for s in b.axes if s not in stacks]
    return found, [*notes, *(f"{stack}: only one of the models has this stack" for stack in missing)]


def _rows(side: Side, stack: str, name: str, ways: Ways) -> dict[Row, dict[Spot, Tensor]]:
    heads = {layer: ways.heads.within(numbers) for (own, layer), numbers in side.heads.items() if own == stack}
    return by_spot(side.kept, stack, name, heads)


def _spots(side: Side, stack: str) -> list[Spot]:
    return [(record.layer, record.head) for record in side.records if record.stack == stack]


def _unlike(a: Side, b: Side, stack: str, theirs: str) -> set[int]:
    """Texts of which the stack's rows or keys are not the same tokens in both models."""
    return {
        text
        for text in range(a.texts)
        for ours, other in zip(a.axes[stack], b.axes[theirs], strict=True)
        if a.tokens.get((ours, text)) != b.tokens.get((other, text))
    }


def _note(stack: str, unlike: int, texts: int, some: bool) -> list[str]:
    if not unlike:
        return [] if some else [f"{stack}: no row of both models sees the same tokens, so there are no distances"]
    which = "the text" if texts == 1 else f"{unlike:,} of {texts:,} texts"
    left = "distances are of the others" if some else "there are no distances and no matching"
    return [
        f"{stack}: the models read other tokens of {which}: {left} "
        "(try --words, with --exclude-special where special tokens differ, and --max-length where texts are cut)"
    ]


# ------------------------------------------------------------------ heads
def changed_heads(a: Side, b: Side, ways: Ways, same: Mapping[str, Mapping[Spot, float]]) -> tuple[HeadChange, ...]:
    """Every head that one of the models has, in order of stack, layer and head.

    Args:
        same: Distances by stack and head.
    """
    names = tuple(dict.fromkeys((*ways.names, *ways.rules.metrics)))
    stacks = stacks_of(a.axes, b.axes)
    own = {(r.stack, r.layer, r.head): r for r in a.records}
    theirs = {(stacks.get(r.stack, r.stack), r.layer, r.head): r for r in b.records}
    order = list(dict.fromkeys([*(stack for stack, _, _ in own), *(stack for stack, _, _ in theirs)]))
    places = sorted({*own, *theirs}, key=lambda place: (order.index(place[0]), *place[1:]))
    back = {name: other for other, name in stacks.items()}
    deltas = {
        (stack, layer): _differences(a, b, (stack, back[stack]), layer, names)
        for stack, layer in {place[:2] for place in places if place[0] in back}
    }
    changes = []
    for stack, layer, head in places:
        records = own.get((stack, layer, head)), theirs.get((stack, layer, head))
        spreads = deltas.get((stack, layer), {}).get(head, {}) if all(records) else {}
        distance = same.get(stack, {}).get((layer, head))
        changes.append(_change((stack, layer, head), records, names, spreads, distance, a.texts))
    return tuple(changes)


def _differences(
    a: Side, b: Side, stacks: tuple[str, str], layer: int, names: Sequence[str]
) -> dict[int, dict[str, tuple[float | None, Spread]]]:
    """By head and metric: the mean of the texts' differences, and their spread."""
    ours, other = (stacks[0], layer), (stacks[1], layer)
    if ours not in a.values or other not in b.values:
        return {}
    heads = [h for h in a.heads[ours] if h in b.heads[other]]
    places_a, places_b = ([side.heads[key].index(h) for h in heads] for side, key in ((a, ours), (b, other)))
    result: dict[int, dict[str, tuple[float | None, Spread]]] = {head: {} for head in heads}
    for name in names:
        if name in a.values[ours] and name in b.values[other]:
            moments = Moments.of(b.values[other][name].value[:, places_b] - a.values[ours][name].value[:, places_a])
            for head, mean, count, one in zip(
                heads, moments.mean.tolist(), moments.count.tolist(), spread(moments), strict=True
            ):
                result[head][name] = (mean if count else None, one)
    return result


def _change(
    place: tuple[str, int, int],
    records: tuple[HeadRecord | None, HeadRecord | None],
    names: Sequence[str],
    spreads: Mapping[str, tuple[float | None, Spread]],
    distance: float | None,
    texts: int,
) -> HeadChange:
    a, b = records
    metrics = [{n: None if r is None else r.metrics.get(n) for n in names} for r in records]
    delta = {name: spreads[name][0] if name in spreads else None for name in names}
    return HeadChange(
        *place,
        pattern_a=None if a is None else a.pattern,
        pattern_b=None if b is None else b.pattern,
        metrics_a=metrics[0],
        metrics_b=metrics[1],
        delta=delta,
        spread={name: one for name, (_, one) in spreads.items()} if texts > 1 and spreads else None,
        distance=distance,
        stability_a=None if a is None else a.stability,
        stability_b=None if b is None else b.stability,
    )
