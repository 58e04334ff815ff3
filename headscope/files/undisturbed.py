"""A few steps that no signal comes between."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# What asks a process to end; not every system has all of them.
STOPPING: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A signal that would end the process, or raise, waits until the block is done. For a few quick steps only.

    In other threads than the main one Python handles no signals, and nothing has to be done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    within = True
    # Those that are ignored, or belong to somebody who is not Python, stay as they are.
    before: dict[int, Any] = {}

    def keep(number: int, frame: FrameType | None) -> None:
        if within:
            waiting.append(number)
        else:
            _deliver(number, before[number])

    try:
        for number in STOPPING:
            handler = signal.getsignal(number)
            if handler is not None and handler != signal.SIG_IGN:
                before[number] = handler
                signal.signal(number, keep)
        yield
    finally:
        within = False
        for kept, handler in before.items():
            signal.signal(kept, handler)
        for came in dict.fromkeys(waiting):
            signal.raise_signal(came)


def _deliver(number: int, handler: Any) -> None:
    """Where the next signal comes before the last one's handler is back in its place."""
    signal.signal(number, handler)
    signal.raise_signal(number)
