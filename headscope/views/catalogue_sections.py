"""What is told of the head catalogue, as plain text that is not yet safe to show; the formats only lay it out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headscope.heads.catalogue.result import Catalogue, Example, TypeInfo, TypeRecord
from headscope.results import Analysis, HeadRecord
from headscope.views.text import token_label

MISSING = "-"
# How many of a type's heads the table of types names.
NAMED = 2

DIRECTIONS = {"dependent_to_head": "to head", "head_to_dependent": "to dependent"}

# How strongly a head has a type, where the score does not say it: distances are small where heads are alike, and the
# accuracies of different relations do not compare.
_STRENGTH: dict[str, Callable[[TypeRecord], float]] = {
    "redundant": lambda record: -record.score,
    "syntax": lambda record: float(record.details.get("difference", record.score)),
}


def _strength(record: TypeRecord) -> float:
    return _STRENGTH[record.type](record) if record.type in _STRENGTH else record.score


@dataclass(frozen=True)
class Shown:
    """One column of a table: its header, a cell a row, and whether they are numbers."""

    header: str
    cells: tuple[str, ...]
    number: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the report: a table, if it has columns, and lines of text under it.

    Attributes:
        quiet: Whether the lines only explain the table.
    """

    title: str
    columns: tuple[Shown, ...] = ()
    lines: tuple[str, ...] = ()
    quiet: bool = True


# ------------------------------------------------------------------ numbers and names
def number(value: Any, digits: int = 3, sign: bool = False) -> str:
    """A number with `digits` decimals, never -0; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{round(float(value), digits) + 0.0:{'+' if sign else ''}.{digits}f}"


def with_interval(value: Any, low: Any, high: Any, sign: bool = False) -> str:
    """`0.912 [0.900, 0.923]`; without the ends where they are not known."""
    if number(low) == MISSING or number(high) == MISSING:
        return number(value, sign=sign)
    return f"{number(value, sign=sign)} [{number(low, sign=sign)}, {number(high, sign=sign)}]"


def p_value(value: Any) -> str:
    """A p-value, however small it is."""
    return "<0.001" if value is not None and value < 0.001 else number(value)


def several_stacks(analysis: Analysis) -> bool:
    """Whether heads need their stack's name."""
    return len({record.stack for record in analysis.heads}) > 1


def head_name(stack: str, layer: int, head: int, several: bool) -> str:
    """`L5H3`, with the stack before it where there are several."""
    return f"{stack} L{layer}H{head}" if several else f"L{layer}H{head}"


def type_names(record: HeadRecord) -> list[str]:
    """The types that a head has, each once."""
    return list(dict.fromkeys(found.type for found in record.types))


def has_types(analysis: Analysis) -> bool:
    """True where at least one head has a type."""
    return any(record.types for record in analysis.heads)


# ------------------------------------------------------------------ the types and their evidence
def ranked(analysis: Analysis, name: str) -> list[tuple[HeadRecord, TypeRecord]]:
    """Heads that have the type, the strongest first, each with its own strongest record."""
    own = [(head, [found for found in head.types if found.type == name]) for head in analysis.heads]
    pairs = [(head, max(found, key=_strength)) for head, found in own if found]
    return sorted(pairs, key=lambda pair: -_strength(pair[1]))


def types_section(analysis: Analysis, catalogue: Catalogue) -> Section:
    """A row a type: how many heads have it, what chance gives, and the strongest heads."""
    several = several_stacks(analysis)
    rows = [(kind, ranked(analysis, kind.name)) for kind in catalogue.types]
    columns = [
        Shown("type", tuple(kind.name for kind, _ in rows)),
        Shown("heads", tuple(MISSING if k.skipped else f"{k.claimed:,} of {k.measured:,}" for k, _ in rows), True),
        Shown("chance", tuple(number(heads[0][1].chance) if heads else MISSING for _, heads in rows), True),
    ]
    for place, header in enumerate(("strongest", "second")[:NAMED]):
        if any(len(heads) > place for _, heads in rows):
            columns.append(Shown(header, tuple(_named(heads[place : place + 1], several) for _, heads in rows)))
    return Section("head types", tuple(columns), tuple(_type_notes(catalogue.types, [h for _, h in rows])))


def _named(heads: list[tuple[HeadRecord, TypeRecord]], several: bool) -> str:
    if not heads:
        return MISSING
    head, record = heads[0]
    value = with_interval(record.score, record.low, record.high)
    return f"{head_name(head.stack, head.layer, head.head, several)} {value}"


def _type_notes(types: Iterable[TypeInfo], heads: list[list[tuple[HeadRecord, TypeRecord]]]) -> Iterator[str]:
    kinds = list(types)
    yield from (f"{kind.name} was not measured: {kind.skipped}" for kind in kinds if kind.skipped)
    costs = [f"{kind.name} {number(kind.seconds, 1)} s" for kind in kinds if kind.seconds is not None]
    if costs:
        yield f"inputs of their own: {', '.join(costs)}"
    if any(heads):
        yield "score [95 % interval]; heads that have the type, of those measured; chance: what even attention scores"
    if any(found and kind.name == "redundant" for kind, found in zip(kinds, heads, strict=True)):
        yield "redundant: distance to the nearest head, less is more alike"
    if any(found and kind.name == "syntax" for kind, found in zip(kinds, heads, strict=True)):
        yield "syntax: the strongest are furthest above the best fixed offset"


def evidence_section(analysis: Analysis, catalogue: Catalogue) -> Section:
    """A line a type: a row of the strongest head that has an example."""
    several = several_stacks(analysis)
    lines = []
    for kind in catalogue.types:
        shown = next(((h, r, r.example) for h, r in ranked(analysis, kind.name) if r.example is not None), None)
        if shown is not None:
            head, record, example = shown
            name = head_name(head.stack, head.layer, head.head, several)
            lines.append(f"{name} {record.type}{_what(record.details)}: {_looks(example)}{_trivial(record)}")
            lines += [f"{name} {record.type}, {line}" for line in _partners(record, several)]
    return Section("what they look at", lines=tuple(lines), quiet=False)


def _looks(example: Example) -> str:
    keys = ", ".join(f"'{token_label(key.token)}' {number(key.weight)}" for key in example.keys)
    return f"'{token_label(example.token)}' looks at {keys or 'nothing'}, in: {example.text}"


def _what(details: Mapping[str, Any]) -> str:
    """The relation, or the other head, that a record is about."""
    if "relation" in details and "direction" in details:
        return f" ({details['relation']} {DIRECTIONS.get(str(details['direction']), details['direction'])})"
    return f" (like {details['partner']})" if isinstance(details.get("partner"), str) else ""


def _partners(record: TypeRecord, several: bool) -> Iterator[str]:
    """The heads without which it does less, the one that it needs most first."""
    partners = [p for p in record.details.get("partners", ()) if p["drop"] > 0][:NAMED]
    if partners:
        drops = [
            f"{number(p['drop'])} without {head_name(p['stack'], p['layer'], p['head'], several)}" for p in partners
        ]
        yield f"which attends less by {', '.join(drops)}"


def _trivial(record: TypeRecord) -> str:
    if record.alternative is None:
        return ""
    name, score = record.alternative
    return f" (score {number(record.score)}, {name} alone {number(score)})"
