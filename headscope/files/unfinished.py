"""What is not whole yet: under names that nobody else has, locked as long as somebody is at it, removed in the end."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headscope.files.undisturbed import undisturbed

try:
    import fcntl
except ImportError:  # where there are no such locks, nothing is ever taken for left behind
    fcntl = None  # type: ignore[assignment]

# A name of 255 bytes is the longest that most file systems take.
_LONGEST = 200
_ENDING = re.compile(r"\.[0-9a-f]{8}\.(part|before)")
# All that this process has not finished.
_OURS: dict[Path, None] = {}


@dataclass(frozen=True)
class Part:
    """A file or directory that will take the place of `target`.

    Attributes:
        path: Where it is until then: beside `target`, hidden.
        number: The open file that its lock is on.
    """

    target: Path
    path: Path
    number: int


@contextmanager
def part_of(target: Path, *, directory: bool = False) -> Iterator[Part]:
    """An empty file or directory beside `target`; whatever has its name when the block ends is removed.

    What a killed process left here is removed first.

    Raises:
        OSError: It cannot be made.
    """
    remove_leftovers(target)
    part: Part | None = None
    try:
        while part is None:
            part = _made(target, directory)
        yield part
    finally:
        with undisturbed():
            if part is not None:
                os.close(part.number)
                _remove(part.path)


@contextmanager
def passing(path: Path) -> Iterator[Path]:
    """Whatever has this name when the block ends is removed, as it is if the process is stopped on the way there."""
    _OURS[path] = None
    try:
        yield path
    finally:
        with undisturbed():
            _remove(path)


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Whether nobody else holds a directory; if so it is held within the block, and by nobody any more if this process
    ends in whatever way. Where the system has no locks, everybody may hold it."""
    number = os.open(folder if fcntl is not None else os.devnull, os.O_RDONLY)
    try:
        yield _lock(number) is not False
    finally:
        os.close(number)


def remove_unfinished() -> None:
    """Remove all that this process has not finished; for somebody who ends it in the middle of something."""
    for path in list(_OURS):
        _remove(path)


def remove_leftovers(target: Path) -> None:
    """Remove what processes that were killed left of a `target`, and put back what one of them had moved aside."""
    if fcntl is None:
        return
    beginning = f".{_stem(target)}"
    with suppress(OSError):  # the directory is not there or cannot be read: whoever writes to it will say so
        # Sorted, what is aside comes before the part for which it made room.
        for name in sorted(os.listdir(target.parent)):
            if name.startswith(beginning) and _ENDING.fullmatch(name, len(beginning)):
                _remove_if_left(target.parent / name, target)


def _stem(target: Path) -> str:
    """The target's name, as long as there is room for an ending; cut between letters."""
    return os.fsencode(target.name)[:_LONGEST].decode("utf-8", "ignore")


def _made(target: Path, directory: bool) -> Part | None:
    """A part; None if somebody took it for a leftover between two of these steps."""
    path = target.with_name(f".{_stem(target)}.{os.urandom(4).hex()}.part")
    _OURS[path] = None
    if directory:
        path.mkdir()
        # Where there are no locks, directories cannot be opened either.
        number = os.open(path if fcntl is not None else os.devnull, os.O_RDONLY)
    else:
        number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    if _lock(number) is not False and path.exists():
        return Part(target, path, number)
    os.close(number)
    _remove(path)
    return None


def _lock(number: int) -> bool | None:
    """Take the lock of an open file: False if somebody has it, None if there are no locks here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_if_left(path: Path, target: Path) -> None:
    # Of what is aside, it is the part for which it made room that shows whether somebody is at it.
    shows = path.with_suffix(".part") if path.suffix == ".before" else path
    number = os.open(shows if shows.exists() else path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not _lock(number):
            return
        if path.suffix == ".before" and not target.exists():
            os.rename(path, target)
        else:
            _remove(path)
    finally:
        os.close(number)


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
    _OURS.pop(path, None)
