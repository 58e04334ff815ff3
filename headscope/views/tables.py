"""The tables: an overview of whole models, and a table a layer with every head's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from headscope.results import Analysis, HeadRecord
from headscope.views.catalogue import catalogue_tables
from headscope.views.catalogue_sections import has_types, type_names
from headscope.views.columns import Column, ColumnBlocks, Facts, Lines
from headscope.views.formats import plain_text
from headscope.views.label_map import LabelMap
from headscope.views.labels import LabelStyle, labels_shown, marked, strongest
from headscope.views.sections import (
    SECOND_TERM,
    STABLE_TERM,
    UNSTABLE_MARK,
    Layers,
    by_stack,
    covers_model,
    facts,
    has_spread,
    has_stability,
    interval_note,
    metric_names,
    percent,
    stability_note,
    unstable,
)
from headscope.views.text import visible

CHANCE_MARK = "~"
MISSING = "-"


def analysis_table(analysis: Analysis, *, header: bool = True) -> RenderableType:
    """The overview where the analysis covers all layers and heads of its stacks, else the heads' tables.

    Under it the head catalogue, where types were asked for.
    """
    heads = overview(analysis, header=header) if covers_model(analysis) else head_tables(analysis, header=header)
    return heads if analysis.catalogue is None else Group(heads, Text(), catalogue_tables(analysis))


def table_text(analysis: Analysis, *, width: int = 100) -> str:
    """`analysis_table` and the warnings as plain text without colour, `width` cells wide."""
    return plain_text(analysis_table(analysis), *warning_lines(analysis), width=width)


def header_lines(analysis: Analysis) -> RenderableType:
    """Model, class, inputs and rules: what a reader needs to know before believing a number."""
    return Facts([(name, visible(value)) for name, value in facts(analysis)])


def warning_lines(analysis: Analysis) -> list[Text]:
    """The analysis's warnings, one line each."""
    return [Text.assemble(("warning: ", "bold yellow"), visible(warning)) for warning in analysis.warnings]


def overview(analysis: Analysis, *, header: bool = True) -> RenderableType:
    """Per stack: how many heads of each label a layer has, the strongest of each, and the label map.

    Over several texts, heads whose label is not stable are marked.
    """
    styles = labels_shown(analysis)
    parts: list[RenderableType] = [header_lines(analysis), Text()] if header else []
    for stack, layers in by_stack(analysis).items():
        parts += [_title(stack), _summary(layers, styles), Text(), LabelMap(layers, styles), Text()]
    parts.append(_overview_legend(analysis, styles))
    return Group(*parts)


def _title(stack: str, rest: str = "") -> Lines:
    return Lines([Text(visible(stack) + rest, style="bold")])


def _summary(layers: Layers, styles: Mapping[str, LabelStyle]) -> ColumnBlocks:
    columns = [Column(Text("layer"), tuple(Text(f"L{layer}") for layer in layers))]
    count_width = max(len(str(len(records))) for records in layers.values())
    head_width = max(len(_short_name(record)) for records in layers.values() for record in records)
    for label, style in styles.items():
        if not any(record.pattern == label for records in layers.values() for record in records):
            continue
        cells = tuple(_summary_cell(records, label, count_width, head_width) for records in layers.values())
        columns.append(Column(_folded(label, f"{style.ink} on {style.fill}"), cells))
    return ColumnBlocks(columns)


def _short_name(record: HeadRecord) -> str:
    return marked(f"H{record.head}", record)


def _summary_cell(records: Sequence[HeadRecord], label: str, count_width: int, head_width: int) -> Text:
    count = sum(record.pattern == label for record in records)
    if not count:
        return Text(MISSING.rjust(count_width), style="dim")
    cell = f"{count:>{count_width}}"
    best = strongest(records, label)
    if best is not None:
        cell += f" {_short_name(best[0]):<{head_width}} {best[1]:.3f}"
    return Text(cell)


