"""What reading gives: texts that are fit to measure, and a tally of what is not."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

Label = str | int
_NAMED = 10


class Columns(NamedTuple):
    """The names under which texts and labels are found."""

    text: str = "text"
    label: str = "label"


class Item(NamedTuple):
    """What a reader found, not checked yet: any value as text and label, or what is wrong with it.

    Attributes:
        where: The place, such as `corpus.jsonl:12`.
        problem: The rest of a sentence that begins with the place, such as "is not JSON".
    """

    where: str
    text: Any = None
    label: Any = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A text of a corpus.

    Attributes:
        number: Which item of the corpus it is, from 0; items that were skipped have numbers, too.
        text: What to measure: never blank, always text that UTF-8 can hold.
        label: Its class, where it has one.
        where: The place: `corpus.jsonl:12` (lines count from 1), `x.parquet:row 3`, `org/name train:17`, `example 5`
            (rows and examples count from 0).
    """

    number: int
    text: str
    label: Label | None
    where: str


@dataclass
class Skipped:
    """A tally of the items that could not be read.

    Attributes:
        count: How many that are.
        first: The first ten as (place, reason).
        items: How many items there were, good ones included.
    """

    count: int = 0
    first: list[tuple[str, str]] = field(default_factory=list)
    items: int = 0

    def add(self, where: str, reason: str) -> None:
        """Count one; `reason` goes on where a sentence begins with the place."""
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append((where, reason))

    def lines(self) -> tuple[str, ...]:
        """Warnings for the user: one line that names the first ten, or none where nothing was skipped."""
        if not self.count:
            return ()
        named = "; ".join(f"{where} {reason}" for where, reason in self.first)
        more = "; …" if self.count > len(self.first) else ""
        were = "was" if self.count == 1 else "were"
        return (f"{self.count:,} of {self.items:,} texts {were} skipped: {named}{more}",)


def item_of(where: str, value: Any, columns: Columns) -> Item:
    """An item of a mapping with the columns, or of a text itself."""
    if isinstance(value, str):
        return Item(where, value)
    if not isinstance(value, Mapping):
        return Item(where, problem="is neither a text nor an object with one")
    if columns.text not in value:
        return Item(where, problem=f"has no text: there is no {columns.text!r} in {reprlib.repr(list(value))}")
    return Item(where, value[columns.text], value.get(columns.label))


def checked(item: Item, number: int) -> Record | str:
    """The record of an item, or what is wrong with it."""
    if item.problem is not None:
        return item.problem
    text, label = item.text, item.label
    if text is None or (isinstance(text, str) and not text.strip()):
        return "has no text"
    if not isinstance(text, str):
        return f"has {reprlib.repr(text)} for a text"
    if label is not None and (isinstance(label, bool) or not isinstance(label, str | Integral)):
        return f"has the label {reprlib.repr(label)}, neither a name nor a whole number"
    if not _is_utf8(text) or (isinstance(label, str) and not _is_utf8(label)):
        return "has half a character (a lone surrogate)"
    # A plain number also where NumPy's was given.
    return Record(number, text, label if label is None or isinstance(label, str) else int(label), item.where)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
