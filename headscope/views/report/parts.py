"""The parts of a page that need no script, as HTML: every text in them is escaped here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from headscope.heads.interval import ROUGH_BELOW
from headscope.results import Analysis
from headscope.views.catalogue import sections_of
from headscope.views.catalogue_sections import Section
from headscope.views.curve import line_name
from headscope.views.importance import facts as importance_facts
from headscope.views.report.curve_file import Losses
from headscope.views.report.matrices import Matrices
from headscope.views.sections import facts, has_spread, plural, stability_note
from headscope.views.text import html_text

if TYPE_CHECKING:
    from headscope.importance.result import Importance

# Of a list of scores, how many of either end are told.
_LISTED = 5


def facts_part(analysis: Analysis) -> str:
    """Model, input and rules."""
    return _list(facts(analysis))


def _list(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{html_text(name)}</dt><dd><bdi>{html_text(value)}</bdi></dd>\n" for name, value in pairs)
    return f"<dl>\n{rows}</dl>"


def warnings_part(warnings: Sequence[str]) -> str:
    """What a reader should know first; nothing where there is nothing."""
    if not warnings:
        return ""
    lines = "".join(f"<li><bdi>{html_text(warning)}</bdi></li>" for warning in dict.fromkeys(warnings))
    return f'<aside class="warnings" aria-label="warnings"><strong>Warnings</strong><ul>{lines}</ul></aside>'


def types_part(analysis: Analysis) -> str:
    """What the catalogue found: the types, then everything else, folded away."""
    found = sections_of(analysis)
    if not found:
        return ""
    first, *rest = found
    folded = "".join(
        f"<details><summary>{html_text(_capital(section.title))}</summary>{_section(section)}</details>\n"
        for section in rest
    )
    return _part("types", "Types of heads", _section(first) + folded)


def _part(name: str, title: str, inside: str) -> str:
    return f'<section aria-labelledby="{name}-title">\n<h2 id="{name}-title">{title}</h2>\n{inside}\n</section>'


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _section(section: Section) -> str:
    kinds = [' class="number"' if column.number else "" for column in section.columns]
    table = ""
    if section.columns:
        rows = zip(*(column.cells for column in section.columns), strict=True)
        table = _table([column.header for column in section.columns], rows, kinds)
    style = ' class="hint"' if section.quiet else ""
    return table + "".join(f"<p{style}><bdi>{html_text(line)}</bdi></p>" for line in section.lines)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str]) -> str:
    top = "".join(f'<th scope="col"{kind}>{html_text(name)}</th>' for name, kind in zip(header, kinds, strict=True))
    body = []
    for row in rows:
        cells = (f"<td{kind}>{html_text(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


# ------------------------------------------------------------------ importance and curve
def importance_part(analysis: Analysis, importance: Importance | None) -> str:
    """How heads were scored, and the ends of the list; the map and the ranking show all of it."""
    if importance is None:
        return ""
    scores = sorted(importance.heads, key=lambda s: s.score)
    count = min(_LISTED, len(scores) // 2)
    several = len({s.stack for s in scores}) > 1
    lines = [
        (name, ", ".join(f"{f'{s.stack} ' * several}L{s.layer}H{s.head} {s.score:.3g}" for s in chosen))
        for name, chosen in (("lowest", scores[:count]), ("highest", scores[::-1][:count]))
        if chosen
    ]
    other = ""
    if importance.model.name and importance.model.name != analysis.model.name:
        other = f"<p><bdi>{html_text(f'scored on the model {importance.model.name}')}</bdi></p>"
    told = [pair for pair in importance_facts(importance) if pair[0] not in ("model", "class")]
    note = '<p class="hint">The more, the more it costs to remove a head. The map and the ranking show all scores.</p>'
    return _part("importance", "Importance", _list([*told, *lines]) + other + note)


def curve_part(losses: Losses | None) -> str:
    """The place of the plot, and its numbers as a table."""
    if losses is None:
        return ""
    plot = (
        '<div id="curve" role="img" aria-label="added loss by share of heads removed; the table has the numbers"></div>'
    )
    note = "solid: repaired; dashed: heads zeroed only; intervals are 95 % over texts, or draws where chance chose"
    header = ("method", "removed", "heads" if losses.unit == "head" else "KV groups", "added loss", "from", "to")
    kinds = ["", *[' class="number"'] * 5]
    table = _table(header, _points(losses), kinds)
    folded = f"<details><summary>The curve as a table</summary>{table}</details>"
    return _part("removal", "What removing heads costs", f'{plot}<p class="hint">{html_text(note)}</p>{folded}')


def _points(losses: Losses) -> Iterator[tuple[str, ...]]:
    for p in losses.points:
        numbers = (f"{v:.4f}" if math.isfinite(v) else "-" for v in (p.added, p.low, p.high))
        yield (line_name(p.method, p.repaired), f"{100 * p.share:.3g} %", f"{p.count:,}", *numbers)


# ------------------------------------------------------------------ how it was made
def made_part(analysis: Analysis, matrices: Matrices, command: str | None, data: int, library: int) -> str:
    """Command, versions, and what the page holds."""
    pairs = [] if command is None else [("command", command)]
    pairs.append(("versions", ", ".join(f"{name} {version}" for name, version in analysis.versions.items())))
    pairs += [("engine", analysis.engine), ("matrices", _kept(matrices))]
    pairs.append(("page", f"{_size(data)} of data, {_size(library)} of Bokeh, which draws the plots; loads nothing"))
    notes = [stability_note(analysis), _intervals(analysis)]
    notes.append("~ no better than chance; – not measurable; entropies in nats, distances in tokens")
    return _list(pairs) + "".join(f'<p class="hint">{html_text(note)}</p>' for note in notes if note)


def _intervals(analysis: Analysis) -> str:
    if not has_spread(analysis):
        return ""
    rough = f", rough over fewer than {ROUGH_BELOW}" if analysis.inputs.texts < ROUGH_BELOW else ""
    return f"[low, high] 95 % intervals of the mean over texts{rough}; sd: standard deviation over texts"


def _kept(matrices: Matrices) -> str:
    heads = sum(len(found["heads"]) for found in matrices.maps)
    if not heads:
        return "none were kept"
    text = (
        f"{plural(heads, 'head')} on the first text, {_size(matrices.bytes)}: square roots of weights in eight bits, "
    )
    text += f"off by {matrices.error:.2g} at most"
    return text + (f"; means of {matrices.tile} × {matrices.tile} tokens" if matrices.tile > 1 else "")


def _size(count: int) -> str:
    """`35 kB`, `1.3 MB`."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{max(count / 1e3, 0.1):.3g} kB"
