"""One more token with a cache: what a model that generates does for every token of its answer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from headscope.models.signature import takes
from headscope.pruning.running import can_generate

_CACHES = ("cache", "past_key_values")


@dataclass(frozen=True)
class Step:
    """A forward pass of one token for each example, after others that are in a cache.

    Attributes:
        inputs: Keywords of the model's forward, but for the cache.
        name: The keyword of the cache.
        cache: Filled; a pass appends to it, so each gets a copy.
        length: Tokens that it holds.
    """

    inputs: Mapping[str, Any]
    name: str
    cache: Any
    length: int

    def fresh(self) -> dict[str, Any]:
        """Keywords for one pass."""
        return {**self.inputs, self.name: copy.deepcopy(self.cache)}


def keeps_cache(model: PreTrainedModel) -> bool:
    """Whether a model generates, and may keep a cache while it does."""
    return can_generate(model) and takes(model, "use_cache") and any(takes(model, name) for name in _CACHES)


def step_after(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Step | None:
    """The step that follows unpadded inputs, of which one forward pass fills the cache; None where there is none.

    Args:
        model: In evaluation mode; gradients have to be off.
        inputs: Keywords of its forward; an encoder-decoder's step follows its `decoder_input_ids`.
    """
    output = model(**inputs, use_cache=True)
    cache = next((output[name] for name in _CACHES if output.get(name) is not None), None)
    if cache is None:
        return None
    given: dict[str, Any] = {"use_cache": True}
    mask = inputs.get("attention_mask")
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids = inputs[name]
    given[name] = ids[:, -1:]
    if name == "decoder_input_ids":
        given["encoder_outputs"] = BaseModelOutput(last_hidden_state=output.encoder_last_hidden_state)
    elif mask is not None:
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    if mask is not None:
        given["attention_mask"] = mask
    return Step(given, next(n for n in _CACHES if takes(model, n)), cache, ids.shape[1])
