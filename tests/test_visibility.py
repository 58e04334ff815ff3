"""Which keys rows may look at, asked in every way, against one NumPy matrix of all cells."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.attention import visibility
from headscope.attention.visibility import HIDDEN, Target, Visibility

CPU = torch.device("cpu")
QUICK = settings(max_examples=80, deadline=None)


@st.composite
def views(draw):
    """A view of any kind, and its cells: bool, (batch or 1, head or 1, rows, keys)."""
    rows, keys, causal = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.booleans())
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    shape = draw(st.sampled_from([None, (batch, 1, 1, keys), (batch, heads, rows, keys), (1, 1, rows, keys)]))
    grid = np.ones((rows, keys), bool)[None, None]
    if causal:
        grid = np.array([[key <= row for key in range(keys)] for row in range(rows)])[None, None]
    if shape is None:
        return Visibility(rows, keys, causal), grid
    mask = rng.random(shape) < draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    return Visibility(rows, keys, causal, torch.tensor(mask)), grid & mask


def part_of(data, size: int) -> tuple[int, int]:
    start = data.draw(st.integers(0, size - 1))
    return start, data.draw(st.integers(start + 1, size))


def equal(ours: torch.Tensor, theirs: np.ndarray) -> None:
    assert np.array_equal(np.broadcast_to(ours.numpy(), theirs.shape), theirs)


# ------------------------------------------------------------------ sums over cells
@QUICK
@given(views(), st.sampled_from([1, 7, 30, 1 << 22]), st.data())
def test_sums_over_cells_are_those_of_the_matrix(both, cells: int, data) -> None:
    """Whatever the number of cells that are looked at in one go; what any head sees counts."""
    view, grid = both
    some = grid.any(axis=1, keepdims=True)
    columns = np.array(data.draw(st.lists(st.booleans(), min_size=view.keys, max_size=view.keys)))
    away = np.abs(np.arange(view.rows)[:, None] - np.arange(view.keys))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visibility, "CELLS", cells)
        for _ in range(2):  # the second time it is remembered
            equal(view.counts(CPU), some.sum(axis=-1))
        equal(view.sums(None, CPU), some.sum(axis=-1))
        equal(view.sums(torch.tensor(columns)[None], CPU), (some * columns).sum(axis=-1))
        equal(view.distances(CPU), (some * away).sum(axis=-1))
        equal(view.seen(CPU), some.any(axis=2))
    assert view.counts(CPU).shape[1:] == view.distances(CPU).shape[1:] == (1, view.rows)
    assert view.counts(CPU).dtype == view.distances(CPU).dtype == torch.int64


@QUICK
@given(views(), st.sampled_from([1, 7, 30, 1 << 22]))
def test_chunks_are_as_large_as_they_may_be(both, cells: int) -> None:
    view, grid = both
    row = len(grid) * view.keys
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visibility, "CELLS", cells)
        chunks = list(view.chunks())
    assert [r for start, stop in chunks for r in range(start, stop)] == list(range(view.rows))
    for start, stop in chunks:
        assert (stop - start) * row <= cells or stop - start == 1
        assert (stop - start + 1) * row > cells or stop == view.rows


# ------------------------------------------------------------------ parts
@QUICK
@given(views(), st.data())
def test_cells_of_some_rows(both, data) -> None:
    view, grid = both
    start, stop = part_of(data, view.rows)
    found = view.cells(start, stop, CPU)
    assert found.dtype == torch.bool and found.shape[1:] == (1, stop - start, view.keys)
    equal(found, grid[:, :, start:stop].any(axis=1, keepdims=True))


@QUICK
@given(views(), st.data())
def test_rows_see_a_key_of_their_own_or_not(both, data) -> None:
    """Positions outside of the keys are seen by none."""
    view, grid = both
    start, stop = part_of(data, view.rows)
    size = stop - start
    positions = data.draw(st.lists(st.integers(-2, view.keys + 1), min_size=size, max_size=size))
    wanted = np.zeros((*grid.shape[:2], size), bool)
    for place, key in enumerate(positions):
        if 0 <= key < view.keys:
            wanted[:, :, place] = grid[:, :, start + place, key]
    equal(view.at(torch.tensor(positions), start), wanted)


@QUICK
@given(views(), st.sampled_from([1, 7, 1 << 22]), st.data())
def test_a_span_is_no_wider_than_the_mask_asks_for(both, cells: int, data) -> None:
    view, grid = both
    start, stop = part_of(data, view.rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visibility, "CELLS", cells)
        low, high = view.span(start, stop)
    keys = np.flatnonzero(grid[:, :, start:stop].any(axis=(0, 1, 2)))
    if not view.causal or view.open is None:
        assert (low, high) == ((int(keys[0]), int(keys[-1]) + 1) if len(keys) else (0, 0))
        return
    # A row's first open key may lie after the row.
    assert (low, high) == (0, 0) or low < high
    assert set(keys) <= set(range(low, high))
    mask = np.flatnonzero(np.broadcast_to(view.open.numpy(), grid.shape)[:, :, start:stop].any(axis=(0, 1, 2)))
    if low < high:
        assert low == mask[0] and high == min(stop, view.keys, int(mask[-1]) + 1)


@QUICK
@given(views(), st.data())
def test_what_is_hidden_in_a_tile(both, data) -> None:
    """None where nothing is, so that nothing has to be added to a tile's scores."""
    view, _ = both
    (start, stop), (first, last) = part_of(data, view.rows), part_of(data, view.keys)
    open_ = None if view.open is None else view.open.numpy()
    rows = slice(None) if open_ is None or open_.shape[2] == 1 else slice(start, stop)
    for _ in range(2):  # the second time it is remembered
        closed = view.closed(start, stop, first, last, CPU)
        if open_ is None or open_[:, :, rows, first:last].all():
            assert closed is None
        else:
            assert np.array_equal(closed.numpy(), ~open_[:, :, rows, first:last])


