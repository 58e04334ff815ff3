"""The table of file formats; `headscope.reading.readers` fills it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from headscope.errors import InputError
from headscope.reading.records import Columns, Item


@dataclass(frozen=True)
class Opened:
    """A file to read from its beginning, decompressed.

    Attributes:
        name: What messages and places call it.
    """

    binary: BufferedReader
    name: str
    columns: Columns

    def at(self, line: int) -> str:
        """The place of a line, from 1."""
        return f"{self.name}:{line}"


# Characters of a column's name in a message.
_LONGEST_NAME = 60

Reader = Callable[[Opened], Iterator[Item]]


@dataclass(frozen=True)
class Format:
    """How files of a suffix are read.

    Attributes:
        read: Yields the items of a file one by one and never holds many. What makes the file as a whole useless (a
            column that is not there, a library that is missing) is an InputError before the first item.
        gzip: Whether such files may be compressed, with .gz after their suffix.
    """

    read: Reader
    gzip: bool


FORMATS: dict[str, Format] = {}
"""Formats by suffix."""


def reads(*suffixes: str, gzip: bool = True) -> Callable[[Reader], Reader]:
    """Register a reader for files with these suffixes."""

    def register(reader: Reader) -> Reader:
        FORMATS.update(dict.fromkeys(suffixes, Format(reader, gzip)))
        return reader

    return register


def format_of(path: Path) -> Format | None:
    """The format that a file's name tells, or None."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        found = FORMATS.get("".join(suffixes[-2:-1]))
        return found if found is not None and found.gzip else None
    return FORMATS.get("".join(suffixes[-1:]))


def is_gzip(path: Path) -> bool:
    """Whether a file's name says that it is compressed."""
    return path.suffix.lower() == ".gz"


def suffixes_said() -> str:
    """All suffixes, for a message."""
    return ", ".join(FORMATS) + " (those of lines also with .gz)"


def labels_from(columns: Columns, there: list[str], name: str) -> str | None:
    """The column of labels, or None where there is none and none was asked for; checks the column of texts as well.

    Raises:
        InputError: A column is not among those of the file, or is there twice.
    """
    optional = columns.label == Columns().label and columns.label not in there
    for column, option in ((columns.text, "--text-column"), (columns.label, "--label-column")):
        if column == columns.label and optional:
            continue
        if there.count(column) != 1:
            said = f"has {there.count(column)} columns {column!r}" if column in there else f"has no column {column!r}"
            raise InputError(f"{name} {said}: its columns are {listed(there)}", f"name one of them with {option}")
    return None if optional else columns.label


def listed(names: list[str]) -> str:
    """Names for a message, twenty at most and none of them long, on one line whatever is in them."""
    short = [n if len(n) <= _LONGEST_NAME else n[: _LONGEST_NAME - 1] + "…" for n in names[:20]]
    return ", ".join(ascii(n)[1:-1] if not n.isprintable() else n for n in short) + ", …" * (len(names) > 20)
