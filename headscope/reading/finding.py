"""Which files a path means: one file, those of a directory, or those of a pattern."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path

from headscope.errors import InputError
from headscope.reading.formats import format_of, suffixes_said
from headscope.reading.libraries import first_line
from headscope.reading.sources import cannot_read

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def find_files(path: Path) -> list[Path] | None:
    """The files, in order; None where there is no such path and its name could be that of a dataset on the hub.

    Of directories (also of those in them) and patterns, files with a known suffix count; hidden ones do not, unless the
    pattern names them. Below a directory and for `**`, links to directories are not followed. Paths are sorted part by
    part.

    Raises:
        InputError: There is no such file, or none with a known suffix.
    """
    if os.path.isdir(path):
        return _known(_below(path), f"no file in {path}")
    if os.path.lexists(path):
        return [path]
    if glob.has_magic(str(path)):
        return _known(_matching(path), f"no file that {path} matches")
    if format_of(path) is None and _HUB_ID.fullmatch(path.as_posix()):
        return None
    raise cannot_read(str(path), FileNotFoundError(2, os.strerror(2)))


def _known(paths: Iterable[Path], none: str) -> list[Path]:
    found = sorted((p for p in paths if format_of(p) is not None and not p.is_dir()), key=lambda p: p.parts)
    if not found:
        raise InputError(f"{none} has a known suffix", f"known ones are {suffixes_said()}")
    return found


def _below(directory: Path) -> Iterable[Path]:
    for parent, below, files in os.walk(directory, onerror=_raise):
        below[:] = [name for name in below if not name.startswith(".")]
        yield from (Path(parent, name) for name in files if not name.startswith("."))


def _matching(pattern: Path) -> Iterable[Path]:
    fixed = next(i for i, part in enumerate(pattern.parts) if glob.has_magic(part))
    wanted = [*pattern.parts[fixed:], *(["*"] if pattern.name == "**" else [])]
    hidden = any(part.startswith(".") for part in wanted)
    try:
        found = list(Path(*pattern.parts[:fixed]).glob("/".join(wanted)))
    except ValueError as error:
        raise InputError(f"cannot read {pattern}: {first_line(error)}", "write data/**/*.txt or data/*.txt") from error
    return (p for p in found if hidden or not any(part.startswith(".") for part in p.parts[fixed:]))


def _raise(error: OSError) -> None:
    raise cannot_read(str(error.filename), error) from error