def _folded(name: str, style: str = "") -> Text:
    """A name as a header, broken after its underscores where that makes it narrower than eight cells or so."""
    lines = [""]
    for part in visible(name).replace("_", "_\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > 8:
            lines.append("")
        lines[-1] += part
    return Text("\n".join(lines), style=style)


def _overview_legend(analysis: Analysis, styles: Mapping[str, LabelStyle]) -> Lines:
    letters = Text()
    for label, style in styles.items():
        letters.append(style.letter, style=f"{style.ink} on {style.fill}")
        letters.append(f"={visible(label)}  ")
    letters.rstrip()
    notes = ["count of each label, then its strongest head and that head's value"]
    if any(record.rest_pattern is not None for record in analysis.heads):
        notes.append("small letter: what a sink does with the rest of its attention")
    return _legend(analysis, letters, Text("; ".join(notes), style="dim"))


def _legend(analysis: Analysis, *lines: Text) -> Lines:
    stability = stability_note(analysis)
    return Lines([*lines, Text(stability)] if stability else lines)


def head_tables(analysis: Analysis, *, header: bool = True) -> RenderableType:
    """Per stack and layer: every head's label, how stable it is over texts, runner-up, rest pattern, metrics, types."""
    styles = labels_shown(analysis)
    parts: list[RenderableType] = [header_lines(analysis), Text()] if header else []
    for stack, layers in by_stack(analysis).items():
        tables = {layer: _head_columns(records, analysis, styles) for layer, records in layers.items()}
        widths = [max(column.width for column in same) for same in zip(*tables.values(), strict=True)]
        for layer, columns in tables.items():
            parts += [_title(stack, f", layer {layer}"), ColumnBlocks(columns, widths), Text()]
    parts.append(_legend(analysis, Text(_number_legend(analysis), style="dim")))
    return Group(*parts)


def _head_columns(records: Sequence[HeadRecord], analysis: Analysis, styles: Mapping[str, LabelStyle]) -> list[Column]:
    everyone = analysis.heads
    columns = [Column(Text("head"), tuple(Text(record.name) for record in records))]
    if any(record.kv_head != record.head for record in everyone):
        columns.append(Column(Text("kv"), tuple(Text(str(record.kv_head)) for record in records), "right"))
    columns.append(Column(Text("label"), tuple(_label_cell(record.pattern, styles) for record in records)))
    if has_stability(analysis):
        columns.append(Column(Text("stable"), tuple(_stability_cell(record) for record in records), "right"))
    if any(record.second is not None for record in everyone):
        columns.append(Column(Text("second"), tuple(_second_cell(record) for record in records)))
    columns.append(Column(Text("runner-up"), tuple(_plain_cell(record.runner_up) for record in records)))
    if any(record.rest_pattern is not None for record in everyone):
        columns.append(Column(Text("rest"), tuple(_plain_cell(record.rest_pattern) for record in records)))
    for name in metric_names(analysis):
        columns.append(Column(_folded(name), tuple(_metric_cell(record, name) for record in records), "right"))
    if has_types(analysis):
        columns.append(Column(Text("types"), tuple(_types_cell(record) for record in records)))
    return columns


def _label_cell(label: str, styles: Mapping[str, LabelStyle]) -> Text:
    return Text(visible(label), style=f"{styles[label].ink} on {styles[label].fill}")


def _plain_cell(label: str | None) -> Text:
    return Text(MISSING, style="dim") if label is None else Text(visible(label))


def _types_cell(record: HeadRecord) -> Text:
    names = type_names(record)
    return Text(visible(", ".join(names))) if names else Text(MISSING, style="dim")


def _stability_cell(record: HeadRecord) -> Text:
    if record.stability is None:
        return Text(MISSING + " ", style="dim")
    return Text(percent(record.stability) + (UNSTABLE_MARK if unstable(record) else " "))


def _second_cell(record: HeadRecord) -> Text:
    if record.second is None or record.second_share is None:
        return Text(MISSING, style="dim")
    return Text(f"{visible(record.second)} {percent(record.second_share)}")


def _metric_cell(record: HeadRecord, name: str) -> Text:
    value = record.metrics.get(name)
    if value is None:
        return Text(MISSING + " ", style="dim")
    text = f"{value:.3f}"
    spread = (record.spread or {}).get(name)
    if spread is not None and spread.low is not None and spread.high is not None:
        text += f" ±{(spread.high - spread.low) / 2:.3f}"
    by_chance = name in record.at_chance
    # The blank keeps the digits of marked and unmarked numbers under each other.
    return Text(text + (CHANCE_MARK if by_chance else " "), style="dim" if by_chance else "")


def _number_legend(analysis: Analysis) -> str:
    notes = []
    if has_stability(analysis):
        notes.append(STABLE_TERM)
    if any(record.second is not None for record in analysis.heads):
        notes.append(SECOND_TERM)
    if any(record.at_chance for record in analysis.heads):
        notes.append(f"{CHANCE_MARK} no better than chance")
    if any(record.rest_pattern is not None for record in analysis.heads):
        notes.append("rest: the label without the first column")
    if has_spread(analysis):
        notes.append(interval_note(analysis))
    if any(value is None for record in analysis.heads for value in record.metrics.values()):
        notes.append(f"{MISSING} not measurable")
    notes.append("entropies in nats")
    return "; ".join(notes)
