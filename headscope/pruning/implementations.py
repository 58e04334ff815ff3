"""Running a model with another attention implementation, and putting back the one it had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedConfig, PreTrainedModel

IMPLEMENTATIONS = ("eager", "sdpa")


@contextmanager
def attention_as(model: PreTrainedModel, name: str) -> Iterator[bool]:
    """Within the block the model computes attention as `name`; False where it has no such implementation."""
    before = [(c, c._attn_implementation_internal) for c in _configs(model)]
    try:
        yield _switch(model, name)
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _switch(model: PreTrainedModel, name: str) -> bool:
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError):
        return False
    return True


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every config object in the model: modules may hold copies, and composite configs hold others."""
    found: dict[int, PreTrainedConfig] = {}
    queue = [c for m in model.modules() if isinstance(c := getattr(m, "config", None), PreTrainedConfig)]
    while queue:
        config = queue.pop()
        if id(config) not in found:
            found[id(config)] = config
            queue.extend(v for v in vars(config).values() if isinstance(v, PreTrainedConfig))
    return list(found.values())
