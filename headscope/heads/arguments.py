"""What callers may pass for a model and for token ids, made into one form each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from headscope.errors import InputError
from headscope.models.loading import LoadedModel, load_model, wrap_model
from headscope.models.selection import whole_number


def loaded_model(
    model: Any, *, tokenizer: Any, processor: Any, trust_remote_code: bool, generates: bool, options: dict[str, Any]
) -> LoadedModel:
    """A caller's own model as it is, or the one of a name, path or None loaded.

    Args:
        generates: Load a model by name in a form that can generate.
        options: More arguments of `load_model`, for a model given by name.

    Raises:
        InputError: Neither a name, a path nor a transformers model.
    """
    if isinstance(model, PreTrainedModel):
        return wrap_model(model, tokenizer=tokenizer, processor=processor)
    if model is not None and not isinstance(model, str | os.PathLike):
        raise InputError(
            f"model is a {type(model).__name__}, not a transformers model",
            "Give a hub id, a directory, a .gguf file, or a PreTrainedModel (the inner one, where another wraps it).",
        )
    name = None if model is None else os.fspath(model)
    return load_model(
        name, tokenizer=tokenizer, trust_remote_code=trust_remote_code, need_generation=generates, **options
    )


def token_ids(ids: Any) -> list[list[int]] | None:
    """One text's token ids or several texts', of any container, as a list a text; None stays None.

    Raises:
        InputError: Not whole numbers, or nested in another way.
    """
    if ids is None:
        return None
    rows = _rows(ids)
    try:
        if not any(isinstance(row, list) for row in rows):
            return [[whole_number(number) for number in rows]]
        return [[whole_number(number) for number in row] for row in rows]
    except TypeError as error:
        raise InputError(
            f"ids are not token ids: {error}", "Give whole numbers, one list of them or a list of lists."
        ) from error


def _rows(ids: Any) -> list[Any]:
    """`ids` with arrays, tensors and tuples made lists."""
    given = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InputError(f"ids is a {type(ids).__name__}, not token ids", "Give a list of whole numbers.")
    rows = (row.tolist() if hasattr(row, "tolist") else row for row in given)
    return [list(row) if isinstance(row, Sequence) and not isinstance(row, str | bytes) else row for row in rows]
