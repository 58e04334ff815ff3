"""What a registered attention function was given, as our own takes it; masks are read once for all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention.tiles import Terms
from headscope.attention.visibility import Visibility
from headscope.capture.layerwise import FUNCTION_ARGUMENTS
from headscope.capture.visible import CLOSED
from headscope.models.exceptions import SINKS_SCALE_CONTEXT

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


AttendArguments = tuple[Tensor, Tensor, Tensor, Visibility, Terms]


def problem_of(module: nn.Module, given: Mapping[str, Any], masks: Masks, eager: bool) -> AttendArguments | None:
    """The arguments of an attention function as ours takes them; None where there is anything that it does not know.

    Args:
        module: Whose call it is.
        given: Its arguments by name.
        masks: The forward pass' masks.
        eager: Masks are made for eager attention, which adds them to the scores whatever they are.
    """
    tensors = [given.get(name) for name in FUNCTION_ARGUMENTS[:3]]
    query, key, value = (t if isinstance(t, Tensor) and t.ndim == 4 else None for t in tensors)
    if query is None or key is None or value is None:
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


def additive_mask(module: nn.Module, given: Mapping[str, Any]) -> Tensor | None:
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
class Masks:
    """What masks say, read once for all layers that are given the same one."""

    _known: dict[tuple[object, ...], tuple[object, Visibility, tuple[Tensor, ...]]] = field(default_factory=dict)

    def read(
        self, mask: Any, shape: tuple[int, int, int, int], causal: bool, eager: bool
    ) -> tuple[Visibility, tuple[Tensor, ...]] | None:
        """What a mask lets rows see, and what it adds to scores; None where it does not fit."""
        # The entry holds the mask, so that its id stays its own.
        key = (id(mask), getattr(mask, "_version", 0), shape, causal)
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
