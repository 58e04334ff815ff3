"""The model as it has to be while its attention is read, and back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

_one_at_a_time = threading.RLock()


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Within the block a model is in evaluation mode; every module's own mode is as before afterwards."""
    training = [(m, m.training) for m in model.modules()]
    model.train(mode=False)
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode


@contextmanager
def eager_evaluation(model: PreTrainedModel, other: Mapping[int, str] | None = None) -> Iterator[None]:
    """Evaluation mode and eager attention in every part of the model, each restored on the way out.

    Threads take turns: models may share a config, and all share transformers' table of attention functions.

    Args:
        model: The model.
        other: Another implementation's name for some configs, by their ids.
    """
    with _one_at_a_time, evaluating(model):
        configs = configs_of(model)
        implementations = [c._attn_implementation_internal for c in configs]
        try:
            for config in configs:
                config._attn_implementation_internal = (other or {}).get(id(config), "eager")
            yield
        finally:
            for config, implementation in zip(configs, implementations, strict=True):
                config._attn_implementation_internal = implementation


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config object in the model: modules hold copies, and composite configs hold others."""
    found: dict[int, PreTrainedConfig] = {}
    own = (getattr(m, "config", None) for m in model.modules())
    queue = [c for c in own if isinstance(c, PreTrainedConfig)]
    while queue:
        config = queue.pop()
        if id(config) not in found:
            found[id(config)] = config
            queue.extend(v for v in vars(config).values() if isinstance(v, PreTrainedConfig))
    return list(found.values())


def config_around(model: nn.Module, path: str) -> PreTrainedConfig | None:
    """The config of the nearest module around a path, its own first; None where none has one."""
    parts = path.split(".")
    around = (model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1))
    configs = (getattr(module, "config", None) for module in around)
    return next((c for c in configs if isinstance(c, PreTrainedConfig)), None)
