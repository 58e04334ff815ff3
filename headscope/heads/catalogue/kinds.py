"""Kinds of tokens that heads may attend to."""

from __future__ import annotations

import torch

from headscope.capture.key_tokens import KeyTokens, punctuation
from headscope.models.batches import TokenAxis

OTHER_SPECIAL, PUNCTUATION = "other_special", "punctuation"


def key_tokens(axis: TokenAxis) -> KeyTokens | None:
    """What a text's tokens are: the same or not, special but not the first, punctuation.

    None where the model was given embeddings and no token numbers.
    """
    if axis.ids is None:
        return None
    start = torch.zeros_like(axis.special)
    start[:, :1] = True
    marks = {
        OTHER_SPECIAL: axis.special & ~start,
        PUNCTUATION: punctuation(axis.labels, axis.special),
    }
    return KeyTokens(axis.ids, axis.special, axis.lengths, marks)
