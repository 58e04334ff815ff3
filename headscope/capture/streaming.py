"""The streaming engine: one forward pass in which attention is computed tile by tile, and no matrix is ever made.

Modules that call transformers' registered attention functions get ours instead. Under a name of our own the model makes
the masks that it makes for sdpa, none at all where it is plainly causal; under the name `eager` it believes to be eager
and makes full ones, which is right for models that treat other names differently. All else is read layer by layer: the
modules that compute attention themselves, and calls with arguments that our function does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from headscope.attention.streaming import StreamedWeights, Terms, attend
from headscope.attention.visibility import Visibility
from headscope.capture.evaluation import configs_of, eager_evaluation
from headscope.capture.layerwise import FUNCTION_ARGUMENTS, Call, arguments_of
from headscope.capture.recording import Recorder, forward, hooked
from headscope.capture.visible import CLOSED
from headscope.models.exceptions import SINKS_SCALE_CONTEXT
from headscope.models.sites import Site

NAME = "headscope"

Mode = Literal["named", "eager"]
"""The name under which modules find our function: our own, or `eager`."""

# Arguments of attention functions that change nothing in evaluation, or that the mask says already.
_WITHOUT_EFFECT = {
    "dropout",
    "sliding_window",
    "use_cache",
    "cache_position",
    "position_ids",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "deterministic",
    "input_ids",
    "grid_thw",
    "image_grid_thw",
    "pixel_values",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}
_WITH_EFFECT = {"scaling", "is_causal", "softcap", "position_bias", "s_aux", "sinks", "indices"}


@dataclass(frozen=True)
class StreamedCall:
    """One attention computation as we did it in the model's place.

    Attributes:
        number: Which call of its module in this forward pass this is.
        weights: What is known of the weights.
        num_kv_heads, head_dim: From the keys' and the queries' shapes.
        context: (batch, query, head, dim).
    """

    site: Site
    number: int
    weights: StreamedWeights
    num_kv_heads: int
    head_dim: int
    context: Tensor


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
    """The configs that get our name: all but those of modules that compute attention themselves, and need full masks."""
    themselves = [s.path for s in sites if not s.uses_interface]
    kept = set()
    for path in themselves:
        parts = path.split(".")
        above = (model.get_submodule(".".join(parts[:i])) for i in range(len(parts), -1, -1))
        own = next((c for c in (getattr(m, "config", None) for m in above) if isinstance(c, PreTrainedConfig)), None)
        kept.add(id(own))
    return {id(config): NAME for config in configs_of(model) if id(config) not in kept}


@contextmanager
def _answering(recorder: Recorder, mode: Mode) -> Iterator[None]:
    """Have the model's modules find our function where they look for theirs."""
    choose: Callable[..., Callable[..., Any]] = AttentionInterface.get_interface
    masks = _Masks()

    def get_interface(self: AttentionInterface, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        if mode == "named" and implementation == NAME:
            return _Streaming(default, recorder, masks, eager=False)
        function = choose(self, implementation, default)
        if mode == "eager" and implementation == "eager":
            return _Streaming(function, recorder, masks, eager=True)
        return function

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

    def __init__(self, function: Callable[..., Any] | None, recorder: Recorder, masks: _Masks, eager: bool) -> None:
        self.function, self.recorder, self.masks, self.eager = function, recorder, masks, eager

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        given = {**kwargs, **dict(zip(FUNCTION_ARGUMENTS, args, strict=False))}
        watched = self.recorder.watches(module)
        if self.eager and not watched:
            assert self.function is not None
            return self.function(module, *args, **kwargs)  # type: ignore[no-any-return]  # as the module's own does
        problem = _problem(module, given, self.masks, self.eager)
        if problem is None:
            return self._as_it_is(module, given, watched)
        context, weights = attend(*problem)
        if watched:
            query, key = problem[:2]
            self.recorder.record(
                module,
                None,
                lambda site, number: StreamedCall(site, number, weights, key.shape[1], query.shape[-1], context),
            )
        return context, None

    def _as_it_is(self, module: nn.Module, given: Mapping[str, Any], watched: bool) -> tuple[Tensor, Tensor | None]:
        """The module's own function with what it was given, masks as eager attention takes them."""
        assert self.function is not None
        mask = given.get("attention_mask")
        if not self.eager:
            mask = _additive(module, given)
        result = self.function(module, **{**given, "attention_mask": mask})
        if watched and isinstance(result[1], Tensor):
            weights, arguments = result[1], arguments_of(given, result[0])
            masks = (mask,) if isinstance(mask, Tensor) else ()
            self.recorder.record(module, weights, lambda site, number: Call(site, number, weights, arguments, masks))
        return result  # type: ignore[no-any-return]  # as the module's own does


Problem = tuple[Tensor, Tensor, Tensor, Visibility, Terms]


def _problem(module: nn.Module, given: Mapping[str, Any], masks: _Masks, eager: bool) -> Problem | None:
    """The arguments of an attention function as ours takes them; None where there is anything that it does not know."""
    query, key, value = (given.get(name) for name in FUNCTION_ARGUMENTS[:3])
    if not all(isinstance(t, Tensor) and t.ndim == 4 for t in (query, key, value)):
        return None
    options = {n: v for n, v in given.items() if n not in FUNCTION_ARGUMENTS and v is not None}
    if not options.keys() <= _WITHOUT_EFFECT | _WITH_EFFECT:
        return None
    mask = given.get("attention_mask")
    batch, heads, rows, width = query.shape
    fits = key.shape[0] == value.shape[0] == batch and heads % key.shape[1] == 0 and key.shape[1] == value.shape[1]
    if not fits or key.shape[-1] != width or key.shape[2] != value.shape[2] or 0 in (rows, key.shape[2]):
        return None
    causal = not eager and mask is None and rows > 1 and _causal(module, options)
    if causal and key.shape[2] > rows:
        key, value = key[:, :, :rows], value[:, :, :rows]
    found = masks.read(mask, (batch, heads, rows, key.shape[2]), causal, eager)
    if found is None:
        return None
    visibility, biases = found
    bias = options.get("position_bias")
    if bias is not None:
        if bias.ndim != 4 or bias.shape[2] not in (1, rows) or bias.shape[3] < key.shape[2]:
            return None
        biases = (*biases, bias[..., : key.shape[2]])
    if "indices" in options:
        visibility = _only(visibility, options["indices"])
    scaling = options.get("scaling")
    terms = Terms(
        width**-0.5 if scaling is None else float(scaling),
        options.get("softcap"),
        biases,
        _sinks(options, heads),
        type(module).__name__ in SINKS_SCALE_CONTEXT,
    )
    return query, key, value, visibility, terms


def _sinks(options: Mapping[str, Any], heads: int) -> Tensor | None:
    """Learned sinks, a logit a head or one for each row of each head, as (batch or 1, head, query or 1)."""
    sinks = options.get("s_aux", options.get("sinks"))
    if not isinstance(sinks, Tensor):
        return None
    return sinks[..., 0] if sinks.ndim == 4 else sinks.reshape(1, heads, 1)


def _causal(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """What sdpa takes a call without a mask for."""
    given = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _only(visibility: Visibility, indices: Tensor) -> Visibility:
    """Only the keys that a sparse indexer chose for each row, (batch, query, k)."""
    chosen = torch.zeros(indices.shape[0], 1, visibility.rows, visibility.keys, dtype=torch.bool, device=indices.device)
    chosen.scatter_(-1, indices.long().unsqueeze(1), True)
    seen = chosen if visibility.open is None else chosen & visibility.open
    return Visibility(visibility.rows, visibility.keys, visibility.causal, seen)


def _additive(module: nn.Module, given: Mapping[str, Any]) -> Tensor | None:
    """A mask as sdpa takes it, as eager attention takes it."""
    mask, query, key = given.get("attention_mask"), given["query"], given["key"]
    options = {n: v for n, v in given.items() if n not in FUNCTION_ARGUMENTS}
    rows, keys = query.shape[2], key.shape[2]
    if mask is None and rows > 1 and _causal(module, options):
        mask = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=query.device).tril()
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(
            ~mask, torch.finfo(query.dtype).min
        )
    return mask


# ------------------------------------------------------------------ masks
@dataclass
class _Masks:
    """What masks say, read once for all layers that are given the same one."""

    _known: dict[tuple[object, ...], tuple[object, Visibility, tuple[Tensor, ...]]] = field(default_factory=dict)

    def read(
        self, mask: Any, shape: tuple[int, int, int, int], causal: bool, eager: bool
    ) -> tuple[Visibility, tuple[Tensor, ...]] | None:
        """What a mask lets rows see, and what it adds to scores; None where it does not fit."""
        # The entry holds the mask, so that its id stays its own.
        key = (id(mask), getattr(mask, "_version", 0), shape[2:], causal)
        if key not in self._known:
            read = _read_mask(mask, shape, causal, eager)
            if read is None:
                return None
            self._known[key] = (mask, *read)
        return self._known[key][1:]


def _read_mask(
    mask: Any, shape: tuple[int, int, int, int], causal: bool, eager: bool
) -> tuple[Visibility, tuple[Tensor, ...]] | None:
    batch, heads, rows, keys = shape
    if mask is None:
        return Visibility(rows, keys, causal), ()
    if not isinstance(mask, Tensor) or mask.ndim > 4:
        return None
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    fits = mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads) and mask.shape[2] in (1, rows)
    if not fits or not (mask.shape[3] >= keys or mask.shape[3] == 1):
        return None
    mask = _narrow(mask[..., :keys]).expand(-1, -1, -1, keys)
    if mask.dtype == torch.bool and not eager:
        return Visibility(rows, keys, open=mask), ()
    if not mask.is_floating_point():
        # Eager attention adds what it is given.
        return Visibility(rows, keys), (mask.to(torch.float32),)
    opened = mask > CLOSED
    if bool(((mask == 0) | ~opened).all()):
        return Visibility(rows, keys, open=opened), ()
    return Visibility(rows, keys, open=opened), (mask,)


def _narrow(mask: Tensor) -> Tensor:
    """A mask that repeats one row or one head for all, as that one."""
    for axis in (0, 1, 2):
        if mask.shape[axis] > 1 and mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return mask
