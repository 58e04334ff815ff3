"""ALiBi and bucketed relative positions against their definitions and against the models that use them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpnet.configuration_mpnet import MPNetConfig
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_alibi
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from headscope.attention.alibi import alibi_key_bias, alibi_slopes, round_to_bfloat16
from headscope.attention.masks import causal_mask, relative_positions
from headscope.attention.reference import attention
from headscope.attention.relative import relative_bias, relative_buckets

QUICK = settings(max_examples=60, deadline=None)


def test_slopes_of_the_paper():
    np.testing.assert_array_equal(alibi_slopes(8), [1 / 2**i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(16), [0.5 ** (i / 2) for i in range(1, 17)])
    np.testing.assert_allclose(alibi_slopes(12), [0.5**i for i in range(1, 9)] + [0.5 ** (i / 2) for i in (1, 3, 5, 7)])
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        alibi_slopes(0)


@QUICK
@given(st.integers(1, 80), st.integers(1, 20))
def test_key_bias_is_that_of_bloom_falcon_and_mpt(num_heads, n):
    real = torch.ones(2, n, dtype=torch.long)
    real[1, n // 2 :] = 0
    positions = ((real.cumsum(-1) - 1) * real).numpy()
    ours = alibi_key_bias(alibi_slopes(num_heads), positions)

    bloom = bloom_alibi(real, num_heads, torch.float32).view(2, num_heads, 1, n).numpy()
    np.testing.assert_allclose(ours, bloom, rtol=1e-6)

    falcon = falcon_alibi(real, num_heads, torch.float32).view(2, num_heads, 1, n).numpy()
    rounded = round_to_bfloat16(
        alibi_key_bias(round_to_bfloat16(alibi_slopes(num_heads)), round_to_bfloat16(positions))
    )
    np.testing.assert_array_equal(rounded, falcon)

    mpt = mpt_alibi(num_heads, n).numpy()
    np.testing.assert_allclose(alibi_key_bias(alibi_slopes(num_heads), np.arange(1 - n, 1)), mpt, rtol=1e-6)
    flatter = mpt_alibi(num_heads, n, alibi_bias_max=4).numpy()
    np.testing.assert_allclose(alibi_key_bias(alibi_slopes(num_heads, 4.0), np.arange(1 - n, 1)), flatter, rtol=1e-6)


@QUICK
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 3))
def test_under_a_causal_mask_the_bias_of_keys_is_the_papers_penalty_on_distance(num_heads, n, first):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(num_heads, rows, 4)) for rows in (n, n + first, n + first))
    mask = causal_mask(n, n + first, first_query=first)
    slopes = alibi_slopes(num_heads)
    penalty = -slopes[:, None, None] * np.abs(relative_positions(n, n + first, first))
    by_distance = attention(q, k, v, mask=mask, bias=penalty)[1]
    by_key = attention(q, k, v, mask=mask, bias=alibi_key_bias(slopes, np.arange(n + first)))[1]
    np.testing.assert_allclose(by_distance, by_key, rtol=1e-9, atol=1e-12)


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32)))
def test_rounding_to_bfloat16_is_torchs(numbers):
    wanted = torch.tensor(numbers, dtype=torch.float32).bfloat16().double().numpy()
    np.testing.assert_array_equal(round_to_bfloat16(numbers), wanted)


@QUICK
@given(st.booleans(), st.sampled_from([8, 16, 32, 64, 320]), st.sampled_from([20, 64, 128, 200, 800]))
def test_buckets_are_those_of_t5(bidirectional, num_buckets, max_distance):
    exact = num_buckets // (4 if bidirectional else 2)
    relative = np.arange(-1500, 1501)
    ours = relative_buckets(
        relative, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max(max_distance, exact + 1)
    )
    wanted = T5Attention._relative_position_bucket(
        torch.tensor(relative), bidirectional, num_buckets, max(max_distance, exact + 1)
    )
    np.testing.assert_array_equal(ours, wanted.numpy())
    assert ours.min() >= 0
    assert ours.max() < num_buckets


def test_buckets_by_the_formula():
    """Every distance alone below 8, then bucket 8 + ⌊8 · log₁₆(d / 8)⌋ up to 15, and 16 more for keys ahead."""
    for distance in range(1, 200):
        bucket = distance if distance < 8 else min(15, 8 + math.floor(8 * math.log(distance / 8, 16) + 1e-9))
        assert relative_buckets(-distance, bidirectional=True) == bucket
        assert relative_buckets(distance, bidirectional=True) == 16 + bucket
        assert relative_buckets(distance, bidirectional=False) == 0


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("past", [0, 5])
def test_bias_is_that_of_t5(is_decoder, past):
    config = T5Config(d_model=8, d_kv=4, num_heads=3, is_decoder=is_decoder, relative_attention_max_distance=64)
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    wanted = layer.compute_bias(40, 40 + past, past_seen_tokens=past)[0].detach().numpy()
    table = layer.relative_attention_bias.weight.detach().numpy()
    ours = relative_bias(table, 40, 40 + past, bidirectional=not is_decoder, max_distance=64, first_query=past)
    np.testing.assert_array_equal(ours, wanted)


def test_bias_is_that_of_mpnet():
    config = MPNetConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, relative_attention_num_buckets=32)
    encoder = MPNetEncoder(config)
    wanted = encoder.compute_position_bias(torch.zeros(1, 30, 8))[0].detach().numpy()
    ours = relative_bias(encoder.relative_attention_bias.weight.detach().numpy(), 30, bidirectional=True)
    np.testing.assert_array_equal(ours, wanted)
