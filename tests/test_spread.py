"""The interval over texts, against SciPy's Student's t."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from headscope.heads.labels import spread, student_t
from headscope.results import Spread

values = st.lists(st.floats(-10, 10) | st.just(float("nan")), max_size=40)


def test_the_points_of_students_t():
    for freedom in [*range(1, 200), 500, 1000, 10**4, 10**6]:
        assert student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=2e-3, rel=1e-3)


@given(values)
def test_the_interval_is_scipys(found):
    found = np.array(found, dtype=np.float64)
    measured = found[~np.isnan(found)]
    result = spread(found)
    assert result.texts == len(measured)
    if len(measured) < 2:
        assert result == Spread(None, None, None, len(measured))
        return
    error = np.std(measured, ddof=1) / np.sqrt(len(measured))
    assert result.sd == pytest.approx(np.std(measured, ddof=1), abs=1e-12)
    low, high = (np.mean(measured) + sign * stats.t.ppf(0.975, len(measured) - 1) * error for sign in (-1, 1))
    assert result.low == pytest.approx(low, abs=2e-3 * error + 1e-12)
    assert result.high == pytest.approx(high, abs=2e-3 * error + 1e-12)


def test_equal_values_have_no_spread():
    assert spread(np.array([0.25, 0.25, np.nan])) == Spread(0.0, 0.25, 0.25, 2)
