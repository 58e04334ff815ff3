"""Caches that transformers makes by the numbers of heads in the config, for models that have others."""

from __future__ import annotations

from transformers import PreTrainedModel

from headscope.models.pruned import pruned_state
from headscope.models.sites import find_sites
from headscope.pruning.standalone import size_caches

_ATTRIBUTES = ("_get_static_cache_init_shape", "init_continuous_batching")


def fewer_kv_heads(model: PreTrainedModel) -> dict[str, int]:
    """Key-value heads that are left in the modules that lost some, by path."""
    states = ((site.path, pruned_state(site.module)) for site in find_sites(model))
    return {path: len(s.kept_kv) for path, s in states if s is not None and len(s.kept_kv) < s.num_kv_heads}


def fit_caches(model: PreTrainedModel) -> None:
    """Let a model's `generate` make static caches that fit it, and refuse what cannot be; undone without need."""
    for name in _ATTRIBUTES:
        vars(model).pop(name, None)
    size_caches(model, "", fewer_kv_heads(model))
