"""What a corpus is made of: files, standard input, and examples in memory."""

from __future__ import annotations

import errno
import gzip
import io
import json
import sys
import tempfile
import weakref
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from headscope.errors import InputError, ResourceError
from headscope.reading.formats import FORMATS, Format, Opened, format_of, is_gzip, suffixes_said
from headscope.reading.libraries import first_line
from headscope.reading.lines import CHUNK, lines
from headscope.reading.records import Columns, Item, item_of


class Source(Protocol):
    """A part of a corpus.

    Attributes:
        size: Its bytes, rows or examples, whichever `done` counts as well; None where that is not known.
    """

    size: int | None

    def items(self) -> Generator[Item]:
        """All items, from the first, as often as it is called."""
        ...

    def done(self) -> int:
        """How much of it the newest iteration has read."""
        ...


class FileSource:
    """A file that has a format.

    Args:
        name: What messages and places call it.
        start: Opens it anew.
        size: Its bytes.
        compressed: Whether it is gzip.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], io.BufferedReader],
        size: int,
        format: Format,
        columns: Columns,
        compressed: bool = False,
    ) -> None:
        self.size: int | None = size
        self._name, self._start, self._format, self._columns = name, start, format, columns
        self._compressed = compressed
        self._file: io.BufferedReader | None = None

    def items(self) -> Generator[Item]:
        """The items that the format finds.

        Raises:
            InputError: The file cannot be read, or is not what its suffix says.
        """
        try:
            with self._start() as self._file:
                binary = self._file
                if self._compressed:
                    binary = io.BufferedReader(gzip.GzipFile(fileobj=binary), CHUNK)
                yield from self._format.read(Opened(binary, self._name, self._columns))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            message = f"{self._name} is not gzip, or is damaged: {first_line(error)}"
            raise InputError(message, "compress it anew, or give it uncompressed") from error
        except OSError as error:
            raise cannot_read(self._name, error) from error
        finally:
            self._file = None

    def done(self) -> int:
        """Bytes that were read, compressed ones where it is compressed."""
        return 0 if self._file is None or self._file.closed else self._file.tell()


class ExamplesSource:
    """Texts in memory, or mappings with the columns."""

    def __init__(self, examples: Iterable[Any], columns: Columns) -> None:
        # Those that are refused would give bytes, keys, and names of columns.
        if not isinstance(examples, Iterable) or isinstance(examples, bytes | Mapping) or hasattr(examples, "iterrows"):
            raise InputError(
                f"{type(examples).__name__} is no sequence of texts",
                'give texts, or mappings such as {"text": "…", "label": 0}',
            )
        # What can be read only once is kept.
        self._examples = tuple(examples) if isinstance(examples, Iterator) else examples
        self._columns = columns
        self.size: int | None = len(self._examples) if isinstance(self._examples, Sized) else None
        self._done = 0

    def items(self) -> Generator[Item]:
        """An item an example."""
        self._done = 0
        for number, example in enumerate(self._examples):
            self._done = number + 1
            yield item_of(f"example {number}", example, self._columns)

    def done(self) -> int:
        """Examples that were read."""
        return self._done


def file_source(path: Path, columns: Columns) -> FileSource:
    """The source of a file.

    Raises:
        InputError: It is not there, is no regular file, or has a suffix of no format.
    """
    found = format_of(path)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise cannot_read(str(path), error) from error
    if not path.is_file():
        raise InputError(f"cannot read {path}: it is no file", "give a file, a directory, a pattern, or - for a pipe")
    if found is None:
        raise InputError(f"cannot read {path}: unknown suffix {path.suffix!r}", f"known ones are {suffixes_said()}")
    return FileSource(str(path), partial(_open, path), size, found, columns, is_gzip(path))


def _open(path: Path) -> io.BufferedReader:
    return io.BufferedReader(io.FileIO(path), CHUNK)


def stdin_source(columns: Columns) -> FileSource:
    """Standard input, copied to a temporary file that nobody else sees: JSON objects where the first line is one, else
    a text a line.

    Raises:
        ResourceError: The disk is full.
    """
    spool = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the source)
    try:
        while chunk := sys.stdin.buffer.read(CHUNK):
            spool.write(chunk)
        spool.flush()
        size = spool.tell()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ResourceError("no room on disk for standard input", "set TMPDIR to another disk") from error
        raise cannot_read("standard input", error) from error
    start = partial(_again, spool)
    with start() as file:
        suffix = ".jsonl" if _begins_with_object(file) else ".txt"
    source = FileSource("stdin", start, size, FORMATS[suffix], columns)
    weakref.finalize(source, spool.close)
    return source


def _again(spool: Any) -> io.BufferedReader:
    return io.BufferedReader(_Again(spool), CHUNK)


def _begins_with_object(file: io.BufferedReader) -> bool:
    first = next((line.text for line in lines(file, "stdin") if line.text.strip()), "")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


class _Again(io.RawIOBase):
    """A file read from its beginning, whoever else reads it; closing this does not close the file."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._file.seek(self._position)
        count: int = self._file.readinto(buffer)
        self._position += count
        return count


def cannot_read(name: str, error: OSError) -> InputError:
    """The error of a file that the system does not let us read."""
    return InputError(
        f"cannot read {name}: {error.strerror or first_line(error)}", "check the path and its permissions"
    )
