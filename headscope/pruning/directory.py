"""A directory that appears whole, under its name, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headscope import files
from headscope.errors import InputError, ResourceError, is_disk_full
from headscope.files.links import own_place

# What a model's directory has, and little else does.
_MARK = "config.json"


def check_directory(path: str | Path, *, force: bool = False) -> Path:
    """The directory at `path`, with links above it followed, if one can be written there.

    Args:
        force: Something that is there may be replaced, if it is an empty directory or a model's.

    Raises:
        InputError: A link or something else is there that must not be replaced, or nothing can be created there.
    """
    target = own_place(Path(os.path.expanduser(path)))
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
    try:
        with files.new_directory(target, force=force) as part:
            yield part
    except Exception as error:  # the libraries that write here have no class in common for this
        if not is_disk_full(error):
            raise
        raise ResourceError(f"no space left for {path}", "Free some, or write elsewhere; nothing remains.") from error
