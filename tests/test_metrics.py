"""Every metric against the plain NumPy of `tests/reference.py`: random matrices, masks, lengths and block sizes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.attention.visibility import Visibility
from headscope.capture import feed
from headscope.capture.feed import Axis, Matrix, blocks
from headscope.errors import InputError
from headscope.heads.metrics import METRICS, chosen, metric_names, variant
from headscope.heads.statistics import HeadStatistics
from tests import reference

LAYER = ("self", 0)
REST = tuple(n for n in METRICS if n != "sink")


def random_matrix(seed, lengths, heads, causal, window, *, cross_keys=None, sharp=1.0, unseen=0.0):
    """A padded batch of attention matrices as a model would give it, and its special tokens."""
    rng = np.random.default_rng(seed)
    n, keys = max(lengths), cross_keys or max(lengths)
    key_lengths = [cross_keys] * len(lengths) if cross_keys else lengths
    seen = np.zeros((len(lengths), 1, n, keys), bool)
    for b, (length, key_length) in enumerate(zip(lengths, key_lengths, strict=True)):
        seen[b, 0, :length, :key_length] = reference.visibility(length, key_length, causal=causal, window=window)
        seen[b, 0, length:, :key_length] = True
    scores = rng.normal(size=(len(lengths), heads, n, keys)) * sharp
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    weights = weights / weights.sum(-1, keepdims=True) * (1 - unseen)
    special = rng.random((len(lengths), keys)) < 0.3
    special &= np.arange(keys) < np.array(key_lengths)[:, None]
    query = Axis(torch.tensor(lengths), torch.zeros(len(lengths), n, dtype=torch.bool))
    key = Axis(torch.tensor(key_lengths), torch.tensor(special))
    weights = torch.tensor(weights, dtype=torch.float32)
    return Matrix(weights, torch.tensor(seen), query, key, query.valid[:, None])


def measure(matrix, names, cross=False):
    statistics = HeadStatistics(tuple(variant(n) for n in names))
    for block in blocks(matrix, cross):
        statistics.add(LAYER, block)
    return statistics.finish()[LAYER]


def close(ours, theirs):
    if theirs is None:
        assert np.isnan(ours)
    else:
        assert abs(ours - theirs) < 1e-5, (ours, theirs)


shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "lengths": st.lists(st.integers(1, 12), min_size=1, max_size=3),
        "heads": st.integers(1, 3),
        "causal": st.booleans(),
        "window": st.sampled_from([None, 1, 2, 4]),
        "sharp": st.sampled_from([0.0, 1.0, 30.0]),
        "unseen": st.sampled_from([0.0, 0.4, 0.999999, 1.0]),
    }
)


@settings(max_examples=40, deadline=None)
@given(shapes, st.sampled_from([1, 37, 1 << 19]))
def test_metrics_equal_plain_numpy(shape, cells):
    matrix = random_matrix(**shape)
    before = matrix.weights.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "BLOCK_CELLS", cells)
        ours = measure(matrix, (*METRICS, *(f"{n}_rest" for n in REST), *adjusted_names()))
    assert torch.equal(matrix.weights, before)
    for b, n in enumerate(shape["lengths"]):
        for h in range(shape["heads"]):
            weights = matrix.weights[b, h, :n, :n].numpy()
            visible, special = matrix.visible[b, 0, :n, :n].numpy(), matrix.key.special[b, :n].numpy()
            measured = reference.metrics(weights, visible, special)
            for name, value in measured.items():
                close(ours[name].value[b, h], value)
            for name, value in reference.chance(visible, special).items():
                # Chance is that of the same rows, and there may be none: with all attention on an unseen sink.
                close(ours[name].chance[b, h], None if measured[name] is None else value)
            rest, chance = reference.rest(weights, visible, special)
            for name in REST:
                close(ours[f"{name}_rest"].value[b, h], rest[name])
                close(ours[f"{name}_rest"].chance[b, h], chance[name])
            for name, value in reference.adjusted(weights, visible).items():
                close(ours[f"{name}_adjusted"].value[b, h], value)
                close(ours[f"{name}_adjusted"].chance[b, h], None if value is None else 0.0)


def adjusted_names():
    return tuple(n for n in metric_names() if n.endswith("_adjusted"))


def test_chance_is_that_of_each_layers_own_rows():
    """Layers share what they may see; which rows still have weight without the first key is each one's own."""
    first, second = (random_matrix(seed, [5, 3], 2, True, None) for seed in (0, 1))
    first.weights[:, :, 2:, 1:] = 0
    first.weights[:, :, 2:, 0] = 1
    view = Visibility(5, 5, open=first.visible)
    statistics = HeadStatistics(
        tuple(variant(n) for n in ("self_attend", "self_attend_rest", "self_attend_adjusted_rest"))
    )
    # Both see the very same keys, with the same special tokens and lengths.
    second = replace(second, query=first.query, key=first.key, valid=first.valid)
    for layer, matrix in enumerate((first, second)):
        for block in blocks(matrix, False, view):
            statistics.add(("self", layer), block)
    found = statistics.finish()
    for layer, matrix in enumerate((first, second)):
        for b, n in enumerate((5, 3)):
            weights, visible = matrix.weights[b, 0, :n, :n].numpy(), matrix.visible[b, 0, :n, :n].numpy()
            values, chances = reference.rest(weights, visible, np.zeros(n, bool))
            ours = found["self", layer]["self_attend_rest"]
            close(ours.value[b, 0], values["self_attend"])
            close(ours.chance[b, 0], chances["self_attend"])
    assert not np.allclose(found["self", 0]["self_attend_rest"].chance, found["self", 1]["self_attend_rest"].chance)
    assert statistics.finish() == {}, "the sums start anew"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 9))
