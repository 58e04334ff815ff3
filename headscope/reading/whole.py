"""Files that are read as a whole, and so must have an end."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import BinaryIO

from headscope.errors import InputError
from headscope.reading.lines import LONGEST
from headscope.reading.sources import cannot_read


def read_whole(path: str | PathLike[str], what: str = "") -> bytes:
    """All bytes of a file.

    Args:
        what: What messages call it before its path.

    Raises:
        InputError: It cannot be read, or is longer than `LONGEST`, as devices are that never end.
    """
    name = f"{what} {fspath(path)}".strip()
    try:
        with Path(path).open("rb") as file:
            return bytes_of(file, name)
    except OSError as error:
        raise cannot_read(name, error) from error
    except ValueError as error:  # a null byte in the path
        raise InputError(f"cannot read {name}: {error}", "check the path") from error


def bytes_of(file: BinaryIO, name: str) -> bytes:
    """What is left of an open file; `name` is what messages call it. Raises InputError as `read_whole` does."""
    try:
        data = file.read(LONGEST + 1)
    except OSError as error:
        raise cannot_read(name, error) from error
    if len(data) > LONGEST:
        raise InputError(f"{name} is longer than {LONGEST >> 20} MB", "give a file of that size at most")
    return data
