"""Scores of heads as a table, JSON, JSON Lines, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from headscope.views.columns import Column, ColumnBlocks, Facts, Lines
from headscope.views.formats import in_format, plain_text
from headscope.views.records import plain
from headscope.views.score_grid import MISSING, Grid, Scale, Scored, grids_of, scale_of
from headscope.views.sections import plural
from headscope.views.text import csv_field, markdown_text, visible

if TYPE_CHECKING:
    from headscope.importance.result import Importance

# How many of the lowest and the highest scores are listed.
_LISTED = 5
_FIELDS = ("unit", "stack", "layer", "head", "kv_group", "heads", "score", "error")


def importance_table(result: Importance) -> RenderableType:
    """A grid a stack and kind of unit, layers down and heads across, then the lowest and the highest scores."""
    parts: list[RenderableType] = []
    for unit, scores in units_of(result).items():
        scale = scale_of(scores)
        for grid in grids_of(unit, scores):
            parts += [
                Lines([Text(visible(grid.title), "bold")]),
                ColumnBlocks(list(grid.columns(scale, scores))),
                Text(),
            ]
        if len(scores) > 1:
            parts += [ColumnBlocks(_extremes(scores, scale)), Text()]
        parts += [Lines([Text("; ".join(_notes(scores, scale)), "dim")]), Text()]
    return Group(*parts[:-1])


def header_lines(result: Importance) -> RenderableType:
    """Model, method and texts: what a reader needs to know before believing a score."""
    return Facts([(name, visible(value)) for name, value in facts(result)])


def facts(result: Importance) -> list[tuple[str, str]]:
    """The header of a report: name and value, as plain text that is not yet safe to show."""
    model = result.model
    ways = [result.method]
    if result.method == "ablation":
        ways.append("a head's mean in its place" if result.replace == "mean" else "zero in its place")
    if result.normalised:
        ways.append("each layer divided by its L2 norm")
    found = [
        ("model", model.name),
        ("class", f"{model.class_name} ({model.type}), {model.dtype} on {model.device}"),
        ("method", ", ".join(ways)),
    ]
    if result.texts:
        loss = f", {result.loss} loss" if isinstance(result.loss, str) else ""
        found.append(("data", f"{plural(result.texts, 'text')}, {result.tokens:,} tokens{loss}"))
    return found


def units_of(result: Importance) -> dict[str, list[Scored]]:
    """The scores by kind of unit, `head` and `kv-group`, those that there are."""
    heads = [Scored("head", s.stack, s.layer, s.head, (s.head,), s.score, s.error) for s in result.heads]
    groups = [
        Scored("kv-group", s.stack, s.layer, s.kv_group, tuple(s.heads), s.score, s.error) for s in result.kv_groups
    ]
    return {unit: scores for unit, scores in (("head", heads), ("kv-group", groups)) if scores}


# ------------------------------------------------------------------ what is shown
def _extremes(scores: Sequence[Scored], scale: Scale) -> list[Column]:
    """The lowest scores, the lowest first, beside the highest, the highest first."""
    ordered = sorted((s for s in scores if s.finite), key=lambda s: s.score)
    count = min(_LISTED, len(ordered) // 2)
    several = len({s.stack for s in scores}) > 1
    columns = []
    for name, chosen in (("lowest", ordered[:count]), ("highest", ordered[::-1][:count])):
        columns.append(Column(Text(name), tuple(Text(visible(_name(s, several))) for s in chosen)))
        columns.append(Column(Text("score"), tuple(Text(_with_error(s, scale)) for s in chosen), "right"))
    return columns


def _name(score: Scored, several: bool) -> str:
    """A unit's name; the stack before it where there are several."""
    return f"{score.stack}.{score.name}" if several else score.name


def _with_error(score: Scored, scale: Scale) -> str:
    return scale.precise(score.score) + ("" if score.error is None else f" ±{scale.precise(score.error)}")


def _notes(scores: Sequence[Scored], scale: Scale) -> list[str]:
    notes = [scale.note] if scale.note else []
    if any(s.error is not None for s in scores):
        notes += ["± a standard error over texts", "~ within two standard errors of 0"]
    if not all(s.finite for s in scores):
        notes.append(f"{MISSING} no finite number")
    return [*notes, "colour: sevenths of all scores, the lowest darkest"]


# ------------------------------------------------------------------ formats
def render_importance(result: Importance, name: str) -> str:
    """Scores in the format `name`, ending with a newline.

    Raises:
        InputError: There is no such format.
    """
    return in_format(result, name, _FORMATS)


def flat_scores(result: Importance) -> Iterator[dict[str, Any]]:
    """One flat dictionary a head, then one a KV group, all with the same keys; None where one has no value."""
    for unit, scores in units_of(result).items():
        for s in scores:
            number = (s.number, None) if unit == "head" else (None, s.number)
            row = (unit, s.stack, s.layer, *number, list(s.heads), plain(s.score), plain(s.error))
            yield dict(zip(_FIELDS, row, strict=True))


def _table(result: Importance) -> str:
    return plain_text(importance_table(result))


def _json(result: Importance) -> str:
    return json.dumps(plain(result.to_dict()), indent=2, allow_nan=False) + "\n"


def _jsonl(result: Importance) -> str:
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in flat_scores(result))


def _csv(result: Importance) -> str:
    """One row a head or group; its heads with blanks between them, since spreadsheets take 1,3 for a number."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_FIELDS)
    for row in flat_scores(result):
        row |= {"stack": csv_field(row["stack"]), "heads": " ".join(map(str, row["heads"]))}
        writer.writerow(row.values())
    return out.getvalue()


def _markdown(result: Importance) -> str:
    lines = ["# Scores of attention heads", "", *(f"- {name}: {markdown_text(value)}" for name, value in facts(result))]
    for unit, scores in units_of(result).items():
        scale = scale_of(scores)
        for grid in grids_of(unit, scores):
            lines += ["", f"## {markdown_text(grid.title)}", "", *_markdown_grid(grid, scale)]
        errors = ["± a standard error over texts"] if any(s.error is not None for s in scores) else []
        lines += ["", "; ".join([scale.note, *errors])] if scale.note or errors else []
    if result.warnings:
        lines += ["", "## Warnings", "", *(f"- {markdown_text(warning)}" for warning in result.warnings)]
    return "\n".join(lines) + "\n"


def _markdown_grid(grid: Grid, scale: Scale) -> Iterator[str]:
    yield f"| layer | {' | '.join(grid.names)} |"
    yield "|---|" + "--:|" * len(grid.names)
    for layer, found in grid.rows.items():
        cells = ("" if n not in found else _with_error(found[n], scale) for n in grid.numbers)
        yield f"| L{layer} | {' | '.join(cells)} |"


_FORMATS: dict[str, Callable[[Importance], str]] = {
    "table": _table,
    "json": _json,
    "jsonl": _jsonl,
    "csv": _csv,
    "markdown": _markdown,
}
