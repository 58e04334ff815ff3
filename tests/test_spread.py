"""From per-text values through sums to records: means, spread, labels, how stable they are, and where they split."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fixtures.building import build_family
from headscope.capture.session import SiteFacts
from headscope.heads.interval import interval
from headscope.heads.labels import head_records, means_of, spread
from headscope.heads.layer_facts import LayerFacts
from headscope.heads.moments import Moments
from headscope.heads.rules import load_rules
from headscope.heads.statistics import Values
from headscope.heads.sums import LayerSums
from headscope.models.pruned import HeadState, set_pruned_state
from headscope.models.sites import find_sites
from headscope.results import SPLITS, STABLE, Spread

SEED, CALIBRATED = load_rules("seed"), load_rules("calibrated")
FACTS = LayerFacts("self", 3, heads=(0, 2, 3), num_kv_heads=2, head_dim=8, kv_heads=(0, 1, 1))
SHOWN = ("sink", "special")

shares = st.floats(0, 1, width=32) | st.just(float("nan"))
NAMES = st.sampled_from(["sink", "prev_token", "entropy", "self_attend", "special", "sink_adjusted"])


def columns(texts):
    return arrays(np.float64, (texts, 3), elements=shares)


@st.composite
def texts_of_metrics(draw, least=0):
    """Per-text values of some metrics on some texts, three heads."""
    texts = draw(st.integers(least, 5))
    names = draw(st.sets(NAMES, min_size=1))
    return {name: Values(draw(columns(texts)), draw(columns(texts))) for name in sorted(names)}


def seed_values(*rows):
    """One head's `sink` on one text after another, the other metrics of the seed rules far from their thresholds."""
    sink = np.repeat(np.array(rows, dtype=np.float64)[:, None], 3, axis=1)
    rest = np.where(np.isnan(sink), np.nan, 0.0)
    others = {name: Values(rest + value, rest) for name, value in (("prev_token", 0.1), ("entropy", 0.9))}
    return {"sink": Values(sink, np.full(sink.shape, 0.1)), **others}


def records(values, rules=SEED, heads=(0, 2, 3)):
    return head_records(FACTS, LayerSums.of(values, rules), rules, SHOWN, heads)


# ------------------------------------------------------------------ spread
def test_spread_is_the_moments_interval():
    values = np.array([[0.1, 0.25, np.nan], [0.2, 0.25, 0.5], [0.6, np.nan, np.nan]])
    moments = Moments.of(values)
    low, high = (ends.tolist() for ends in interval(moments))
    found = spread(moments)
    assert found[0] == Spread(pytest.approx(np.std(values[:, 0], ddof=1)), low[0], high[0], 3)
    assert found[1:] == [Spread(0.0, 0.25, 0.25, 2), Spread(None, None, None, 1)]


@settings(deadline=None)
@given(texts_of_metrics(least=1))
def test_records_hold_means_and_spread_of_each_head(values):
    for head, record in zip((3, 0), records(values, heads=(3, 0)), strict=True):
        place = FACTS.heads.index(head)
        assert (record.stack, record.layer, record.head, record.kv_head) == ("self", 3, head, int(head > 0))
        assert list(record.metrics) == ["sink", "special", "prev_token", "self_attend", "entropy"]
        for name in record.metrics:
            for found, field in ((record.metrics[name], "value"), (record.chance[name], "chance")):
                column = getattr(values[name], field)[:, place] if name in values else np.array([])
                column = column[~np.isnan(column)]
                assert (found is None) == (len(column) == 0)
                assert found is None or found == pytest.approx(np.mean(column), rel=1e-12)
                if len(values.get(name, Values(column, column)).value) == len(column) == 1:
                    assert found == column[0]
        if len(next(iter(values.values())).value) == 1:
            assert record.spread is None and record.stability is None
            continue
        assert list(record.spread) == [name for name in record.metrics if name in values]
        for name, got in record.spread.items():
            assert got == spread(Moments.of(values[name].value))[place]
        means = means_of(values, place)
        assert (record.pattern, record.runner_up) == SEED.label(means)