@QUICK
@given(views(), st.data())
def test_what_comes_later_in_a_tile(both, data) -> None:
    """Keys from a tile's first row on; None where each of them is before every row's end."""
    view, _ = both
    start, stop = part_of(data, view.rows)
    last = data.draw(st.integers(start, start + 9))
    hidden = np.array([[key > row for key in range(start, last)] for row in range(start, stop)]).reshape(
        stop - start, -1
    )
    found = view.later(start, stop, last, CPU)
    if not view.causal or not hidden.any():
        assert found is None
    else:
        assert found.shape == (1, 1, stop - start, last - start) and found.dtype == torch.float32
        equal(found, np.where(hidden, np.float32(HIDDEN), np.float32(0))[None, None])
        assert view.later(start, stop, last, CPU) is found


@QUICK
@given(views(), st.sampled_from([1, 7, 1 << 22]))
def test_rows_that_see_nothing(both, cells: int) -> None:
    view, grid = both
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visibility, "CELLS", cells)
        seeing = view.seeing()
    assert (seeing is None) == (view.open is None)
    if seeing is not None:
        equal(seeing, grid.any(axis=-1))


@QUICK
@given(views(), st.data())
def test_padding_hides_keys_from_then_on(both, data) -> None:
    view, grid = both
    batch = len(grid) if len(grid) > 1 else data.draw(st.integers(1, 3))
    real = np.arange(view.keys) < np.array([data.draw(st.integers(1, view.keys)) for _ in range(batch)])[:, None]
    view.counts(CPU), view.span(0, view.rows), view.seeing()
    found = view.within(torch.tensor(real))
    if real.all():
        assert found is view
        return
    assert (found.rows, found.keys, found.causal) == (view.rows, view.keys, view.causal)
    narrower = grid & real[:, None, None, :]
    equal(found.cells(0, view.rows, CPU), narrower.any(axis=1, keepdims=True))
    equal(found.counts(CPU), narrower.any(axis=1, keepdims=True).sum(axis=-1))
    equal(found.seeing(), narrower.any(axis=-1))
    equal(view.cells(0, view.rows, CPU), grid.any(axis=1, keepdims=True))


def test_what_is_remembered_is_made_once() -> None:
    view, made = Visibility(2, 2), []
    for _ in range(3):
        assert view.remember("a", lambda: made.append("a") or 5) == 5
    assert view.remember("b", lambda: 6) == 6 and made == ["a"]
    assert view != Visibility(2, 2) and Visibility(2, 2)._known is not view._known


# ------------------------------------------------------------------ targets
def test_a_target_is_one_key_or_one_distance() -> None:
    rows = torch.arange(3, 6)
    assert Target(key=2).positions(rows).tolist() == [2, 2, 2] and str(Target(key=2)) == "key 2"
    assert Target(key=0).positions(rows).tolist() == [0, 0, 0] and str(Target(key=0)) == "key 0"
    assert Target(offset=-4).positions(rows).tolist() == [-1, 0, 1]
    assert str(Target(offset=-4)) == "the key at offset -4"
    assert Target(offset=0).positions(rows).tolist() == [3, 4, 5]
