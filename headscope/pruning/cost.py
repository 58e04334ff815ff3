"""What a model costs in parameters, bytes and cache, and what its layers have of heads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.models.describe import located
from headscope.models.projections import Projections
from headscope.models.pruned import HeadState, pruned_state
from headscope.models.sites import Site, find_sites
from headscope.pruning.result import LayerHeads

# Arguments of attention modules that take the keys and values of earlier tokens.
_CACHES = {"cache", "past_key_values", "past_key_value", "layer_past"}


@dataclass(frozen=True)
class Cost:
    """Sizes of one model; their meaning is that of the same names in `PruneResult`."""

    params: int
    attention_params: int
    bytes: int
    kv_cache: int


def cost_of(model: PreTrainedModel) -> Cost:
    """Count a model's parameters and bytes, from shapes and dtypes alone."""
    sites = located(model)
    attention = {id(p): p for site, found in sites for p in _parameters(site, found)}
    return Cost(
        params=model.num_parameters(),
        attention_params=sum(p.numel() for p in attention.values()),
        bytes=_stored_bytes(model),
        kv_cache=sum(_cache_bytes(site, found) for site, found in sites if found is not None and has_cache(site)),
    )


def has_cache(site: Site) -> bool:
    """Whether generation keeps this site's keys and values and adds to them with each token."""
    module = site.module
    if site.cross or False in (getattr(module, "is_decoder", True), getattr(module, "is_causal", True)):
        return False
    return bool(_CACHES & set(inspect.signature(module.forward).parameters))


def _cache_bytes(site: Site, found: Projections) -> int:
    """Keys and values of all key-value heads for one token: num_kv_heads × (head_dim + value_dim) numbers.

    Code that repeats them for each query head before it caches them, as Falcon's, takes more.
    """
    shape = found.shape
    return shape.num_kv_heads * (shape.head_dim + shape.value_dim) * found.key.weight.tensor.element_size()


def _parameters(site: Site, found: Projections | None) -> Iterator[nn.Parameter]:
    """Those of the projections; all of the module's where those are not known."""
    if found is None:
        yield from site.module.parameters()
        return
    for projection in found:
        for place in (projection.weight, projection.bias):
            parameter = None if place is None else place.owner._parameters.get(place.name)
            if parameter is not None:
                yield parameter


def _stored_bytes(model: nn.Module) -> int:
    """Parameters, shared ones once, and the buffers that are saved with them."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = [tensor for name, tensor in model.state_dict().items() if name not in names]
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *buffers) if isinstance(t, Tensor))


# ------------------------------------------------------------------ heads
def layer_heads(model: PreTrainedModel) -> tuple[LayerHeads, ...]:
    """The layers of a model that lost heads."""
    layers = []
    for site in find_sites(model):
        state = pruned_state(site.module)
        if state is not None and state.gone:
            layers.append(_layer(site, state))
    return tuple(layers)


def _layer(site: Site, state: HeadState) -> LayerHeads:
    return LayerHeads(
        stack=site.stack,
        layer=site.layer,
        num_heads=state.num_heads,
        num_kv_heads=state.num_kv_heads,
        left=len(state.kept),
        kv_left=len(state.kept_kv),
        gone=state.gone,
        zeroed=state.zeroed,
    )
