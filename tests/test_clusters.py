"""Ratios over clusters against textbook formulas, scipy and simulation; corrected p-values against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headscope.heads.clusters import ClusterSums, holm, student_survival


def sample(seed, clusters, heads=3, equal=False):
    """Sums of clusters: values, expected values and rows, (cluster, head) each."""
    numbers = np.random.default_rng(seed)
    rows = np.full((clusters, heads), 7.0) if equal else numbers.integers(0, 9, (clusters, heads)).astype(float)
    return rows * numbers.random((clusters, heads)), rows * 0.3, rows


@settings(max_examples=100)
@given(st.integers(0, 10_000), st.integers(2, 40))
def test_the_ratio_estimator_of_the_textbook(seed, clusters):
    """Cochran 1977, 6.3: v(R) = sum (y - R x)² / (n (n - 1) mean(x)²), over clusters with an eligible row."""
    value, expected, rows = sample(seed, clusters)
    found = ClusterSums.of(value, expected, rows)
    low, high = found.interval()
    for head in range(3):
        y, x = value[rows[:, head] > 0, head], rows[rows[:, head] > 0, head]
        if len(x) < 2:
            assert np.isnan(low[head]) and np.isnan(high[head])
            continue
        ratio, n = y.sum() / x.sum(), len(x)
        error = np.sqrt(((y - ratio * x) ** 2).sum() / (n * (n - 1))) / x.mean()
        half = stats.t.ppf(0.975, n - 1) * error
        assert found.clusters[head] == n and found.rows[head] == x.sum()
        assert found.score[head] == pytest.approx(ratio) and found.chance[head] == pytest.approx(0.3)
        assert (low[head], high[head]) == pytest.approx((ratio - half, ratio + half), abs=1e-5)


@settings(max_examples=100)
@given(st.integers(0, 10_000), st.integers(2, 60))
def test_equal_clusters_give_the_t_interval_and_the_t_test_of_their_means(seed, clusters):
    value, expected, rows = sample(seed, clusters, equal=True)
    found = ClusterSums.of(value, expected, rows)
    low, high = found.interval()
    p = found.p_above()
    for head in range(3):
        means = value[:, head] / 7
        theirs = stats.ttest_1samp(means, 0.3, alternative="greater")
        exact = stats.ttest_1samp(means, 0.3).confidence_interval(0.95)
        assert (low[head], high[head]) == pytest.approx((exact.low, exact.high), abs=1e-5)
        near = 1e-2 if clusters < 6 else 2e-3
        assert p[head] == pytest.approx(max(theirs.pvalue, 0.5**clusters), abs=near)


def test_the_approximation_of_students_t():
    t = np.linspace(-12, 12, 400)
    for freedom, near in ((1, 1e-2), (2, 5e-3), (5, 1e-3), (20, 1e-4), (300, 1e-6)):
        found = student_survival(t, np.full(t.shape, freedom))
        assert np.abs(found - stats.t.sf(t, freedom)).max() < near
        assert found[0] > 0.96 and np.all(np.diff(found) <= 1e-15)
    assert student_survival(np.array([-np.inf, 0.0, np.inf]), np.array([3, 3, 3])).tolist() == [1.0, 0.5, 0.0]
    # What is small is small by about as much.
    assert student_survival(np.array([8.0]), np.array([31]))[0] == pytest.approx(stats.t.sf(8, 31), rel=0.1)


def test_what_cannot_be_known():
    none = ClusterSums.of(np.zeros((4, 1)), np.zeros((4, 1)), np.zeros((4, 1)))
    for values in (none.score, none.chance, *none.interval(), none.p_above()):
        assert np.isnan(values).all()
    one = ClusterSums.of(np.array([[3.0]]), np.array([[1.0]]), np.array([[4.0]]))
    assert one.score == 0.75 and np.isnan(one.interval()).all() and one.p_above() == 0.5
    same = ClusterSums.of(np.full((10, 1), 0.9), np.full((10, 1), 0.1), np.ones((10, 1)))
    assert np.allclose(same.interval(), 0.9) and same.p_above() == 0.5**10
    equal = ClusterSums.of(np.full((10, 1), 0.1), np.full((10, 1), 0.1), np.ones((10, 1)))
    assert equal.p_above() >= 0.5
    # Empty clusters count for nothing.
    value, expected, rows = sample(0, 8)
    more = [np.concatenate([a, np.zeros((5, 3))]) for a in (value, expected, rows)]
    for ours, theirs in zip(
        ClusterSums.of(*more).interval(), ClusterSums.of(value, expected, rows).interval(), strict=True
    ):
        assert np.array_equal(ours, theirs)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_parts_add_up_in_any_order(seed, sizes, shuffle):
    value, expected, rows = sample(seed, sum(sizes))
    whole = ClusterSums.of(value, expected, rows)
    order = list(np.split(np.random.default_rng(seed).permutation(sum(sizes)), np.cumsum(sizes)[:-1]))
    shuffle.shuffle(order)
    parts = [ClusterSums.of(value[i], expected[i], rows[i]) for i in order]
    while len(parts) > 1:
        parts.append(parts.pop(shuffle.randrange(len(parts))) + parts.pop(0))
    for ours, theirs in ((parts[0].interval(), whole.interval()), ([parts[0].p_above()], [whole.p_above()])):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(whole.take(1).score, whole.score[1])


@given(st.lists(st.one_of(st.floats(0, 1), st.just(float("nan"))), max_size=30))
def test_holm_by_its_definition(p):
    """The i-th smallest of m is multiplied by m - i + 1, and none becomes smaller than one before it."""
    known, expected = sorted(x for x in p if x == x), {}
    largest = 0.0
    for i, x in enumerate(known):
        largest = max(largest, min(1.0, x * (len(known) - i)))
        expected.setdefault(x, largest)
    found = holm(np.array(p, dtype=float))
    assert found.shape == (len(p),)
    for x, ours in zip(p, found.tolist(), strict=True):
        # Equal ones have the same product at best; later ones of them are not below it.
        assert np.isnan(ours) if x != x else ours == pytest.approx(expected[x])


def test_holm_of_any_shape():
    assert holm(np.array([[0.01, np.nan], [0.02, 0.5]])) == pytest.approx(
        np.array([[0.03, np.nan], [0.04, 0.5]]), nan_ok=True
    )


# ------------------------------------------------------------------ simulation
def clustered(numbers, trials, clusters, mean, spread):
    """Binomial rows in clusters of different sizes whose own means differ: values and rows, (cluster, trial)."""
    rows = numbers.integers(10, 60, (clusters, trials)).astype(float)
    means = numbers.beta(mean * spread, (1 - mean) * spread, (clusters, trials))
    return numbers.binomial(rows.astype(int), means).astype(float), rows


@pytest.mark.parametrize(("clusters", "mean", "spread"), [(32, 0.3, 20.0), (32, 0.7, 5.0), (12, 0.5, 10.0)])
def test_intervals_hold_the_truth_95_times_in_100(clusters, mean, spread):
    value, rows = clustered(np.random.default_rng(0), 4000, clusters, mean, spread)
    low, high = ClusterSums.of(value, 0.0, rows).interval()
    assert 0.93 < np.mean((low <= mean) & (mean <= high)) < 0.97


def test_rows_that_are_alike_within_clusters_are_no_sample():
    """As independent rows they would have intervals far too narrow."""
    value, rows = clustered(np.random.default_rng(1), 2000, 32, 0.5, 3.0)
    low, high = ClusterSums.of(value, 0.0, rows).interval()
    share = value.sum(axis=0) / rows.sum(axis=0)
    naive = 1.96 * np.sqrt(share * (1 - share) / rows.sum(axis=0))
    assert np.mean(np.abs(share - 0.5) < naive) < 0.6 < 0.93 < np.mean((low <= 0.5) & (high >= 0.5))


@pytest.mark.parametrize("clusters", [8, 32])
def test_noise_is_seldom_taken_for_a_type(clusters):
    """Of 144 heads that are no better than chance, any one is claimed in about one of twenty runs."""
    numbers, runs, heads = np.random.default_rng(2), 1000, 144
    false = 0
    for _ in range(runs):
        value, rows = clustered(numbers, heads, clusters, 0.3, 10.0)
        false += bool((holm(ClusterSums.of(value, 0.3 * rows, rows).p_above()) < 0.05).any())
    assert false / runs < 0.09


def test_heads_that_are_better_are_found_among_noise():
    numbers = np.random.default_rng(3)
    value, rows = clustered(numbers, 144, 32, 0.3, 10.0)
    value[:, 7] = np.minimum(value[:, 7] + 0.3 * rows[:, 7], rows[:, 7])
    assert (holm(ClusterSums.of(value, 0.3 * rows, rows).p_above()) < 0.05).nonzero()[0].tolist() == [7]
