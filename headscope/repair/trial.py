"""Forward passes of two short texts, in which what modules read is written down, and changed on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.models.batches import Batch
from headscope.models.signature import takes

# Tokens of each of the two texts.
_LENGTH = 8


@dataclass(frozen=True)
class Event:
    """A tensor of a forward pass.

    Attributes:
        path: The module's path in the model.
        call: Which call of the module it is.
        key: The place or name of an argument; None for the module's result.
    """

    path: str
    call: int = 0
    key: int | str | None = None

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The argument, among those of a call."""
        return args[self.key] if isinstance(self.key, int) else kwargs[str(self.key)]


def plain_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """A batch's inputs on the model's device, and no cache: it would keep every layer's keys and values."""
    off: dict[str, Any] = {"use_cache": False} if takes(model, "use_cache") else {}
    return {name: t.to(model.device) for name, t in batch.inputs.items()} | off


def short(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """The first tokens of two texts. Two, so that a tensor with other axes first does not look the same."""
    lengths = {axis.special.shape[1] for axis in batch.axes.values()}
    short: dict[str, Any] = {}
    for name, value in plain_inputs(model, batch).items():
        if not isinstance(value, Tensor):
            short[name] = value
            continue
        two = value[[0, -1]]
        cut = two[:, :_LENGTH] if two.ndim > 1 and two.shape[1] in lengths else two
        short[name] = torch.ones_like(cut) if name.endswith("attention_mask") and cut.ndim == 2 else cut
    return short


class _Stop(BaseException):
    """Ends a forward pass early."""


@dataclass(frozen=True)
class Trial:
    """A model and what it is tried on."""

    model: PreTrainedModel
    projections: Mapping[str, nn.Module]
    inputs: Mapping[str, Any]

    def run(self, at: Event | None = None, add: Tensor | None = None, stop: Event | None = None) -> dict[Event, Tensor]:
        """All results of projections and all tensors as wide as these that modules read, in the order of calls.

        Args:
            at, add: What is added to which of the tensors, in place.
            stop: The result that ends the pass.
        """
        seen: dict[Event, Tensor] = {}
        calls: Counter[str] = Counter()
        widths: set[int] = set()

        def note(event: Event, value: Any) -> None:
            if event == stop:
                raise _Stop
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
                return
            if event.key is None:
                widths.add(value.shape[-1])
            if event == at and add is not None:
                value.add_(add.reshape(value.shape))
            seen[event] = value.clone()

        with _watched(self.model, self.projections, calls, note), torch.no_grad(), suppress(_Stop):
            self.model(**self.inputs)
        return {event: value for event, value in seen.items() if value.shape[-1] in widths}


@contextmanager
def _watched(model: nn.Module, projections: Mapping[str, nn.Module], calls: Counter[str], note: Any) -> Iterator[None]:
    def before(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[path] += 1
            given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            for key, value in given:
                note(Event(path, calls[path] - 1, key), value)

        return hook

    def after(path: str) -> Any:
        return lambda module, args, result: note(Event(path, calls[path] - 1), result)

    handles = [m.register_forward_pre_hook(before(path), with_kwargs=True) for path, m in model.named_modules()]
    handles += [m.register_forward_hook(after(path)) for path, m in projections.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
