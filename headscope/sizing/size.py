"""Sizing models from their configurations: the public function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headscope.errors import InputError, ModelError
from headscope.models.loading import FoundConfig, read_config
from headscope.models.model_classes import own_class_of
from headscope.models.selection import MOST, check_count
from headscope.models.versions import versions
from headscope.sizing.asked import Asked
from headscope.sizing.configs import ConfigStack, config_stacks
from headscope.sizing.formulas import Shape, shape_of_numbers, total_of_numbers
from headscope.sizing.lengths import DEFAULT_LENGTH
from headscope.sizing.result import LayerSize, Sizes, StackSize, window_note
from headscope.sizing.skeleton import build_skeleton
from headscope.sizing.stacks import model_rows

Model = str | PathLike[str] | PreTrainedConfig | PreTrainedModel
# Each is a row in memory.
_MOST_LAYERS = 100_000


def size(
    models: Model | Sequence[Model] | None = None,
    *,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    num_layers: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int | None = None,
    name: str | None = None,
    length: int | None = None,
    dtype: str | torch.dtype | None = None,
    batch_size: int = 1,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Sizes:
    """Parameters, bytes of attention matrices and KV cache of models, from their configurations, without weights.

    A model's own projections are counted: it is built without values, which takes no memory. Where that cannot be, the
    numbers come from formulas on what its configuration says (`StackSize.source` tells). Biases are not counted.

    Args:
        models: Hub ids, directories (also with a pruned model), `.gguf` files, configurations or models; None is the
            default model, or no model where numbers are given.
        hidden_size, num_heads, num_layers: A model that is numbers only, the last row; all three or none.
        num_kv_heads, head_dim: Of that model; by default num_heads and hidden_size / num_heads.
        intermediate_size, vocab_size: Width of its feed-forward parts and its number of tokens; with both, all its
            parameters are told: attention, two feed-forward matrices a layer, one embedding matrix.
        name: What that row is called.
        length: Tokens; by default each model's limit, or 2,048. Towers for images and sounds keep their own.
        dtype: Of matrices and cache; by default each config's, else float32.
        batch_size: Sequences at once.
        revision: On the Hub.
        trust_remote_code: Allow a model's own Python code to run.

    Raises:
        InputError: Numbers are missing, not positive or do not fit each other.
        ModelError: A configuration cannot be read, or the model has no attention.
    """
    asked = Asked(length, dtype, batch_size)
    numbers = {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
    }
    own = [_numbers_row(name, numbers, asked)] if name or any(v is not None for v in numbers.values()) else []
    rows: list[StackSize] = []
    for model in _listed(models, default=not own):
        rows += _rows(model, asked, revision, trust_remote_code)
    return Sizes((*rows, *own), versions())


def _listed(models: Model | Sequence[Model] | None, default: bool) -> list[Model | None]:
    if models is None:
        return [None] if default else []
    if isinstance(models, str | PathLike | PreTrainedConfig | PreTrainedModel):
        return [models]
    return list(models) or ([None] if default else [])


def _rows(model: Model | None, asked: Asked, revision: str | None, trust: bool) -> list[StackSize]:
    if isinstance(model, PreTrainedModel):
        return model_rows(str(getattr(model, "name_or_path", "") or type(model).__name__), model, asked)
    found = _found(model, revision, trust)
    skeleton = build_skeleton(found, trust_remote_code=trust)
    if skeleton is not None:
        return model_rows(found.name, skeleton, asked)
    if found.removed is not None:
        raise ModelError(
            f"{found.name} lacks heads, and its model cannot be built without weights to tell which",
            "load it with headscope.load, and give the model to headscope.size",
        )
    stacks = config_stacks(found.config)
    if not stacks:
        raise ModelError(
            f"the configuration of {found.name} does not say how many attention heads it has",
            "give the numbers: --hidden-size, --heads and --layers",
        )
    return [_config_row(found, stack, asked) for stack in stacks]


def _found(model: str | PathLike[str] | PreTrainedConfig | None, revision: str | None, trust: bool) -> FoundConfig:
    if not isinstance(model, PreTrainedConfig):
        return read_config(model, revision=revision, trust_remote_code=trust)
    try:
        auto = own_class_of(model)
    except ValueError:
        auto = None
    return FoundConfig(str(getattr(model, "name_or_path", "") or type(model).__name__), model, None, auto)


# ------------------------------------------------------------------ from formulas
def _config_row(found: FoundConfig, stack: ConfigStack, asked: Asked) -> StackSize:
    notes = ["its model cannot be built without weights: formulas on what the configuration says"]
    if stack.causal and any(stack.windows):
        notes.append(window_note(stack.windows))
    layers = [
        _layer(layer, shape, shape.cached if stack.causal else 0, window if stack.causal else None)
        for layer, shape, window in zip(stack.layers, stack.shapes, stack.windows, strict=True)
    ]
    return _formula_row(
        found.name,
        stack.stack,
        layers,
        stack.shapes[0].hidden_size,
        asked,
        found.config,
        asked.length or stack.limit or DEFAULT_LENGTH,
        notes,
        depth=stack.num_layers,
        kind=str(found.config.model_type),
        source="config",
    )


def _numbers_row(name: str | None, numbers: dict[str, int | None], asked: Asked) -> StackSize:
    hidden, heads, depth = _checked(numbers)
    shape = shape_of_numbers(hidden, heads, numbers["num_kv_heads"], numbers["head_dim"])
    layers = [_layer(layer, shape, shape.cached, None) for layer in range(depth)]
    named = name or f"{depth} × {heads} heads, {hidden:,} wide"
    length = asked.length or DEFAULT_LENGTH
    row = _formula_row(named, "self", layers, hidden, asked, None, length, [], depth=depth, kind="", source="numbers")
    inner, words = numbers["intermediate_size"], numbers["vocab_size"]
    if inner is None or words is None:
        return row
    total = total_of_numbers(row.attention_params, hidden, depth, inner, words)
    counted = "all parameters: attention, two feed-forward matrices a layer and one embedding matrix, without biases"
    return replace(row, total_params=total, notes=(counted,))


def _formula_row(
    name: str,
    stack: str,
    layers: list[LayerSize],
    hidden_size: int,
    asked: Asked,
    config: Any,
    length: int,
    notes: list[str],
    *,
    depth: int,
    kind: str,
    source: str,
) -> StackSize:
    dtype, width = asked.dtype_of(config)
    return StackSize(
        name=name,
        stack=stack,
        kind=kind,
        hidden_size=hidden_size,
        num_layers=depth,
        layers=tuple(layers),
        total_params=None,
        length=length,
        key_length=length,
        dtype=dtype,
        dtype_bytes=width,
        batch_size=asked.batch_size,
        keeps_cache=any(layer.cached for layer in layers),
        cross=stack == "cross",
        source=source,
        notes=tuple(notes),
    )


def _layer(layer: int, shape: Shape, kept: int, window: int | None) -> LayerSize:
    counts = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim, shape.qkv_params, shape.o_params)
    return LayerSize(layer, *counts, cached=kept, window=window)


def _checked(numbers: dict[str, int | None]) -> tuple[int, int, int]:
    for label, value in numbers.items():
        check_count(label, value, most=_MOST_LAYERS if label == "num_layers" else MOST)
    needed = {label: numbers[label] for label in ("hidden_size", "num_heads", "num_layers")}
    missing = [label for label, value in needed.items() if value is None]
    if missing:
        raise InputError(
            f"a model by numbers needs {', '.join(missing)}, too", "--hidden-size 12288 --heads 96 --layers 96"
        )
    hidden, heads, depth = (value or 0 for value in needed.values())
    return hidden, heads, depth
