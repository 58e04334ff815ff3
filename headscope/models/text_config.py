"""The part of a model's config that speaks of its text."""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel


def text_config(model: PreTrainedModel, decoder: bool = False) -> PreTrainedConfig:
    """`config.get_text_config`, and the whole config where that finds several (a text encoder beside a decoder)."""
    try:
        found: PreTrainedConfig = model.config.get_text_config(decoder=decoder)
    except ValueError:
        return model.config
    return found
