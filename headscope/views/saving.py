"""A saved pruned model as a table, JSON, JSON Lines, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.text import Text

from headscope.pruning.save_report import FORMS, SaveReport
from headscope.pruning.spec import write_heads
from headscope.views.columns import Column, ColumnBlocks, Lines
from headscope.views.formats import in_format, plain_text
from headscope.views.text import csv_field, markdown_text, visible

_HEADERS = ("layer", "removed", "zeroed")


def saving_table(report: SaveReport) -> RenderableType:
    """What each layer lost, in the numbers of the original model, where the model went, and how it loads."""
    rows = _rows(report)
    columns = [
        Column(Text(header), tuple(Text(visible(row[i])) for row in rows), "left") for i, header in enumerate(_HEADERS)
    ]
    return Group(ColumnBlocks(columns), Text(), Lines([Text(visible(line)) for line in _lines(report)]))


def _rows(report: SaveReport) -> list[tuple[str, str, str]]:
    rows = []
    for name, heads in report.heads.items():
        zeroed = set(report.zeroed.get(name, ()))
        rows.append(
            (name, write_heads([h for h in heads if h not in zeroed]) or "-", write_heads(sorted(zeroed)) or "-")
        )
    return rows


def _lines(report: SaveReport) -> list[str]:
    found = report.equivalence
    again = f"differs by {found.max_abs:.1e} ({found.relative:.1e} of the largest output)"
    return [
        f"written to {report.output}: {report.params:,} parameters, {report.bytes:,} bytes",
        f"{report.form}: {FORMS[report.form]}",
        f"loaded again, it {again if found.max_abs else 'is the same'} in {len(found.checks)} comparisons",
    ]


def render_saving(report: SaveReport, name: str) -> str:
    """A report in the format `name`, ending with a newline.

    Raises:
        InputError: There is no such format.
    """
    return in_format(report, name, _FORMATS)


def _table(report: SaveReport) -> str:
    return plain_text(saving_table(report))


def _json(report: SaveReport) -> str:
    return json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n"


def _jsonl(report: SaveReport) -> str:
    return json.dumps(report.to_dict(), allow_nan=False) + "\n"


def _csv(report: SaveReport) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_HEADERS)
    writer.writerows([csv_field(cell) for cell in row] for row in _rows(report))
    return out.getvalue()


def _markdown(report: SaveReport) -> str:
    rows = [_HEADERS, ("---",) * 3, *(tuple(markdown_text(cell) for cell in row) for row in _rows(report))]
    table = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*table, "", *(f"- {markdown_text(line)}" for line in _lines(report))]) + "\n"


_FORMATS: dict[str, Callable[[SaveReport], str]] = {
    "table": _table,
    "json": _json,
    "jsonl": _jsonl,
    "csv": _csv,
    "markdown": _markdown,
}
