"""Masks against the definition, entry by entry, and against those that transformers builds."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from headscope.attention import masks

QUICK = settings(max_examples=40, deadline=None)


@QUICK
@given(st.integers(0, 9), st.integers(1, 12), st.integers(0, 4), st.integers(1, 5))
def test_every_entry_follows_the_definition(n_q, n_k, first, size):
    """The visible pairs of each mask, written as conditions on two positions."""
    visible = {
        "causal": lambda i, j: j <= i,
        "sliding": lambda i, j: 0 <= i - j < size,
        "two_sided": lambda i, j: abs(i - j) <= size,
        "chunked": lambda i, j: j <= i and i // size == j // size,
    }
    made = {
        "causal": masks.causal_mask(n_q, n_k, first_query=first),
        "sliding": masks.sliding_window_mask(n_q, n_k, window=size, first_query=first),
        "two_sided": masks.two_sided_window_mask(n_q, n_k, distance=size, first_query=first),
        "chunked": masks.chunked_mask(n_q, n_k, chunk_size=size, first_query=first),
    }
    for name, mask in made.items():
        assert mask.dtype == bool
        assert mask.shape == (n_q, n_k)
        wanted = [[not visible[name](i, j) for j in range(n_k)] for i in range(first, first + n_q)]
        assert mask.tolist() == wanted, name


def theirs(create, real: np.ndarray, **settings_: int) -> np.ndarray:
    """The mask that transformers gives to eager attention, as True for blocked, (batch, 1, n, n)."""
    config = LlamaConfig(hidden_size=4, num_attention_heads=1, attn_implementation="eager", **settings_)
    embeddings = torch.zeros(*real.shape, 4)
    keywords = {"config": config, "inputs_embeds": embeddings, "attention_mask": torch.tensor(real).long()}
    if create not in (create_bidirectional_mask, create_bidirectional_sliding_window_mask):
        keywords["cache"] = None
    return (create(**keywords) != 0).expand(-1, 1, real.shape[1], -1).numpy()


@st.composite
def padded(draw):
    """Which tokens of a batch with padding on the right are real, with at least one pad a text."""
    batch, n = draw(st.integers(1, 3)), draw(st.integers(2, 9))
    lengths = np.array([draw(st.integers(1, n - 1)) for _ in range(batch)])
    return np.arange(n) < lengths[:, None]


@QUICK
@given(padded(), st.integers(1, 8))
def test_with_padding_masks_are_those_of_transformers(real, size):
    n = real.shape[1]
    padding = ~real[:, None, None, :]
    pairs = [
        (masks.causal_mask(n), create_causal_mask, {}),
        (np.zeros((n, n), bool), create_bidirectional_mask, {}),
        (masks.sliding_window_mask(n, window=size), create_sliding_window_causal_mask, {"sliding_window": size}),
        (
            masks.two_sided_window_mask(n, distance=size),
            create_bidirectional_sliding_window_mask,
            {"sliding_window": size},
        ),
        (masks.chunked_mask(n, chunk_size=size), create_chunked_causal_mask, {"attention_chunk_size": size}),
    ]
    for ours, create, settings_ in pairs:
        combined = ours | padding
        wanted = theirs(create, real, **settings_)
        assert combined.shape == wanted.shape
        np.testing.assert_array_equal(combined, wanted, err_msg=create.__name__)


def test_relative_positions_count_from_the_query():
    assert masks.relative_positions(2, 3).tolist() == [[0, 1, 2], [-1, 0, 1]]
    assert masks.relative_positions(2, 3, first_query=4).tolist() == [[-4, -3, -2], [-5, -4, -3]]