# ------------------------------------------------------------------ marks
def test_what_is_no_better_than_chance_is_marked():
    """Chance is 0.1 for sinks and 0 for the others; of entropy the low values are the telling ones."""
    assert {record.at_chance for record in records(seed_values(0.9, 0.7))} == {("entropy",)}
    assert {record.at_chance for record in records(seed_values(0.1, 0.1))} == {("sink", "entropy")}


def test_of_a_sink_the_other_keys_tell_the_rest():
    values = seed_values(0.9, 0.8)
    assert {(r.pattern, r.rest_pattern) for r in records(values)} == {("attention_sink", None)}, "none was measured"
    values["entropy_rest"] = values["entropy"]
    assert {(r.pattern, r.rest_pattern) for r in records(values)} == {("attention_sink", "broad")}
    values["prev_token_rest"] = Values(values["sink"].value.copy(), values["sink"].chance)
    assert {(r.pattern, r.rest_pattern) for r in records(values)} == {("attention_sink", "prev_token")}
    values["sink"].value[:] = 0.1
    assert {(r.pattern, r.rest_pattern) for r in records(values)} == {("broad", None)}, "it is no sink"


# ------------------------------------------------------------------ stability
@pytest.mark.parametrize(
    ("sinks", "pattern", "stability", "second", "share"),
    [
        ([0.9], "attention_sink", None, None, None),
        ([0.9, np.nan], "attention_sink", None, None, None),
        ([np.nan, np.nan], "broad", None, None, None),
        ([0.9, 0.9, np.nan], "attention_sink", 1.0, None, None),
        ([0.9] * 9 + [0.1], "attention_sink", STABLE, None, None),
        ([0.9] * 8 + [0.1] * 2, "attention_sink", 0.8, "broad", 0.2),
        # The mean is a sink's, most texts are not.
        ([1.0, 1.0, 0.2, 0.2, 0.2], "attention_sink", 0.4, "broad", 0.6),
        # The mean is what no text is.
        ([0.41, 0.41, 0.0, 0.0], "broad", 0.5, "attention_sink", 0.5),
    ],
)
def test_stability_is_the_share_of_texts_with_the_records_label(sinks, pattern, stability, second, share):
    for record in records(seed_values(*sinks)):
        assert (record.pattern, record.stability) == (pattern, stability)
        assert (record.second, record.second_share) == (second, share)
        assert [record.to_dict()[name] for name in ("stability", "second", "second_share")] == [
            stability,
            second,
            share,
        ]


def test_a_label_that_few_texts_have_is_no_second_one():
    """Eleven texts: eight sinks, and three labels that one text in eleven has each."""
    values = seed_values(*[0.9] * 8, 0.0, 0.0, 0.0)
    for name, text, value in (("prev_token", 8, 0.5), ("entropy", 9, 0.1)):
        values[name].value[text] = value
    (record, *_) = records(values)
    assert record.stability == 8 / 11 < STABLE and SPLITS > 1 / 11
    assert (record.pattern, record.second, record.second_share) == ("attention_sink", None, None)


def test_a_second_label_is_one_that_a_tenth_of_texts_has():
    """Ten texts: eight sinks, and two labels that one text in ten has each; the rules' first comes first."""
    values = seed_values(*[0.9] * 8, 0.0, 0.0)
    values["prev_token"].value[8] = 0.5
    for record in records(values):
        assert (record.stability, record.second_share) == (0.8, SPLITS)
        assert record.second == "prev_token"


def test_of_one_text_there_is_no_spread():
    assert [record.spread for record in records(seed_values(0.9))] == [None] * 3
    for record in records(seed_values(0.9, 0.8)):
        assert list(record.spread) == [name for name in record.metrics if name in ("sink", "prev_token", "entropy")]


def test_texts_that_cannot_show_anything_have_no_label():
    adjusted = np.array([[0.5], [np.nan], [0.6], [0.2]])
    values = {name: Values(adjusted, adjusted * 0) for name in ("sink_adjusted", "relative_entropy")}
    facts = LayerFacts("self", 0, (0,), 1, None, (0,))
    sums = LayerSums.of(values, CALIBRATED)
    assert {n: c.tolist() for n, c in sums.labels.items() if c.any()} == {"attention_sink": [2], "focused": [1]}
    (record,) = head_records(facts, sums, CALIBRATED, (), (0,))
    assert (record.pattern, record.stability, record.second, record.second_share) == (
        "attention_sink",
        2 / 3,
        "focused",
        1 / 3,
    )
    nothing = {"sink_adjusted": Values(np.full((3, 1), np.nan), np.full((3, 1), np.nan))}
    (record,) = head_records(facts, LayerSums.of(nothing, CALIBRATED), CALIBRATED, (), (0,))
    assert (record.pattern, record.stability) == ("unmeasurable", None)


