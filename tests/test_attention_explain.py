"""The teaching steps repeat the reference's numbers."""

from __future__ import annotations

import numpy as np
import pytest

from headscope.attention.explain import explain, make_step
from headscope.attention.reference import MultiHeadAttention, attention, project, split_heads

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = RNG.normal(size=(3, 2)), RNG.normal(size=(5, 2)), RNG.normal(size=(5, 6))


def test_plain_steps_in_order():
    steps = explain(QUERY, KEY, VALUE)
    assert [step.name for step in steps] == ["query", "key", "value", "scores", "weights", "context"]
    assert [step.shape for step in steps] == [(3, 2), (5, 2), (5, 6), (3, 5), (3, 5), (3, 6)]
    assert [step.axes for step in steps][3:] == [("n_q", "n_k"), ("n_q", "n_k"), ("n_q", "d_v")]
    assert steps[3].formula == "S = Q · Kᵀ / √2"
    np.testing.assert_allclose(steps[3].values, (QUERY @ KEY.T / np.sqrt(2))[:, :4])


def test_the_weights_follow_from_the_last_scores():
    """Softmax of the last step before the weights, done here by hand, is the weights step."""
    mask = np.triu(np.ones((3, 5), bool), 2)
    options = {"scale": 0.3, "softcap": 1.5, "bias": RNG.normal(size=(3, 5)), "mask": mask}
    steps = {step.name: step for step in explain(QUERY, KEY, VALUE, **options, sink=0.2, rows=9, columns=9)}
    assert list(steps)[3:8] == ["scores", "capped scores", "bias", "biased scores", "masked scores"]
    last = np.exp(steps["masked scores"].values)
    by_hand = last / (last.sum(axis=-1, keepdims=True) + np.exp(0.2))
    np.testing.assert_allclose(steps["weights"].values, by_hand, rtol=1e-12)
    context, weights = attention(QUERY[None], KEY[None], VALUE[None], **options, sinks=[0.2])
    np.testing.assert_array_equal(steps["weights"].values, weights[0])
    np.testing.assert_array_equal(steps["context"].values, context[0])
    assert "0.2" in steps["weights"].formula
    assert steps["scores"].formula == "S = Q · Kᵀ · 0.3"


def test_the_heads_outputs_add_up_to_the_layers():
    layer = MultiHeadAttention(4, 2, value_dim=3)
    x = RNG.normal(size=(5, 4))
    q, k, v = (split_heads(project(x, w), 2) for w in (layer.W_q, layer.W_k, layer.W_v))
    parts = [explain(q[h], k[h], v[h], output_weight=layer.W_o[3 * h : 3 * h + 3], rows=5)[-1].values for h in range(2)]
    np.testing.assert_allclose(parts[0] + parts[1], layer(x)[0], rtol=1e-12)


def test_a_step_keeps_a_corner_of_its_own():
    array = np.arange(12.0).reshape(3, 4)
    step = make_step("x", "X", array, ("n", "d_model"), rows=2, columns=3)
    array[:] = -1
    np.testing.assert_array_equal(step.values, [[0, 1, 2], [4, 5, 6]])
    assert step.shape == (3, 4)
    with pytest.raises(ValueError, match=r"x must have two axes, got shape \(2, 2, 2\)"):
        make_step("x", "X", np.zeros((2, 2, 2)), ("a", "b"))
