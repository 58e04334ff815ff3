"""The NumPy reference against plain loops over numbers, closed forms and the textbook example."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.attention import reference
from headscope.attention.reference import MultiHeadAttention, attention

SIZES = st.integers(1, 4)
QUICK = settings(max_examples=40, deadline=None)


def looped_attention(query, key, value, scale, mask, bias, softcap, sinks):
    """One batch entry, number by number: query [heads][n_q][d_k], key and value [kv_heads][n_k][…], the rest full."""
    heads, n_q, n_k, d_v = len(query), len(query[0]), len(key[0]), len(value[0][0])
    group = heads // len(key)
    context = np.zeros((heads, n_q, d_v))
    weights = np.zeros((heads, n_q, n_k))
    for h in range(heads):
        for i in range(n_q):
            exponentials = {}
            for j in range(n_k):
                if mask[h][i][j]:
                    continue
                score = scale * math.fsum(a * b for a, b in zip(query[h][i], key[h // group][j], strict=True))
                if softcap is not None:
                    score = softcap * math.tanh(score / softcap)
                exponentials[j] = math.exp(score + bias[h][i][j])
            total = math.fsum(exponentials.values()) + (0 if sinks is None else math.exp(sinks[h]))
            for j, exponential in exponentials.items():
                weights[h, i, j] = exponential / total
                for d in range(d_v):
                    context[h, i, d] += weights[h, i, j] * value[h // group][j][d]
    return context, weights


@st.composite
def cases(draw):
    """Arrays of small random shapes with every option on or off, and masks with wholly blocked rows."""
    batch, n_q, n_k, d_k, d_v, kv_heads, group = (draw(SIZES) for _ in range(7))
    heads = kv_heads * group
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = rng.random((batch, heads, n_q, n_k)) < draw(st.sampled_from([0.0, 0.4, 0.9]))
    mask[:, :, -1] |= draw(st.booleans())
    options = {
        "scale": draw(st.sampled_from([None, 1.0, 0.3])),
        "mask": draw(st.sampled_from([None, mask])),
        "bias": draw(st.sampled_from([None, rng.normal(size=(batch, heads, n_q, n_k)), rng.normal(size=(n_q, n_k))])),
        "softcap": draw(st.sampled_from([None, 0.7, 30.0])),
        "sinks": draw(st.sampled_from([None, rng.normal(size=heads)])),
    }
    query = rng.normal(size=(batch, heads, n_q, d_k))
    return query, rng.normal(size=(batch, kv_heads, n_k, d_k)), rng.normal(size=(batch, kv_heads, n_k, d_v)), options


@QUICK
@given(cases())
def test_attention_is_the_loop_over_numbers(case):
    query, key, value, options = case
    context, weights = attention(query, key, value, **options)
    full = weights.shape
    mask = np.zeros(full, bool) if options["mask"] is None else options["mask"]
    bias = np.zeros(full) if options["bias"] is None else np.broadcast_to(options["bias"], full)
    scale = query.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    for b in range(len(query)):
        wanted_context, wanted_weights = looped_attention(
            query[b], key[b], value[b], scale, mask[b], bias[b], options["softcap"], options["sinks"]
        )
        np.testing.assert_allclose(context[b], wanted_context, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(weights[b], wanted_weights, rtol=1e-12, atol=1e-14)


@QUICK
@given(cases())
def test_rows_sum_to_one_or_leave_the_sink_its_share(case):
    query, key, value, options = case
    _, weights = attention(query, key, value, **options)
    blocked = np.zeros(weights.shape, bool) if options["mask"] is None else options["mask"]
    assert np.all(weights[blocked] == 0)
    sums = weights.sum(axis=-1)
    dead = blocked.all(axis=-1)
    assert np.all(sums[dead] == 0)
    if options["sinks"] is None:
        np.testing.assert_allclose(sums[~dead], 1, rtol=1e-12)
    else:
        assert np.all(sums < 1)


def test_textbook_example():
    layer = MultiHeadAttention(d_model=4, num_heads=2)
    layer.W_q = layer.W_k = layer.W_v = layer.W_o = np.eye(4)
    x = [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]

    heads = reference.split_heads(reference.project(x, layer.W_q), 2)
    np.testing.assert_array_equal(heads[0], [[1, 0], [0, 1], [1, 1]])
    scores = reference.scores(heads, heads)
    np.testing.assert_allclose(scores[0], [[0.71, 0, 0.71], [0, 0.71, 0.71], [0.71, 0.71, 1.41]], atol=0.005)

    output, weights = layer.forward(x)
    e = math.exp(math.sqrt(0.5))
    np.testing.assert_allclose(weights[0, 0], np.array([e, 1, e]) / (2 * e + 1), rtol=1e-14)
    np.testing.assert_allclose(output[0, :2], np.array([2 * e, 1 + e]) / (2 * e + 1), rtol=1e-14)
    assert output.shape == (3, 4)
    assert weights.shape == (2, 3, 3)


@QUICK
@given(SIZES, SIZES, st.integers(0, 2**32 - 1))
def test_equal_scores_give_the_mean_of_the_visible_values(n_q, n_k, seed):
    rng = np.random.default_rng(seed)
    value = rng.normal(size=(1, n_k, 3))
    mask = rng.random((n_q, n_k)) < 0.4
    mask[:, 0] = False
    context, weights = attention(np.zeros((1, n_q, 2)), rng.normal(size=(1, n_k, 2)), value, mask=mask)
    for i in range(n_q):
        np.testing.assert_allclose(context[0, i], value[0, ~mask[i]].mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(weights[0, i], ~mask[i] / (~mask[i]).sum(), rtol=1e-12)


def test_a_sharp_one_hot_query_copies_its_value():
    keys = np.eye(5)[None]
    value = np.random.default_rng(0).normal(size=(1, 5, 3))
    order = [3, 0, 4, 1, 2]
    context, weights = attention(keys[:, order], keys, value, scale=1e4)
    np.testing.assert_allclose(context, value[:, order], rtol=1e-12)
    np.testing.assert_array_equal(weights[0], np.eye(5)[order])


def test_huge_scores_do_not_overflow():
    weights = reference.softmax(np.array([[[1e307, 1e307, -1e307]]]))
    np.testing.assert_array_equal(weights, [[[0.5, 0.5, 0]]])
    with np.errstate(over="raise"):
        np.testing.assert_array_equal(reference.softmax(np.full((1, 1, 2), -5.0), sinks=[1e300]), [[[0, 0]]])


def test_a_row_without_a_visible_key_is_zero():
    context, weights = attention(*np.ones((3, 2, 2, 4)), mask=np.array([[True, True], [False, True]]))
    np.testing.assert_array_equal(weights[:, 0], 0)
    np.testing.assert_array_equal(context[:, 0], 0)
    np.testing.assert_array_equal(weights[:, 1], [[1, 0], [1, 0]])


def test_a_constant_in_a_row_cancels_but_a_sink_sees_it():
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(3, 2, 3, 4))
    shift = rng.normal(size=(3, 1))
    np.testing.assert_allclose(attention(q, k, v, bias=shift)[1], attention(q, k, v)[1], rtol=1e-12)
    with_sink = [attention(q, k, v, bias=bias, sinks=[0.0, 1.0])[1] for bias in (None, shift)]
    assert np.abs(with_sink[0] - with_sink[1]).max() > 1e-3


@QUICK
@given(SIZES, SIZES, SIZES, st.integers(0, 3))
def test_merge_undoes_split(n, heads, width, batch_axes):
    x = np.random.default_rng(0).normal(size=(2,) * batch_axes + (n, heads * width))
    pieces = reference.split_heads(x, heads)
    assert pieces.shape == (2,) * batch_axes + (heads, n, width)
    np.testing.assert_array_equal(pieces[..., heads - 1, :, :], x[..., (heads - 1) * width :])
    np.testing.assert_array_equal(reference.merge_heads(pieces), x)


@QUICK
@given(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES, st.booleans(), st.integers(0, 2**32 - 1))
def test_the_layer_is_its_heads_added_up(batch, n, kv_heads, group, head_dim, value_dim, bias, seed):
    """Output = Σ_h weights_h · (x W_v)_h · W_o[rows of h], each head with its own slices of the matrices."""
    d_model, heads = 5, kv_heads * group
    layer = MultiHeadAttention(d_model, heads, kv_heads, head_dim, value_dim, bias=bias, softcap=2.0, seed=seed)
    rng = np.random.default_rng(seed)
    if bias:
        for name in ("b_q", "b_k", "b_v", "b_o"):
            setattr(layer, name, rng.normal(size=getattr(layer, name).shape))
    x = rng.normal(size=(batch, n, d_model))
    mask = np.triu(np.ones((n, n), bool), 1)
    output, weights = layer(x, mask)
    wanted = np.zeros_like(x) + (layer.b_o if bias else 0)
    for h in range(heads):
        g = h // group
        qs, ks = slice(h * head_dim, (h + 1) * head_dim), slice(g * head_dim, (g + 1) * head_dim)
        vs, os = slice(g * value_dim, (g + 1) * value_dim), slice(h * value_dim, (h + 1) * value_dim)
        q = x @ layer.W_q[:, qs] + (layer.b_q[qs] if bias else 0)
        k = x @ layer.W_k[:, ks] + (layer.b_k[ks] if bias else 0)
        v = x @ layer.W_v[:, vs] + (layer.b_v[vs] if bias else 0)
        scores = 2 * np.tanh(np.einsum("bid,bjd->bij", q, k) / math.sqrt(head_dim) / 2)
        w = np.exp(scores) * ~mask
        w /= w.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(weights[:, h], w, rtol=1e-10, atol=1e-14)
        wanted += w @ v @ layer.W_o[os]
    np.testing.assert_allclose(output, wanted, rtol=1e-10, atol=1e-12)


def test_cross_attention_takes_keys_and_values_from_the_context():
    layer = MultiHeadAttention(4, 2, context_dim=6)
    rng = np.random.default_rng(0)
    x, context = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 5, 6))
    output, weights = layer.forward(x, context=context)
    assert output.shape == (2, 3, 4)
    assert weights.shape == (2, 2, 3, 5)
    order = [4, 2, 0, 1, 3]
    shuffled_output, shuffled_weights = layer.forward(x, context=context[:, order])
    np.testing.assert_allclose(shuffled_output, output, rtol=1e-12)
    np.testing.assert_allclose(shuffled_weights, weights[..., order], rtol=1e-12)


def test_masks_may_leave_out_batch_and_heads():
    layer = MultiHeadAttention(4, 2)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4))
    each = rng.random((2, 3, 3)) < 0.5
    _, weights = layer(x, each)
    for b in range(2):
        np.testing.assert_allclose(weights[b], layer(x[b], each[b])[1], rtol=1e-14)
        np.testing.assert_allclose(layer(x, each[b])[1][b], weights[b], rtol=1e-14)
    by_head = rng.random((2, 2, 3, 3)) < 0.5
    np.testing.assert_array_equal(layer(x, by_head)[1][by_head], 0)
    np.testing.assert_allclose(layer(x[0], by_head[0])[1], layer(x, by_head)[1][0], rtol=1e-14)


def test_the_same_seed_gives_the_same_layer():
    first, again, other = MultiHeadAttention(4, 2, seed=3), MultiHeadAttention(4, 2, seed=3), MultiHeadAttention(4, 2)
    np.testing.assert_array_equal(first.W_o, again.W_o)
    assert not np.array_equal(first.W_o, other.W_o)
    assert first.b_q is None
    assert MultiHeadAttention(4, 2, bias=True).b_o.shape == (4,)


ONES = np.ones((2, 3, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention(ONES[0], ONES, ONES), r"query needs axes \(…, heads, length, width\), got shape \(3, 4\)"),
        (lambda: attention(ONES, ONES[..., :2], ONES), r"differ in width: \(2, 3, 4\) and \(2, 3, 2\)"),
        (lambda: attention(ONES, ONES, ONES[:, :2]), r"differ in heads or length: \(2, 3, 4\) and \(2, 2, 4\)"),
        (lambda: attention(ONES, ONES, ONES[:1]), "differ in heads or length"),
        (lambda: attention(ONES, np.ones((3, 3, 4)), np.ones((3, 3, 4))), "2 query heads cannot share 3 key-value"),
        (lambda: attention(ONES, ONES, ONES, mask=np.ones((3, 3))), "mask must be boolean .* got float64"),
        (lambda: attention(ONES, ONES, ONES, mask=np.ones((2, 3), bool)), r"mask of shape \(2, 3\) does not broadcast"),
        (lambda: attention(ONES, ONES, ONES, bias=np.ones((5, 2, 3, 3))), "bias of shape .* does not broadcast"),
        (lambda: attention(ONES, ONES, ONES, sinks=[1.0]), r"sinks must have shape \(2,\), got \(1,\)"),
        (lambda: reference.split_heads(ONES, 3), "width 4 is not a multiple of 3 heads"),
        (lambda: MultiHeadAttention(5, 2), "d_model 5 is not a multiple of 2 heads"),
        (lambda: MultiHeadAttention(6, 3, 2), "3 query heads cannot share 2"),
        (lambda: MultiHeadAttention(6, 3)(ONES), r"x must have shape \(…, n, 6\), got \(2, 3, 4\)"),
        (lambda: MultiHeadAttention(4, 2)(ONES, context=ONES[..., :3]), r"context must have shape \(…, n, 4\)"),
        (lambda: MultiHeadAttention(4, 2)(ONES, np.ones((1, 1, 2, 3, 3), bool)), "mask needs 2 axes"),
    ],
)
def test_errors_name_the_argument_and_the_shape(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_replaced_weight_must_fit():
    layer = MultiHeadAttention(4, 2)
    layer.W_k = np.eye(3)
    with pytest.raises(ValueError, match=r"W_k must have shape \(4, 4\), got \(3, 3\)"):
        layer(ONES)


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("alibi, explain, frequencies, masks, norms, reference, relative, rotary, shapes", {"torch", "transformers"}),
        ("torch_attention, torch_mha", {"transformers"}),
    ],
)
def test_what_is_not_imported(modules, absent):
    code = f"from headscope.attention import {modules}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not absent & set(done.stdout.split())