# ------------------------------------------------------------------ sums
def same(one, two):
    """Assert that two sums are the same, counts exactly and all else to rounding."""
    assert one.names == two.names and one.texts == two.texts
    assert {n: c.tolist() for n, c in one.labels.items()} == {n: c.tolist() for n, c in two.labels.items()}
    for left, right in ((one.values, two.values), (one.chances, two.chances)):
        for name in one.names:
            for part, array in left[name].to_arrays().items():
                other = getattr(right[name], part)
                assert array.dtype == other.dtype and array.shape == (3,)
                assert array == pytest.approx(other, rel=1e-12, abs=1e-14, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(texts_of_metrics(), texts_of_metrics(), texts_of_metrics())
def test_sums_add_up_in_any_order_where_metrics_differ(a, b, c):
    one, two, three = (LayerSums.of(values, SEED) for values in (a, b, c))
    whole = one + two + three
    same(whole, one + (two + three))
    same(whole, three + one + two)
    names = sorted({*a, *b, *c})
    texts = [len(next(iter(v.values())).value) for v in (a, b, c)]
    missing = Values(*(np.full((5, 3), np.nan),) * 2)
    joined = {
        name: Values(
            *(
                np.concatenate([getattr(v.get(name, missing), f)[:n] for v, n in zip((a, b, c), texts, strict=True)])
                for f in ("value", "chance")
            )
        )
        for name in names
    }
    same(whole, LayerSums.of(joined, SEED))


@settings(max_examples=20, deadline=None)
@given(texts_of_metrics(), texts_of_metrics())
def test_sums_are_stored_and_come_back(a, b):
    sums, file = LayerSums.of(a, CALIBRATED) + LayerSums.of(b, SEED), io.BytesIO()
    np.savez(file, **sums.to_arrays())
    file.seek(0)
    with np.load(file, allow_pickle=False) as stored:
        back = LayerSums.from_arrays(stored)
    same(back, sums)
    assert isinstance(back.texts, int)
    for name, array in sums.to_arrays().items():
        assert np.array_equal(array, back.to_arrays()[name], equal_nan=array.dtype.kind == "f")


def test_label_counts_are_exact_and_of_each_head():
    values = seed_values(0.9, 0.1, 0.5)
    values["sink"].value[0, 1] = 0.0
    sums = LayerSums.of(values, SEED)
    assert tuple(sums.labels) == SEED.labels and sums.texts == 3 and sums.labelled.tolist() == [3, 3, 3]
    assert sums.labels["attention_sink"].tolist() == [2, 1, 2] and sums.labels["broad"].tolist() == [1, 2, 1]
    twice = sums + sums
    assert twice.labels["attention_sink"].tolist() == [4, 2, 4] and twice.labels["broad"].dtype == np.int64


def test_facts_of_a_layer_with_and_without_all_its_heads():
    site = find_sites(build_family("llama"))[1]
    whole = SiteFacts(site, num_heads=4, num_kv_heads=2, head_dim=8)
    assert LayerFacts.of(whole) == LayerFacts("self", 1, (0, 1, 2, 3), 2, 8, (0, 0, 1, 1))
    set_pruned_state(site.module, HeadState(num_heads=8, num_kv_heads=4, head_dim=8, value_dim=8, removed=(0, 1, 5)))
    facts = LayerFacts.of(SiteFacts(site, num_heads=5, num_kv_heads=3, head_dim=None))
    assert facts == LayerFacts("self", 1, (2, 3, 4, 6, 7), 3, None, (1, 1, 2, 3, 3))
    assert facts.num_heads == 5 and [facts.kv_head(head) for head in (2, 4, 7)] == [1, 2, 3]
    with pytest.raises(ValueError, match="not in tuple"):
        facts.kv_head(5)
