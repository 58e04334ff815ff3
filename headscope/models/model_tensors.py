"""Tokenized texts as the arguments of a model's forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from headscope.models.batches import TokenAxis, TokenSequence, axis_of, mask_of, type_ids_of
from headscope.models.loading import LoadedModel
from headscope.models.signature import takes
from headscope.models.text_config import text_config


def text_batch(loaded: LoadedModel, rows: Sequence[TokenSequence]) -> tuple[dict[str, Tensor], TokenAxis]:
    """The arguments for one batch of texts, on the CPU, and their axis."""
    axis = axis_of(rows, padding(loaded))
    assert axis.ids is not None
    inputs = {"input_ids": axis.ids}
    if takes(loaded.model, "attention_mask"):
        inputs["attention_mask"] = mask_of(axis)
    if any(row.type_ids is not None for row in rows) and takes(loaded.model, "token_type_ids"):
        inputs["token_type_ids"] = type_ids_of(rows)
    return inputs, axis


def padding(loaded: LoadedModel) -> int:
    """A token that exists; which one does not matter behind the mask, except to models that count positions by it."""
    config = text_config(loaded.model)
    number = getattr(config, "pad_token_id", None)
    return number if isinstance(number, int) and 0 <= number < getattr(config, "vocab_size", number + 1) else 0


def on_device(loaded: LoadedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the model's device; fractions take the model's dtype."""
    model = loaded.model
    result = {}
    for name, value in inputs.items():
        fraction = value.is_floating_point() and "mask" not in name
        result[name] = value.to(model.device, model.dtype if fraction else value.dtype, copy=True)
    return result
