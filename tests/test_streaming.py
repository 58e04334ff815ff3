"""Attention without its matrix against plain float64 attention with it: context, weights, all that is asked of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.attention import tiles
from headscope.attention.streaming import StreamedWeights
from headscope.attention.tiles import Terms
from headscope.attention.visibility import Target, Visibility
from headscope.capture import blocks as rows_of
from headscope.capture.blocks import RowBlock, StreamedRows
from headscope.capture.uniform import UniformRows

TARGETS = (Target(key=0), Target(key=3), Target(offset=0), Target(offset=-1), Target(offset=1), Target(offset=-200))


def plain(query, key, value, visibility, terms):
    """Context (batch, query, head, dim) and weights (batch, head, query, key), in float64 and with whole matrices."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query.double() @ key.mT * terms.scaling
    if terms.softcap:
        scores = (scores / terms.softcap).tanh() * terms.softcap
    for bias in terms.biases:
        scores = scores + bias.double()
    scores = scores.masked_fill(~seen(visibility), -torch.inf)
    blind = (scores == -torch.inf).all(dim=-1, keepdim=True)
    sinks = -torch.inf if terms.sinks is None else terms.sinks.double()[..., None]
    with_sink = torch.cat([scores, torch.zeros_like(scores[..., :1]) + sinks], dim=-1)
    weights = with_sink.masked_fill(blind, 0).softmax(dim=-1)[..., :-1].masked_fill(blind, 0)
    nothing = value.mean(dim=2, keepdim=True) * (terms.sinks is None)
    context = torch.where(blind, nothing, weights @ value)
    if terms.sinks_scale_context:
        weights = scores.masked_fill(blind, 0).softmax(dim=-1).masked_fill(blind, 0)
    return context.transpose(1, 2), weights


def seen(visibility):
    """bool, (batch or 1, head or 1, query, key)."""
    cells = torch.ones(1, 1, visibility.rows, visibility.keys, dtype=torch.bool)
    if visibility.causal:
        cells = cells.tril()
    return cells if visibility.open is None else cells & visibility.open


@st.composite
def computations(draw):
    """Shapes, masks, biases, sinks, caps and score sizes of every kind."""
    torch.manual_seed(draw(st.integers(0, 10_000)))
    batch, kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows, width = draw(st.sampled_from([1, 2, 5, 17, 70, 130])), draw(st.sampled_from([1, 4, 16]))
    cross = draw(st.integers(0, 4)) == 0
    keys = draw(st.sampled_from([1, 4, 33, 140])) if cross else rows
    heads, chance = kv_heads * groups, draw(st.sampled_from([0.1, 0.7]))
    masks = {
        "none": lambda: None,
        "padding": lambda: torch.rand(batch, 1, 1, keys) < chance,
        "cells": lambda: torch.rand(1, 1, rows, keys) < chance,
        "heads": lambda: torch.rand(batch, heads, rows, keys) < chance,
        "window": lambda: torch.ones(1, 1, rows, keys, dtype=torch.bool).triu(-3),
    }
    size = draw(st.sampled_from([0.3, 1.0, 10.0, 300.0]))
    bias = torch.randn(draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), rows, keys) * 2
    terms = Terms(
        scaling=size / width**0.5,
        softcap=draw(st.sampled_from([None, None, 30.0])),
        biases=(bias,) if draw(st.booleans()) else (),
        sinks=torch.randn(1, heads, draw(st.sampled_from([1, rows]))) if draw(st.integers(0, 2)) == 0 else None,
        sinks_scale_context=draw(st.booleans()),
    )
    visibility = Visibility(rows, keys, not cross and draw(st.booleans()), masks[draw(st.sampled_from(list(masks)))]())
    key = torch.randn(batch, kv_heads, keys, width) + draw(st.sampled_from([0.0, 3.0]))
    query, value = torch.randn(batch, heads, rows, width), torch.randn(batch, kv_heads, keys, draw(st.integers(1, 5)))
    # Scores are rounded to float32, so weights are known as well as the largest score is.
    tolerance = 1e-5 * max(1.0, size * float(key.abs().max()))
    return query, key, value, visibility, terms, tolerance


def check(name, ours, theirs, tolerance):
    assert ours.shape == theirs.shape, name
    assert float((ours - theirs).abs().max()) < tolerance, name


@settings(max_examples=150, deadline=None)
@given(computations(), st.sampled_from([(1, 64), (16, 1024), (64, 1 << 18)]))
def test_everything_equals_plain_attention(computation, sizes):
    query, key, value, visibility, terms, tolerance = computation
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ROWS", sizes[0])
        patch.setattr(tiles, "tile_cells", lambda device: sizes[1])
        patch.setattr(tiles, "TARGET_ROWS", 7)
        found = StreamedWeights(query, key, value, visibility, terms)
        context = found.context
        expected, weights = plain(query, key, value, visibility, terms)
        check("context", context, expected, tolerance)
        for first in (True, False):
            check_sums(found, weights, first, tolerance)
        for target in TARGETS:
            keys = target.positions(torch.arange(visibility.rows))
            index = keys.clamp(0, visibility.keys - 1)[:, None].expand(*weights.shape[:3], 1)
            exists = (keys >= 0) & (keys < visibility.keys)
            check(str(target), found.at(target) * exists, weights.gather(-1, index)[..., 0] * exists, tolerance)
        start = visibility.rows // 3
        check("rows", found.rows(range(start, visibility.rows)), weights[:, :, start:], tolerance)


