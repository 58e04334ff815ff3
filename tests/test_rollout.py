"""Attention rollout and means over heads, against plain NumPy and closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import headscope
from headscope.errors import InputError
from headscope.heads.rollout import head_mean, rollout
from headscope.results import AttentionMap

IDS = [2, 9, 11, 7, 23, 5, 3]


def layer_map(number: int, weights: NDArray[np.float64], stack: str = "self") -> AttentionMap:
    labels = tuple(f"t{i}" for i in range(weights.shape[2]))
    heads = tuple(range(len(weights)))
    return AttentionMap(stack, number, heads, weights.astype(np.float32), labels[: weights.shape[1]], labels)


def random_rows(generator: np.random.Generator, heads: int, n: int, causal: bool) -> NDArray[np.float64]:
    weights = generator.gamma(0.3, size=(heads, n, n)) + 1e-6
    weights = np.tril(weights) if causal else weights
    return weights / weights.sum(-1, keepdims=True)


def by_paths(layers: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The same by its meaning: a token's shares are half its own and half those of what it attends to."""
    n = layers[0].shape[-1]
    shares = [{i: 1.0} for i in range(n)]
    for weights in layers:
        mean = weights.mean(0)
        before, shares = shares, []
        for query in range(n):
            mixed = {key: 0.5 * share for key, share in before[query].items()}
            for key in range(n):
                for origin, share in before[key].items():
                    mixed[origin] = mixed.get(origin, 0.0) + 0.5 * mean[query, key] * share
            shares.append(mixed)
    return np.array([[row.get(i, 0.0) for i in range(n)] for row in shares])


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("heads", ["all", "1,3"])
def test_rollout_of_a_model_is_that_of_its_own_attentions(family_model, family: str, heads: str) -> None:
    model, _, _ = family_model(family)
    with torch.no_grad():
        attentions = model(input_ids=torch.tensor([IDS]), output_attentions=True).attentions
    chosen = slice(None) if heads == "all" else [1, 3]
    expected = by_paths([a[0].double().numpy()[chosen] for a in attentions])
    for maps in ("mean", True):
        found = headscope.analyze(model, ids=IDS, head=heads, maps=maps)
        (weights,) = rollout(found.maps).weights
        np.testing.assert_allclose(weights, expected, atol=2e-6)


def test_kept_means_are_the_means_of_the_kept_heads(family_model) -> None:
    model, _, _ = family_model("bert")
    whole = headscope.analyze(model, ids=IDS, head="0,2", maps=True).maps
    means = headscope.analyze(model, ids=IDS, head="0,2", maps="mean").maps
    assert [m.heads for m in means] == [()] * 3
    for one, mean in zip(whole, means, strict=True):
        np.testing.assert_allclose(mean.weights[0], one.weights.mean(0), atol=1e-7)
        np.testing.assert_array_equal(head_mean(one).weights[0], one.weights.mean(0))
        assert head_mean(mean) is mean


@given(st.integers(1, 12), st.integers(1, 6))
def test_even_attention_has_a_closed_form(n: int, layers: int) -> None:
    maps = [layer_map(i, np.full((3, n, n), 1 / n)) for i in range(layers)]
    kept = 0.5**layers
    np.testing.assert_allclose(rollout(maps).weights[0], kept * np.eye(n) + (1 - kept) / n, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_rollout_is_the_sum_over_paths(n: int, layers: int, heads: int, causal: bool, random) -> None:
    generator = np.random.default_rng(random.randrange(2**32))
    weights = [random_rows(generator, heads, n, causal) for _ in range(layers)]
    maps = [layer_map(i, w) for i, w in enumerate(weights)]
    random.shuffle(maps)
    found = rollout(maps)
    assert found.layer == layers - 1 and found.heads == () and found.weights.shape == (1, n, n)
    np.testing.assert_allclose(found.weights[0], by_paths(weights), atol=1e-6)
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-6)
    assert not causal or not np.triu(found.weights[0], 1).any()


def test_rows_that_give_some_to_a_learned_sink_are_scaled() -> None:
    weights = np.array([[[0.2, 0.0], [0.1, 0.3]]])
    expected = np.array([[1.0, 0.0], [0.1 / 1.4, 1.3 / 1.4]])
    np.testing.assert_allclose(rollout([layer_map(0, weights)]).weights[0], expected, atol=1e-7)


def test_what_cannot_be_rolled_out_is_refused() -> None:
    even = [layer_map(0, np.full((1, 4, 4), 0.25)), layer_map(1, np.full((1, 3, 3), 1 / 3))]
    pooled = replace(even[0], tile=2, tokens=(8, 8), peak=even[0].weights)
    for maps, said in (
        ([], "no attention map"),
        (even, r"layers 0 and 1 do not share their tokens \(4 and 3\)"),
        ([layer_map(0, np.full((1, 2, 4), 0.25), "cross")], "queries of layer 0 are other tokens than its keys"),
        ([pooled], "not pooled"),
        ([even[0], replace(even[0], stack="other")], "several stacks: self, other"),
        ([even[0], replace(even[0], layer=1, queries=("x", "a", "b", "c"), keys=("x", "a", "b", "c"))], "do not share"),
    ):
        with pytest.raises(InputError, match=said) as caught:
            rollout(maps)
        assert caught.value.hint
