"""A verification and a head's explanation as tables, JSON, JSON Lines, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from math import inf, isfinite
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from headscope.errors import InputError
from headscope.results import HeadExplanation, SiteCheck, Verification
from headscope.views.columns import Column, ColumnBlocks, Lines
from headscope.views.formats import plain_text
from headscope.views.text import csv_field, markdown_text, token_label, visible

_NUMBERS = ("max_abs_weights", "max_abs_output", "rel_output")
_HEADERS = ("site", "backend", "weights", "output", "relative", "positions", "mask", "worst", "")


def verification_table(result: Verification) -> RenderableType:
    """One row a site and backend, then what was skipped and why, then the verdict."""
    parts: list[RenderableType] = []
    if result.sites:
        rows = [_cells(site) for site in result.sites]
        columns = [
            Column(Text(header), tuple(row[i] for row in rows), "right" if 2 <= i <= 4 else "left")
            for i, header in enumerate(_HEADERS)
        ]
        parts += [ColumnBlocks(columns), Text()]
    for skipped in result.skipped:
        parts.append(
            Lines([Text(visible(f"skipped {skipped.stack} layer {skipped.layer}: {skipped.reason}"), "yellow")])
        )
    parts.append(Lines([Text(verdict(result), "bold green" if result.passed else "bold red")]))
    parts.append(Lines([Text(_note(result), "dim")]))
    return Group(*parts)


def _note(result: Verification) -> str:
    """What the columns mean and what was allowed."""
    limits = result.tolerance
    wider = any(s.allowed_weights > limits["weights"] for s in result.sites)
    return (
        f"largest differences from the model; allowed in {result.dtype}: weights {limits['weights']:.2g}, output "
        f"{limits['output']:.2g} of its largest value{', more where scores are large' if wider else ''}; "
        "own: our formulas, model: the model's tensors"
    )


def verdict(result: Verification) -> str:
    """The outcome in one line, with the site and head that differ most where it failed."""
    sites = {(s.stack, s.layer) for s in result.sites}
    if not result.sites:
        return "not verified: no site could be rebuilt"
    if result.passed:
        return f"passed: {len(sites)} sites rebuilt, {len(result.skipped)} skipped"
    worst = max((s for s in result.sites if not s.passed), key=_excess)
    failed = {(s.stack, s.layer) for s in result.sites if not s.passed}
    if not worst.max_abs_weights <= worst.allowed_weights:
        where = f"L{worst.layer}H{worst.worst_head} (query {worst.worst_position[0]}, key {worst.worst_position[1]})"
    else:
        head = "" if worst.worst_head is None else f"H{worst.worst_head}"
        where = f"L{worst.layer}{head} (its output)"
    return f"FAILED: {len(failed)} of {len(sites)} sites differ, most in {worst.stack} {where}"


def _excess(site: SiteCheck) -> tuple[float, float]:
    """What makes a site worse than another; not a number is worst of all."""
    numbers = (site.max_abs_weights, site.rel_output or 0.0)
    return (numbers[0], numbers[1]) if all(map(isfinite, numbers)) else (inf, inf)


def _cells(site: SiteCheck) -> list[Text]:
    style = "" if site.passed else "red"
    numbers = ["-" if (v := getattr(site, name)) is None else f"{v:.1e}" for name in _NUMBERS]
    worst = "-" if site.worst_head is None else f"H{site.worst_head}"
    texts = [f"{site.stack}.{site.layer}", site.backend, *numbers, site.positions, site.mask, worst]
    return [Text(visible(t), style) for t in (*texts, "ok" if site.passed else "DIFFERS")]


def explanation_table(result: HeadExplanation) -> RenderableType:
    """The steps under each other: formula, shape and a corner of the numbers with its tokens."""
    parts: list[RenderableType] = [Lines([Text(visible(f"{result.stack} {result.name}"), "bold")])]
    for number, step in enumerate(result.steps, 1):
        shape = " × ".join(str(size) for size in step.shape)
        title = Text.assemble((f"{number}. {step.name}", "bold"), (f"  {shape}  ", "dim"), visible(step.formula))
        parts += [Text(), Lines([title]), ColumnBlocks(_matrix(result, step.values, step.axes, step.shape))]
    return Group(*parts)


def _matrix(result: HeadExplanation, values: Any, axes: tuple[str, str], shape: tuple[int, int]) -> list[Column]:
    sides = {"n_q": result.tokens[0], "n_k": result.tokens[1]}
    rows, columns = (
        [token_label(t, 12) for t in sides[axis][:count]] if axis in sides else [f"{axis} {i}" for i in range(count)]
        for axis, count in zip(axes, values.shape, strict=True)
    )
    below = [Text("…")] if shape[0] > values.shape[0] else []
    blank = [Text("")] * len(below)
    table = [Column(Text(""), (*(Text(r, "dim") for r in rows), *below))]
    for index, label in enumerate(columns):
        table.append(Column(Text(label), (*(Text(_number(v)) for v in values[:, index]), *blank), "right"))
    right = Column(Text(""), (*(Text("…") for _ in rows), *blank))
    return [*table, right] if shape[1] > values.shape[1] else table


def _number(value: float) -> str:
    return "-inf" if value == float("-inf") else f"{value:.3f}"


# ------------------------------------------------------------------ formats
def render_verification(result: Verification | HeadExplanation, name: str) -> str:
    """A result in the format `name`, ending with a newline.

    Raises:
        InputError: The result has no such format.
    """
    formats = _FORMATS if isinstance(result, Verification) else _EXPLANATION_FORMATS
    if name not in formats:
        raise InputError(f"this result cannot be written as {name}", f"Formats: {', '.join(formats)}.")
    return formats[name](result)


def _table(result: Verification | HeadExplanation) -> str:
    return plain_text(verification_table(result) if isinstance(result, Verification) else explanation_table(result))


def _json(result: Verification | HeadExplanation) -> str:
    return json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n"


def _jsonl(result: Any) -> str:
    return "".join(json.dumps(site.to_dict(), allow_nan=False) + "\n" for site in result.sites)


def _csv(result: Any) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = ("stack", "layer", "backend", *_NUMBERS, "positions", "mask", "passed", "worst_head")
    writer.writerow(names)
    for site in result.sites:
        values = [getattr(site, name) for name in names]
        writer.writerow([csv_field(v) if isinstance(v, str) else v for v in values])
    return out.getvalue()


def _markdown(result: Any) -> str:
    lines = ["# Attention rebuilt from the weights", "", markdown_text(verdict(result)), ""]
    lines += [f"| {' | '.join(_HEADERS[:-1])} | |", f"|{'---|' * len(_HEADERS)}"]
    lines += [f"| {' | '.join(markdown_text(c.plain) for c in _cells(site))} |" for site in result.sites]
    lines += ["", *(markdown_text(f"skipped {s.stack} layer {s.layer}: {s.reason}") for s in result.skipped)]
    return "\n".join(lines).rstrip() + "\n"


_FORMATS: dict[str, Callable[[Any], str]] = {
    "table": _table,
    "json": _json,
    "jsonl": _jsonl,
    "csv": _csv,
    "markdown": _markdown,
}
_EXPLANATION_FORMATS: dict[str, Callable[[Any], str]] = {"table": _table, "json": _json}
