"""The attention layers of a model without values: heads, weights and what generation keeps, from their shapes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedModel

from headscope.models.exceptions import CACHES_EVERY_HEAD
from headscope.models.head_counts import NUM_HEADS
from headscope.models.layouts import LAYOUTS
from headscope.models.projections import Projections
from headscope.models.sites import Site
from headscope.sizing.result import LayerSize

Located = tuple[Site, Projections | None]

# Arguments of attention modules that take the keys and values of earlier tokens.
_CACHES = {"cache", "past_key_values", "past_key_value", "layer_past"}
_OUTPUTS = {row.output for row in LAYOUTS if row.output}


def layer_sizes(model: PreTrainedModel, sites: Sequence[Located], keeps_cache: bool) -> tuple[LayerSize, ...]:
    """The layers of one stack.

    Args:
        sites: The stack's sites, with their projections where those are plain.
        keeps_cache: Whether generation keeps the stack's keys and values.
    """
    kept = _cache_layers(model) if keeps_cache else []
    seen: set[int] = set()
    layers = []
    for site, found in sites:
        cached, window = _cached(site, found, kept) if keeps_cache else (0, None)
        counts = _of_module(site.module) if found is None else _of_projections(found)
        layers.append(LayerSize(site.layer, *counts, id(site.module) in seen, cached, window))
        seen.add(id(site.module))
    return tuple(layers)


def keeps_keys(model: PreTrainedModel, site: Site) -> bool:
    """Whether generation keeps this site's keys and values, as far as the code of its module and its place say."""
    module = site.module
    if site.query_axis == "vision" or not _CACHES & set(inspect.signature(module.forward).parameters):
        return False
    if getattr(model.config, "is_encoder_decoder", False):
        return site.query_axis == "decoder"
    return site.cross or False not in (getattr(module, "is_decoder", True), getattr(module, "is_causal", True))


def repeats_keys(site: Site, found: Projections | None) -> bool:
    """Whether keys and values are kept once for every query head although heads share them."""
    return found is not None and found.shape.num_kv_heads > 1 and type(site.module).__name__ in CACHES_EVERY_HEAD


def is_indexer(name: str) -> bool:
    """Whether a child of an attention module chooses the keys that queries may see, as in DeepSeek-V3.2."""
    return "indexer" in name


def latent_width(module: nn.Module) -> int | None:
    """Numbers of the narrow vector that latent attention keeps for each token; None for another kind of attention."""
    rank, rotary = _said(module, "kv_lora_rank"), _said(module, "qk_rope_head_dim")
    return None if rank is None or rotary is None else rank + rotary


# ------------------------------------------------------------------ weights
_Counts = tuple[int | None, int | None, int | None, int | None, int, int]


def _of_projections(found: Projections) -> _Counts:
    shape = found.shape
    parts = [p for p in (found.query, found.key, found.value, found.gate) if p is not None]
    qkv = sum(p.rows.heads * p.rows.dim * p.matrix().shape[1] for p in parts)
    output = 0 if found.output is None else found.output.matrix().numel()
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim, qkv, output


def _of_module(module: nn.Module) -> _Counts:
    """All matrices of the module, where its projections are not plain; those of its output projection apart."""
    matrices = {
        id(p): (name, p.numel()) for name, p in module.named_parameters() if p.ndim > 1 and not is_indexer(name)
    }
    output = sum(count for name, count in matrices.values() if name.partition(".")[0] in _OUTPUTS)
    qkv = sum(count for _, count in matrices.values()) - output
    heads = next((n for name in NUM_HEADS if (n := _said(module, name))), None)
    if latent_width(module) is None:
        return heads, None, None, None, qkv, output
    rotary, rest = _said(module, "qk_rope_head_dim") or 0, _said(module, "qk_nope_head_dim") or 0
    return heads, heads, rotary + rest, _said(module, "v_head_dim"), qkv, output


# ------------------------------------------------------------------ what is kept
def _cached(site: Site, found: Projections | None, kept: Sequence[Any]) -> tuple[int | None, int | None]:
    """Numbers kept a token, and the window: by the cache that transformers makes for this config."""
    place = getattr(site.module, "layer_idx", None)
    place = site.layer if not isinstance(place, int) else place
    layer = kept[place] if not site.cross and place < len(kept) else None
    if type(layer).__name__ == "DummyLayer":  # it reads another layer's keys and values; older releases lack the class
        return 0, None
    window = getattr(layer, "sliding_window", None)
    if found is None:
        return latent_width(site.module), window
    shape = found.shape
    heads = shape.num_heads if repeats_keys(site, found) else shape.num_kv_heads
    return heads * (shape.head_dim + shape.value_dim), window


def _cache_layers(model: PreTrainedModel) -> Sequence[Any]:
    try:
        return DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # this config tells transformers nothing of its cache
        return []


def _said(module: nn.Module, name: str) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
