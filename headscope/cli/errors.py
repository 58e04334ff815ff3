"""The one place where an exception becomes an `error:` line, a `hint:` line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import typer

from headscope.cli import signals
from headscope.errors import HeadscopeError, lack
from headscope.files import undisturbed

# Characters of a line: what it quotes may be a whole file.
_MOST = 2000


@dataclass(frozen=True)
class Problem:
    """What the user is told: one line, what to do about it, and the process's exit code."""

    message: str
    hint: str | None
    exit_code: int


def explain(exc: BaseException) -> Problem:
    """Say what went wrong, for any exception.

    Exit codes: 2 input, 3 model, 4 memory or disk, 130 interrupted (SIGTERM: 143, SIGHUP: 129). What was not foreseen
    is 3, since in practice it is an error inside a model's own code; 1 is kept for a check that ran and failed.
    """
    asked = signals.stopped()
    if asked is not None:
        # Whatever came of it: libraries make errors of their own of an interrupt.
        return Problem(asked[0], signals.HINT, asked[1])
    lacking = lack(exc)
    if lacking is not None:
        return Problem(lacking.message, lacking.hint, lacking.exit_code)
    if isinstance(exc, HeadscopeError):
        return Problem(exc.message, exc.hint, exc.exit_code)
    if isinstance(exc, KeyboardInterrupt):
        return Problem("interrupted", signals.HINT, 130)
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

    line = " ".join(text.split())
    line = line if len(line) <= _MOST else line[: _MOST - 1] + "…"
    with suppress(OSError):  # nobody listens any more, and the work goes on
        print(f"{kind}: {visible(line)}", file=sys.stderr)


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Run a command's body: report what it raises and leave with the right exit code; a traceback only with `debug`."""
    stderr = sys.stderr
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
        sys.stderr = stderr  # an interrupt may come as it is being put back
        if debug:
            traceback.print_exc()
        problem = explain(exc)
        with undisturbed():  # a second interrupt is not to be told of between the two
            signals.told()
            report(problem.message, problem.hint)
        raise typer.Exit(problem.exit_code) from None
