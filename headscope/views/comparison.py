"""Two models compared, as a table, JSON, JSON Lines, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from headscope.comparison.result import Comparison, HeadChange, Match
from headscope.views.columns import Column, ColumnBlocks, Lines
from headscope.views.comparison_summary import facts, name_of, summary
from headscope.views.formats import in_format, plain_text
from headscope.views.records import plain
from headscope.views.text import csv_field, markdown_text, visible

MISSING = "-"
# Heads of the same label that are listed, those with the largest distances.
_LISTED = 12
# Columns of words, before those of numbers.
_TEXTS = 3


# ------------------------------------------------------------------ for reading
def comparison_table(result: Comparison) -> RenderableType:
    """Heads that changed label first, then those that are furthest apart; and what was found in all."""
    head, *rows = table_rows(result, listed(result))
    columns = [
        Column(Text(visible(name)), tuple(Text(visible(row[i])) for row in rows), "left" if i < _TEXTS else "right")
        for i, name in enumerate(head)
    ]
    shown: list[RenderableType] = [ColumnBlocks(columns), Text()] if rows else []
    found = Lines([Text(visible(line)) for line in summary(result)])
    legend: list[RenderableType] = [Text(), Lines([Text(visible(_legend(result, _LISTED)), "dim")])] if rows else []
    return Group(*shown, found, *legend)


def listed(result: Comparison, most: int | None = _LISTED) -> list[HeadChange]:
    """Heads in the order in which they are shown.

    Those that changed label, the furthest apart first; then the furthest of all others that differ at all, `most` of
    them, or all for None.
    """
    far = sorted(result.heads, key=lambda h: -1.0 if h.distance is None else -h.distance)
    changed = [h for h in far if h.changed]
    others = [h for h in far if h.in_both and not h.changed and (h.distance or any(h.delta.values()))]
    return [*changed, *others[:most]]


def table_rows(result: Comparison, heads: Sequence[HeadChange]) -> list[list[str]]:
    """The header, then a row a head."""
    matches = {(m.stack, m.a): m for m in result.matching}
    metrics = list(dict.fromkeys(name for h in result.heads for name in h.delta))
    rows = [["head", "label A", "label B", "distance", "match in B", *metrics]]
    for h in heads:
        found = matches.get((h.stack, (h.layer, h.head)))
        rows.append(
            [
                name_of(result, h.stack, h.name),
                h.pattern_a or MISSING,
                _other(h),
                MISSING if h.distance is None else f"{h.distance:.3f}",
                MISSING if found is None else _match(h, found),
                *(_delta(h, name) for name in metrics),
            ]
        )
    return rows


def _other(head: HeadChange) -> str:
    if head.pattern_b is None:
        return MISSING
    return head.pattern_b if head.changed or head.pattern_a is None else "same"


def _match(head: HeadChange, found: Match) -> str:
    return "same" if found.b == (head.layer, head.head) else f"{found.names[1]} {found.distance:.3f}"


def _delta(head: HeadChange, name: str) -> str:
    value = head.delta.get(name)
    if value is None:
        return MISSING
    spread = None if head.spread is None else head.spread.get(name)
    half = None if spread is None or spread.high is None or spread.low is None else (spread.high - spread.low) / 2
    number = f"{round(value, 3) + 0.0:+.3f}" if value else "0"
    return number + (f" ±{half:.3f}" if half else "")


def _legend(result: Comparison, most: int | None) -> str:
    notes = ["metrics: B less A, mean over texts"]
    if any(h.spread for h in result.heads):
        notes.append("± half of the 95 % interval of the texts' differences")
    if result.rows:
        notes.append("distance: 0 the same rows, 1 no key in common")
    left_out = len(listed(result, None)) - len(listed(result, most))
    if left_out:
        notes.append(f"{left_out:,} more differ, with the same label (-f csv has all)")
    return "; ".join(notes)


# ------------------------------------------------------------------ formats
def render_comparison(result: Comparison, name: str) -> str:
    """A comparison in the format `name`, ending with a newline.

    Raises:
        InputError: There is no such format.
    """
    return in_format(result, name, _FORMATS)


def flat_changes(result: Comparison) -> list[dict[str, Any]]:
    """One flat dictionary a head, all with the same keys; None where one has no value.

    `stack, layer, head, pattern_a, pattern_b, changed, distance, match, similarity`, then a metric each: its
    difference as `METRIC`, and `METRIC_a`, `METRIC_b`, with several texts `METRIC_low` and `METRIC_high`.
    """
    matches = {(m.stack, m.a): m for m in result.matching}
    metrics = list(dict.fromkeys(name for h in result.heads for name in h.delta))
    several = any(h.spread for h in result.heads)
    return [_flat(h, matches.get((h.stack, (h.layer, h.head))), metrics, several) for h in result.heads]


def _flat(head: HeadChange, match: Match | None, metrics: Sequence[str], several: bool) -> dict[str, Any]:
    row = {name: getattr(head, name) for name in ("stack", "layer", "head", "pattern_a", "pattern_b", "changed")}
    row |= {"distance": plain(head.distance), "match": None if match is None else match.names[1]}
    row["similarity"] = None if match is None else match.similarity
    for name in metrics:
        row |= {
            name: head.delta.get(name),
            f"{name}_a": head.metrics_a.get(name),
            f"{name}_b": head.metrics_b.get(name),
        }
        spread = None if head.spread is None else head.spread.get(name)
        if several:
            row |= {f"{name}_{part}": None if spread is None else getattr(spread, part) for part in ("low", "high")}
    return row


def _table(result: Comparison) -> str:
    return plain_text(comparison_table(result))


def _json(result: Comparison) -> str:
    return json.dumps(plain(result.to_dict()), indent=2, allow_nan=False) + "\n"


def _jsonl(result: Comparison) -> str:
    return "".join(json.dumps(plain(head.to_dict()), allow_nan=False) + "\n" for head in result.heads)


def _csv(result: Comparison) -> str:
    rows = flat_changes(result)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else ["stack", "layer", "head"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_field(v) if isinstance(v, str) else v for name, v in row.items()} for row in rows)
    return out.getvalue()


def _markdown(result: Comparison) -> str:
    lines = ["# Two models compared", "", *(f"- {name}: {markdown_text(value)}" for name, value in facts(result)), ""]
    lines += [f"- {markdown_text(line)}" for line in summary(result)]
    head, *rows = ([markdown_text(cell) for cell in row] for row in table_rows(result, listed(result, None)))
    if rows:
        marks = "|---" * _TEXTS + "|--:" * (len(head) - _TEXTS) + "|"
        lines += ["", _row(head), marks, *map(_row, rows), "", markdown_text(_legend(result, None))]
    if result.warnings:
        lines += ["", "## Warnings", "", *(f"- {markdown_text(warning)}" for warning in result.warnings)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


_FORMATS: Mapping[str, Callable[[Comparison], str]] = {
    "table": _table,
    "json": _json,
    "jsonl": _jsonl,
    "csv": _csv,
    "markdown": _markdown,
}
