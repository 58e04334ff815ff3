"""Sums over streamed weights, by kind of key, by cell and by column, against the same sums over whole matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.attention import tiles
from headscope.attention.streaming import StreamedWeights
from headscope.attention.survey import Wanted
from headscope.attention.tiles import Terms
from headscope.attention.visibility import Target, Visibility
from headscope.capture import blocks as rows_of
from headscope.capture.blocks import RowBlock, StreamedRows
from headscope.capture.key_tokens import REPEATS, SUCCESSORS, KeyTokens
from headscope.heads.catalogue.kinds import OTHER_SPECIAL, PUNCTUATION

# Rows and cells of a tile: one row, odd heights, whole examples together.
TILES = [(1, 64), (3, 64), (7, 700), (16, 1024), (128, 1 << 19)]


@st.composite
def computations(draw):
    """Queries, keys, what they see, terms, and how far rounded scores may be off."""
    torch.manual_seed(draw(st.integers(0, 10_000)))
    batch, kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    # Tiles hold 128 keys or more: the longest take several.
    rows, width = draw(st.sampled_from([1, 2, 9, 40, 131])), draw(st.sampled_from([1, 8]))
    keys = draw(st.sampled_from([rows, rows, rows, 5, 150]))
    heads, causal = kv_heads * groups, keys == rows and draw(st.booleans())
    padding = torch.arange(keys) < torch.randint(1, keys + 1, (batch, 1))
    masks = {
        "none": None,
        "padding": padding[:, None, None],
        "cells": torch.rand(batch, 1, rows, keys) < 0.3,
        "heads": torch.rand(1, heads, rows, keys) < 0.7,
        "window": torch.ones(1, 1, rows, keys, dtype=torch.bool).triu(-3).tril(3),
        "padded window": torch.ones(1, 1, rows, keys, dtype=torch.bool).triu(-5) & padding[:, None, None],
    }
    # The largest make scores that need a second pass with each row's own maximum.
    size = draw(st.sampled_from([0.3, 3.0, 400.0]))
    bias = torch.randn(draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), rows, keys)
    terms = Terms(
        scaling=size / width**0.5,
        softcap=draw(st.sampled_from([None, None, 20.0])),
        biases=(bias,) if draw(st.booleans()) else (),
        sinks=torch.randn(1, heads, draw(st.sampled_from([1, rows]))) if draw(st.integers(0, 2)) == 0 else None,
        sinks_scale_context=draw(st.booleans()),
    )
    view = Visibility(rows, keys, causal, masks[draw(st.sampled_from(list(masks)))])
    query, key = torch.randn(batch, heads, rows, width), torch.randn(batch, kv_heads, keys, width) + 1
    tolerance = 1e-5 * max(1.0, size * float(key.abs().max()))
    return query, key, view, terms, tolerance


def plain(query, key, view, terms):
    """Weights in float64, (batch, head, query, key)."""
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.double() @ key.mT * terms.scaling
    if terms.softcap:
        scores = (scores / terms.softcap).tanh() * terms.softcap
    scores = sum((bias.double() for bias in terms.biases), scores)
    seen = torch.ones(view.rows, view.keys, dtype=torch.bool)
    seen = seen.tril() if view.causal else seen
    scores = scores.masked_fill(~(seen if view.open is None else seen & view.open), -torch.inf)
    sinks = None if terms.sinks_scale_context else terms.sinks
    column = torch.full_like(scores[..., :1], -torch.inf) if sinks is None else sinks.double()[..., None]
    with_sink = torch.cat([scores, column.expand_as(scores[..., :1])], dim=-1)
    blind = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return with_sink.masked_fill(blind, 0).softmax(dim=-1)[..., :-1].masked_fill(blind, 0)


def close(name, ours, theirs, tolerance):
    assert ours.shape == theirs.shape, name
    assert float((ours - theirs).abs().max()) < tolerance, name


@settings(max_examples=60, deadline=None)
@given(computations(), st.sampled_from(TILES))
def test_every_sum_equals_that_over_the_whole_matrix(computation, sizes):
    query, key, view, terms, tolerance = computation
    batch, rows, keys = len(query), view.rows, view.keys
    kinds = {
        "few": torch.rand(batch, keys) < 0.2,
        "many": torch.rand(batch, keys) < 0.9,
        "none": torch.zeros(batch, keys) > 0,
    }
    grids = {
        "a": torch.rand(batch, rows, keys) < 0.1,
        "b": torch.rand(batch, rows, keys) < 0.6,
        "empty": torch.zeros(batch, rows, keys) > 0,
    }
    counted = torch.rand(batch, rows) < 0.8

    def cells_of(grid):
        def listed(of_rows, of_keys):
            example, row, place = grid[:, of_rows, of_keys].nonzero(as_tuple=True)
            return example, row + of_rows.start, place + of_keys.start

        return listed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ROWS", sizes[0])
        patch.setattr(tiles, "tile_cells", lambda device: sizes[1])
        streamed = StreamedWeights(query, key, key, view, terms)
        context = streamed.context
        wanted = Wanted(kinds, {name: cells_of(grid) for name, grid in grids.items()}, counted)
        found = streamed.survey(wanted)
        assert torch.equal(context, streamed.context), "what is looked at on the way changes nothing"
        assert streamed.survey(wanted) is found
        dense = streamed.rows(range(rows)).double()
    # Large scores are rounded a little differently wherever they are computed anew.
    for weights, near in ((dense, 2e-5 + tolerance / 10), (plain(query, key, view, terms), tolerance)):
        close("largest", found.largest, weights.amax(dim=-1), near)
        for name, columns in kinds.items():
            close(name, found.on[name], (weights * columns[:, None, None]).sum(dim=-1), near)
        for name, grid in grids.items():
            close(name, found.onto[name], (weights * grid[:, None]).sum(dim=-1), near)
        for parity in (0, 1):
            half = counted & (torch.arange(rows) % 2 == parity)
            expected = (weights * half[:, None, :, None]).sum(dim=2)
            close(f"received {parity}", found.received[:, :, parity], expected, near * rows)


def test_large_scores_really_take_the_second_pass():
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 30, 8) * 30, torch.randn(1, 1, 30, 8) * 30
    streamed = StreamedWeights(query, key, key, Visibility(30, 30, causal=True), Terms(1.0))
    assert streamed._sums.shift is not None
    found = streamed.survey(Wanted({}, {}, torch.ones(1, 30, dtype=torch.bool)))
    weights = streamed.rows(range(30))
    # Scores as large as these differ in their last digits however they are computed: the first key's is computed once.
    weights[..., 0] = streamed.at(Target(key=0))
    close("received", found.received.sum(dim=2), weights.sum(dim=2), 1e-5)
    close("largest", found.largest, weights.amax(dim=-1), 1e-6)


# ------------------------------------------------------------------ rows for consumers
@st.composite
def surveyed(draw):
    """Streamed rows that know their tokens, and the same rows with weights."""
    query, key, view, terms, tolerance = draw(computations())
    batch, keys, cross = len(query), view.keys, view.rows != view.keys
    lengths = torch.randint(1, keys + 1, (batch,))
    special, marked = torch.rand(batch, keys) < 0.2, torch.rand(batch, keys) < 0.3
    tokens = KeyTokens(
        torch.randint(0, 6, (batch, keys)), special, lengths, {OTHER_SPECIAL: special, PUNCTUATION: marked}
    )
    weights = StreamedWeights(query, key, key, view, terms)
    lengths = torch.randint(1, view.rows + 1, (batch,)) if cross else lengths
    valid = (torch.arange(view.rows) < lengths[:, None])[:, None]
    facts = (valid, view, special, lengths, cross, 0)
    streamed = StreamedRows(0, *facts, weights=weights, tokens=tokens)
    return streamed, RowBlock(0, *facts, weights=weights.rows(range(view.rows)), tokens=tokens), tolerance


@settings(max_examples=60, deadline=None)
@given(surveyed(), st.booleans(), st.sampled_from([1, 900, 1 << 19]))
def test_streamed_rows_tell_the_same_of_tokens_as_rows_with_weights(both, rest, cells):
    streamed, whole, tolerance = both
    if rest:
        streamed, whole = streamed.without_first(), whole.without_first()
    # Rows with next to nothing left beside the first key do not count, and are not well known.
    counted = (streamed.valid & whole.valid).expand(streamed.weights.shape[:3])
    near = tolerance * (1000 if rest else 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_of, "BLOCK_CELLS", cells)
        for name in (OTHER_SPECIAL, PUNCTUATION):
            close(name, streamed.on_kind(name) * counted, whole.on_kind(name) * counted, near)
            close(name, whole.on_kind(name), (whole.weights * whole.kind(name)[:, None, None]).sum(dim=-1), 1e-5)
        for name in () if streamed.cross else (REPEATS, SUCCESSORS):
            close(name, streamed.onto(name) * counted, whole.onto(name) * counted, near)
            assert torch.equal(streamed.counts_of(name), whole.counts_of(name))
        close("largest", streamed.largest() * counted, whole.largest() * counted, near)
        if not rest:
            close("received", streamed.received() / streamed.size, whole.received() / streamed.size, near)
        else:
            parts = sum(block.received() for block in streamed.blocks())
            close("received", streamed.received(), parts, 1e-4 * streamed.size)


@settings(max_examples=60, deadline=None)
@given(surveyed(), st.integers(1, 50))
def test_what_keys_receive_in_blocks_adds_up(both, step):
    """Blocks may begin at odd rows; padded rows give nothing, whatever is in them."""
    _, whole, _ = both
    real = (whole.positions < whole.lengths[:, None])[:, None, :, None]
    broken = whole.weights.masked_fill(~real, torch.nan)
    received = torch.zeros(*whole.weights.shape[:2], 2, whole.view.keys)
    for start in range(0, whole.size, step):
        part = slice(start, start + step)
        facts = (whole.view, whole.special, whole.lengths, whole.cross, 0)
        block = RowBlock(start, whole.valid[..., part], *facts, weights=broken[:, :, part], tokens=whole.tokens)
        received += block.received()
    for parity in (0, 1):
        expected = (whole.weights.double() * real)[:, :, parity::2].sum(dim=2)
        close("received", received[:, :, parity], expected, 1e-4)
