"""The least squares of a repair against NumPy's on matrices that are written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.repair.refit import Sums, refit, token_weights


def problem(seed, tokens, inputs, outputs, noise=1.0):
    """x, y, w and a weight (in, out), as float64 tensors."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(inputs, inputs))
    x = rng.normal(size=(tokens, inputs)) @ mixed + 0.3
    truth = rng.normal(size=(inputs, outputs))
    y = x @ truth + noise * rng.normal(size=(tokens, outputs)) + 0.5
    w = rng.uniform(0.1, 3.0, size=tokens)
    weight = truth + rng.normal(size=truth.shape)
    return [torch.from_numpy(a) for a in (x, y, w, weight)]


def sums_of(x, y, w, weight):
    sums = Sums.of_none(weight)
    sums.add(x, y - x @ weight, w)
    return sums


def augmented(x, y, w, weight, ridge):
    """The weight that is best with a ridge that pulls to `weight`, by NumPy's lstsq on rows for the ridge, too."""
    x, y, w, weight = (t.numpy() for t in (x, y, w, weight))
    root = np.sqrt(w)[:, None]
    pull = np.sqrt(ridge * np.mean(np.sum(w[:, None] * x**2, axis=0))) * np.eye(x.shape[1])
    rows = np.concatenate([root * x, pull])
    aims = np.concatenate([root * y, pull @ weight])
    return np.linalg.lstsq(rows, aims, rcond=None)[0]


@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(3, 60),
    inputs=st.integers(1, 12),
    outputs=st.integers(1, 9),
    ridge=st.sampled_from([1e-3, 1e-2, 0.3, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_fit_is_lstsq_of_the_augmented_system(seed, tokens, inputs, outputs, ridge) -> None:
    x, y, w, weight = problem(seed, tokens, inputs, outputs)
    new = weight + sums_of(x, y, w, weight).fit(ridge)
    np.testing.assert_allclose(new.numpy(), augmented(x, y, w, weight, ridge), rtol=1e-6, atol=1e-8)


@given(seed=st.integers(0, 10_000), tokens=st.integers(20, 60), parts=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_sums_are_those_of_all_tokens_together(seed, tokens, parts) -> None:
    x, y, w, weight = problem(seed, tokens, 5, 4)
    whole, added = sums_of(x, y, w, weight), Sums.of_none(weight)
    for i in range(parts):
        added = added + sums_of(x[i::parts], y[i::parts], w[i::parts], weight)
    assert added.tokens == tokens
    for name, value in vars(whole).items():
        np.testing.assert_allclose(vars(added)[name], value, rtol=1e-9, atol=1e-9)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_errors_and_variance_are_what_they_say(seed) -> None:
    x, y, w, weight = problem(seed, 40, 6, 3)
    sums = sums_of(x, y, w, weight)
    change = torch.from_numpy(np.random.default_rng(seed + 1).normal(size=weight.shape))
    for moved in (torch.zeros_like(change), change):
        left = (w[:, None] * (y - x @ (weight + moved)) ** 2).sum()
        assert sums.error(moved) == pytest.approx(float(left), rel=1e-9)
    assert sums.error() == pytest.approx(sums.error(torch.zeros_like(change)), rel=1e-9)
    mean = (w[:, None] * y).sum(0) / w.sum()
    assert sums.variance(weight) == pytest.approx(float((w[:, None] * (y - mean) ** 2).sum()), rel=1e-9)


def test_a_weight_that_explains_everything_is_found() -> None:
    x, y, w, weight = problem(1, 50, 6, 4, noise=0.0)
    y = y - 0.5
    truth = torch.linalg.lstsq(x, y).solution
    found = refit(sums_of(x[10:], y[10:], w[10:], weight), sums_of(x[:10], y[:10], w[:10], weight), weight, (1e-13,))
    torch.testing.assert_close(weight + found.change, truth, rtol=1e-6, atol=1e-7)
    assert found.error_before > 0.1 and found.error_after < 1e-10 and found.held_after < 1e-10


def test_the_ridge_that_is_best_on_what_was_held_back_is_taken_and_everything_fitted() -> None:
    ridges = (1e-4, 1e-2, 0.1, 1.0)
    x, y, w, weight = problem(3, 40, 20, 4, noise=8.0)
    rest, held = [t[:24] for t in (x, y, w)], [t[24:] for t in (x, y, w)]

    def held_error(ridge):
        new = torch.from_numpy(augmented(*rest, weight, ridge))
        return float((held[2][:, None] * (held[1] - held[0] @ new) ** 2).sum())

    best = min(ridges, key=held_error)
    found = refit(sums_of(*rest, weight), sums_of(*held, weight), weight, ridges)
    assert best not in (ridges[0], ridges[-1])  # or the choice shows nothing
    assert found.ridge == best
    np.testing.assert_allclose((weight + found.change).numpy(), augmented(x, y, w, weight, best), rtol=1e-7)
    size = sums_of(*held, weight).variance(weight)
    assert found.held_after == pytest.approx(held_error(best) / size, rel=1e-8)


def test_a_weight_that_no_ridge_helps_is_left() -> None:
    """Noise only: fits to a few tokens are worse on others."""
    rng = np.random.default_rng(5)
    x, r = torch.from_numpy(rng.normal(size=(60, 20))), torch.from_numpy(rng.normal(size=(60, 3)))
    weight = torch.zeros(20, 3, dtype=torch.float64)
    w = torch.ones(60, dtype=torch.float64)
    found = refit(sums_of(x[:30], r[:30], w[:30], weight), sums_of(x[30:], r[30:], w[30:], weight), weight)
    assert found.change is None and found.ridge is None
    assert found.error_after == found.error_before and found.held_after == found.held_before


@pytest.mark.parametrize("inputs", [0, 3])
def test_where_nothing_comes_in_nothing_is_fitted(inputs) -> None:
    weight, ones = torch.zeros(inputs, 2, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    sums = sums_of(torch.zeros(4, inputs, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64), ones, weight)
    assert refit(sums, sums, weight).change is None


def test_tokens_weigh_what_the_next_norm_divides_by() -> None:
    wanted, given = torch.tensor([[3.0, 5.0], [-1.0, 1.0]]), torch.tensor([[0.0, 0.0], [6.0, 8.0]])
    np.testing.assert_allclose(token_weights(wanted, given, centred=False), [1 / 17, 1 / 50], rtol=1e-5)
    np.testing.assert_allclose(token_weights(wanted, given, centred=True), [1.0, 1.0], rtol=1e-5)
    assert torch.isfinite(token_weights(torch.zeros(1, 4), torch.zeros(1, 4), centred=True)).all()
