"""A pruning as tables, JSON, JSON Lines, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from math import isfinite

from rich.console import Group, RenderableType
from rich.text import Text

from headscope.pruning.result import Change, PruneResult, Quality
from headscope.pruning.spec import write_heads
from headscope.views.choosing import chosen_lines, repair_lines
from headscope.views.columns import Column, ColumnBlocks, Facts, Lines
from headscope.views.formats import in_format, plain_text
from headscope.views.text import csv_field, markdown_text, visible

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Rows = list[tuple[str, ...]]


def pruning_table(result: PruneResult) -> RenderableType:
    """What left each layer, what that saves, whether it is right, how fast and how good the model is."""
    parts: list[RenderableType] = []
    for rows in (layer_rows(result), size_rows(result)):
        parts += [_columns(rows), Text()]
    parts.append(Lines([Text(visible(verdict(result)), "bold green" if result.passed else "bold red")]))
    parts.append(Lines([Text(visible(line), "dim") for line in proof_lines(result)]))
    if result.latency:
        parts += [Text(), _columns(latency_rows(result)), Lines([Text(visible(latency_line(result)), "dim")])]
    for line in (chosen_lines(result), repair_lines(result), quality_lines(result), saved_lines(result)):
        if line:
            parts += [Text(), Lines([Text(visible(t), "dim" if i else "") for i, t in enumerate(line)])]
    return Group(*parts)


def header_lines(result: PruneResult) -> RenderableType:
    """The model that was pruned, and how it is saved."""
    model = result.model
    kind = f"{model.class_name} ({model.type}), {model.dtype} on {model.device}"
    return Facts([(n, visible(v)) for n, v in (("model", model.name), ("class", kind), ("form", result.form))])


def _columns(rows: Rows) -> ColumnBlocks:
    head, body = rows[0], rows[1:]
    return ColumnBlocks(
        [
            Column(Text(name), tuple(Text(visible(row[i])) for row in body), "left" if i == 0 else "right")
            for i, name in enumerate(head)
        ]
    )


# ------------------------------------------------------------------ what is shown
def layer_rows(result: PruneResult) -> Rows:
    """One row a layer that lost heads, in the numbers of the original model."""
    zeroed = any(layer.zeroed for layer in result.layers)
    grouped = any(layer.num_kv_heads != layer.num_heads for layer in result.layers)
    head = ["layer", "removed", *(["zeroed"] if zeroed else []), "heads left", *(["kv left"] if grouped else [])]
    rows: Rows = [tuple(head)]
    for layer in result.layers:
        removed = [h for h in layer.gone if h not in layer.zeroed]
        row = [layer.name, write_heads(removed) or "-", *([write_heads(layer.zeroed) or "-"] if zeroed else [])]
        row.append(f"{layer.left} of {layer.num_heads}")
        if grouped:
            row.append(f"{layer.kv_left} of {layer.num_kv_heads}")
        rows.append(tuple(row))
    return rows


def size_rows(result: PruneResult) -> Rows:
    """Parameters, bytes and cache, before and after."""
    rows: Rows = [("", "before", "after", "saved")]
    rows.append(("parameters", *_pair(result.params, _count)))
    rows.append(("of those, attention", *_pair(result.attention_params, _count)))
    rows.append(("weights on disk", *_pair(result.bytes, _bytes)))
    if result.kv_cache.before:
        rows.append(("KV cache a token", *_pair(result.kv_cache, _bytes)))
    return rows


def _pair(change: Change, shown: Callable[[float], str]) -> tuple[str, str, str]:
    return shown(change.before), shown(change.after), f"{100 * change.share:.1f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _bytes(value: float) -> str:
    unit = 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value == int(value) else f"{value:.1f} {_UNITS[unit]}"


def verdict(result: PruneResult) -> str:
    """The outcome of the proof in one line."""
    found = result.equivalence
    numbers = f"largest difference {_number(found.max_abs)}, relative {_number(found.relative)}"
    if result.passed:
        return f"equal to the original with these heads zeroed: {numbers}, allowed {found.tolerance:.0e}"
    return f"NOT EQUAL to the original with these heads zeroed: {numbers}, allowed {found.tolerance:.0e}"


def proof_lines(result: PruneResult) -> list[str]:
    """What was compared, what failed, and what attention's share of the parameters allows."""
    found = result.equivalence
    ways = list(dict.fromkeys(f"{check.mode} ({check.implementation})" for check in found.checks))
    lines = [*found.failures, f"{len(found.checks)} comparisons: {', '.join(ways) or 'none'}", *found.notes]
    share = result.attention_params.before / result.params.before if result.params.before else 0.0
    return [*lines, f"attention has {100 * share:.1f} % of the parameters, so no pruning of heads saves more"]


