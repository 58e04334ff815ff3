"""Attention that is spread evenly, or all on one key a row, against NumPy matrices of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.attention import visibility
from headscope.attention.visibility import Target, Visibility
from headscope.capture.blocks import RowBlock
from headscope.capture.key_tokens import REPEATS, SUCCESSORS, KeyTokens
from headscope.capture.uniform import UniformRows, pointing

TARGETS = (Target(key=0), Target(key=2), Target(offset=0), Target(offset=-1), Target(offset=1), Target(offset=-9))


@st.composite
def rows_with_weights(draw):
    """Rows of some layer from any row on, the cells that they see, (batch, rows, keys), and their tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    batch, size, first_row = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(0, 4))
    first_row = min(first_row, size - 1)
    causal, some = draw(st.booleans()), draw(st.booleans())
    first_key = draw(st.sampled_from([0, 1]))
    grid = np.tril(np.ones((size, size), bool)) if causal else np.ones((size, size), bool)
    mask = rng.random((batch, 1, size, size)) < 0.6
    view = Visibility(size, size, causal, torch.tensor(mask) if some else None)
    cells = np.broadcast_to(grid, (batch, size, size)) & (mask[:, 0] if some else True)
    stop = draw(st.integers(first_row + 1, size))
    cells = cells[:, first_row:stop].copy()
    cells[..., :first_key] = False
    lengths = torch.tensor(rng.integers(1, size + 1, batch))
    special = torch.tensor(rng.random((batch, size)) < 0.3)
    ids = torch.tensor(rng.integers(0, 3, (batch, size)))
    tokens = KeyTokens(ids, special, lengths, {"marked": torch.tensor(rng.random((batch, size)) < 0.5)})
    weights = torch.tensor(rng.random((batch, 2, stop - first_row, size)), dtype=torch.float32)
    valid = torch.tensor(rng.random((batch, 1, stop - first_row)) < 0.8)
    facts = (valid, view, special, lengths, False, first_key)
    return RowBlock(first_row, *facts, weights=weights, tokens=tokens), cells


def close(ours: torch.Tensor, theirs: np.ndarray) -> None:
    """Results are (batch or 1, 1, rows)."""
    assert ours.shape[1] == 1
    assert np.allclose(np.broadcast_to(ours[:, 0].numpy(), theirs.shape), theirs, atol=2e-6)


@settings(max_examples=100, deadline=None)
@given(rows_with_weights(), st.sampled_from([1, 20, 1 << 22]))
def test_even_rows_answer_as_a_matrix_does(both, cells_at_once: int) -> None:
    rows, cells = both
    even = UniformRows.like(rows)
    assert even.num_heads == 1 and even.size == rows.size and even.tokens is rows.tokens
    count = cells.sum(axis=-1)
    share = 1 / np.maximum(count, 1)
    weights = cells * share[..., None]
    first, size = rows.first_row, rows.view.keys
    positions = np.arange(first, first + rows.size)
    away = np.abs(positions[:, None] - np.arange(size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visibility, "CELLS", cells_at_once)
        close(even.total(), (count > 0).astype(float))
        close(even.entropy(), -(weights * np.log(weights + 1e-9)).sum(axis=-1))
        close(even.largest(), weights.max(axis=-1))
        close(even.distance(), (weights * away).sum(axis=-1))
        close(even.on(rows.special), (weights * rows.special.numpy()[:, None]).sum(axis=-1))
        close(even.on_kind("marked"), (weights * rows.tokens.marks["marked"].numpy()[:, None]).sum(axis=-1))
        for name in (REPEATS, SUCCESSORS):
            related = rows.tokens.cells(name, slice(first, first + rows.size), slice(0, size)).numpy()
            close(even.onto(name), (weights * related).sum(axis=-1))
        for target in TARGETS:
            keys = [target.key if target.key is not None else int(p) + target.offset for p in positions]
            wanted = [weights[:, i, k] if 0 <= k < size else 0 * share[:, i] for i, k in enumerate(keys)]
            close(even.at(target), np.stack(wanted, axis=-1))
        real = weights * (positions < rows.lengths.numpy()[:, None])[..., None]
        by_parity = np.stack([real[:, positions % 2 == parity].sum(axis=1) for parity in (0, 1)], axis=1)
        received = even.received()
        assert received.shape[1:] == (1, 2, size)
        assert np.allclose(np.broadcast_to(received[:, 0].numpy(), by_parity.shape), by_parity, atol=2e-6)
        parts = list(even.blocks())
    assert [p.first_row for p in parts] == list(np.cumsum([first, *(p.size for p in parts[:-1])]))
    assert sum(p.size for p in parts) == rows.size
    assert torch.equal(torch.cat([p.valid for p in parts], dim=-1), rows.valid)
    got = torch.cat([p.weights.expand(len(cells), -1, -1, -1) for p in parts], dim=2)
    assert got.shape[1] == 1 and np.allclose(got[:, 0].numpy(), weights, atol=1e-6)
    assert {p.first_key for p in parts} == {rows.first_key}


@settings(max_examples=40, deadline=None)
@given(rows_with_weights())
def test_even_rows_without_the_first_key(both) -> None:
    rows, cells = both
    cells = cells.copy()
    cells[..., 0] = False
    rest = UniformRows.like(rows).without_first()
    assert rest.first_key == 1
    close(rest.largest(), (cells / np.maximum(cells.sum(axis=-1, keepdims=True), 1)).max(axis=-1))


@settings(max_examples=60, deadline=None)
@given(rows_with_weights(), st.sampled_from(TARGETS), st.sampled_from([1, 20, 1 << 22]))
def test_pointing_rows_have_one_key_each(both, target: Target, cells_at_once: int) -> None:
    rows, cells = both
    wanted = np.zeros(cells.shape)
    for i in range(rows.size):
        key = target.key if target.key is not None else rows.first_row + i + target.offset
        if 0 <= key < rows.view.keys:
            wanted[:, i, key] = cells[:, i, key]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visibility, "CELLS", cells_at_once)
        found = torch.cat([b.weights.expand(len(cells), -1, -1, -1) for b in pointing(rows, target)], dim=2)
    assert found.shape == (len(cells), 1, *cells.shape[1:]) and np.array_equal(found[:, 0].numpy(), wanted)
