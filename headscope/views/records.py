"""An analysis as JSON, JSON Lines, CSV and Markdown.

A new format is one function from an analysis to its text, decorated with `output_format`.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from headscope.errors import InputError
from headscope.results import Analysis, HeadRecord
from headscope.views.catalogue import catalogue_markdown
from headscope.views.catalogue_sections import has_types, type_names
from headscope.views.sections import (
    UNSTABLE_MARK,
    by_stack,
    facts,
    has_spread,
    has_stability,
    interval_note,
    metric_names,
    percent,
    stability_note,
    unstable,
)
from headscope.views.text import csv_field, markdown_text

Writer = Callable[[Analysis], str]


@dataclass(frozen=True)
class OutputFormat:
    """A way to write an analysis: its name, the file suffixes that choose it, the function that does it."""

    name: str
    suffixes: tuple[str, ...]
    write: Writer


FORMATS: dict[str, OutputFormat] = {}


def output_format(name: str, suffixes: tuple[str, ...]) -> Callable[[Writer], Writer]:
    """Enter the decorated function as the writer of format `name`."""

    def enter(write: Writer) -> Writer:
        FORMATS[name] = OutputFormat(name, suffixes, write)
        return write

    return enter


def format_for(path: str | PurePath | None, explicit: str | None = None) -> str:
    """The format to write: `explicit` if given, else what the suffix of `path` says, else `table`.

    Raises:
        InputError: There is no such format, or the suffix says nothing.
    """
    if explicit is not None:
        if explicit not in FORMATS:
            raise InputError(f"unknown format {explicit!r}", hint=f"formats: {', '.join(FORMATS)}")
        return explicit
    if path is None:
        return "table"
    suffix = PurePath(path).suffix.lower()
    for known in FORMATS.values():
        if suffix in known.suffixes:
            return known.name
    raise InputError(
        f"the suffix {suffix!r} of {str(path)!r} names no format",
        hint=f"give --format, or use one of {', '.join(s for f in FORMATS.values() for s in f.suffixes)}",
    )


def render(analysis: Analysis, name: str) -> str:
    """`analysis` in the format `name`, ending with a newline. Raises InputError for an unknown name."""
    return FORMATS[format_for(None, name)].write(analysis)


@output_format("table", suffixes=(".txt",))
def to_table(analysis: Analysis) -> str:
    """The tables as plain text, 100 columns wide: for files, where there is no terminal to ask."""
    from headscope.views.tables import table_text

    return table_text(analysis, width=100)


@output_format("json", suffixes=(".json",))
def to_json(analysis: Analysis) -> str:
    """The contract's object, indented. Floats are unrounded, and what is not a finite number is null."""
    return json.dumps(plain(analysis.to_dict()), indent=2, allow_nan=False) + "\n"


@output_format("jsonl", suffixes=(".jsonl", ".ndjson"))
def to_jsonl(analysis: Analysis) -> str:
    """One record a head and line, with the keys of the `heads` list of the JSON object."""
    return "".join(json.dumps(plain(record.to_dict()), allow_nan=False) + "\n" for record in analysis.heads)


