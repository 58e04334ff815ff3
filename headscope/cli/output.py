"""The one output sink: standard output, or a file that appears whole or not at all."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, BinaryIO

from headscope.errors import InputError
from headscope.files import new_file
from headscope.files.links import own_place

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Sink:
    """Where a result goes: `path`, or standard output if it is None."""

    path: Path | None
    force: bool = False

    def check(self) -> None:
        """Raise InputError now if the target could not be written later."""
        if self.path is not None:
            check_target(self.path, self.force)

    def text(self, text: str) -> None:
        """Write text as UTF-8, whatever the locale."""
        data = text.encode("utf-8")
        if self.path is not None:
            with replacing(self.path, self.force) as file:
                file.write(data)
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)


def print_table(table: RenderableType) -> None:
    """Print to standard output. Raises BrokenPipeError if nobody reads it any more, where rich ends the process."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    Plain().print(table)


def check_target(path: Path, force: bool) -> None:
    """Raise InputError if `path` is a link, exists (unless `force`) or cannot be written.

    Devices and pipes are always taken, also through links such as /dev/stdout.
    """
    if path.is_dir():
        raise InputError(f"{path} is a directory", "name a file to write")
    if _is_stream(path):
        return
    place = own_place(path)
    if place.exists() and not force:
        raise InputError(f"{path} exists", "use --force to overwrite it, or another name")
    check_directory(place.parent)


def check_directory(folder: Path) -> None:
    """Raise InputError if `folder` is missing or nothing can be created in it (tried, since permissions alone lie)."""
    if not folder.is_dir():
        raise InputError(f"no such directory: {folder}", "create it first")
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        raise InputError(
            f"cannot write to {folder}: {exc.strerror}", "check its permissions or write elsewhere"
        ) from exc


@contextmanager
def replacing(path: Path, force: bool) -> Iterator[BinaryIO]:
    """Open a new file next to `path` that takes its place when the block ends, and vanishes if the block raises.

    Raises:
        InputError: `path` is a link, or exists and `force` is off, or nothing can be created there.
    """
    check_target(path, force)
    if _is_stream(path):
        with path.open("wb") as stream:
            yield stream
        return
    with new_file(own_place(path), force=force) as file:
        yield file


def _is_stream(path: Path) -> bool:
    """A device, a pipe or a socket: it cannot be replaced, only written to."""
    return path.exists() and not path.is_file() and not path.is_dir()
