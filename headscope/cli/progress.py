"""What is shown while a command works."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from headscope.cli.errors import say

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def notes(quiet: bool) -> Callable[[str], None] | None:
    """Where a long computation's lines go, what it costs and how far it is: standard error, each once; or nowhere."""
    if quiet:
        return None
    said: set[str] = set()

    def note(line: str) -> None:
        if line not in said:
            said.add(line)
            say("note", line)

    return note


@contextmanager
def progress(message: str | None, quiet: bool, debug: bool) -> Iterator[None]:
    """A spinner on a terminal, if there is a message; other libraries' Python warnings are not shown unless `debug`."""
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
        if message is None or quiet or not sys.stderr.isatty():
            yield
            return
        with console().status(message):
            yield


def show(lines: RenderableType) -> None:
    """Print what is no result, but about it, to standard error."""
    with suppress(OSError):
        console().print(lines)


def console() -> Console:
    """Standard error. Where nobody listens any more the work goes on, and is written if it goes to a file."""
    from rich.console import Console

    class Heedless(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True

    return Heedless(file=sys.stderr)
