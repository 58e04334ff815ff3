"""Functions that go into the modelling file of a pruned model as they are: they know torch only.

`headscope.pruning.remote_source` copies their source, with classes of `headscope.pruning.runtime` where they are
needed.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from headscope.pruning.runtime import ConfigView, SharedBias, Subset


def cut(model: nn.Module, prefix: str, cuts: list[Any]) -> None:
    """Keep some entries of parameters along an axis, counted after all axes but the first are flattened."""
    for axis, spans, path, names in cuts:
        for name in names.split():
            place, _, leaf = f"{prefix}{path}.{name}".rpartition(".")
            owner: Any = model.get_submodule(place)
            old = getattr(owner, leaf)
            index = torch.cat([torch.arange(*span, device=old.device) for span in spans])
            new = (old.detach().flatten(1) if axis else old.detach()).index_select(axis, index)
            if axis:
                new = new.reshape(old.shape[0], -1, *old.shape[2:])
            setattr(owner, leaf, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
            if leaf == "weight" and isinstance(owner, nn.Linear):
                owner.out_features, owner.in_features = new.shape
            elif leaf == "weight" and hasattr(owner, "nf"):
                owner.nx, owner.nf = new.shape


def say_numbers(model: nn.Module, prefix: str, numbers: dict[str, Any]) -> None:
    """Set what modules know of their heads."""
    for path, values in numbers.items():
        for name, value in values.items():
            setattr(model.get_submodule(prefix + path), name, value)


def view_configs(model: nn.Module, prefix: str, views: dict[str, Any]) -> None:
    """Let modules that ask their config for numbers of heads hear their own."""
    for path, numbers in views.items():
        module: Any = model.get_submodule(prefix + path)
        module.config = ConfigView(module.config, dict(numbers))


def subset_inputs(model: nn.Module, prefix: str, inputs: dict[str, Any]) -> None:
    """Let modules that are told something for each original head see that of the heads that are left."""
    for path, (kept, num_heads) in inputs.items():
        model.get_submodule(prefix + path).register_forward_pre_hook(Subset(kept, num_heads), with_kwargs=True)


def share_bias(model: nn.Module, prefix: str, inputs: dict[str, Any]) -> None:
    """The same where modules hand on the bias of all original heads."""
    for path, (kept, num_heads) in inputs.items():
        module, bias = model.get_submodule(prefix + path), SharedBias(kept, num_heads)
        module.register_forward_hook(bias.after)
        table = getattr(module, "relative_attention_bias", None)
        if isinstance(table, nn.Embedding):
            table.register_forward_hook(bias.of_table)
        module.register_forward_pre_hook(bias, with_kwargs=True)


def size_caches(model: nn.Module, prefix: str, kv_heads: dict[str, int]) -> None:
    """Let `generate` size a static cache by the keys that come: the config says the original numbers of heads."""
    generating: Any = model
    if kv_heads and hasattr(model, "generate"):
        generating._get_static_cache_init_shape = shape_of_first_keys
        generating.init_continuous_batching = no_continuous_batching


def shape_of_first_keys() -> None:
    """No shape to make a cache with before it is needed."""


def no_continuous_batching(*args: Any, **kwargs: Any) -> NoReturn:
    """What `generate_batch` would stumble over later."""
    raise NotImplementedError(
        "continuous batching (generate_batch) makes one cache for all layers with the number of key-value heads of the "
        "config, and this pruned model has others: use generate, or save it as uniform or masked and load it plainly"
    )
