"""Forward passes that wait for each other: each in a thread of its own, of which one runs at any time.

A pass pauses wherever a stream is read, and goes on when it is told to. So what must be kept is what the paused passes
hold, one layer's activations, and all work is one pass for each batch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.models.batches import Batch
from headscope.repair.streams import Stream
from headscope.repair.trial import Event, plain_inputs

_local = threading.local()


class Stopped(BaseException):
    """Ends a pass that is not needed any more. No Exception, so that no model takes it for one of its own."""


@dataclass(frozen=True)
class Pause:
    """A pass at a stream.

    Attributes:
        stream: Which.
        value: Its tensor, (..., features): what is written into it in place, the rest of the pass reads.
        inputs: What went into the projection, (..., in_features), where that is kept.
    """

    stream: Stream
    value: Tensor
    inputs: Tensor | None


class ForwardPass:
    """Work in a thread of its own, which runs only while `resume` waits for it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.calls: Counter[str] = Counter()
        self.inputs: dict[str, Tensor] = {}
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._paused: Pause | None = None
        self._error: BaseException | None = None
        self._closed = self._ended = False

    def resume(self) -> Pause | None:
        """Run on to the next pause; None at the end. Raises what the work raises."""
        if self._ended:
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="headscope forward pass")
            self._thread.start()
        self._paused = None
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error
        return self._paused

    def pause(self, at: Pause) -> None:
        """Called by the work, in its thread: hand `at` over and wait.

        Raises:
            Stopped: The pass was closed.
        """
        self._paused = at
        self._back.release()
        self._go.acquire()
        if self._closed:
            raise Stopped

    def close(self) -> None:
        """End the work where it is paused, and its thread."""
        self._closed = True
        if self._thread is not None:
            self._go.release()
            self._thread.join()
        self._paused = None
        self.inputs.clear()

    def _run(self) -> None:
        torch.get_num_threads()  # a new thread takes over torch's number of threads only when asked for it
        self._go.acquire()
        _local.running = self
        try:
            if not self._closed:
                with torch.no_grad():
                    self._work()
        except Stopped:
            pass
        except BaseException as error:  # the caller's, who waits for it
            self._error = error
        self._ended = True
        self._back.release()


@contextmanager
def forward_passes(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    streams: Sequence[Stream],
    keep: Mapping[str, nn.Module] | None = None,
) -> Iterator[tuple[ForwardPass, ...]]:
    """A forward pass for each batch, each of which will pause at all streams, in their order.

    When the block ends, however it ends, the passes end where they are; no thread and no hook is left.

    Args:
        model: In evaluation mode.
        keep: Projections, by path, whose inputs are kept until their streams are read.
    """

    def forward(batch: Batch) -> Callable[[], object]:
        return lambda: model(**plain_inputs(model, batch))

    passes = tuple(ForwardPass(forward(batch)) for batch in batches)
    handles = _register(model, passes, streams, keep or {})
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()
        for one in passes:
            one.close()


def _register(
    model: nn.Module, passes: Sequence[ForwardPass], streams: Sequence[Stream], keep: Mapping[str, nn.Module]
) -> list[Any]:
    at: dict[Event, list[Stream]] = {}
    for stream in sorted(streams, key=lambda s: s.order):
        at.setdefault(stream.event, []).append(stream)

    def running() -> ForwardPass | None:
        """The pass that runs in this thread, if it is one of these."""
        one = getattr(_local, "running", None)
        return one if one in passes else None

    def before(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            one = running()
            if one is None:
                return
            for event in (e for e in at if (e.path, e.call) == (path, one.calls[path]) and e.key is not None):
                _pause(one, at[event], event.of(args, kwargs))
            one.calls[path] += 1

        return hook

    def after(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], result: Tensor) -> None:
            one = running()
            if one is None:
                return
            if path in keep:
                one.inputs[path] = args[0]
            _pause(one, at.get(Event(path), []), result)

        return hook

    read = dict.fromkeys(e.path for e in at if e.key is not None)
    handles = [model.get_submodule(p).register_forward_pre_hook(before(p), with_kwargs=True) for p in read]
    own = dict.fromkeys([*keep, *(e.path for e in at if e.key is None)])
    return handles + [model.get_submodule(p).register_forward_hook(after(p)) for p in own]


def _pause(one: ForwardPass, streams: Sequence[Stream], value: Tensor) -> None:
    for stream in streams:
        one.pause(Pause(stream, value, one.inputs.pop(stream.projection, None)))
