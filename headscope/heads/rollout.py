"""Attention matrices put together: means over heads, and attention rollout over layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headscope.errors import InputError
from headscope.results import AttentionMap


def head_mean(attention: AttentionMap) -> AttentionMap:
    """The mean over a layer's heads, as a map of one matrix; pooled, the mean of tiles' means, without largest weights.

    A map that is a mean already comes back as it is.
    """
    if len(attention.weights) == 1:
        return attention
    return replace(attention, heads=(), weights=attention.weights.mean(axis=0, keepdims=True), peak=None)


def rollout(maps: Sequence[AttentionMap]) -> AttentionMap:
    """Attention rollout: how much of each input token reaches each token through all layers, if attention were all.

    Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", section 3: a layer passes on
    A' = (A + I) / 2, A the mean over its heads and I the residual connection, and the rollout is the product of the
    layers' A', the last on the left. Rows of A' are divided by their sums, which changes nothing where rows of A sum to
    1, and makes up for what a head gives to a learned sink. Rows of the result sum to 1.

    Args:
        maps: One map a layer, of one stack, in any order; neither pooled nor between different tokens.

    Returns:
        A map of one matrix, with the number of the last layer.

    Raises:
        InputError: There is no map, or the layers do not share their tokens, or they are pooled.
    """
    layers = sorted(maps, key=lambda one: one.layer)
    _check(layers)
    result = np.eye(len(layers[0].keys))
    for one in layers:
        passed = one.weights.mean(axis=0, dtype=np.float64) + np.eye(len(result))
        result = (passed / passed.sum(axis=1, keepdims=True)) @ result
    return replace(layers[-1], heads=(), weights=result[None].astype(np.float32))


def _check(layers: Sequence[AttentionMap]) -> None:
    if not layers:
        raise InputError("there is no attention map to roll out", "analyze with maps='mean'")
    stacks = list(dict.fromkeys(one.stack for one in layers))
    if len(stacks) > 1:
        raise InputError(f"rollout over several stacks: {', '.join(stacks)}", "choose one with --stack")
    if any(one.tile > 1 for one in layers):
        raise InputError("rollout needs matrices that are not pooled", "analyze with maps='mean' or maps=True")
    stack, tokens = stacks[0], layers[0].keys
    for one in layers:
        if one.weights.shape[1] != one.weights.shape[2] or one.queries != one.keys:
            raise InputError(
                f"rollout of {stack}: the queries of layer {one.layer} are other tokens than its keys",
                "rollout goes through self-attention; choose such a stack with --stack",
            )
        if one.keys != tokens:
            raise InputError(
                f"rollout of {stack}: layers {layers[0].layer} and {one.layer} do not share their tokens "
                f"({len(tokens)} and {len(one.keys)})",
                "choose layers that do with --layer",
            )