def test_cross_attention_measures_only_what_makes_sense(seed, lengths, keys):
    matrix = random_matrix(seed, lengths, 2, False, None, cross_keys=keys)
    ours = measure(matrix, METRICS, cross=True)
    for b, n in enumerate(lengths):
        weights = matrix.weights[b, 0, :n].numpy()
        visible, special = np.ones((n, keys), bool), matrix.key.special[b].numpy()
        expected = reference.metrics(weights, visible, special, cross=True)
        for name, value in expected.items():
            if name in ours:
                close(ours[name].value[b, 0], value)
            else:
                assert value is None


def test_uniform_causal_attention_has_its_closed_forms():
    for n in (2, 4, 8, 64):
        harmonic = sum(1 / k for k in range(1, n + 1))
        uniform = torch.tensor(reference.uniform(np.tril(np.ones((n, n), bool))), dtype=torch.float32)[None, None]
        axis = Axis.plain(1, n, torch.device("cpu"))
        matrix = Matrix(uniform, uniform > 0, axis, axis, axis.valid[:, None])
        ours = measure(matrix, (*METRICS, *adjusted_names()))
        for name, value in {
            "sink": harmonic / n,
            "self_attend": harmonic / n,
            "prev_token": (harmonic - 1) / (n - 1),
            "entropy": np.log(np.arange(1, n + 1)).sum() / n,
            "relative_entropy": 1.0,
            "sink_adjusted": 0.0,
        }.items():
            assert ours[name].value[0, 0] == pytest.approx(value, abs=1e-6)
            if "adjusted" not in name:
                assert ours[name].chance[0, 0] == pytest.approx(value, abs=1e-6)


def test_one_token_is_measured_where_it_can_be():
    axis = Axis.plain(1, 1, torch.device("cpu"))
    matrix = Matrix(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1, dtype=torch.bool), axis, axis, axis.valid[:, None])
    ours = measure(matrix, metric_names())
    assert ours["sink"].value[0, 0] == ours["sink"].chance[0, 0] == 1
    assert ours["entropy"].value[0, 0] == pytest.approx(0, abs=1e-6)
    for name in ("prev_token", "next_token", "relative_entropy", "sink_adjusted", "entropy_rest", "self_attend_rest"):
        assert np.isnan(ours[name].value[0, 0])


def test_names_that_cannot_be():
    for name in ("sinks", "sink_rest", "entropy_adjusted", "prev_token_rest_adjusted", "", "_rest"):
        with pytest.raises(InputError, match="unknown metric"):
            variant(name)
    with pytest.raises(InputError, match="names no metric") as error:
        chosen(" , ")
    assert error.value.hint == f"Known metrics: {', '.join(metric_names())}."
    with pytest.raises(InputError, match="metrics"):
        chosen(5)
    assert chosen("entropy, sink,entropy") == ("entropy", "sink")
    assert set(chosen("all")) == set(metric_names()) > set(chosen("core"))
    for name in metric_names():
        assert variant(name).name == name
