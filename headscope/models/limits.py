"""How long a text may be, and which token numbers exist."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headscope.models.text_config import text_config

TEXT_LIMITS = ("max_position_embeddings", "max_encoder_position_embeddings")
DECODER_LIMITS = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")
UNSET_LENGTH = 1_000_000  # tokenizers without a limit say something above this


def text_limit(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, wanted: int | None = None
) -> int | None:
    """Tokens kept per text, special tokens included; None where nothing limits them.

    `wanted` may be beyond what a rotary model was trained on, but never beyond a table of positions. Models with
    relative positions only have no limit, whatever their tokenizer says.
    """
    config = text_config(model)
    limit = _configured(config, TEXT_LIMITS)
    if limit is None:
        return wanted
    limit -= _reserved_positions(model, limit)
    if wanted is not None:
        return wanted if _is_rotary(config) else min(wanted, limit)
    own = getattr(tokenizer, "model_max_length", None)
    return min(limit, own) if isinstance(own, int) and 0 < own < UNSET_LENGTH else limit


def decoder_limit(model: PreTrainedModel) -> int | None:
    """Tokens that an encoder-decoder's decoder takes; None where nothing limits them."""
    return _configured(text_config(model, decoder=True), DECODER_LIMITS)


def _configured(config: object, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _is_rotary(config: object) -> bool:
    return bool(getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None))


def _reserved_positions(model: PreTrainedModel, limit: int) -> int:
    """Rows of a position table that no token uses: with a padding row, positions are counted from the row after it."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] != "position_embeddings" or not isinstance(module, nn.Embedding):
            continue
        if module.num_embeddings == limit and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0


def vocabulary_size(model: PreTrainedModel) -> int | None:
    """Number of token numbers that the model has embeddings for; None where it cannot be told."""
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        embedding = None
    if isinstance(embedding, nn.Embedding):
        return embedding.num_embeddings
    size = getattr(text_config(model), "vocab_size", None)
    return size if isinstance(size, int) else None
