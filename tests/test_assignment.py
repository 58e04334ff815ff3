"""Assignments against SciPy's, against all permutations, and against one that is planted."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linear_sum_assignment

from headscope.comparison.assignment import assign
from headscope.errors import InputError

SHAPES = st.tuples(st.integers(0, 9), st.integers(0, 9))
# Whole numbers, negative ones too, have many ties.
COSTS = SHAPES.flatmap(
    lambda shape: st.one_of(
        arrays(np.float64, shape, elements=st.integers(-3, 3).map(float)),
        arrays(np.float64, shape, elements=st.floats(-1e3, 1e3)),
    )
)


@given(COSTS)
@settings(max_examples=300, deadline=None)
def test_pairs_are_an_assignment_as_cheap_as_scipys(cost):
    rows, columns = assign(cost)
    assert len(rows) == len(columns) == min(cost.shape)
    assert (np.diff(rows) > 0).all() and len(set(columns.tolist())) == len(columns)
    assert cost[rows, columns].sum() == pytest.approx(cost[linear_sum_assignment(cost)].sum(), abs=1e-9, rel=1e-12)


@pytest.mark.parametrize("shape", [(5, 5), (3, 6), (6, 3)])
def test_no_permutation_is_cheaper(shape):
    cost = np.random.default_rng(1).normal(size=shape)
    wide = cost if shape[0] <= shape[1] else cost.T
    best = min(sum(wide[i, p] for i, p in enumerate(way)) for way in permutations(range(wide.shape[1]), len(wide)))
    assert cost[assign(cost)].sum() == pytest.approx(best)


@pytest.mark.parametrize("shape", [(150, 150), (72, 144), (144, 72)])
def test_large_ones_are_scipys_pair_by_pair(shape):
    cost = np.random.default_rng(0).random(shape)  # no ties, so there is one best assignment
    for ours, theirs in zip(assign(cost), linear_sum_assignment(cost), strict=True):
        assert ours.tolist() == theirs.tolist()


def test_a_planted_permutation_is_found():
    order = np.random.default_rng(2).permutation(60)
    cost = np.random.default_rng(3).uniform(0.5, 1, (60, 60))
    cost[np.arange(60), order] = 0
    assert assign(cost)[1].tolist() == order.tolist()


def test_the_costs_are_left_as_they_were():
    cost = np.random.default_rng(4).random((5, 7)).astype(np.float32)
    before = cost.copy()
    assign(cost)
    assert (cost == before).all()


@pytest.mark.parametrize("bad", [np.zeros(3), np.full((2, 2), np.nan), np.full((2, 2), np.inf)])
def test_other_costs_are_refused(bad):
    with pytest.raises(InputError, match="finite"):
        assign(bad)
