"""A directory that appears whole, under its name, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from headscope.errors import InputError, ResourceError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
# What a model's directory has, and little else does.
_MARK = "config.json"


def check_directory(path: str | Path, *, force: bool = False) -> Path:
    """The directory behind `path` with links followed, if one can be written there.

    Args:
        force: Something that is there may be replaced, if it is an empty directory or a model's.

    Raises:
        InputError: Something is there that must not be replaced, or nothing can be created there.
    """
    target = Path(os.path.realpath(Path(path).expanduser()))
    if target.exists():
        if not target.is_dir():
            raise InputError(f"{path} is a file, not a directory", "Name a directory that does not exist yet.")
        used = any(target.iterdir())
        if used and not force:
            raise InputError(f"{path} exists", "Use --force to replace it, or another name.")
        if used and not (target / _MARK).is_file():
            raise InputError(
                f"{path} is not a model's directory, so it is not replaced", "Name another one, or empty it yourself."
            )
    if not target.parent.is_dir():
        raise InputError(f"no such directory: {target.parent}", "Create it first.")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write to {target.parent}", "Check its permissions, or write elsewhere.")
    return target


@contextmanager
def new_directory(path: str | Path, *, force: bool = False) -> Iterator[Path]:
    """A new directory next to `path`, which takes its name when the block ends and vanishes if the block raises.

    Where the process is killed it stays behind under a hidden name; the next time it is removed.

    Raises:
        InputError: As `check_directory`.
        ResourceError: The disk is full.
    """
    target = check_directory(path, force=force)
    _remove_leftovers(target)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.mkdir()
        yield part
        _put(part, target)
    except (OSError, SafetensorError) as error:
        if not _is_full(error):
            raise
        raise ResourceError(f"no space left for {path}", "Free some, or write elsewhere; nothing remains.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _put(part: Path, target: Path) -> None:
    """Rename, with what was there before moved aside until the new one is in its place."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.before")
    if target.exists():
        os.rename(target, aside)
    try:
        os.rename(part, target)
    except OSError:
        with suppress(FileNotFoundError):
            os.rename(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """What a killed process left half-written here."""
    for left in target.parent.glob(f".{_escaped(target.name)}.*.part"):
        number = left.name.split(".")[-2]
        if number.isdigit() and not _alive(int(number)):
            shutil.rmtree(left, ignore_errors=True)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to somebody else
        return True
    return True


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    return "No space left" in str(error) or "quota exceeded" in str(error).lower()
