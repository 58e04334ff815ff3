"""What is shown while a command works."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def progress(message: str, quiet: bool, debug: bool) -> Iterator[None]:
    """A spinner on a terminal; Python warnings of other libraries stay out of the output unless `debug`."""
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
        if quiet or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console

        with Console(file=sys.stderr).status(message):
            yield
