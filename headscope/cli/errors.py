"""The one place where an exception becomes an `error:` line, a `hint:` line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer

from headscope.errors import HeadscopeError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM}
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Problem:
    """What the user is told: one line, what to do about it, and the process's exit code."""

    message: str
    hint: str | None
    exit_code: int


def explain(exc: BaseException) -> Problem:
    """Say what went wrong, for any exception.

    Exit codes: 2 input, 3 model, 4 memory or disk, 130 interrupted. What was not foreseen is 3, since in practice it is
    an error inside a model's own code; 1 is kept for a check that ran and failed.
    """
    if isinstance(exc, HeadscopeError):
        return Problem(exc.message, exc.hint, exc.exit_code)
    if isinstance(exc, KeyboardInterrupt):
        return Problem("interrupted", "nothing half-written remains; run the command again", 130)
    if _out_of_memory(exc):
        return Problem(
            "out of memory", "take fewer or shorter texts (--batch-size 1, --max-length) or a smaller model", 4
        )
    if isinstance(exc, OSError) and exc.errno in _NO_ROOM:
        return Problem(
            f"cannot write: {exc.strerror}", "free some space or write elsewhere; nothing half-written remains", 4
        )
    if isinstance(exc, OSError) and exc.strerror and exc.filename is not None:
        return Problem(f"{exc.filename}: {exc.strerror}", "check the path and its permissions", 2)
    return Problem(f"{type(exc).__name__}: {exc}", "run it again with --debug for the traceback", 3)


def report(message: str, hint: str | None) -> None:
    """Write the `error:` and `hint:` lines, one line each, to standard error."""
    say("error", message)
    if hint:
        say("hint", hint)


def say(kind: str, text: str) -> None:
    """Write one line `kind: text` to standard error; the text may be anything, a model's or a file's."""
    from headscope.views.text import visible

    print(f"{kind}: {visible(' '.join(text.split()))}", file=sys.stderr)


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Run a command's body: report what it raises and leave with the right exit code; a traceback only with `debug`."""
    try:
        yield
        sys.stdout.flush()
    except typer.Exit:
        raise
    except BrokenPipeError:
        # The reader has seen enough (`… | head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except (Exception, KeyboardInterrupt) as exc:  # whatever it is, the user gets two lines and a code
        if debug:
            traceback.print_exc()
        problem = explain(exc)
        report(problem.message, problem.hint)
        raise typer.Exit(problem.exit_code) from None


def _out_of_memory(exc: BaseException) -> bool:
    """torch raises its own OutOfMemoryError on some devices and a plain RuntimeError on others: both say so."""
    if isinstance(exc, MemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(words in str(exc).lower() for words in _OUT_OF_MEMORY)