def check_sums(found, weights, first, tolerance):
    """What is summed over keys, with and without the first one."""
    kept = weights.clone()
    kept[..., 0] *= first
    total = kept.sum(dim=-1)
    check("total", found.total(first), total, tolerance)
    scaled = kept / total.clamp(min=1e-300)[..., None]
    enough = total > 1e-3
    of = scaled if not first else kept
    entropy = -torch.special.xlogy(of, of).sum(dim=-1)
    check("entropy", found.entropy(first) * enough, entropy * enough, tolerance)
    if first:
        entropy = -torch.special.xlogy(scaled, scaled).sum(dim=-1)
        check("scaled entropy", found.entropy(scaled=True) * enough, entropy * enough, tolerance)
    check("largest", found.largest(first), kept.amax(dim=-1), tolerance)
    columns = torch.rand(1, weights.shape[-1]) < 0.5
    check("columns", found.on(columns, first), (kept * columns[:, None, None]).sum(dim=-1), tolerance)
    away = (torch.arange(weights.shape[2])[:, None] - torch.arange(weights.shape[3])).abs()
    check(
        "distance",
        found.distance(first) / max(weights.shape[2:]),
        (kept * away).sum(dim=-1) / max(weights.shape[2:]),
        tolerance,
    )


def test_scores_far_beyond_the_range_of_powers_of_two():
    """Sums that would overflow, or vanish, are made again with each row's own maximum."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 40, 8) * 40, torch.randn(1, 1, 40, 8) * 40, torch.randn(1, 1, 40, 8)
    found = StreamedWeights(query, key, value, Visibility(40, 40, causal=True), Terms(1.0))
    context = found.context
    expected, weights = plain(query, key, value, Visibility(40, 40, causal=True), Terms(1.0))
    assert (query @ key.mT).abs().max() > 5000
    check("context", context, expected, 5e-3)
    check("rows", found.rows(range(40)), weights, 5e-3)
    assert bool(torch.isfinite(found.entropy()).all())


def test_a_sink_that_takes_everything():
    query = torch.randn(1, 2, 6, 4)
    terms = Terms(0.5, sinks=torch.tensor([[[500.0], [0.0]]]))
    found = StreamedWeights(query, query, query, Visibility(6, 6), terms)
    context = found.context
    assert float(found.total()[0, 0].max()) < 1e-20 and float(context[0, :, 0].abs().max()) < 1e-20
    assert float(found.total()[0, 1].min()) > 0.1 and bool(torch.isfinite(found.entropy()).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    """Statistics are those of the same queries and keys in float32, whatever the model would round on the way."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 90, 16).to(dtype) for heads in (6, 2, 2))
    found = StreamedWeights(query, key, value, Visibility(90, 90, causal=True), Terms(0.25))
    context = found.context
    expected, weights = plain(query, key, value, Visibility(90, 90, causal=True), Terms(0.25))
    assert context.dtype == dtype
    check("context", context.double(), expected, torch.finfo(dtype).eps * float(expected.abs().max()))
    check("rows", found.rows(range(90)), weights, 1e-6)


# ------------------------------------------------------------------ rows for consumers
@settings(max_examples=60, deadline=None)
@given(computations(), st.booleans(), st.sampled_from([1, 300, 1 << 19]))
def test_streamed_rows_answer_as_rows_with_weights_do(computation, rest, cells):
    query, key, value, visibility, terms, tolerance = computation
    found = StreamedWeights(query, key, value, visibility, terms)
    batch, _, rows, keys = found.shape
    valid = torch.rand(batch, 1, rows) < 0.8
    special = torch.rand(1, keys) < 0.3
    facts = (valid, visibility, special, torch.full((batch,), rows), rows != keys, 0)
    streamed = StreamedRows(0, *facts, weights=found)
    whole = RowBlock(0, *facts, weights=found.rows(range(rows)))
    if rest:
        streamed, whole = streamed.without_first(), whole.without_first()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_of, "BLOCK_CELLS", cells)
        pieces = list(streamed.blocks())
    check("weights", torch.cat([p.weights for p in pieces], dim=2), whole.weights, tolerance)
    assert torch.equal(torch.cat([p.valid for p in pieces], dim=2), whole.valid) or rest
    # Rows with next to nothing left beside the first key are not counted, and not well known.
    counted = (streamed.valid & whole.valid).expand(found.shape[:3])
    near = tolerance * (1000 if rest else 1)
    for name in ("total", "entropy", "distance", "largest"):
        ours, theirs = getattr(streamed, name)() * counted, getattr(whole, name)() * counted
        check(name, ours / max(rows, keys), theirs / max(rows, keys), near)
    for columns in (special, torch.rand(1, keys) < 0.9):
        check("on", streamed.on(columns) * counted, whole.on(columns) * counted, near)
    for target in TARGETS:
        there = counted & streamed.has(target)
        check(str(target), streamed.at(target) * there, whole.at(target) * there, near)
    ours = streamed.from_weights(lambda block: (block.weights**2).sum(dim=-1))
    check("from weights", ours * counted, (whole.weights**2).sum(dim=-1) * counted, near)


