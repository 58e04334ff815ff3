"""Several files and directories that take their places together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from headscope.files.undisturbed import undisturbed


class _Waiting:
    """What is finished and waits for the others."""

    def __init__(self) -> None:
        self.places: list[Callable[[], None]] = []
        self.open = ExitStack()


_waiting: _Waiting | None = None


@contextmanager
def together() -> Iterator[None]:
    """What `new_file` and `new_directory` finish within the block takes its place when the block ends.

    If the block raises, nothing does; but where it is only that nobody reads standard output any more, what is finished
    does. A block within another ends with the outer one.
    """
    global _waiting
    if _waiting is not None:
        yield
        return
    ours = _waiting = _Waiting()
    with ours.open:
        try:
            yield
        except BrokenPipeError:
            _place_all(ours)
            raise
        finally:
            _waiting = None
        _place_all(ours)


def _place_all(waiting: _Waiting) -> None:
    with undisturbed():
        for place in waiting.places:
            place()


def finish(place: Callable[[], None], opened: ExitStack) -> None:
    """Let something take its place: now, or with the others.

    Args:
        place: What puts it there.
        opened: What is closed afterwards.
    """
    if _waiting is None:
        with undisturbed():
            place()
    else:
        _waiting.places.append(place)
        _waiting.open.push(opened.pop_all())
