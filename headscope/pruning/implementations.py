"""Running a model with another attention implementation, and putting back the one it had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from headscope.capture.evaluation import configs_of

IMPLEMENTATIONS = ("eager", "sdpa")


@contextmanager
def attention_as(model: PreTrainedModel, name: str) -> Iterator[bool]:
    """Within the block the model computes attention as `name`; False where it has no such implementation."""
    before = [(c, c._attn_implementation_internal) for c in configs_of(model)]
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
