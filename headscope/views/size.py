"""Sizes of models as a table, JSON, JSON Lines, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from headscope.views.columns import Column, ColumnBlocks, Lines
from headscope.views.formats import in_format, plain_text
from headscope.views.text import ELLIPSIS, csv_field, markdown_text, visible

if TYPE_CHECKING:
    from headscope.sizing.result import Sizes, StackSize

MISSING = "-"
_LONGEST_NAME = 32
# What JSON has that is no single value.
_NESTED = ("layers", "notes")
_COUNTS = ("", " K", " M", " B", " T")
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LEFT = ("model", "stack", "dtype")
_PARAMETERS = (
    *("layers", "heads", "kv", "d_k", "hidden"),
    *("QKV a layer", "output a layer", "attention", "all", "share"),
)
_TERMS = (
    "weights without biases; matrices: heads × tokens² in every layer of one forward pass; streaming: the scores that "
    "it holds at once, on a CPU; of full: the cache against one in which every head keeps its own keys and values"
)


def size_table(result: Sizes) -> RenderableType:
    """Parameters, then bytes, a row a stack; what the columns mean; what is to be known of each model's numbers."""
    notes = [Text(visible(line), "dim") for line in note_lines(result)]
    parts: list[RenderableType] = []
    for names in _headers(result):
        parts += [ColumnBlocks([_column(result, name) for name in names]), Text()]
    return Group(*parts, Lines([Text(_TERMS, "dim"), *notes]))


def _headers(result: Sizes) -> tuple[list[str], list[str]]:
    """The columns of both parts, without those that no row has; a model's name and stack stand in both."""
    rows = [_cells(row) for row in result.models]
    first = ["model", *(["stack"] if any(row.stack != "self" for row in result.models) else [])]
    shown = [n for n in rows[0] if n not in ("model", "stack") and any(row[n] != MISSING for row in rows)]
    return [*first, *(n for n in shown if n in _PARAMETERS)], [*first, *(n for n in shown if n not in _PARAMETERS)]


def _column(result: Sizes, name: str) -> Column:
    texts = [visible(_cells(row)[name]) for row in result.models]
    cells = tuple(Text(_end_of(text) if name == "model" else text) for text in texts)
    return Column(Text(name), cells, "left" if name in _LEFT else "right")


def note_lines(result: Sizes) -> list[str]:
    """Notes with what they are about, as plain text that is not yet safe to show."""
    several, lines = len({row.name for row in result.models}) > 1, []
    for row in result.models:
        about = [row.name] if several else []
        about += [row.stack] if sum(1 for other in result.models if other.name == row.name) > 1 else []
        lines += [f"{', '.join(about)}: {note}" if about else note for note in row.notes]
    return lines


def _cells(row: StackSize) -> dict[str, str]:
    """A row's cells by header."""
    layers = str(row.num_layers) if row.num_layers == len(row.layers) else f"{len(row.layers)} of {row.num_layers}"
    tokens = _tokens(row)
    return {
        "model": row.name,
        "stack": row.stack,
        "layers": layers,
        "heads": _over_layers([layer.num_heads for layer in row.layers]),
        "kv": _over_layers([layer.num_kv_heads for layer in row.layers]),
        "d_k": _over_layers([layer.head_dim for layer in row.layers]),
        "hidden": MISSING if row.hidden_size is None else str(row.hidden_size),
        "QKV a layer": _over_layers([layer.qkv_params for layer in row.layers], count_text),
        "output a layer": _over_layers([layer.o_params for layer in row.layers], count_text),
        "attention": count_text(row.attention_params),
        "all": count_text(row.total_params),
        "share": _percent(row.attention_share),
        "tokens": tokens,
        "matrices": bytes_text(row.attention_matrix_bytes),
        "one layer": bytes_text(row.layer_matrix_bytes),
        "streaming": bytes_text(row.streaming_bytes),
        "KV a token": bytes_text(row.kv_cache_bytes_per_token),
        "KV cache": bytes_text(row.kv_cache_bytes),
        "of full": _percent(row.kv_cache_share),
        "dtype": row.dtype,
    }


def _end_of(name: str) -> str:
    """A name, of a long one the end: it tells paths apart."""
    return name if len(name) <= _LONGEST_NAME else ELLIPSIS + name[1 - _LONGEST_NAME :]


def _tokens(row: StackSize) -> str:
    if row.length is None:
        return MISSING
    shown = f"{row.length:,}" if row.key_length in (row.length, None) else f"{row.length:,} × {row.key_length:,}"
    return f"{row.batch_size} × {shown}" if row.batch_size > 1 else shown


def count_text(value: int | None) -> str:
    """A number to three digits: `590 K`, `1.77 M`, `175 B`."""
    if value is None:
        return MISSING
    unit = 0
    scaled = float(value)
    while scaled >= 999.5 and unit < len(_COUNTS) - 1:
        scaled, unit = scaled / 1000, unit + 1
    return str(value) if unit == 0 else f"{_three_digits(scaled)}{_COUNTS[unit]}"


def bytes_text(value: int | None) -> str:
    """Bytes to three digits in units of 1,024: `8 GiB`, `1.5 MiB`."""
    if value is None:
        return MISSING
    unit = 0
    scaled = float(value)
    while scaled >= 1023.5 and unit < len(_BYTES) - 1:
        scaled, unit = scaled / 1024, unit + 1
    shown = f"{scaled:.0f}" if scaled == int(scaled) else _three_digits(scaled)
    return f"{shown} {_BYTES[unit]}"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _over_layers(values: Sequence[int | None], shown: Callable[[int | None], str] | None = None) -> str:
    """One number where all layers agree, else from the smallest to the largest."""
    known = [value for value in values if value is not None]
    if not known:
        return MISSING
    ends = [str(v) if shown is None else shown(v) for v in dict.fromkeys((min(known), max(known)))]
    return " to ".join(ends)


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f} %"


# ------------------------------------------------------------------ formats
def render_size(result: Sizes, name: str) -> str:
    """Sizes in the format `name`, ending with a newline.

    Raises:
        InputError: There is no such format.
    """
    return in_format(result, name, _FORMATS)


def _table(result: Sizes) -> str:
    return plain_text(size_table(result))


def _json(result: Sizes) -> str:
    return json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n"


def _jsonl(result: Sizes) -> str:
    return "".join(json.dumps(row.to_dict(), allow_nan=False) + "\n" for row in result.models)


def _csv(result: Sizes) -> str:
    """A row a stack, with the keys of JSON that hold one value."""
    rows = [_flat(row) for row in result.models]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return out.getvalue()


def _flat(row: StackSize) -> dict[str, Any]:
    flat = {key: value for key, value in row.to_dict().items() if key not in _NESTED}
    return {key: csv_field(value) if isinstance(value, str) else value for key, value in flat.items()}


def _markdown(result: Sizes) -> str:
    lines = ["# Sizes of attention"]
    rows = [_cells(row) for row in result.models]
    for names in _headers(result):
        lines += ["", f"| {' | '.join(markdown_text(name) for name in names)} |"]
        lines.append("|" + "|".join("---" if name in _LEFT else "--:" for name in names) + "|")
        lines += [f"| {' | '.join(markdown_text(row[name]) for name in names)} |" for row in rows]
    lines += ["", markdown_text(_TERMS)]
    notes = note_lines(result)
    lines += ["", *(f"- {markdown_text(note)}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


_FORMATS: dict[str, Callable[[Sizes], str]] = {
    "table": _table,
    "json": _json,
    "jsonl": _jsonl,
    "csv": _csv,
    "markdown": _markdown,
}
