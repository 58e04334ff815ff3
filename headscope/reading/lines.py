"""Lines of a file, one at a time, whatever its encoding says of itself; only a newline ends a line."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from typing import NamedTuple

from headscope.errors import InputError

LONGEST = 64 << 20
"""Bytes of a line at most; what is longer is no text but something else."""
TOO_LONG = f"is longer than {LONGEST >> 20} MB"
_HEAD = 8 << 10
CHUNK = 1 << 16
"""Bytes to read at once."""
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_CONVERT = "convert it to UTF-8 first"


class Line(NamedTuple):
    """A line with its end.

    Attributes:
        number: From 1.
        text: Bytes that are not UTF-8 are lone surrogates in it; "" where the line is too long.
        problem: What is wrong with it, such as "is not UTF-8 (byte 3)".
    """

    number: int
    text: str
    problem: str | None = None

    @property
    def content(self) -> str:
        """The line without its end: a newline, or a carriage return before it."""
        return self.text.removesuffix("\n").removesuffix("\r")


def lines(file: io.BufferedReader, name: str) -> Iterator[Line]:
    """The lines of a file as UTF-8, or as UTF-16 where a byte order mark says so. Memory is that of one line.

    Raises:
        InputError: The file does not hold text; `name` is what the message calls it.
    """
    file = _as_utf8(file, name)
    number = 0
    while data := file.readline(LONGEST + 1):
        number += 1
        if len(data) > LONGEST:
            _finish_line(file, data)
            yield Line(number, "", TOO_LONG)
            continue
        try:
            yield Line(number, data.decode())
        except UnicodeDecodeError as error:
            yield Line(number, data.decode(errors="surrogateescape"), f"is not UTF-8 (byte {error.start})")


def _finish_line(file: io.BufferedReader, data: bytes) -> None:
    while data and not data.endswith(b"\n"):
        data = file.readline(CHUNK)


def _as_utf8(file: io.BufferedReader, name: str) -> io.BufferedReader:
    head = file.peek(_HEAD)[:_HEAD]
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        raise InputError(f"{name} is UTF-32", _CONVERT)
    if head.startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))
    elif encoding := _UTF16.get(head[:2]):
        file.read(2)
        return io.BufferedReader(_Utf16(file, encoding), CHUNK)
    elif b"\0" in head and not _begins_text(head):
        raise InputError(f"{name} is not text: it holds binary data", "give a file of texts")
    return file


def _begins_text(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


class _Utf16(io.RawIOBase):
    """UTF-16 as UTF-8: half a character becomes bytes that are not UTF-8, so that its line is known as bad."""

    def __init__(self, file: io.BufferedReader, encoding: str) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
        self._ready = b""
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready and not self._ended:
            data = self._file.read(CHUNK)
            self._ended = not data
            self._ready = self._decode(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decode(self, data: bytes) -> bytes:
        try:
            return self._decoder.decode(data, final=not data).encode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            # An odd number of bytes: what is left at the end is no character.
            return b"\xff"