def latency_rows(result: PruneResult) -> Rows:
    """Medians and quartiles of a forward pass by shape of the input, and of one more token with a cache."""
    rows: Rows = [("batch × length", "before", "after", "after / before", "")]
    for cell in result.latency:
        shape = f"{cell.batch} × {cell.length}" if cell.length is not None else f"{cell.batch}"
        if cell.kind == "decode":
            shape = f"{cell.batch} × 1 after {cell.length}"
        before, after = (
            f"{_ms(middle)} ({_ms(low)}–{_ms(high)})"
            for middle, (low, high) in ((cell.before_ms, cell.before_middle), (cell.after_ms, cell.after_middle))
        )
        rows.append((shape, before, after, f"{cell.ratio:.2f}", "inside the noise" if cell.in_noise else ""))
    return rows


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def latency_line(result: PruneResult) -> str:
    """What the times are and what they were measured on."""
    on = result.conditions
    if on is None:
        return ""
    threads = f", {on.threads} thread{'s' if on.threads != 1 else ''}" if on.device == "cpu" else ""
    decodes = any(cell.kind == "decode" for cell in result.latency)
    after = "; after N: one more token, with a cache of N" if decodes else ""
    return (
        f"ms of a forward pass, median (middle half), both models in turns{after}; {on.attention} attention in "
        f"{on.dtype} on {on.device}{threads}"
    )


def quality_lines(result: PruneResult) -> list[str]:
    """The measure before and after, and what it is."""
    found = result.quality
    if found is None:
        return []
    name, before, after = found.metric.replace("_", " "), _quality(found, found.before), _quality(found, found.after)
    return [
        f"{name}: {before} before, {after} after ({found.better} is better)",
        f"{found.detail}; {found.texts} texts, {found.tokens} tokens",
    ]


def _quality(found: Quality, value: float) -> str:
    return f"{100 * value:.1f} %" if found.metric == "accuracy" else f"{value:.4g}"


def saved_lines(result: PruneResult) -> list[str]:
    """Where the model went."""
    saved = result.saved
    if saved is None:
        return [] if result.passed else ["nothing was written"]
    found = saved.equivalence
    again = f"loaded again, it differs by {_number(found.max_abs)}" if found.max_abs else "loaded again, it is the same"
    return [f"written to {saved.output} ({saved.form}, {_bytes(saved.bytes)}); {again}"]


def _number(value: float) -> str:
    return f"{value:.1e}" if isfinite(value) else "infinite"


# ------------------------------------------------------------------ formats
def render_pruning(result: PruneResult, name: str) -> str:
    """A pruning in the format `name`, ending with a newline.

    Raises:
        InputError: There is no such format.
    """
    return in_format(result, name, _FORMATS)


def _table(result: PruneResult) -> str:
    return plain_text(pruning_table(result))


def _json(result: PruneResult) -> str:
    return json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n"


def _jsonl(result: PruneResult) -> str:
    return "".join(json.dumps(layer.to_dict(), allow_nan=False) + "\n" for layer in result.layers)


def _csv(result: PruneResult) -> str:
    """One row a layer; heads as `--heads` reads them."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("stack", "layer", "num_heads", "num_kv_heads", "left", "kv_left", "gone", "zeroed"))
    for layer in result.layers:
        numbers = (layer.layer, layer.num_heads, layer.num_kv_heads, layer.left, layer.kv_left)
        # Blanks between heads: spreadsheets take 1,3 for a number.
        heads = (" ".join(map(str, layer.gone)), " ".join(map(str, layer.zeroed)))
        writer.writerow((csv_field(layer.stack), *numbers, *heads))
    return out.getvalue()


def _markdown(result: PruneResult) -> str:
    lines = ["# Heads removed", "", f"- model: {markdown_text(result.model.name)}", f"- form: {result.form}", ""]
    for rows in (layer_rows(result), size_rows(result)):
        lines += [*_markdown_table(rows), ""]
    lines += [markdown_text(verdict(result)), "", *(f"- {markdown_text(t)}" for t in proof_lines(result)), ""]
    if result.latency:
        lines += [*_markdown_table(latency_rows(result)), "", markdown_text(latency_line(result)), ""]
    for found in (chosen_lines(result), repair_lines(result), quality_lines(result), saved_lines(result)):
        if found:
            lines += [*(f"- {markdown_text(t)}" for t in found), ""]
    if result.warnings:
        lines += ["## Warnings", "", *(f"- {markdown_text(warning)}" for warning in result.warnings)]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    rule = "|---|" + "--:|" * (len(rows[0]) - 1)
    head, *body = (f"| {' | '.join(markdown_text(cell) for cell in row)} |" for row in rows)
    return [head, rule, *body]


_FORMATS: dict[str, Callable[[PruneResult], str]] = {
    "table": _table,
    "json": _json,
    "jsonl": _jsonl,
    "csv": _csv,
    "markdown": _markdown,
}