@settings(max_examples=60, deadline=None)
@given(computations(), st.booleans(), st.integers(0, 20))
def test_uniform_rows_are_those_of_uniform_weights(computation, rest, start):
    visibility = dataclasses.replace(computation[3], _known={})
    rows, keys = visibility.rows, visibility.keys
    cells = seen(visibility).any(dim=1, keepdim=True).double()
    cells[..., 0] *= not rest
    start = min(start, rows - 1)
    weights = (cells / cells.sum(dim=-1, keepdim=True).clamp(min=1))[:, :, start:]
    valid, special = torch.ones(len(cells), 1, rows - start, dtype=torch.bool), torch.rand(1, keys) < 0.4
    even = UniformRows(start, valid, visibility, special, torch.full((len(cells),), rows), False, int(rest))
    whole = RowBlock(start, valid, visibility, special, even.lengths, False, int(rest), weights=weights.float())
    for name in ("total", "entropy", "distance", "largest"):
        ours, theirs = getattr(even, name)(), getattr(whole, name)()
        check(name, ours.expand(theirs.shape), theirs, 1e-4 if name == "distance" else 1e-5)
    check("on", even.on(special).expand(whole.total().shape), whole.on(special), 1e-6)
    for target in TARGETS:
        exists = even.has(target)
        check(str(target), (even.at(target) * exists).expand(whole.total().shape), whole.at(target) * exists, 1e-6)
    assert torch.equal(torch.cat([b.weights for b in even.blocks()], dim=2), whole.weights)


@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
def test_large_values_beside_large_powers(size):
    """A sum of powers that is within float32 may not be so times the values."""
    torch.manual_seed(0)
    query, key = torch.ones(1, 1, 40, 1), torch.zeros(1, 1, 40, 1)
    key[:, :, 5] = 83.0  # 2 to the power of 117 above the mean key's score
    value = size * torch.randn(1, 1, 40, 4)
    view = Visibility(40, 40)
    found = StreamedWeights(query, key, value, view, Terms(1.0))
    context = found.context
    check("context", context, plain(query, key, value, view, Terms(1.0))[0], 1e-5 * size)


@pytest.mark.parametrize("keys", [3000, 5000])
def test_the_entropy_of_the_seed_rules_at_length(keys):
    """What 1e-9 in the logarithm takes off is estimated from a sample of rows where there are many keys."""
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, keys, 8), torch.randn(1, 1, keys, 8)
    for scaling in (0.0, 0.3, 3.0):
        view = Visibility(keys, keys, causal=True)
        found = StreamedWeights(query, key, key, view, Terms(scaling))
        axis = torch.zeros(1, keys, dtype=torch.bool)
        rows = StreamedRows(0, ~axis[:, None], view, axis, torch.tensor([keys]), False, 0, weights=found)
        exact = []
        for start in range(0, keys, 500):
            weights = plain(
                query[:, :, start : start + 500], key, key, _part(view, start, min(start + 500, keys)), Terms(scaling)
            )[1]
            exact.append(-(weights * (weights + 1e-9).log()).sum(dim=-1))
        assert abs(float(rows.entropy().double().mean() - torch.cat(exact, dim=-1).mean())) < 2e-6


def _part(view, start, stop):
    return Visibility(stop - start, view.keys, open=view.cells(start, stop, torch.device("cpu")))


# ------------------------------------------------------------------ visibility
@settings(max_examples=80, deadline=None)
@given(computations())
def test_visibility_answers_from_its_mask(computation):
    visibility, cpu = computation[3], torch.device("cpu")
    cells = seen(visibility)
    some = cells.any(dim=1, keepdim=True)
    assert torch.equal(visibility.cells(0, visibility.rows, cpu), some)
    if visibility.open is None or visibility.open.shape[1] == 1:
        assert torch.equal(visibility.counts(cpu).expand(len(some), 1, -1), some.sum(dim=-1))
    for start in range(0, visibility.rows, 29):
        stop = min(start + 29, visibility.rows)
        low, high = visibility.span(start, stop)
        part = cells[:, :, start:stop]
        assert not bool(part[..., :low].any()) and not bool(part[..., high:].any())
        if low < high:
            shown = torch.ones_like(part[..., low:high])
            closed = visibility.closed(start, stop, low, high, cpu)
            if closed is not None:
                shown &= ~closed
            later = visibility.later(start, stop, high, cpu)
            if later is not None:
                first = max(low, start)
                shown[..., first - low :] &= later[..., first - start :] == 0
            assert torch.equal(shown, part[..., low:high])
    blind = ~cells.any(dim=-1)
    seeing = visibility.seeing()
    assert torch.equal(blind, torch.zeros_like(blind) if seeing is None else ~seeing.expand(blind.shape))
