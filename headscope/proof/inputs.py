"""What a verification runs on: the user's text, or something that fits the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headscope.errors import InputError
from headscope.models.inputs import Batch, prepare
from headscope.models.loading import LoadedModel
from headscope.models.text_config import text_config

# Of different lengths, so that one of them is padded.
TEXTS = ("The cat sat on the mat because it was tired.", "Heads look at other words.")
DECODER_TEXTS = ("A cat was tired and sat down.", "They look around.")


def verification_batch(
    loaded: LoadedModel, text: str | Sequence[str] | None, inputs: Mapping[str, Tensor] | None, seed: int
) -> Batch:
    """One batch: the given inputs or texts, else two sentences, else seeded numbers of the right shape.

    Raises:
        InputError: Text for a model that starts from something else.
    """
    options: dict[str, Any] = {"batch_size": 1 << 16}
    if inputs is not None:
        return prepare(loaded, tensors=inputs).batches[0]
    main = str(getattr(loaded.model, "main_input_name", "input_ids"))
    if main == "input_ids":
        texts = [text] if isinstance(text, str) else list(text or TEXTS)
        if loaded.tokenizer is None and text is None:
            options["ids"] = _random_ids(loaded, seed)
        else:
            options["texts"] = texts
        if getattr(loaded.model.config, "is_encoder_decoder", False):
            options["decoder_texts"] = [DECODER_TEXTS[i % len(DECODER_TEXTS)] for i in range(len(texts))]
        return prepare(loaded, **options).batches[0]
    if text is not None:
        raise InputError(
            f"{loaded.name} does not start from text: it reads {main}", "Leave the text out: the check runs on noise."
        )
    return prepare(loaded, tensors=_random_tensors(loaded, main, seed)).batches[0]


def _random_ids(loaded: LoadedModel, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(getattr(text_config(loaded.model), "vocab_size", 100))
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in (13, 8)]


def _random_tensors(loaded: LoadedModel, main: str, seed: int) -> dict[str, Tensor]:
    """Noise in the shape of one image or sound."""
    config = getattr(loaded.model.config, "vision_config", loaded.model.config)
    generator = torch.Generator().manual_seed(seed)
    if main.startswith("pixel"):
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape: tuple[int, ...] = (1, int(getattr(config, "num_channels", 3)), height, width)
    elif main == "input_features":
        frames = 2 * int(getattr(config, "max_source_positions", 1500))
        shape = (1, int(getattr(config, "num_mel_bins", 80)), frames)
    else:
        shape = (1, 16000)
    tensors = {main: torch.randn(shape, generator=generator).to(loaded.model.dtype)}
    if getattr(loaded.model.config, "is_encoder_decoder", False):
        start = getattr(loaded.model.config, "decoder_start_token_id", None) or 0
        tensors["decoder_input_ids"] = torch.tensor([[start, *range(5, 11)]])
    return tensors
