"""The judge judged: closed forms and worked matrices, independent of any model."""

from math import lgamma, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import (
    adjusted,
    calibrated_labels,
    chance,
    mean_over_texts,
    metrics,
    rest,
    rest_pattern,
    seed_labels,
    uniform,
    visibility,
)

lengths = st.integers(2, 80)


def no_special(length):
    return np.zeros(length, bool)


def shifted(length, offset):
    """One-hot rows on the token `offset` away, held within the text."""
    return np.eye(length)[np.clip(np.arange(length) + offset, 0, length - 1)]


@given(length=lengths)
def test_chance_of_a_causal_head(length):
    """Harmonic numbers for columns and diagonals, ln(n!) / n for the entropy, (n - 1) / 4 for the distance."""
    harmonic = sum(1 / n for n in range(1, length + 1))
    found = chance(visibility(length, causal=True), no_special(length))
    assert found["sink"] == pytest.approx(harmonic / length)
    assert found["self_attend"] == found["max_weight"] == pytest.approx(harmonic / length)
    assert found["prev_token"] == pytest.approx((harmonic - 1) / (length - 1))
    assert found["entropy"] == pytest.approx(lgamma(length + 1) / length, abs=1e-6)
    assert found["mean_distance"] == pytest.approx((length - 1) / 4)
    assert found["relative_entropy"] == pytest.approx(1)
    assert found["next_token"] is None and found["special"] is None


@given(length=lengths)
def test_chance_of_a_head_that_sees_everything(length):
    special = np.arange(length) == 0
    found = chance(visibility(length), special)
    for name in ("sink", "prev_token", "self_attend", "next_token", "special", "max_weight"):
        assert found[name] == pytest.approx(1 / length)
    assert found["entropy"] == pytest.approx(log(length), abs=1e-6)
    assert found["mean_distance"] == pytest.approx((length**2 - 1) / (3 * length))


@given(length=st.integers(8, 80), window=st.integers(2, 6))
def test_chance_of_a_windowed_head(length, window):
    harmonic = sum(1 / n for n in range(1, window + 1))
    found = chance(visibility(length, causal=True, window=window), no_special(length))
    assert found["sink"] == pytest.approx(harmonic / length)
    assert found["self_attend"] == pytest.approx((harmonic + (length - window) / window) / length)


@given(length=lengths, causal=st.booleans())
def test_a_uniform_head_is_broad_and_its_adjusted_values_are_zero(length, causal):
    visible = visibility(length, causal=causal)
    values = adjusted(uniform(visible), visible)
    assert all(value is None or abs(value) < 1e-12 for value in values.values())
    assert (values["next_token"] is None) == causal
    assert calibrated_labels(uniform(visible), visible, no_special(length)) == ("broad", None)


def test_one_token_measures_nothing_relative():
    one, seen = np.ones((1, 1)), np.ones((1, 1), bool)
    found = metrics(one, seen, no_special(1))
    assert found["sink"] == 1 and found["prev_token"] is found["relative_entropy"] is None
    assert calibrated_labels(one, seen, no_special(1))[0] == "unmeasurable"
    assert rest_pattern(one, seen, no_special(1)) is None


@pytest.mark.parametrize(
    ("offset", "seed", "calibrated"),
    [(-1, "prev_token", "prev_token"), (0, "self_attend", "self_attend"), (1, "focused", "next_token")],
)
def test_one_hot_heads(offset, seed, calibrated):
    visible = visibility(16)
    found = metrics(shifted(16, offset), visible, no_special(16))
    assert seed_labels(found)[0] == seed
    assert calibrated_labels(shifted(16, offset), visible, no_special(16))[0] == calibrated
    assert found["mean_distance"] == pytest.approx(abs(offset) * 15 / 16) and found["max_weight"] == 1


def test_the_rest_of_a_sink_is_a_previous_token_head():
    """0.8 on the first token, 0.2 on the previous one: rows 0 and 1 have nothing left, the others are one-hot."""
    weights, visible = 0.8 * np.eye(10)[[0] * 10] + 0.2 * shifted(10, -1), visibility(10, causal=True)
    values, by_chance = rest(weights, visible, no_special(10))
    assert values["prev_token"] == pytest.approx(1) and values["self_attend"] == 0
    assert by_chance["prev_token"] == by_chance["self_attend"] == pytest.approx(np.mean([1 / n for n in range(2, 10)]))
    assert by_chance["mean_distance"] == pytest.approx(np.mean([(n - 1) / 2 for n in range(2, 10)]))
    assert rest_pattern(weights, visible, no_special(10)) == "prev_token"
    assert seed_labels(metrics(weights, visible, no_special(10))) == ("attention_sink", "focused")


def test_a_mean_over_texts_leaves_out_what_is_none():
    assert mean_over_texts([{"a": 1.0, "b": None}, {"a": 2.0, "b": 4.0}, {"a": 6.0, "b": None}]) == {"a": 3.0, "b": 4.0}
    assert mean_over_texts([{"a": None}]) == {"a": None}


def test_cross_attention_has_no_positions():
    visible = visibility(3, 5)
    found = metrics(uniform(visible), visible, np.arange(5) == 4, cross=True)
    assert [name for name, value in found.items() if value is None] == [
        "prev_token",
        "self_attend",
        "next_token",
        "mean_distance",
    ]
    assert found["sink"] == found["special"] == pytest.approx(0.2)
