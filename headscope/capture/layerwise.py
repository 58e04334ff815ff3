"""The layerwise engine: one eager forward pass that hands on each layer's attention matrix and then forgets it.

Modules that call transformers' registered attention functions are read where they call them, with the very function
that their own file defines as eager; all others at their output. Nothing stays changed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from headscope.capture.evaluation import eager_evaluation
from headscope.capture.recording import Recorder, forward, hooked
from headscope.models.sites import Site

FUNCTION_ARGUMENTS = ("query", "key", "value", "attention_mask")


@dataclass(frozen=True)
class Arguments:
    """What a registered attention function was given, and the context that it gave back.

    Attributes:
        query, key, value: (batch, head or key/value head, query or key, dim), positions applied.
        mask: Additive or boolean, None where there was none.
        options: The keyword arguments, such as `scaling`, `softcap`, `s_aux` or `position_bias`.
        context: (batch, query, head, dim).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: Mapping[str, Any]
    context: Tensor


@dataclass(frozen=True)
class Call:
    """One attention computation as the model did it.

    Attributes:
        number: Which call of its module in this forward pass this is; a site's own `call`, unless there are too many.
        weights: (batch, head, query, key) in the model's dtype, as the module's own eager attention returns them.
        arguments: What the attention function was given; None for a module that computes attention itself.
        masks: What hid keys from rows, additive or of zeros and ones, as far as it is known; broadcastable to `weights`
            or, of two axes, (batch, key).
    """

    site: Site
    number: int
    weights: Tensor
    arguments: Arguments | None
    masks: tuple[Tensor, ...] = ()

    @property
    def num_kv_heads(self) -> int | None:
        """From the keys' shape; None where they are not known."""
        return None if self.arguments is None else self.arguments.key.shape[1]

    @property
    def head_dim(self) -> int | None:
        """From the queries' shape; None where they are not known."""
        return None if self.arguments is None else self.arguments.query.shape[-1]


Take = Callable[[Call], None]


def run(model: PreTrainedModel, sites: Sequence[Site], inputs: Mapping[str, Tensor], take: Take) -> tuple[Site, ...]:
    """Run one forward pass in evaluation mode and call `take` for every attention matrix, layer by layer.

    A module that computes attention more often than it has sites gives calls beyond its last site, for the caller to
    refuse. The model's training mode, attention implementation and hooks are as before afterwards, also after an error.

    Returns:
        The sites whose modules ran but gave no attention weights.

    Raises:
        ModelError: The forward pass fails, or nothing is captured.
        ResourceError: Out of memory.
    """
    recorder = Recorder(sites, take)

    def read(module: nn.Module, weights: Tensor, masks: tuple[Tensor, ...]) -> None:
        recorder.record(module, weights, lambda site, number: Call(site, number, weights, None, masks))

    with ExitStack() as stack:
        stack.enter_context(eager_evaluation(model))
        stack.enter_context(_listening(recorder))
        stack.enter_context(hooked(recorder, read))
        stack.enter_context(torch.no_grad())
        return forward(model, inputs, recorder)


@contextmanager
def _listening(recorder: Recorder) -> Iterator[None]:
    """Let the recorder see every call of a registered attention function by one of its modules."""
    choose: Callable[..., Callable[..., Any]] = AttentionInterface.get_interface

    def get_interface(self: AttentionInterface, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return _recorded(choose(self, *args, **kwargs), recorder)

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]  # that is the point
    try:
        yield
    finally:
        AttentionInterface.get_interface = choose  # type: ignore[method-assign]  # as above


def _recorded(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """`function` as it is, but the weights of the recorder's modules are shown to it."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = function(module, *args, **kwargs)
        weights = result[1] if isinstance(result, tuple) and len(result) > 1 else None
        if isinstance(weights, Tensor) and recorder.watches(module):
            given = {**kwargs, **dict(zip(FUNCTION_ARGUMENTS, args, strict=False))}
            mask = given.get("attention_mask")
            masks = (mask,) if isinstance(mask, Tensor) else ()
            arguments = arguments_of(given, result[0])
            recorder.record(module, weights, lambda site, number: Call(site, number, weights, arguments, masks))
        return result

    return call


def arguments_of(given: Mapping[str, Any], context: Tensor) -> Arguments | None:
    """What an attention function was given and gave, None where that is not (batch, head, token, dim)."""
    tensors = [given.get(name) for name in FUNCTION_ARGUMENTS[:3]]
    query, key, value = (t if isinstance(t, Tensor) and t.ndim == 4 else None for t in tensors)
    if query is None or key is None or value is None:
        return None
    mask = given.get("attention_mask")
    options = {name: value for name, value in given.items() if name not in FUNCTION_ARGUMENTS}
    return Arguments(query, key, value, mask if isinstance(mask, Tensor) else None, options, context)
