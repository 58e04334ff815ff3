"""Attention without matrices of weights, which every forward pass that waits would hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedConfig, PreTrainedModel

from headscope.capture.evaluation import configs_of


@contextmanager
def without_matrices(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, eager attention is torch's own, where the model has that; the same up to rounding."""
    before = [(config, config._attn_implementation_internal) for config in configs_of(model)]
    try:
        if any(implementation == "eager" for _, implementation in before):
            try:
                model.set_attn_implementation("sdpa")
            except (ValueError, ImportError):
                _restore(before)
        yield
    finally:
        _restore(before)


def _restore(before: list[tuple[PreTrainedConfig, str | None]]) -> None:
    for config, implementation in before:
        config._attn_implementation_internal = implementation
