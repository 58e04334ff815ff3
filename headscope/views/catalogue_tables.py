"""The catalogue's tables by relation, by mention and by needle, as plain text that is not yet safe to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headscope.results import Analysis
from headscope.views.catalogue_sections import (
    DIRECTIONS,
    MISSING,
    Section,
    Shown,
    head_name,
    number,
    p_value,
    several_stacks,
    with_interval,
)
from headscope.views.sections import plural

Rows = Sequence[Mapping[str, Any]]


def relations_section(analysis: Analysis, rows: Rows) -> Section:
    """The best head of each relation and direction beside the best fixed offset, furthest above it first."""
    several = several_stacks(analysis)
    found = sorted((r for r in rows if r["accuracy"] is not None), key=lambda r: -r["difference"])
    columns = (
        Shown("relation", tuple(f"{r['relation']} {DIRECTIONS.get(r['direction'], r['direction'])}" for r in found)),
        Shown("head", tuple(head_name(r["stack"], r["layer"], r["head"], several) for r in found)),
        Shown("accuracy", tuple(with_interval(r["accuracy"], r["low"], r["high"]) for r in found), True),
        Shown("best offset", tuple(f"{r['offset']:+d}  {number(r['offset_accuracy'])}" for r in found), True),
        Shown("difference", tuple(_difference(r) for r in found), True),
        Shown("p", tuple(p_value(r["p"]) for r in found), True),
        Shown("words", tuple(f"{r['eligible']:,}" for r in found), True),
        Shown("chance", tuple(number(r["chance"]) for r in found), True),
    )
    lines = ["accuracy and difference [95 % interval]; p: corrected for heads, relations and directions"] * bool(found)
    if len(found) < len(rows):
        rare = len(rows) - len(found)
        lines.append(f"too rare to measure: {rare:,} of {len(rows):,} pairs of relation and direction")
    return Section("syntax: the best heads by relation", columns if found else (), tuple(lines))


def _difference(row: Mapping[str, Any]) -> str:
    return with_interval(row["difference"], row["diff_low"], row["diff_high"], sign=True)


def coreference_section(rows: Rows, summary: Mapping[str, Any]) -> Section:
    """The best head and the baselines, over all mentions and by kind."""
    columns = (
        Shown("who answers", tuple(f"{r['name']}, {r['kind']}" for r in rows)),
        Shown("accuracy", tuple(with_interval(r["accuracy"], r["low"], r["high"]) for r in rows), True),
        Shown("mentions", tuple(f"{r['mentions']:,}" for r in rows), True),
    )
    lines = ["share of mentions whose antecedent is found [95 % interval]"]
    if summary.get("gain") is not None:
        gain = with_interval(summary["gain"], summary["low"], summary["high"], sign=True)
        lines.append(f"{summary['head']} over {summary['baseline']}: {gain}, p {p_value(summary['p'])}")
    if "documents_to_choose" in summary:
        chosen, scored = summary["documents_to_choose"], summary["documents_to_score"]
        lines.append(f"the head is chosen on {plural(chosen, 'document')} and scored on {scored:,} others")
    return Section("coreference: antecedents found", columns, tuple(lines))


def retrieval_section(analysis: Analysis, rows: Rows, summary: Mapping[str, Any]) -> Section:
    """A row a length, a column a depth of the needle with the best head there."""
    several = several_stacks(analysis)
    lengths = sorted({r["length"] for r in rows})
    cells = {(r["length"], r["depth"]): _best(r, several) for r in rows}
    trials = {n: [r for r in rows if r["length"] == n] for n in lengths}
    columns = [
        Shown("tokens", tuple(f"{n:,}" for n in lengths), True),
        Shown("passed", tuple(f"{_sum(trials[n], 'passed')} of {_sum(trials[n], 'trials')}" for n in lengths), True),
        Shown("recall", tuple(number(_recall(trials[n])) for n in lengths), True),
    ]
    for depth in sorted({r["depth"] for r in rows}):
        columns.append(Shown(f"depth {depth:g}", tuple(cells.get((n, depth), MISSING) for n in lengths)))
    lines = [
        "passed: trials in which the model tells the needle; then the best head at each depth, and its share copied"
    ]
    if summary.get("share_wu_2025") is not None:
        copying, idle = summary["share_wu_2025"], summary["share_zero"]
        lines.append(
            f"{number(100 * copying, 1)} % of the heads copy a tenth or more, {number(100 * idle, 1)} % nothing"
        )
    if summary.get("latest_match") is not None:
        lines.append(f"looking behind the latest match would copy {number(summary['latest_match'])}")
    return Section("retrieval: needles copied", tuple(columns), tuple(lines))


def _best(row: Mapping[str, Any], several: bool) -> str:
    if row["head"] is None:
        return MISSING
    return f"{row['stack'] + ' ' if several else ''}{row['head']} {number(row['score'])}"


def _sum(rows: Rows, name: str) -> int:
    return sum(int(r[name]) for r in rows)


def _recall(rows: Rows) -> float | None:
    """Mean over trials."""
    trials = _sum(rows, "trials")
    return sum(r["recall"] * r["trials"] for r in rows) / trials if trials else None


def other_section(name: str, rows: Rows) -> Section:
    """A table that is not known here: its keys are the headers."""
    columns = (Shown(str(key), *_cells([row.get(key) for row in rows])) for key in rows[0])
    return Section(name, tuple(columns))


def _cells(values: Sequence[Any]) -> tuple[tuple[str, ...], bool]:
    numbers = all(v is None or isinstance(v, int | float) for v in values)
    return tuple(plain_value(v) for v in values), numbers


def plain_value(value: Any) -> str:
    """Counts as they are, other numbers with three decimals, the rest as text."""
    if value is None or isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
