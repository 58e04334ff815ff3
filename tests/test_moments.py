"""Sums over texts against exact fractions, merged in every way."""

from __future__ import annotations

import io
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headscope.heads.moments import Moments

NAMES = ("count", "mean", "m2", "m3", "low", "high")
numbers = st.floats(-100, 100).map(lambda value: round(value, 6)) | st.just(math.nan)
columns = st.lists(st.tuples(numbers, numbers), max_size=12).map(
    lambda rows: np.array(rows, dtype=np.float64).reshape(-1, 2)
)


def exact(values):
    """count, mean, m2 and m3 of one column by fractions, each rounded once."""
    found = [Fraction(v) for v in values if not math.isnan(v)]
    if not found:
        return 0, math.nan, 0.0, 0.0
    mean = sum(found) / len(found)
    return len(found), float(mean), *(float(sum((v - mean) ** power for v in found)) for power in (2, 3))


def close(ours, count, mean, m2, m3, tolerance=1e-12):
    """Assert that one cell's moments are those given, to the digits that values of their size leave."""
    scale = max(abs(ours.low), abs(ours.high))
    assert ours.count == count
    if count == 0:
        assert np.isnan(ours.mean) and ours.m2 == ours.m3 == 0 and ours.low == math.inf and ours.high == -math.inf
        return
    assert ours.mean == pytest.approx(mean, rel=0, abs=tolerance * scale)
    assert ours.m2 == pytest.approx(m2, rel=tolerance, abs=tolerance * scale * math.sqrt(m2 * count))
    # A sum of signed cubes is as exact as the sum of their sizes allows.
    assert ours.m3 == pytest.approx(m3, rel=tolerance, abs=tolerance * scale * m2 * 8)


def same(a, b):
    assert (
        np.array_equal(a.low, b.low) and np.array_equal(a.high, b.high) and a.count.dtype == b.count.dtype == np.int64
    )
    for place in np.ndindex(a.count.shape):
        other = b.take(place)
        close(a.take(place), other.count, other.mean, other.m2, other.m3)


def bits(moments):
    return [array.tobytes() for array in moments.to_arrays().values()]


@given(columns)
def test_moments_are_those_of_fractions(values):
    moments = Moments.of(values)
    for column in range(2):
        close(moments.take(column), *exact(values[:, column]))
        measured = values[:, column][~np.isnan(values[:, column])]
        if len(measured):
            assert (moments.low[column], moments.high[column]) == (measured.min(), measured.max())
        sd = moments.sd[column]
        assert np.isnan(sd) if len(measured) < 2 else sd == pytest.approx(np.std(measured, ddof=1), abs=1e-10)


@given(st.lists(columns, max_size=6), st.randoms())
def test_parts_in_any_order_are_the_whole(parts, order):
    whole = Moments.of(np.concatenate([np.empty((0, 2)), *parts]))
    found = [Moments.of(part) for part in parts] + [Moments.none((2,))]
    while len(found) > 1:
        order.shuffle(found)
        found.append(found.pop() + found.pop())
    same(found[0], whole)


@given(columns, columns, columns)
def test_a_commutative_monoid(a, b, c):
    a, b, c = map(Moments.of, (a, b, c))
    same((a + b) + c, a + (b + c))
    same(a + b, b + a)
    assert bits((a + b) + c) == bits((a + b) + c)
    for added in (a + Moments.none((2,)), Moments.none((2,)) + a):
        for name, array in added.to_arrays().items():
            assert np.array_equal(array, getattr(a, name), equal_nan=True)


@given(st.floats(-1e9, 1e9), st.integers(1, 50), st.integers(1, 50))
def test_equal_values_deviate_by_nothing(value, few, many):
    one, sums = Moments.of(np.array([value])), Moments.of(np.full(few, value)) + Moments.of(np.full(many, value))
    assert one.mean == value and one.count == 1 and np.isnan(one.sd)
    assert sums.mean == sums.low == sums.high == value and sums.m2 == sums.m3 == sums.sd == 0


def random_tree(parts, draw):
    """All parts added up, neighbours first, in trees cut at random."""
    while len(parts) > 1:
        cuts = np.flatnonzero(draw.random(len(parts) - 1) < 0.5) + 1
        groups = np.split(np.arange(len(parts)), cuts)
        parts = [sum((parts[i] for i in group[1:]), parts[group[0]]) for group in groups]
    return parts[0]


@pytest.mark.parametrize(("offset", "tolerance"), [(0.0, 1e-13), (1.0, 1e-13), (1e8, 1e-9)])
def test_a_million_texts_in_random_trees(offset, tolerance):
    """Against sums that are rounded once; a deviation of 1 is known to 1e-8 where means of 1e8 have 16 digits."""
    draw = np.random.default_rng(3)
    values = draw.gamma(0.7, size=1_000_000) + offset
    mean = math.fsum(values) / len(values)
    apart = (values - mean) - math.fsum(values - mean) / len(values)
    for _ in range(2):
        parts = [Moments.of(part) for part in np.split(values, np.sort(draw.choice(len(values), 2000, replace=False)))]
        draw.shuffle(parts)
        sums = random_tree(parts, draw)
        assert (sums.count, sums.low, sums.high) == (len(values), values.min(), values.max())
        assert sums.mean == pytest.approx(mean, rel=1e-14)
        assert sums.m2 == pytest.approx(math.fsum(apart**2), rel=tolerance)
        assert sums.m3 == pytest.approx(math.fsum(apart**3), rel=tolerance)


def test_texts_one_by_one_are_stable_beside_a_large_offset():
    """The textbook sum of squares less the square of the sum would leave nothing of a deviation of 1 beside 1e8."""
    draw = np.random.default_rng(4)
    values = 1e8 + draw.integers(0, 3, (5000, 3)).astype(np.float64)
    sums = Moments.none((3,))
    for row in values:
        sums = sums + Moments.of(row[None])
    for column in range(3):
        count, mean, m2, m3 = exact(values[:, column])
        found = sums.take(column)
        assert found.count == count and found.mean == pytest.approx(mean, rel=1e-13)
        assert found.m2 == pytest.approx(m2, rel=1e-7) and found.m3 == pytest.approx(m3, abs=1e-6 * m2)


def test_shapes_indices_and_files(tmp_path):
    values = np.random.default_rng(5).random((9, 2, 4))
    values[3, 0, 1] = values[:, 1, 2] = np.nan
    moments = Moments.of(values)
    assert moments.mean.shape == (2, 4) and moments.count.tolist() == [[9, 8, 9, 9], [9, 9, 0, 9]]
    assert bits(moments.take(1)) == bits(Moments.of(values[:, 1].copy()))
    assert moments.take((0, 1)).count == 8 and moments.take((slice(None), [2, 0])).mean.shape == (2, 2)
    file = io.BytesIO()
    np.savez(file, **moments.to_arrays())
    file.seek(0)
    with np.load(file) as stored:
        assert tuple(stored) == NAMES and bits(Moments.from_arrays(stored)) == bits(moments)
    with pytest.raises(KeyError):
        Moments.from_arrays({"count": moments.count})
    with pytest.raises(ValueError, match=r"shape \(4,\) to moments of shape \(2, 4\)"):
        moments + moments.take(0)
