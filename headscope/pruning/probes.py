"""Inputs to prove a pruned model on: several batches that fit the model, padded on both sides where it reads text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.models.limits import vocabulary_size
from headscope.models.signature import takes
from headscope.models.text_config import text_config

# Low numbers are special tokens in most vocabularies.
_LOWEST = 10
_LENGTHS = ((12, 7), (9, 12))
_DECODER_LENGTH = 6


@dataclass(frozen=True)
class Probe:
    """One batch.

    Attributes:
        name: What it is.
        inputs: Keywords of the model's forward.
    """

    name: str
    inputs: Mapping[str, Tensor]


def probes(model: PreTrainedModel, seed: int = 0) -> tuple[Probe, ...]:
    """Made-up batches for a model: token ids padded on the right and on the left, or noise for images and sounds."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(_probes(model, generator))


def _probes(model: PreTrainedModel, generator: torch.Generator) -> Iterator[Probe]:
    main = str(getattr(model, "main_input_name", "input_ids"))
    if main != "input_ids":
        for count in (2, 1):
            inputs = _noise(model, main, count, generator) | _decoder(model, count, generator)
            yield Probe(f"noise for {count}", _on_device(model, inputs))
        return
    images = hasattr(model, "get_text_features") and takes(model, "pixel_values")
    sides = ("right", "left") if takes(model, "attention_mask") else ("none",)
    for side, lengths in zip(sides, _LENGTHS, strict=False):
        inputs = _text(model, lengths, side, generator) | _decoder(model, len(lengths), generator)
        if images:
            inputs |= _noise(model, "pixel_values", len(lengths), generator)
        yield Probe(f"padded {side}" if side != "none" else "one length", _on_device(model, inputs))


def _text(model: PreTrainedModel, lengths: tuple[int, ...], side: str, generator: torch.Generator) -> dict[str, Tensor]:
    longest = max(lengths)
    ids = _ids(model, (len(lengths), longest), generator)
    places = torch.arange(longest) if side == "right" else torch.arange(longest).flip(0)
    mask = (places < torch.tensor(lengths)[:, None]).long()
    if side == "none":
        return {"input_ids": ids}
    padding = getattr(text_config(model), "pad_token_id", None)
    padding = padding if isinstance(padding, int) and padding >= 0 else 0
    return {"input_ids": ids.where(mask.bool(), torch.tensor(padding)), "attention_mask": mask}


def _ids(model: PreTrainedModel, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    size = vocabulary_size(model) or 100
    return torch.randint(min(_LOWEST, size - 1), size, shape, generator=generator)


def _decoder(model: PreTrainedModel, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    if not getattr(model.config, "is_encoder_decoder", False) or not takes(model, "decoder_input_ids"):
        return {}
    config = text_config(model, decoder=True)
    size = min(s for s in (vocabulary_size(model), getattr(config, "vocab_size", None), 10**9) if isinstance(s, int))
    ids = torch.randint(min(_LOWEST, size - 1), size, (count, _DECODER_LENGTH), generator=generator)
    ids[:, 0] = getattr(model.config, "decoder_start_token_id", None) or 0
    return {"decoder_input_ids": ids}


def _noise(model: PreTrainedModel, name: str, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Noise in the shape of images or sounds."""
    config = getattr(model.config, "vision_config", model.config)
    if name.startswith("pixel"):
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape: tuple[int, ...] = (count, int(getattr(config, "num_channels", 3)), height, width)
    elif name == "input_features":
        frames = 2 * int(getattr(model.config, "max_source_positions", 50))
        shape = (count, int(getattr(model.config, "num_mel_bins", 80)), frames)
    else:
        shape = (count, 16000)
    return {name: torch.randn(shape, generator=generator)}


def _on_device(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.to(model.device, model.dtype if t.is_floating_point() else t.dtype) for n, t in inputs.items()}
