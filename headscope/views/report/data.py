"""What a page embeds as JSON: everything its script shows, as text that is safe to show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headscope.heads.catalogue.result import TypeRecord
from headscope.results import Analysis, HeadRecord
from headscope.views.catalogue_sections import number, p_value, with_interval
from headscope.views.labels import LabelStyle, cell_letters, labels_shown, marked, strongest
from headscope.views.records import plain
from headscope.views.report.columns import columns_of, label_styles_data
from headscope.views.report.matrices import Matrices
from headscope.views.sections import by_stack, percent, unstable
from headscope.views.text import token_label, visible

if TYPE_CHECKING:
    from headscope.importance.result import Importance

REPORT_SCHEMA = "headscope/report@1"

# Labels worth opening first, before those of heads that only park their attention.
_INTERESTING = ("prev_token", "next_token", "focused", "self_attend", "attention_sink")
_LOOKED = 3


def page_data(
    analysis: Analysis, matrices: Matrices, importance: Importance | None, plots: Mapping[str, Any]
) -> dict[str, Any]:
    """The object that the page's script reads.

    Raises:
        InputError: The importance is of other heads.
    """
    styles = labels_shown(analysis)
    return {
        "schema": REPORT_SCHEMA,
        "labels": label_styles_data(styles),
        "heads": [_head(record, styles) for record in analysis.heads],
        "stacks": [visible(name) for name in by_stack(analysis)],
        "columns": columns_of(analysis, importance),
        "first": _first(analysis),
        "maps": [found | {"stack": visible(found["stack"])} for found in matrices.maps],
        "axes": [list(axis) for axis in matrices.axes],
        "plots": dict(plots),
    }


def _head(record: HeadRecord, styles: Mapping[str, LabelStyle]) -> dict[str, Any]:
    return {
        "stack": visible(record.stack),
        "layer": record.layer,
        "head": record.head,
        "kv_head": record.kv_head,
        "name": record.name,
        "label": visible(record.pattern),
        "letters": marked(cell_letters(record, styles), record),
        "notes": list(_notes(record)),
        "types": [list(_evidence(found)) for found in record.types],
    }


def _notes(record: HeadRecord) -> Iterator[str]:
    """What else there is to say of a label."""
    if record.runner_up is not None:
        yield f"runner-up: {visible(record.runner_up)}"
    if record.rest_pattern is not None:
        yield f"rest, without the first column: {visible(record.rest_pattern)}"
    if record.stability is not None:
        yield f"this label on {percent(record.stability)} of the texts{', not stable' if unstable(record) else ''}"
    if record.second is not None:
        share = "" if record.second_share is None else f" on {percent(record.second_share)}"
        yield f"else mostly {visible(record.second)}{share}"


def _evidence(found: TypeRecord) -> Iterator[str]:
    """The type's name, the numbers for it, then a line of what the head looked at."""
    yield visible(found.type)
    parts = [f"score {with_interval(found.score, found.low, found.high)}"]
    if found.chance is not None:
        parts.append(f"chance {number(found.chance)}")
    if found.alternative is not None:
        parts.append(f"{visible(found.alternative[0])} alone {number(found.alternative[1])}")
    if found.p is not None:
        parts.append(f"p {p_value(found.p)}")
    parts.append(f"{found.eligible:,} rows")
    if found.criteria:
        parts.append(f"criteria: {', '.join(map(visible, found.criteria))}")
    yield ", ".join(parts)
    if found.example is not None:
        keys = ", ".join(f"'{token_label(k.token)}' {number(k.weight)}" for k in found.example.keys[:_LOOKED])
        query = token_label(found.example.token)
        yield f"'{query}' looks at {keys or 'nothing'}, in: {visible(found.example.text)}"


def _first(analysis: Analysis) -> int:
    """The head that is open at first: the strongest of an interesting label."""
    heads = list(analysis.heads)
    found = next((s for s in (strongest(heads, label) for label in _INTERESTING) if s is not None), None)
    return heads.index(found[0]) if found is not None else 0


# ------------------------------------------------------------------ into a page
def embedded(value: Any) -> str:
    """JSON that can stand in a script element whatever its strings hold: ASCII, with escapes for `<`, `>` and `&`."""
    text = json.dumps(plain(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
