"""What is shown while a command works."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headscope.cli.errors import say


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
        from rich.console import Console

        with Console(file=sys.stderr).status(message):
            yield
