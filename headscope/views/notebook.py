"""An analysis as HTML for a notebook cell: one self-contained fragment, styled in place, no scripts, nothing loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headscope.results import Analysis, HeadRecord
from headscope.views.catalogue import catalogue_html
from headscope.views.catalogue_sections import has_types, type_names
from headscope.views.labels import LabelStyle, cell_letters, labels_shown, marked
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
    plural,
    stability_note,
    unstable,
)
from headscope.views.text import html_text

_CELL = "padding:1px 6px;text-align:center;font-size:85%"
_NUMBER = "padding:1px 8px;text-align:right;font-variant-numeric:tabular-nums"
_TEXT = "padding:1px 8px;text-align:left"


def analysis_html(analysis: Analysis) -> str:
    """Facts, label maps, every head's numbers (folded away where there are maps), the catalogue, warnings, escaped."""
    styles = labels_shown(analysis)
    stacks = by_stack(analysis)
    parts = ['<div class="headscope">', _facts(analysis)]
    whole = covers_model(analysis)
    if whole:
        parts += [_label_map(stack, layers, styles) for stack, layers in stacks.items()]
        parts.append(_legend(analysis, styles))
    tables = "".join(_heads(analysis, stack, layers, styles) for stack, layers in stacks.items())
    tables += _note("~ no better than chance; – not measurable; entropies in nats")
    if has_spread(analysis):
        tables += _note(f"{interval_note(analysis)}; hold the pointer over a value for its ends")
    if has_stability(analysis):
        tables += _note(f"{STABLE_TERM}; {SECOND_TERM}")
        parts.append(_note(stability_note(analysis)))
    parts.append(f"<details><summary>all heads</summary>{tables}</details>" if whole else tables)
    parts += catalogue_html(analysis)
    parts += [f"<div>warning: {html_text(warning)}</div>" for warning in analysis.warnings]
    return "\n".join([*parts, "</div>"])


def _note(text: str) -> str:
    return f'<div style="font-size:85%">{html_text(text)}</div>'


def _facts(analysis: Analysis) -> str:
    rows = "".join(
        f'<tr><td style="{_TEXT}">{html_text(name)}</td><td style="{_TEXT}"><bdi>{html_text(value)}</bdi></td></tr>'
        for name, value in facts(analysis)
    )
    return f"<table>{rows}</table>"


def _label_map(stack: str, layers: Layers, styles: Mapping[str, LabelStyle]) -> str:
    heads = sorted({record.head for records in layers.values() for record in records})
    header = "".join(f'<th style="{_CELL}">{head}</th>' for head in heads)
    rows = []
    for layer, records in layers.items():
        found = {record.head: record for record in records}
        cells = "".join(_map_cell(found.get(head), styles) for head in heads)
        rows.append(f'<tr><th style="{_CELL}">L{layer}</th>{cells}</tr>')
    caption = f'<caption style="text-align:left">{html_text(stack)}</caption>'
    return f"<table>{caption}<tr><th></th>{header}</tr>{''.join(rows)}</table>"


def _map_cell(record: HeadRecord | None, styles: Mapping[str, LabelStyle]) -> str:
    if record is None:
        return "<td></td>"
    rest = f" (rest: {record.rest_pattern})" if record.rest_pattern is not None else ""
    title = html_text(f"{record.name}: {record.pattern}{rest}{_on_texts(record)}")
    letters = marked(cell_letters(record, styles), record)
    return f'<td title="{title}" style="{_CELL};{_paint(styles[record.pattern])}">{letters}</td>'


def _on_texts(record: HeadRecord) -> str:
    if record.stability is None:
        return ""
    second = "" if record.second is None else f", {_second(record)}"
    return f" on {percent(record.stability)} of the texts{second}"


def _second(record: HeadRecord) -> str:
    share = "" if record.second_share is None else f" {percent(record.second_share)}"
    return "–" if record.second is None else record.second + share


def _paint(style: LabelStyle) -> str:
    return f"background:{style.fill};color:{style.ink}"


def _legend(analysis: Analysis, styles: Mapping[str, LabelStyle]) -> str:
    chips = " ".join(
        f'<span style="{_CELL};{_paint(style)}">{style.letter}</span> {html_text(label)}'
        for label, style in styles.items()
    )
    rests = any(record.rest_pattern is not None for record in analysis.heads)
    note = "; small letter: what a sink does with the rest of its attention" if rests else ""
    return f'<div style="font-size:85%">{chips}{note}</div>'


def _heads(analysis: Analysis, stack: str, layers: Layers, styles: Mapping[str, LabelStyle]) -> str:
    names, stability, types = metric_names(analysis), has_stability(analysis), has_types(analysis)
    first = ("head", "label", *(("stable", "second") if stability else ()), "runner-up", "rest")
    header = "".join(f'<th style="{_TEXT}">{name}</th>' for name in first)
    header += "".join(f'<th style="{_NUMBER}">{html_text(name)}</th>' for name in names)
    header += f'<th style="{_TEXT}">types</th>' if types else ""
    cells = (
        _head_cells(record, names, styles, stability) + (_types(record) if types else "")
        for records in layers.values()
        for record in records
    )
    rows = "".join(f"<tr>{row}</tr>" for row in cells)
    caption = f'<caption style="text-align:left">{html_text(stack)}</caption>'
    return f"<table>{caption}<tr>{header}</tr>{rows}</table>"


def _head_cells(record: HeadRecord, names: Sequence[str], styles: Mapping[str, LabelStyle], stability: bool) -> str:
    label = f'<td style="{_TEXT};{_paint(styles[record.pattern])}">{html_text(record.pattern)}</td>'
    others = [record.runner_up or "–", record.rest_pattern or "–"]
    if stability:
        others = [_stability(record), _second(record), *others]
    texts = "".join(f'<td style="{_TEXT}">{html_text(other)}</td>' for other in others)
    numbers = "".join(_number(record, name) for name in names)
    return f'<td style="{_TEXT}">{record.name}</td>{label}{texts}{numbers}'


def _types(record: HeadRecord) -> str:
    return f'<td style="{_TEXT}">{html_text(", ".join(type_names(record)) or "–")}</td>'


def _stability(record: HeadRecord) -> str:
    if record.stability is None:
        return "–"
    return percent(record.stability) + (UNSTABLE_MARK if unstable(record) else "")


def _number(record: HeadRecord, name: str) -> str:
    value = record.metrics.get(name)
    if value is None:
        return f'<td style="{_NUMBER}">–</td>'
    shown = f"{value:.3f}" + ("~" if name in record.at_chance else "")
    spread = (record.spread or {}).get(name)
    if spread is None or spread.low is None or spread.high is None:
        return f'<td style="{_NUMBER}">{shown}</td>'
    title = f"{spread.low:.3f} to {spread.high:.3f} over {plural(spread.texts, 'text')}"
    half = (spread.high - spread.low) / 2
    return f'<td title="{title}" style="{_NUMBER}">{shown}<span> ±{half:.3f}</span></td>'
