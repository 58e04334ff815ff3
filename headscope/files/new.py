"""A new file, or a new directory, as a block that writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from headscope.files.placing import place_directory, place_file
from headscope.files.together import finish
from headscope.files.unfinished import part_of


@contextmanager
def new_file(target: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A file that takes the name `target` when the block ends, and vanishes if the block raises.

    Two processes may do so at the same time: without `force` one of them succeeds, with it the last one stays.

    Raises:
        InputError: `force` is off and something has the name by then.
        OSError: It cannot be written.
    """
    with ExitStack() as opened:
        part = opened.enter_context(part_of(target))
        with os.fdopen(part.number, "wb", closefd=False) as file:
            yield file
            file.flush()
            # Some file systems say only now that there is no room.
            os.fsync(part.number)
        finish(partial(place_file, part.path, target, force=force), opened)


@contextmanager
def new_directory(target: Path, *, force: bool) -> Iterator[Path]:
    """A directory that takes the name `target` when the block ends, and vanishes if the block raises.

    An empty directory of this name is replaced, and with `force` any.

    Raises:
        InputError: `force` is off and something has the name by then.
        OSError: It cannot be written.
    """
    with ExitStack() as opened:
        part = opened.enter_context(part_of(target, directory=True))
        yield part.path
        finish(partial(place_directory, part.path, target, force=force), opened)


@contextmanager
def new_files(folder: Path, *, force: bool) -> Iterator[Path]:
    """A directory in `folder`, which is there; what is written to it moves to `folder` when the block ends.

    If the block raises nothing moves, and without `force` nothing either if one of the names is taken.

    Raises:
        InputError: `force` is off and something has one of the names by then.
        OSError: They cannot be written.
    """
    with ExitStack() as opened:
        # Within: elsewhere may be another file system, from which nothing moves in one step.
        part = opened.enter_context(part_of(folder / "new", directory=True))
        yield part.path
        finish(partial(_place_all, part.path, folder, force=force), opened)


def _place_all(part: Path, folder: Path, *, force: bool) -> None:
    placed: list[Path] = []
    try:
        for path in sorted(part.iterdir()):
            place_file(path, folder / path.name, force=force)
            placed.append(folder / path.name)
    except BaseException:
        # With `force` what they replaced is gone, and they are better than nothing.
        for path in placed if not force else []:
            path.unlink()
        raise
