"""What removing heads costs, share by share: a picture, and the numbers behind it in every format.

matplotlib is imported when the picture is drawn, never by importing this module.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from math import floor, isfinite, log10
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from headscope.pruning.curve_result import Curve, Point
from headscope.views.choosing import counts_tokens, loss_unit, perplexity_rise, sizes_line
from headscope.views.columns import Column, ColumnBlocks, Facts, Lines
from headscope.views.formats import in_format, plain_text
from headscope.views.heatmaps import DPI, picture
from headscope.views.records import plain
from headscope.views.text import csv_field, markdown_text, visible

# The method that is a band over draws, not an interval over texts.
RANDOM = "random"
_FIELDS = ("method", "repaired", "unit", "share", "count", "added", "low", "high", "interval", "seeds")
_RISE = "perplexity_rise"


def curve_picture(curve: Curve, *, file_format: str = "png", dpi: int = DPI) -> bytes:
    """The added loss against the share that is removed, a line a method, as `png`, `svg` or `pdf`."""
    from headscope.views.curve_figure import curve_figure

    return picture(lambda: curve_figure(curve), file_format, dpi)


def curve_csv(curve: Curve) -> str:
    """A row a point: what the picture shows, floats unrounded.

    `added`, `low` and `high` are in the loss's own unit; `interval` says what the last two are: `95% over texts`, or
    `seeds` for the lowest and highest of several draws. With a loss in nats a token, `perplexity_rise` is
    exp(added) - 1.
    """
    rows = list(flat_points(curve))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_fields(curve))
    for row in rows:
        writer.writerow([csv_field(value) if isinstance(value, str) else value for value in row.values()])
    return out.getvalue()


def flat_points(curve: Curve) -> Iterator[dict[str, Any]]:
    """The points as flat dictionaries, line by line of the picture."""
    for points in lines_of(curve).values():
        for p in points:
            band = "seeds" if p.method == RANDOM else "95% over texts"
            row = (p.method, bool(p.repaired), curve.unit, p.share, p.count, p.added, p.low, p.high, band, p.seeds)
            rise = (perplexity_rise(p.added),) if counts_tokens(curve.loss) else ()
            yield {name: plain(value) for name, value in zip(_fields(curve), (*row, *rise), strict=True)}


def _fields(curve: Curve) -> tuple[str, ...]:
    return (*_FIELDS, _RISE) if counts_tokens(curve.loss) else _FIELDS


def lines_of(curve: Curve) -> dict[tuple[str, bool], list[Point]]:
    """The points by method and whether a repair followed, each line by share; methods in the order of the points."""
    methods = dict.fromkeys(p.method for p in curve.points)
    found = {
        (m, r): [p for p in curve.points if (p.method, bool(p.repaired)) == (m, r)] for m in methods for r in (0, 1)
    }
    return {(m, bool(r)): sorted(points, key=lambda p: p.share) for (m, r), points in found.items() if points}


def line_name(method: str, repaired: bool) -> str:
    """`gradient`, or `gradient, repaired`."""
    return f"{method}, repaired" if repaired else method


def unit_name(curve: Curve) -> str:
    """`heads` or `KV groups`."""
    return "heads" if curve.unit == "head" else "KV groups"


# ------------------------------------------------------------------ for reading
def header_lines(curve: Curve) -> RenderableType:
    """The model and what the loss was measured on."""
    return Facts([(name, visible(value)) for name, value in facts(curve)])


def facts(curve: Curve) -> list[tuple[str, str]]:
    """Name and value, as plain text that is not yet safe to show."""
    model = curve.model
    kind = f"{model.class_name} ({model.type}), {model.dtype} on {model.device}"
    base = f"{loss_unit(curve.loss)}: {curve.base:.4f} with all heads"
    return [("model", model.name), ("class", kind), ("data", sizes_line(curve.sizes)), ("loss", base)]


def curve_table(curve: Curve) -> RenderableType:
    """A row a share, a column a method, with and without repair."""
    head, *rows = curve_rows(curve)
    columns = [
        Column(Text(visible(name)), tuple(Text(visible(row[i])) for row in rows), "left" if i == 0 else "right")
        for i, name in enumerate(head)
    ]
    return Group(ColumnBlocks(columns), Text(), Lines([Text(visible(_legend(curve)), "dim")]))


def curve_rows(curve: Curve) -> list[list[str]]:
    """The header, then a row a share: how many heads that is, and every line's added loss there."""
    lines = lines_of(curve)
    counts = {p.share: p.count for p in curve.points}
    decimals = _decimals(curve.points)
    rows = [["removed", f"of {curve.units:,} {unit_name(curve)}", *(line_name(*key) for key in lines)]]
    for share in sorted(counts):
        there = [next((p for p in points if p.share == share), None) for points in lines.values()]
        rows.append([f"{100 * share:.3g} %", str(counts[share]), *(_cell(p, decimals) for p in there)])
    return rows


def _decimals(points: Sequence[Point]) -> int:
    """As many as give the smallest loss two digits: between 3 and 6."""
    sizes = [abs(p.added) for p in points if isfinite(p.added) and p.added]
    return min(max(1 - floor(log10(min(sizes))), 3), 6) if sizes else 3


def _cell(point: Point | None, decimals: int) -> str:
    if point is None or not isfinite(point.added):
        return "-"
    added, bounds = f"{point.added:.{decimals}f}", (point.low, point.high)
    if any(b is None or not isfinite(b) for b in bounds):
        return added
    return f"{added} ({bounds[0]:.{decimals}f}–{bounds[1]:.{decimals}f})"


def _legend(curve: Curve) -> str:
    notes = [f"added loss, {loss_unit(curve.loss)} (95 % interval over texts)"]
    if any(p.method == RANDOM for p in curve.points):
        notes.append(f"{RANDOM}: mean, lowest and highest of {max(int(p.seeds) for p in curve.points)} draws")
    return "; ".join(notes)


# ------------------------------------------------------------------ formats
def render_curve(curve: Curve, name: str) -> str:
    """A curve in the format `name`, ending with a newline.

    Raises:
        InputError: There is no such format.
    """
    return in_format(curve, name, _FORMATS)


def _table(curve: Curve) -> str:
    return plain_text(curve_table(curve))


def _json(curve: Curve) -> str:
    return json.dumps(plain(curve.to_dict()), indent=2, allow_nan=False) + "\n"


def _jsonl(curve: Curve) -> str:
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in flat_points(curve))


def _markdown(curve: Curve) -> str:
    head, *rows = ([markdown_text(cell) for cell in row] for row in curve_rows(curve))
    lines = [
        "# What removing heads costs",
        "",
        *(f"- {name}: {markdown_text(value)}" for name, value in facts(curve)),
        "",
    ]
    lines += [_row(head), "|---|" + "--:|" * (len(head) - 1), *map(_row, rows), "", markdown_text(_legend(curve))]
    if curve.warnings:
        lines += ["", "## Warnings", "", *(f"- {markdown_text(warning)}" for warning in curve.warnings)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


_FORMATS: dict[str, Callable[[Curve], str]] = {
    "table": _table,
    "json": _json,
    "jsonl": _jsonl,
    "csv": curve_csv,
    "markdown": _markdown,
}
