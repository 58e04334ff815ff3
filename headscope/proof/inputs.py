"""What a verification runs on: the user's text, or something that fits the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headscope.errors import InputError, check_type
from headscope.models.inputs import Batch, prepare
from headscope.models.loading import LoadedModel
from headscope.models.signature import takes
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
    if inputs is not None:
        return prepare(loaded, tensors=inputs).batches[0]
    check_type("text", text, (str, list, tuple), "one text or a list of texts")
    main = str(getattr(loaded.model, "main_input_name", "input_ids"))
    if main != "input_ids" and text is not None:
        raise InputError(
            f"{loaded.name} does not start from text: it reads {main}", "Leave the text out: the check runs on noise."
        )
    if main != "input_ids":
        return prepare(loaded, tensors=_random_tensors(loaded, main, seed)).batches[0]
    texts = [text] if isinstance(text, str) else list(text or TEXTS)
    if loaded.tokenizer is None and text is None:
        tokens = _random_ids(loaded, seed)
    elif _compares_with_images(loaded) and loaded.tokenizer is not None:
        tokens = dict(loaded.tokenizer(texts, padding=True, return_tensors="pt"))
    else:
        return _of_texts(loaded, texts)
    images = _random_image(loaded, seed, len(tokens["input_ids"])) if _compares_with_images(loaded) else {}
    return prepare(loaded, tensors=tokens | images).batches[0]


def _of_texts(loaded: LoadedModel, texts: Sequence[str]) -> Batch:
    decoder_texts = None
    if _is_encoder_decoder(loaded):
        decoder_texts = [DECODER_TEXTS[i % len(DECODER_TEXTS)] for i in range(len(texts))]
    return prepare(loaded, texts=texts, decoder_texts=decoder_texts, batch_size=len(texts)).batches[0]


def _compares_with_images(loaded: LoadedModel) -> bool:
    """Whether the model needs images with its texts, as CLIP does."""
    return hasattr(loaded.model, "get_text_features") and takes(loaded.model, "pixel_values")


def _is_encoder_decoder(loaded: LoadedModel) -> bool:
    return bool(getattr(loaded.model.config, "is_encoder_decoder", False))


def _random_ids(loaded: LoadedModel, seed: int) -> dict[str, Tensor]:
    """Two texts of tokens that mean nothing, the second one padded."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(getattr(text_config(loaded.model), "vocab_size", 100))
    ids = torch.randint(0, vocabulary, (2, 13), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    tensors = {"input_ids": ids, "attention_mask": mask}
    if _is_encoder_decoder(loaded):
        tensors["decoder_input_ids"] = _decoder_ids(loaded).repeat(2, 1)
    return {name: t for name, t in tensors.items() if takes(loaded.model, name)}


def _decoder_ids(loaded: LoadedModel) -> Tensor:
    start = getattr(loaded.model.config, "decoder_start_token_id", None) or 0
    return torch.tensor([[start, *range(5, 11)]])


def _random_tensors(loaded: LoadedModel, main: str, seed: int) -> dict[str, Tensor]:
    """Noise in the shape of one image or sound."""
    config = loaded.model.config
    if main.startswith("pixel"):
        tensors = _random_image(loaded, seed, 1, main)
    else:
        frames = 2 * int(getattr(config, "max_source_positions", 1500))
        mels = int(getattr(config, "num_mel_bins", 80))
        tensors = {main: _noise(loaded, seed, (1, mels, frames) if main == "input_features" else (1, 16000))}
    if _is_encoder_decoder(loaded):
        tensors["decoder_input_ids"] = _decoder_ids(loaded)
    return tensors


def _random_image(loaded: LoadedModel, seed: int, count: int, name: str = "pixel_values") -> dict[str, Tensor]:
    config = getattr(loaded.model.config, "vision_config", loaded.model.config)
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return {name: _noise(loaded, seed, (count, int(getattr(config, "num_channels", 3)), height, width))}


def _noise(loaded: LoadedModel, seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(loaded.model.dtype)
