"""Models that are changed or derived: with the head of their checkpoint, and with all weights in memory."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from transformers import PreTrainedModel

from headscope.errors import ModelError
from headscope.models.loading import LoadedModel, load_model, wrap_model


def whole_model(
    model: str | PathLike[str] | PreTrainedModel | None, tokenizer: Any, processor: Any, options: Mapping[str, Any]
) -> LoadedModel:
    """A caller's own model, or the one of a name with the checkpoint's own class: its head is kept, all is in memory.

    Args:
        options: More arguments of `load_model`, for a model given by name.

    Raises:
        ModelError: Weights are not in memory.
    """
    if isinstance(model, PreTrainedModel):
        loaded = wrap_model(model, tokenizer=tokenizer, processor=processor)
    else:
        loaded = load_model(model, tokenizer=tokenizer, own_class=True, **options)
    absent = [name for name, parameter in loaded.model.named_parameters() if parameter.device.type == "meta"]
    if absent:
        raise ModelError(
            f"{len(absent)} weights of {loaded.name} are not in memory (one is {absent[0]}): offloaded or never loaded",
            "Load the model as a whole: without --device-map, or on a device that has room for it.",
        )
    return loaded