def plain(value: Any) -> Any:
    """NumPy scalars as Python numbers, and None for what is not finite: JSON knows neither."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat_records(analysis: Analysis) -> list[dict[str, Any]]:
    """One flat dictionary a head, all with the same keys.

    `stack, layer, head, kv_head, pattern, runner_up`, the metrics, `rest_pattern`, `at_chance` (names with a space
    between them), with several texts `stability`, `second`, `second_share`, then `METRIC_chance` a metric, and with
    several texts `METRIC_low`, `METRIC_high`, `METRIC_sd`; where types were asked for, `types` (names of those that the
    head has, with a space between them) and `TYPE_score` a type. Floats are unrounded; None stands for what could not
    be measured.
    """
    names = metric_names(analysis)
    spread_names = [n for n in names if any(r.spread and n in r.spread for r in analysis.heads)]
    stability = has_stability(analysis)
    rows = [_flat(record, names, spread_names, stability) for record in analysis.heads]
    if analysis.catalogue is not None:
        for number, (row, record) in enumerate(zip(rows, analysis.heads, strict=True)):
            row["types"] = " ".join(type_names(record))
            row.update((f"{name}_score", plain(own[number])) for name, own in analysis.catalogue.scores.items())
    return rows


def _flat(record: HeadRecord, names: Sequence[str], spread_names: Sequence[str], stability: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "stack": record.stack,
        "layer": record.layer,
        "head": record.head,
        "kv_head": record.kv_head,
        "pattern": record.pattern,
        "runner_up": record.runner_up,
    }
    row.update((name, record.metrics.get(name)) for name in names)
    row.update(rest_pattern=record.rest_pattern, at_chance=" ".join(record.at_chance))
    if stability:
        row.update(stability=record.stability, second=record.second, second_share=record.second_share)
    row.update((f"{name}_chance", record.chance.get(name)) for name in names)
    for name in spread_names:
        spread = (record.spread or {}).get(name)
        for part in ("low", "high", "sd"):
            row[f"{name}_{part}"] = getattr(spread, part, None)
    return {key: plain(value) for key, value in row.items()}


@output_format("csv", suffixes=(".csv",))
def to_csv(analysis: Analysis) -> str:
    """The flat records under one header line; an empty field is a value that could not be measured."""
    rows = flat_records(analysis)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    first = ("stack", "layer", "head", "kv_head", "pattern", "runner_up", "rest_pattern", "at_chance")
    writer.writerow([csv_field(name) for name in (rows[0] if rows else first)])
    for row in rows:
        writer.writerow([csv_field(value) if isinstance(value, str) else value for value in row.values()])
    return out.getvalue()


@output_format("markdown", suffixes=(".md", ".markdown"))
def to_markdown(analysis: Analysis) -> str:
    """The header as a list, a table a stack with values to four decimals, the head catalogue, and the warnings."""
    lines = ["# Attention heads", ""]
    lines += [f"- {name}: {markdown_text(value)}" for name, value in facts(analysis)]
    for stack, layers in by_stack(analysis).items():
        lines += ["", f"## {markdown_text(stack)}", "", *_markdown_table(analysis, list(layers.values()))]
    for note in _markdown_notes(analysis):
        lines += ["", note]
    lines += catalogue_markdown(analysis)
    if analysis.warnings:
        lines += ["", "## Warnings", "", *(f"- {markdown_text(warning)}" for warning in analysis.warnings)]
    return "\n".join(lines) + "\n"


def _markdown_notes(analysis: Analysis) -> list[str]:
    notes = []
    if has_stability(analysis):
        notes.append(markdown_text(stability_note(analysis)))
    if any(record.at_chance for record in analysis.heads):
        notes.append(r"\~ no better than chance")
    if has_spread(analysis):
        notes.append(interval_note(analysis))
    return notes


def _markdown_table(analysis: Analysis, layers: Sequence[Sequence[HeadRecord]]) -> list[str]:
    names, stability, types = metric_names(analysis), has_stability(analysis), has_types(analysis)
    over_texts = ["stability", "second", "second_share"] if stability else []
    header = ["head", "label", "runner-up", "rest", *over_texts, *names] + ["types"] * types
    rule = ["---"] * 4 + ["--:", "---", "--:"] * stability + ["--:"] * len(names) + ["---"] * types
    rows = [
        [*_markdown_row(record, names, stability), *[markdown_text(", ".join(type_names(record)))] * types]
        for layer in layers
        for record in layer
    ]
    return [f"| {' | '.join(cells)} |" for cells in ([markdown_text(h) for h in header], rule, *rows)]


def _markdown_row(record: HeadRecord, names: Sequence[str], stability: bool) -> list[str]:
    labels = (record.pattern, record.runner_up, record.rest_pattern)
    cells = [record.name, *("" if label is None else markdown_text(label) for label in labels)]
    if stability:
        own, other = ("" if s is None else percent(s) for s in (record.stability, record.second_share))
        second = "" if record.second is None else markdown_text(record.second)
        mark = markdown_text(UNSTABLE_MARK) if unstable(record) else ""
        cells += [own + mark, second, other]
    for name in names:
        value = plain(record.metrics.get(name))
        spread = (record.spread or {}).get(name)
        cell = "" if value is None else f"{value:.4f}"
        if cell and spread is not None and spread.low is not None and spread.high is not None:
            cell += f" ± {(spread.high - spread.low) / 2:.4f}"
        cells.append(cell + (r"\~" if cell and name in record.at_chance else ""))
    return cells
