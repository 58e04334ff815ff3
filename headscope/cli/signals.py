"""What a signal does that asks the command to end: it ends orderly, and at the second one at once, but tidily."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from headscope.files.undisturbed import STOPPING
from headscope.files.unfinished import remove_unfinished

HINT = "nothing half-written remains; run the command again"
_SAID = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "the terminal was closed"}
_SHOW_CURSOR = b"\x1b[?25h"
# Until what has swallowed an interrupt is over.
_SECONDS = 0.02


@dataclass
class _State:
    """Of this process.

    Attributes:
        owner: The process that listens; one that is forked from it does not.
        alone: Whether the process is there for the command only, and may be ended.
        at_work: Whether there is a command that would hear of an exception.
        came: The first signal of this command.
        told: Whether the user was told of it.
        before: The handlers that there were.
    """

    owner: int = 0
    alone: bool = False
    at_work: bool = False
    came: int | None = None
    told: bool = False
    before: dict[int, Any] = field(default_factory=dict)


_state = _State()


def listen() -> None:
    """From now on this process, which is there for a command only, ends tidily whenever it is asked to."""
    _state.alone = True
    _take()


@contextmanager
def at_work() -> Iterator[None]:
    """Within the block the first signal that asks the process to end raises KeyboardInterrupt, whichever it is.

    If nobody listened before, signals go back to whoever had them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.came, _state.told = None, False
    if not _state.alone:
        _take()
    hook, sys.unraisablehook = sys.unraisablehook, _again_if_swallowed
    _state.at_work = True
    try:
        yield
    finally:
        _state.at_work = False
        sys.unraisablehook = hook
        if not _state.alone:
            for number, handler in _state.before.items():
                signal.signal(number, handler)


def _take() -> None:
    _state.owner = os.getpid()
    for number in STOPPING:
        handler = signal.getsignal(number)
        # What it was started to ignore (by `nohup`, or in the background of a script) it goes on to ignore.
        if handler not in (None, signal.SIG_IGN, _stop):
            _state.before[number] = handler
            signal.signal(number, _stop)


def stopped() -> tuple[str, int] | None:
    """What the user is told, and the exit code, if the command was asked to end."""
    if _state.came is None:
        return None
    return _SAID[signal.Signals(_state.came).name], 128 + _state.came


def told() -> bool:
    """Whether the user was told so; asked a second time, yes."""
    before, _state.told = _state.told, True
    return before


def _stop(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _state.owner:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    first = _state.came is None
    if first:
        _state.came = number
    if (first and _state.at_work) or not _state.alone:
        raise KeyboardInterrupt
    _end_at_once()


def _end_at_once() -> NoReturn:
    """Nothing is unwound: whatever the process is in the middle of does not go on."""
    found = stopped()
    try:
        # Not imported here: this may be in the middle of that.
        processes = sys.modules.get("multiprocessing.process")
        with suppress(Exception):  # whatever they say, they end with this process
            for child in [] if processes is None else processes.active_children():
                child.kill()
        remove_unfinished()
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)
        if found is not None and not told():
            os.write(2, f"error: {found[0]}\nhint: {HINT}\n".encode())
    finally:
        os._exit(1 if found is None else found[1])


def _again_if_swallowed(unraisable: Any) -> None:
    """Where Python cannot raise (as an object vanishes, in a library's callback) it would only print the interrupt."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt) or _state.came is None:
        sys.__unraisablehook__(unraisable)
        return
    number, _state.came = _state.came, None
    # `Thread.start` waits for the thread, and where the machine is busy the interrupt would come while it does.
    _thread.start_new_thread(_send_later, (number,))


def _send_later(number: int) -> None:
    time.sleep(_SECONDS)
    os.kill(os.getpid(), number)
