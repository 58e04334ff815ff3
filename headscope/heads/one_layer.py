"""One layer's attention as arrays: taken out of a model, and labelled, whatever model it is from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedModel

from headscope.capture.feed import Axis, Matrix, blocks, mass_of
from headscope.capture.visible import unmasked_visible
from headscope.errors import InputError
from headscope.heads.analysis import analyze
from headscope.heads.labels import means_of
from headscope.heads.metrics import CORE, variant
from headscope.heads.rules import load_rules
from headscope.heads.statistics import HeadStatistics


def extract_attention_patterns(
    text: str, model_name: str | PreTrainedModel | None = None, layer: int = 0, **options: Any
) -> dict[str, Any]:
    """The attention of one layer on one text.

    Args:
        text: The text.
        model_name: A hub id, a directory, a loaded model, or None for the default model.
        layer: The model's own layer number; negative ones count from the end.
        options: More arguments of `headscope.analyze`, such as `stack` or `words`.

    Returns:
        `{"tokens": one readable label a query, "weights": float32 (heads, query, key), "keys": one label a key}`; of
        self-attention `"keys"` are the tokens again.

    Raises:
        InputError: An unknown layer, or one that several stacks have.
        ModelError: The model cannot be loaded or has no attention.
    """
    maps = analyze(model_name, text, layer=layer, maps=True, **options).maps
    stacks = dict.fromkeys(m.stack for m in maps)
    if len(stacks) > 1:
        raise InputError(f"layer {layer} exists in several stacks ({', '.join(stacks)})", "Choose one with stack=.")
    if len(maps) > 1:
        raise InputError(f"layer {layer} names {len(maps)} layers", "Name one, or take analyze(…, maps=True).maps.")
    return {"tokens": list(maps[0].queries), "weights": maps[0].weights, "keys": list(maps[0].keys)}


def analyze_head_patterns(
    weights: ArrayLike, tokens: Sequence[str] | None = None, rules: str = "seed"
) -> list[dict[str, Any]]:
    """Label and metrics of each head of one layer's attention weights.

    Args:
        weights: (heads, n, n), rows are queries.
        tokens: One label a token; checked against the shape.
        rules: As in `headscope.analyze`.

    Returns:
        One `{"head", "pattern", "runner_up", "metrics": {name: value}}` a head, entropy in nats; None where nothing
        could be measured.

    Raises:
        InputError: The shape is not (heads, n, n) with n tokens, or the values are not attention weights.
    """
    matrix = _matrix(_tensor(weights), None if tokens is None else len(tokens))
    rule_set = load_rules(rules)
    statistics = HeadStatistics(tuple(variant(n) for n in dict.fromkeys((*CORE, *rule_set.metrics))))
    for block in blocks(matrix, cross=False):
        statistics.add(("self", 0), block)
    values = statistics.finish()["self", 0]
    records = []
    for head in range(matrix.weights.shape[1]):
        metrics = means_of(values, head)
        pattern, runner_up = rule_set.label(metrics)
        records.append({"head": head, "pattern": pattern, "runner_up": runner_up, "metrics": metrics})
    return records


def _tensor(weights: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(weights)
    except (TypeError, ValueError, RuntimeError) as error:  # what torch raises for what is no array of numbers
        raise InputError(
            f"analyze_head_patterns: weights are a {type(weights).__name__} that is no array of numbers",
            "Give (heads, n, n) numbers.",
        ) from error
    if tensor.is_complex():
        raise InputError("analyze_head_patterns: weights are complex numbers", "Give the weights after the softmax.")
    return tensor


def _matrix(weights: torch.Tensor, tokens: int | None) -> Matrix:
    shape = tuple(weights.shape)
    if len(shape) != 3 or shape[1] != shape[2] or 0 in shape or tokens not in (None, shape[1]):
        wanted = "(heads, n, n)" if tokens is None else f"(heads, {tokens}, {tokens}), one row a token"
        raise InputError(
            f"analyze_head_patterns: weights have shape {shape}, expected {wanted}",
            "pass what extract_attention_patterns returns",
        )
    weights = weights.detach().float()[None]
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()) or bool((weights.sum(dim=-1) > 1.01).any()):
        raise InputError(
            "analyze_head_patterns: not attention weights: NaN, negative, or rows that sum to more than one",
            "Give the weights after the softmax.",
        )
    axis = Axis.plain(1, shape[1], weights.device)
    visible = unmasked_visible(mass_of(weights), axis.valid, axis.valid, cross=False, causal=None)
    return Matrix(weights, visible, axis, axis, axis.valid[:, None])
