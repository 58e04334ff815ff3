"""Merging the pieces of words and leaving out special tokens: which tokens share a row and a column."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headscope.capture.feed import Axis
from headscope.errors import InputError
from headscope.models.inputs import Batch, TokenAxis
from headscope.models.tokens import join_labels


def token_groups(batch: Batch, words: bool, exclude_special: bool) -> Callable[[str, Axis], Tensor]:
    """For each axis, every token's group, (batch, n): its word or itself; -1 leaves a token out."""

    def groups(name: str, axis: Axis) -> Tensor:
        known = batch.axes.get(name)
        if known is None:
            return torch.arange(axis.special.shape[1]).repeat(len(axis.lengths), 1)
        result = torch.full(tuple(axis.special.shape), -1)
        for text in range(len(axis.lengths)):
            numbers = group_numbers(known, text, words, exclude_special)
            result[text, : len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        return result

    return groups


def group_numbers(axis: TokenAxis, text: int, words: bool, exclude_special: bool) -> list[int]:
    """Each real token's group, numbered from 0 without gaps; -1 for a token that is left out.

    Raises:
        InputError: Nothing but special tokens, and these are to be left out.
    """
    special = axis.special[text].tolist()
    keys = axis.words[text] if words else range(len(axis.labels[text]))
    numbers: dict[int, int] = {}
    result = []
    for position, key in enumerate(keys):
        left_out = exclude_special and special[position]
        result.append(-1 if left_out else numbers.setdefault(key, len(numbers)))
    if exclude_special and not numbers:
        raise InputError("nothing is left of the text without its special tokens", "Leave --exclude-special out.")
    return result


def token_labels(batch: Batch, name: str, text: int, size: int, words: bool, exclude_special: bool) -> tuple[str, ...]:
    """Readable labels of one text's tokens or words along an axis; plain numbers where positions are not tokens."""
    axis = batch.axes.get(name)
    if axis is None or size > axis.special.shape[1]:
        return tuple(str(i) for i in range(size))
    merged: dict[int, list[str]] = {}
    for label, group in zip(axis.labels[text], group_numbers(axis, text, words, exclude_special), strict=True):
        if group >= 0:
            merged.setdefault(group, []).append(label)
    return tuple(join_labels(merged[g]) for g in sorted(merged))
