"""The head catalogue for a terminal, as Markdown and as HTML: the same sections, laid out and made safe to show."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from headscope.results import Analysis
from headscope.views.catalogue_sections import Section, Shown, evidence_section, types_section
from headscope.views.catalogue_tables import coreference_section, other_section, relations_section, retrieval_section
from headscope.views.catalogue_words import ablation_section, similarity_section, summary_section
from headscope.views.columns import Column, ColumnBlocks, Lines
from headscope.views.text import html_text, markdown_text, visible

_NUMBER = "padding:1px 8px;text-align:right;font-variant-numeric:tabular-nums"
_TEXT = "padding:1px 8px;text-align:left"


def sections_of(analysis: Analysis) -> list[Section]:
    """What there is to tell, in order; nothing where no types were asked for."""
    return [section for section in _sections(analysis) if section.columns or section.lines]


def _sections(analysis: Analysis) -> Iterator[Section]:
    catalogue = analysis.catalogue
    if catalogue is None:
        return
    if catalogue.types:
        yield types_section(analysis, catalogue)
        yield evidence_section(analysis, catalogue)
    for name, rows in catalogue.tables.items():
        summary = catalogue.summary.get(name, {})
        if not rows:
            continue
        if name == "relations":
            yield relations_section(analysis, rows)
        elif name == "coreference":
            yield coreference_section(rows, summary)
        elif name == "retrieval":
            yield retrieval_section(analysis, rows, summary)
        else:
            yield other_section(name, rows)
    if catalogue.similarity is not None:
        yield similarity_section(analysis, catalogue.similarity)
    if catalogue.ablation is not None:
        yield ablation_section(analysis, catalogue.ablation)
    yield summary_section(catalogue.summary)


# ------------------------------------------------------------------ terminal
def catalogue_tables(analysis: Analysis) -> RenderableType:
    """The sections one under the other, each with its title."""
    parts: list[RenderableType] = []
    for section in sections_of(analysis):
        parts += [Text()] if parts else []
        parts.append(Lines([Text(visible(section.title), "bold")]))
        if section.columns:
            parts.append(ColumnBlocks([_column(column) for column in section.columns]))
        if section.lines:
            parts.append(Lines([Text(visible(line), "dim" if section.quiet else "") for line in section.lines]))
    return Group(*parts)


def _column(column: Shown) -> Column:
    cells = tuple(Text(visible(cell)) for cell in column.cells)
    return Column(Text(visible(column.header)), cells, "right" if column.number else "left")


# ------------------------------------------------------------------ Markdown
def catalogue_markdown(analysis: Analysis) -> list[str]:
    """Lines, an empty one before each section; none where no types were asked for."""
    lines: list[str] = []
    for section in sections_of(analysis):
        lines += ["", f"## {markdown_text(section.title[:1].upper() + section.title[1:])}", ""]
        if section.columns:
            lines += [*_markdown_table(section.columns), ""]
        lines += [f"- {markdown_text(line)}" for line in section.lines] if section.lines else []
        if not lines[-1]:
            lines.pop()
    return lines


def _markdown_table(columns: tuple[Shown, ...]) -> Iterator[str]:
    yield f"| {' | '.join(markdown_text(column.header) for column in columns)} |"
    yield f"| {' | '.join('--:' if column.number else '---' for column in columns)} |"
    for row in zip(*(column.cells for column in columns), strict=True):
        yield f"| {' | '.join(map(markdown_text, row))} |"


# ------------------------------------------------------------------ HTML
def catalogue_html(analysis: Analysis) -> list[str]:
    """A fragment a section; all but the first, the types, are folded away."""
    parts = []
    for number, section in enumerate(sections_of(analysis)):
        inside = _html_table(section) if section.columns else ""
        inside += "".join(f'<div style="font-size:85%"><bdi>{html_text(line)}</bdi></div>' for line in section.lines)
        title = html_text(section.title)
        parts.append(f"<div>{title}{inside}</div>" if not number else _folded(title, inside))
    return parts


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{title}</summary>{inside}</details>"


def _html_table(section: Section) -> str:
    styles = [_NUMBER if column.number else _TEXT for column in section.columns]
    pairs = zip(section.columns, styles, strict=True)
    header = "".join(f'<th style="{style}">{html_text(column.header)}</th>' for column, style in pairs)
    rows = []
    for row in zip(*(column.cells for column in section.columns), strict=True):
        cells = zip(row, styles, strict=True)
        rows.append("".join(f'<td style="{style}">{html_text(cell)}</td>' for cell, style in cells))
    return f"<table><tr>{header}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
