"""Selecting layers and heads: `5`, `-1`, `0,2,5`, `3-7`, `all`."""

from __future__ import annotations

import operator
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headscope.errors import InputError

_ITEM = re.compile(r"(?P<single>-?[0-9]{1,9})|(?P<low>[0-9]{1,9})\s*-\s*(?P<high>[0-9]{1,9})")

MOST = 10**9
"""Of anything that is counted: more fits no machine."""


@dataclass(frozen=True)
class Selection:
    """Numbers as a user writes them; None selects all. Negative ones count from the end."""

    what: str
    text: str
    items: tuple[tuple[int, int], ...] | None

    def within(self, available: Sequence[int]) -> tuple[int, ...]:
        """The numbers of `available` (ascending) that are selected; ones that do not exist are left out."""
        if self.items is None:
            return tuple(available)
        return tuple(n for n in available if any(low <= n <= high for low, high in self._resolved(available)))

    def check(self, lists: Iterable[Sequence[int]], where: str) -> None:
        """Make sure that every selected number, and every end of a range, exists in at least one of `lists`.

        Raises:
            InputError: One does not; the message names the valid ones.
        """
        if self.items is None:
            return
        lists = [list(numbers) for numbers in lists]
        valid = sorted({n for a in lists for n in a})
        for low, high in self.items:
            if low < 0:
                exists = any(-low <= len(a) for a in lists)
            else:
                # A range may span layers without attention, but must not reach past the last one.
                exists = bool(valid) and high <= valid[-1] and any(low <= n <= high for n in valid)
            if not exists:
                asked = str(low) if low == high else f"{low}-{high}"
                raise InputError(
                    f"{self.what} {asked} does not exist in {where}",
                    f"Valid {self.what}s: {ranges(valid)}; -1 is the last.",
                )

    def _resolved(self, available: Sequence[int]) -> list[tuple[int, int]]:
        found = []
        for low, high in self.items or ():
            if low >= 0:
                found.append((low, high))
            elif -low <= len(available):
                found.append((available[low], available[low]))
        return found


def parse_selection(what: str, value: str | int | Iterable[int] | None) -> Selection:
    """Read a selection of layers or heads.

    Args:
        what: `layer` or `head`, for messages.
        value: Text in the grammar above, a number, several numbers, or None for all.

    Raises:
        InputError: The text does not parse, or selects nothing.
    """
    text = _as_text(what, value)
    if text.strip() == "all":
        return Selection(what, text, None)
    items = []
    for part in text.split(","):
        match = _ITEM.fullmatch(part.strip())
        if match is None:
            raise _unreadable(what, text)
        low, high = (match["single"],) * 2 if match["single"] is not None else (match["low"], match["high"])
        if match["single"] is None and int(low) > int(high):
            raise _unreadable(what, text)
        items.append((int(low), int(high)))
    return Selection(what, text, tuple(items))


def _as_text(what: str, value: Any) -> str:
    if value is None:
        return "all"
    if isinstance(value, str):
        return value
    try:
        numbers = [whole_number(n) for n in (value if isinstance(value, Iterable) and not _is_one(value) else [value])]
    except TypeError as error:
        raise _unreadable(what, str(value)) from error
    return ",".join(map(str, numbers))


def _is_one(value: Any) -> bool:
    return getattr(value, "ndim", 1) == 0


def whole_number(number: Any) -> int:
    """A whole number of any library as Python's own. Raises TypeError for anything else, True and False too."""
    if isinstance(number, bool):
        raise TypeError(f"{number} is not a number")
    return operator.index(number)


def check_count(name: str, value: Any, least: int = 1, most: int = MOST) -> None:
    """Refuse what is no whole number from `least` to `most`; None passes.

    Raises:
        InputError: It names the argument and what was given.
    """
    if value is None:
        return
    try:
        number = whole_number(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        needs = f"{least} or more" if number < least else f"{most} or less"
        raise InputError(f"{name} is {reprlib.repr(value)}, needs {needs}", "give a whole number in that range")


def check_seed(seed: Any) -> None:
    """Refuse what random numbers cannot be made from. Raises InputError."""
    check_count("seed", 0.5 if seed is None else seed, least=0, most=2**32 - 1)


def _unreadable(what: str, value: str) -> InputError:
    return InputError(f"cannot read --{what} {reprlib.repr(value)}", "Write 5, -1, 0,2,5, 3-7 or all.")


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7`: ascending numbers in short."""
    parts: list[str] = []
    start = previous = None
    for n in [*numbers, None]:
        if previous is not None and n == previous + 1:
            previous = n
            continue
        if previous is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = n
    return ", ".join(parts)
