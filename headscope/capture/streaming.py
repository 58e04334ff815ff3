"""The streaming engine: one forward pass in which attention is computed tile by tile, and no matrix is ever made.

Modules that call transformers' registered attention functions get ours instead. Under a name of our own the model makes
the masks that it makes for sdpa, none at all where it is plainly causal; under the name `eager` it believes to be eager
and makes full ones, which is right for models that treat other names differently. All else is read layer by layer: the
modules that compute attention themselves, and calls with arguments that our function does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from headscope.attention.streaming import StreamedWeights
from headscope.capture.evaluation import config_around, configs_of, eager_evaluation
from headscope.capture.given import Masks, additive_mask, problem_of
from headscope.capture.layerwise import FUNCTION_ARGUMENTS, Call, arguments_of
from headscope.capture.recording import Recorder, forward, hooked
from headscope.models.sites import Site

NAME = "headscope"

Mode = Literal["named", "eager"]
"""The name under which modules find our function: our own, or `eager`."""


@dataclass(frozen=True)
class StreamedCall:
    """One attention computation as we did it in the model's place.

    Attributes:
        number: Which call of its module in this forward pass this is.
        weights: What is known of the weights.
        num_kv_heads, head_dim: From the keys' and the queries' shapes.
    """

    site: Site
    number: int
    weights: StreamedWeights
    num_kv_heads: int
    head_dim: int

    @property
    def context(self) -> Tensor:
        """(batch, query, head, dim)."""
        return self.weights.context


def run(
    model: PreTrainedModel,
    sites: Sequence[Site],
    inputs: Mapping[str, Tensor],
    take: Callable[[Call | StreamedCall], None],
    mode: Mode,
) -> tuple[Site, ...]:
    """Run one forward pass in evaluation mode and call `take` for every attention computation, layer by layer.

    The model's training mode, attention implementation and hooks, and what transformers has registered, are as before
    afterwards, also after an error.

    Returns:
        The sites whose modules ran but gave nothing to read.

    Raises:
        ModelError: The forward pass fails, or nothing is captured.
        ResourceError: Out of memory.
    """
    recorder = Recorder(sites, take)

    def read(module: nn.Module, weights: Tensor, masks: tuple[Tensor, ...]) -> None:
        recorder.record(module, weights, lambda site, number: Call(site, number, weights, None, masks))

    named = _ours(model, sites) if mode == "named" else {}
    with ExitStack() as stack:
        stack.enter_context(eager_evaluation(model, named))
        stack.enter_context(_answering(recorder, mode))
        stack.enter_context(hooked(recorder, read))
        stack.enter_context(torch.no_grad())
        return forward(model, inputs, recorder)


def _ours(model: PreTrainedModel, sites: Sequence[Site]) -> dict[int, str]:
    """The configs that get our name: all but those of modules that compute attention themselves on full masks."""
    kept = {id(config_around(model, site.path)) for site in sites if not site.uses_interface}
    return {id(config): NAME for config in configs_of(model) if id(config) not in kept}


@contextmanager
def _answering(recorder: Recorder, mode: Mode) -> Iterator[None]:
    """Have the model's modules find our function where they look for theirs."""
    choose: Callable[..., Callable[..., Any]] = AttentionInterface.get_interface
    masks = Masks()

    def get_interface(self: AttentionInterface, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        wanted = {**kwargs, **dict(zip(("attn_implementation", "default"), args, strict=False))}
        ours = NAME if mode == "named" else "eager"
        if wanted.get("attn_implementation") != ours:
            return choose(self, *args, **kwargs)
        function = wanted.get("default") if mode == "named" else choose(self, *args, **kwargs)
        return _Streaming(function, recorder, masks, eager=mode == "eager")

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]  # that is the point
    if mode == "named":
        AttentionInterface.register(NAME, _Streaming(None, recorder, masks, eager=False))
        AttentionMaskInterface.register(NAME, sdpa_mask)
    try:
        yield
    finally:
        AttentionInterface.get_interface = choose  # type: ignore[method-assign]  # as above
        AttentionInterface._global_mapping.pop(NAME, None)
        AttentionMaskInterface._global_mapping.pop(NAME, None)


# ------------------------------------------------------------------ our attention function
class _Streaming:
    """What modules call in place of a registered attention function; `eager` is the one of their own file."""

    def __init__(self, function: Callable[..., Any] | None, recorder: Recorder, masks: Masks, eager: bool) -> None:
        self.function, self.recorder, self.masks, self.eager = function, recorder, masks, eager

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        given = {**kwargs, **dict(zip(FUNCTION_ARGUMENTS, args, strict=False))}
        watched = self.recorder.watches(module)
        if self.eager and not watched:
            assert self.function is not None
            return self.function(module, *args, **kwargs)  # type: ignore[no-any-return]  # as the module's own does
        problem = problem_of(module, given, self.masks, self.eager)
        if problem is None:
            return self._as_it_is(module, given, watched)
        query, key = problem[:2]
        # What is summed in float32 stays so where the caller lets torch round products.
        with torch.autocast(query.device.type, enabled=False):
            # Nothing is computed yet: who takes it says first what else to look at on the way.
            weights = StreamedWeights(*problem)
            if watched:
                self.recorder.record(
                    module,
                    None,
                    lambda site, number: StreamedCall(site, number, weights, key.shape[1], query.shape[-1]),
                )
            return weights.context, None

    def _as_it_is(self, module: nn.Module, given: Mapping[str, Any], watched: bool) -> tuple[Tensor, Tensor | None]:
        """The module's own function with what it was given, masks as eager attention takes them."""
        assert self.function is not None
        mask = given.get("attention_mask")
        if not self.eager:
            mask = additive_mask(module, given)
        options = {name: value for name, value in given.items() if name not in FUNCTION_ARGUMENTS}
        result = self.function(module, given["query"], given["key"], given["value"], mask, **options)
        if watched and isinstance(result[1], Tensor):
            weights, arguments = result[1], arguments_of(given, result[0])
            masks = (mask,) if isinstance(mask, Tensor) else ()
            self.recorder.record(module, weights, lambda site, number: Call(site, number, weights, arguments, masks))
        return result  # type: ignore[no-any-return]  # as the module's own does
