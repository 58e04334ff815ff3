"""How what is finished takes its place: in one step, so that there is always the old or the new, whole."""

from __future__ import annotations

import errno
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from headscope.errors import InputError

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE, and RENAME_SWAP
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}
_THERE = {errno.EEXIST, errno.ENOTEMPTY}


def place_file(path: Path, target: Path, *, force: bool) -> None:
    """Give a file its name. Without `force` one that is there stays, also if it came only now.

    Raises:
        InputError: It is there.
        OSError: It cannot be put there.
    """
    if force:
        os.replace(path, target)
        return
    try:
        os.link(path, target)
    except FileExistsError as error:
        raise exists(target) from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _claim(target)
        os.replace(path, target)


def _claim(target: Path) -> None:
    """Where a file cannot have two names, an empty one takes the place for a moment."""
    try:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL))
    except FileExistsError as error:
        raise exists(target) from error


def place_directory(path: Path, target: Path, *, force: bool) -> None:
    """Give a directory its name; afterwards `path` is what was there before, or nothing.

    Without `force` only an empty directory is replaced.

    Raises:
        InputError: Something else is there.
        OSError: It cannot be put there.
    """
    try:
        os.rename(path, target)
    except OSError as error:
        if error.errno not in _THERE:
            raise
        if not force:
            raise exists(target) from error
        if not exchange(path, target):
            _one_after_the_other(path, target)


def exchange(a: Path, b: Path) -> bool:
    """Let two names change places in one step; False where the system or the file system cannot."""
    call = _system_call()
    if call is None:
        return False
    first, second = os.fsencode(a), os.fsencode(b)
    done: int = call(first, second, _EXCHANGE) if sys.platform == "darwin" else call(_HERE, first, _HERE, second, 2)
    return done == 0


@cache
def _system_call() -> Any:
    """The function that exchanges two names, which Python itself does not offer."""
    import ctypes  # takes a while, and is not always needed

    try:
        return getattr(ctypes.CDLL(None), "renamex_np" if sys.platform == "darwin" else "renameat2")
    except (AttributeError, OSError, TypeError):
        return None


def _one_after_the_other(path: Path, target: Path) -> None:
    """Between two steps there is nothing under the name: see `headscope.files.unfinished.remove_leftovers`."""
    aside = path.with_suffix(".before")
    os.rename(target, aside)
    try:
        os.rename(path, target)
    except OSError:
        os.rename(aside, target)
        raise
    os.rename(aside, path)


def exists(target: Path) -> InputError:
    """What is said where something is in the way."""
    return InputError(f"{target} exists", "use --force to overwrite it, or another name")
