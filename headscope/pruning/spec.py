"""`--heads "5:0,3;7:1-4"` as requests: a stack, a layer and its heads, as they are written. No model is needed."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

from headscope.errors import InputError, check_type

GRAMMAR = "Write 5:0,3;7:1-4, L5H3, 5:all, or with a stack: encoder.0:1."

_GROUP = re.compile(
    r"(?:(?P<stack>[^:;]+)\.)?(?:(?P<layer>[^.:;]+):(?P<heads>[^:;]*)|L(?P<l>[0-9]{1,9})H(?P<h>[0-9]{1,9}))"
)
_NUMBER = re.compile(r"[0-9]{1,9}")
_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_NEGATIVE = re.compile(r"-[0-9]+")


@dataclass(frozen=True)
class Request:
    """Heads of one layer.

    Attributes:
        stack: As written before the layer, None for none.
        layer: The model's own layer number.
        heads: Pairs of the first and the last head of each range, a single head twice; None for all.
    """

    stack: str | None
    layer: int
    heads: tuple[tuple[int, int], ...] | None


def parse_heads(text: str | Sequence[str], valid: str | None = None) -> tuple[Request, ...]:
    """Read a `--heads` argument, or several.

    Args:
        text: Groups separated by `;`. White space does not count.
        valid: What layers and heads there are, for messages.

    Raises:
        InputError: It does not parse; the hint is the grammar, with `valid`.
    """
    texts = [text] if isinstance(text, str) else list(text)
    for one in texts:
        check_type("one of heads", one, str, "text such as '5:0,3'")
    hint = GRAMMAR if valid is None else f"{GRAMMAR} {valid}"
    groups = [group for t in texts for group in "".join(t.split()).split(";")]
    if not any(groups):
        raise InputError("no heads are given", hint)
    return tuple(_request(group, hint) for group in groups)


def _request(group: str, hint: str) -> Request:
    match = _GROUP.fullmatch(group)
    if match is None:
        raise InputError(f"cannot read {reprlib.repr(group)} in --heads", hint)
    if match["l"] is not None:
        head = int(match["h"])
        return Request(match["stack"], int(match["l"]), ((head, head),))
    return Request(match["stack"], _layer(match["layer"], group, hint), _heads(match["heads"], group, hint))


def _layer(text: str, group: str, hint: str) -> int:
    if _NUMBER.fullmatch(text):
        return int(text)
    if _NEGATIVE.fullmatch(text):
        raise InputError(f"layer {text} in --heads is negative: layers are counted from 0", hint)
    if "-" in text or "," in text or text == "all":
        raise InputError(f"{reprlib.repr(group)} in --heads names several layers: one stands before each colon", hint)
    raise InputError(f"cannot read the layer {reprlib.repr(text)} in --heads", hint)


def _heads(text: str, group: str, hint: str) -> tuple[tuple[int, int], ...] | None:
    if text == "":
        raise InputError(f"{reprlib.repr(group)} in --heads names no head", hint)
    return None if text == "all" else tuple(_item(item, group, hint) for item in text.split(","))


def _item(item: str, group: str, hint: str) -> tuple[int, int]:
    if _NUMBER.fullmatch(item):
        return int(item), int(item)
    if _NEGATIVE.fullmatch(item):
        raise InputError(f"head {item} in {reprlib.repr(group)} is negative: heads are counted from 0", hint)
    match = _RANGE.fullmatch(item)
    if match is None or int(match[1]) > int(match[2]):
        raise InputError(f"cannot read the heads {reprlib.repr(item)} in {reprlib.repr(group)}", hint)
    return int(match[1]), int(match[2])


def write_heads(heads: Sequence[int]) -> str:
    """`0,3-5`: ascending heads as `--heads` reads them."""
    parts: list[str] = []
    start = previous = -1
    for head in [*sorted(set(heads)), -1]:
        if previous >= 0 and head == previous + 1:
            previous = head
            continue
        if previous >= 0:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = head
    return ",".join(parts)
