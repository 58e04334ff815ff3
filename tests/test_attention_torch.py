"""The torch versions against the NumPy reference, torch's own module, and each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from headscope.attention import torch_attention
from headscope.attention.reference import MultiHeadAttention, attention
from headscope.attention.torch_attention import attention_torch, efficient_mha, softmax_torch
from headscope.attention.torch_mha import MultiHeadAttentionTorch

SIZES = st.integers(1, 5)
QUICK = settings(max_examples=40, deadline=None)
# Largest error relative to the largest number, by dtype: rounding of inputs and of every step.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def assert_close(ours: torch.Tensor, wanted: np.ndarray, tolerance: float) -> None:
    assert ours.shape == wanted.shape
    error = np.abs(ours.detach().double().numpy() - wanted).max(initial=0)
    assert error <= tolerance * max(np.abs(wanted).max(initial=0), 1e-3), f"largest error {error:.3g}"


@st.composite
def arrays(draw):
    """Query, key and value in NumPy, and a mask and a bias that may lack axes or be absent."""
    batch, n_q, n_k, d_k, d_v, kv_heads, group = (draw(SIZES) for _ in range(7))
    heads = kv_heads * group
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.sampled_from([(batch, heads, n_q, n_k), (batch, 1, n_q, n_k), (batch, 1, 1, n_k), (n_q, n_k)]))
    mask = rng.random(shape) < draw(st.sampled_from([0.2, 0.7]))
    mask[..., -1, :] |= draw(st.booleans())
    mask = draw(st.sampled_from([None, mask]))
    bias = draw(st.sampled_from([None, rng.normal(size=(heads, n_q, n_k)), rng.normal(size=(1, n_k))]))
    query, key = rng.normal(size=(batch, heads, n_q, d_k)), rng.normal(size=(batch, kv_heads, n_k, d_k))
    return query, key, rng.normal(size=(batch, kv_heads, n_k, d_v)), mask, bias, rng.normal(size=heads)


def tensors(dtype, *numbers):
    return [None if array is None else torch.tensor(array, dtype=dtype) for array in numbers]


def as_tensor(mask):
    return None if mask is None else torch.tensor(mask)


@pytest.mark.parametrize("dtype", TOLERANCE)
@QUICK
@given(arrays(), st.sampled_from([None, 0.4]), st.sampled_from([None, 2.0]), st.booleans())
def test_torch_is_numpy(dtype, case, scale, softcap, with_sinks):
    query, key, value, mask, bias, sinks = case
    q, k, v, b, s = tensors(dtype, query, key, value, bias, sinks if with_sinks else None)
    context, weights = attention_torch(q, k, v, scale=scale, mask=as_tensor(mask), bias=b, softcap=softcap, sinks=s)
    wanted_context, wanted_weights = attention(
        query, key, value, scale=scale, mask=mask, bias=bias, softcap=softcap, sinks=sinks if with_sinks else None
    )
    assert context.dtype == weights.dtype == dtype
    assert_close(weights, wanted_weights, TOLERANCE[dtype])
    assert_close(context, wanted_context, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@QUICK
@given(arrays(), st.sampled_from([None, 0.4]))
def test_the_fused_path_is_numpy(dtype, case, scale):
    query, key, value, mask, bias, _ = case
    q, k, v, b = tensors(dtype, query, key, value, bias)
    context = efficient_mha(q, k, v, scale=scale, mask=as_tensor(mask), bias=b)
    assert context.dtype == dtype
    assert_close(context, attention(query, key, value, scale=scale, mask=mask, bias=bias)[0], TOLERANCE[dtype])


def test_bfloat16_is_as_wrong_as_its_rounding():
    """On a usual size bfloat16 differs from float64 by some of its 2⁻⁸ steps, and not by much less or more."""
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 2, 4, 64, 32))
    wanted = attention(query, key, value)[0]
    q, k, v = tensors(torch.bfloat16, query, key, value)
    for context in (attention_torch(q, k, v)[0], efficient_mha(q, k, v)):
        error = np.abs(context.double().numpy() - wanted).max() / np.abs(wanted).max()
        assert 2**-11 < error < 2**-6


def test_causal_without_a_mask_is_causal_with_one():
    q, k, v = torch.randn(3, 2, 4, 7, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    torch.testing.assert_close(efficient_mha(q, k, v, causal=True), efficient_mha(q, k, v, mask=mask))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("d_model", [8, 12])
def test_torchs_own_module_with_our_weights(d_model, bias):
    generator = torch.Generator().manual_seed(d_model)
    theirs = nn.MultiheadAttention(d_model, 4, bias=bias, batch_first=True)
    ours = MultiHeadAttention(d_model, 4, bias=bias)
    packed = theirs.in_proj_weight.detach().double().numpy()
    ours.W_q, ours.W_k, ours.W_v = (part.T for part in np.split(packed, 3))
    ours.W_o = theirs.out_proj.weight.detach().double().numpy().T
    if bias:
        nn.init.normal_(theirs.in_proj_bias, generator=generator)
        nn.init.normal_(theirs.out_proj.bias, generator=generator)
        ours.b_q, ours.b_k, ours.b_v = np.split(theirs.in_proj_bias.detach().double().numpy(), 3)
        ours.b_o = theirs.out_proj.bias.detach().double().numpy()
    module = MultiHeadAttentionTorch.from_reference(ours)

    x = torch.randn(3, 6, d_model, generator=generator)
    context = torch.randn(3, 5, d_model, generator=generator)
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    for mask, other in ((None, None), (causal, None), (None, context)):
        source = x if other is None else other
        output, weights = theirs(x, source, source, attn_mask=mask, average_attn_weights=False)
        numpy_output, numpy_weights = ours(x, mask, context=other)
        torch_output, torch_weights = module(x, mask, context=other)
        assert_close(output, numpy_output, 1e-5)
        assert_close(weights, numpy_weights, 1e-5)
        assert_close(torch_output, numpy_output, 1e-5)
        assert_close(torch_weights, numpy_weights, 1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@QUICK
@given(SIZES, SIZES, SIZES, SIZES, st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
def test_the_module_is_the_reference_layer(dtype, batch, n, kv_heads, group, bias, cross, seed):
    sizes = (6, kv_heads * group, kv_heads, 3, 2)
    reference = MultiHeadAttention(*sizes, context_dim=5 if cross else None, bias=bias, scale=0.5, seed=seed)
    module = MultiHeadAttentionTorch(
        *sizes, context_dim=5 if cross else None, bias=bias, scale=0.5, seed=seed, dtype=dtype
    )
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, n, 6))
    context = rng.normal(size=(batch, 4, 5)) if cross else None
    mask = rng.random((batch, n, 4 if cross else n)) < 0.3
    score_bias = rng.normal(size=mask.shape[1:])
    output, weights = reference(x, mask, context=context, bias=score_bias)
    tx, tc, tb = tensors(dtype, x, context, score_bias)
    for need_weights in (True, False):
        ours, ours_weights = module(tx, torch.tensor(mask), context=tc, bias=tb, need_weights=need_weights)
        assert_close(ours, output, TOLERANCE[dtype])
        if need_weights:
            assert_close(ours_weights, weights, TOLERANCE[dtype])
        else:
            assert ours_weights is None


def test_sinks_and_soft_cap_travel_with_the_layer():
    reference = MultiHeadAttention(6, 3, softcap=1.5, sinks=[0.1, -1.0, 2.0])
    module = MultiHeadAttentionTorch.from_reference(reference, dtype=torch.float64)
    x = np.random.default_rng(0).normal(size=(4, 6)) * 3
    assert_close(module(torch.tensor(x))[1], reference(x)[1], 1e-13)
    assert set(dict(module.named_parameters())) == {"W_q", "W_k", "W_v", "W_o", "sinks"}
    with pytest.raises(ValueError, match="efficient_mha: softcap cannot be fused"):
        module(torch.tensor(x), need_weights=False)


def test_gradients_are_those_of_finite_differences_also_beside_a_blocked_row():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 3, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    k, v = (torch.randn(2, 4, 2, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2))
    sinks = torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1] = True
    mask[2, 2] = True
    for options in ({}, {"softcap": 1.3}):
        assert torch.autograd.gradcheck(lambda *x, o=options: attention_torch(*x, mask=mask, **o)[0], (q, k, v))
    assert torch.autograd.gradcheck(lambda q, s: attention_torch(q, k, v, mask=mask, sinks=s)[0], (q, sinks))
    assert torch.autograd.gradcheck(lambda *x: efficient_mha(*x, mask=mask), (q, k, v))


def test_a_sink_far_above_the_scores_leaves_finite_gradients():
    scores = torch.zeros(1, 2, 3, requires_grad=True)
    sinks = torch.tensor([1000.0], requires_grad=True)
    weights = softmax_torch(scores - 50, sinks)
    weights.sum().backward()
    for gradient in (scores.grad, sinks.grad):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    assert torch.equal(weights, torch.zeros_like(weights))


def test_bfloat16_takes_its_softmax_in_float32():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 64, 16, generator=generator).bfloat16()
    weights = attention_torch(q, k, k, scale=1.0)[1]
    wanted = torch.softmax((q @ k.transpose(-1, -2)).float(), dim=-1).bfloat16()
    assert (weights != wanted).double().mean() < 0.01  # float32 sums in another order may tip a rounding


def test_blocked_rows_are_zero_whatever_the_kernel_gives(monkeypatch):
    def kernel_with_nan(query, key, value, attn_mask, **keywords):
        context = scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **keywords)
        return context.masked_fill(~attn_mask.any(dim=-1, keepdim=True), float("nan"))

    monkeypatch.setattr(torch_attention, "scaled_dot_product_attention", kernel_with_nan)
    q, k, v = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True
    torch.testing.assert_close(efficient_mha(q, k, v, mask=mask), attention_torch(q, k, v, mask=mask)[0])
    everything = torch.ones(1, 1, dtype=torch.bool)
    assert torch.equal(efficient_mha(q, k, v, mask=everything), torch.zeros_like(q))


ONES = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: efficient_mha(ONES, ONES, ONES, softcap=1.0), "softcap cannot be fused; use attention_torch"),
        (lambda: efficient_mha(ONES, ONES, ONES, sinks=torch.ones(2)), "sinks cannot be fused"),
        (lambda: efficient_mha(ONES, ONES, ONES, mask=torch.ones(3, 3)), "mask must be boolean .* torch.float32"),
        (lambda: efficient_mha(ONES, ONES, ONES, causal=True, bias=torch.ones(3, 3)), "neither mask nor bias"),
        (lambda: efficient_mha(ONES[:, :1], ONES, ONES, causal=True), "causal needs as many keys as queries"),
        (lambda: efficient_mha(ONES, ONES, ONES, bias=torch.ones(2, 2)), r"bias of shape \(2, 2\) does not broadcast"),
        (lambda: attention_torch(ONES, ONES, ONES, mask=torch.ones(3, 3)), "mask must be boolean"),
        (lambda: attention_torch(ONES, ONES, ONES, sinks=torch.ones(3)), r"sinks must have shape \(2,\), got \(3,\)"),
        (lambda: attention_torch(ONES, ONES[:, :, :3], ONES), "differ in width"),
        (lambda: MultiHeadAttentionTorch(4, 2)(ONES[..., :3]), r"x must have shape \(…, n, 4\), got \(2, 3, 3\)"),
    ],
)
def test_errors_name_the_argument_and_the_shape(call, message):
    with pytest.raises(ValueError, match=message):
        call()
