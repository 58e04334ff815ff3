"""The one output sink: standard output, or a file that appears whole or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from headscope.errors import InputError


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


def check_target(path: Path, force: bool) -> None:
    """Raise InputError if `path` exists (unless `force`) or cannot be written. Devices and pipes are always taken."""
    if path.is_dir():
        raise InputError(f"{path} is a directory", "name a file to write")
    if _is_stream(path):
        return
    if path.exists() and not force:
        raise InputError(f"{path} exists", "use --force to overwrite it, or another name")
    check_directory(_behind_links(path).parent)


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
        InputError: `path` exists and `force` is off, or nothing can be created there.
    """
    check_target(path, force)
    if _is_stream(path):
        with path.open("wb") as stream:
            yield stream
        return
    target = _behind_links(path)
    unfinished = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
    try:
        with unfinished.open("xb") as file:
            yield file
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _behind_links(path: Path) -> Path:
    """The file that a link points to, there or not. Raises InputError for a link to itself."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise InputError(f"{path} is a link that leads to itself", "name another file")
    return target


def _is_stream(path: Path) -> bool:
    """A device, a pipe or a socket: it cannot be replaced, only written to."""
    return path.exists() and not path.is_file() and not path.is_dir()
