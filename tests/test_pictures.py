"""Matrices kept for pictures: exact ones as they are, pooled ones as NumPy pools the whole matrix."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaModel

import headscope
from fixtures.building import build_family, build_tokenizer
from fixtures.families import FAMILIES
from headscope.attention.visibility import Visibility
from headscope.capture.blocks import RowBlock
from headscope.errors import InputError
from headscope.heads import measuring
from headscope.heads.pictures import Keep, tile_of
from headscope.models.selection import parse_selection

TEXTS = ["the restless dog was unbelievable", "an unmeasurable cat sat", "the cat sat on the mat because it was tired"]


def plain_pool(matrix: np.ndarray, tile: int, reduce) -> np.ndarray:
    """One head's tiles, one by one."""
    rows, columns = (range(0, n, tile) for n in matrix.shape)
    return np.array([[reduce(matrix[i : i + tile, j : j + tile]) for j in columns] for i in rows])


def check_pooled(found, exact, most: int) -> None:
    """A pooled map against the exact one of the same layer."""
    queries, keys = exact.weights.shape[1:]
    tile = -(-max(queries, keys) // most)
    assert (found.stack, found.layer, found.heads) == (exact.stack, exact.layer, exact.heads)
    if tile <= 1:
        assert (found.tile, found.peak, found.tokens) == (1, None, None)
        assert np.array_equal(found.weights, exact.weights)
        assert (found.queries, found.keys) == (exact.queries, exact.keys)
        return
    assert (found.tile, found.tokens) == (tile, (queries, keys))
    assert found.weights.dtype == found.peak.dtype == np.float32
    assert max(found.weights.shape[1:]) <= most
    for mean, peak, matrix in zip(found.weights, found.peak, exact.weights, strict=True):
        np.testing.assert_allclose(mean, plain_pool(matrix.astype(np.float64), tile, np.mean), rtol=1e-5, atol=1e-9)
        np.testing.assert_array_equal(peak, plain_pool(matrix, tile, np.max))
    assert len(found.queries) == found.weights.shape[1] and len(found.keys) == found.weights.shape[2]
    assert found.keys[0] == f"0–{min(tile, keys) - 1}" or (found.keys[0] == "0" and keys == 1)


# ------------------------------------------------------------------ the consumer by itself
@st.composite
def problems(draw):
    """Weights (batch, head, query, key), real lengths of each text, and where rows are cut into blocks."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    queries, keys = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    lengths = [(draw(st.integers(1, queries)), draw(st.integers(1, keys))) for _ in range(batch)]
    cuts = sorted({0, queries, *draw(st.lists(st.integers(0, queries), max_size=6))})
    row = draw(st.integers(0, batch - 1))
    chosen = sorted(draw(st.sets(st.integers(0, heads - 1), min_size=1)))
    weights = np.random.default_rng(draw(st.integers(0, 2**16))).gamma(0.2, size=(batch, heads, queries, keys))
    return weights.astype(np.float32), lengths, cuts, row, chosen, draw(st.integers(1, 45))


def kept(weights, lengths, cuts, row, chosen, most):
    """The map that `Keep` makes of one text's rows, fed block by block; padding is NaN."""
    axes = {
        name: SimpleNamespace(
            labels=[[str(i) for i in range(pair[side])] for pair in lengths],
            special=np.zeros((len(lengths), weights.shape[2 + side]), dtype=bool),
        )
        for side, name in enumerate(("decoder", "text"))
    }
    site = SimpleNamespace(module=None, stack="cross", layer=3, query_axis="decoder", key_axis="text")
    keep = Keep(SimpleNamespace(axes=axes), row, parse_selection("head", chosen), False, False, most)
    padded = torch.tensor(weights)
    for text, (queries, keys) in enumerate(lengths):
        padded[text, :, queries:], padded[text, :, :, keys:] = torch.nan, torch.nan
    view = Visibility(*weights.shape[2:])
    for start, stop in pairwise(cuts):
        facts = (torch.ones(1), view, torch.zeros(1), torch.ones(1), True, 0)
        keep.rows(site, RowBlock(start, *facts, weights=padded[:, :, start:stop]))
    (found,) = keep.maps()
    return found


@settings(max_examples=150, deadline=None)
@given(problems())
def test_tiles_are_those_of_the_whole_matrix(problem) -> None:
    weights, lengths, _, row, chosen, most = problem
    queries, keys = lengths[row]
    exact = kept(*problem[:-1], None)
    assert np.array_equal(exact.weights, weights[row, chosen, :queries, :keys])
    assert exact.heads == tuple(chosen)
    check_pooled(kept(*problem[:-1], most), exact, most)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 2000))
def test_tiles_are_the_smallest_that_fit(queries: int, keys: int, most: int) -> None:
    tile = tile_of(queries, keys, most)
    longest = max(queries, keys)
    assert -(-longest // tile) <= most
    assert tile == 1 or -(-longest // (tile - 1)) > most
    assert (tile == 1) == (longest <= most)


def test_a_layer_without_the_selected_heads_is_left_out() -> None:
    site = SimpleNamespace(module=None, stack="self", layer=0, query_axis="a", key_axis="a")
    keep = Keep(SimpleNamespace(axes={}), 0, parse_selection("head", 5), False, False, None)
    facts = (torch.ones(1), Visibility(3, 3), torch.zeros(1), torch.ones(1), False, 0)
    keep.rows(site, RowBlock(0, *facts, weights=torch.ones(1, 4, 3, 3)))
    assert keep.maps() == ()


# ------------------------------------------------------------------ through analyze
@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "t5", "gpt_oss"])
@pytest.mark.parametrize("engine", ["streaming", "layerwise", "full"])
@pytest.mark.parametrize("options", [{}, {"words": True, "exclude_special": True}], ids=["tokens", "words"])
def test_pooled_maps_of_models(name: str, engine: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = build_family(name), build_tokenizer(FAMILIES[name].tokenizer)
    if name == "t5":
        options = {**options, "decoder_texts": "the mat was tired"}
    arguments = {"tokenizer": tokenizer, "head": "-1,0", **options}
    exact = headscope.analyze(model, TEXTS, engine="layerwise", maps=True, **arguments).maps
    for most in (3, 512):
        monkeypatch.setattr(measuring, "MOST_CELLS", most)
        found = headscope.analyze(model, TEXTS, engine=engine, maps="pooled", **arguments).maps
        assert len(found) == len(exact) > 0
        for one, whole in zip(found, exact, strict=True):
            queries, keys = whole.weights.shape[1:]
            tile = max(1, -(-max(queries, keys) // most))
            assert one.tile == tile and one.heads == whole.heads
            for mean, peak, matrix in zip(
                one.weights, one.weights if tile == 1 else one.peak, whole.weights, strict=True
            ):
                assert np.abs(mean - plain_pool(matrix, tile, np.mean)).max() < 1e-5
                assert np.abs(peak - plain_pool(matrix, tile, np.max)).max() < 1e-5


def test_maps_are_exact_unless_pooling_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MOST_CELLS", 4)
    model, tokenizer = build_family("llama"), build_tokenizer(FAMILIES["llama"].tokenizer)
    for one in headscope.analyze(model, TEXTS, tokenizer=tokenizer, maps=True).maps:
        assert (one.tile, one.peak) == (1, None)
        assert one.weights.shape[1] == len(one.queries) > 4
    assert headscope.analyze(model, TEXTS, tokenizer=tokenizer).maps == ()
    with pytest.raises(InputError, match="maps is 'exact'"):
        headscope.analyze(model, TEXTS, tokenizer=tokenizer, maps="exact")


def tiny_llama() -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaModel(config).eval()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that torch makes while it is active."""

    cells = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.cells = max(self.cells, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_memory_of_pooled_maps_does_not_grow_with_the_square_of_the_length() -> None:
    model, numbers = tiny_llama(), np.random.default_rng(0)
    for length in (700, 3001):
        ids = numbers.integers(0, 50, length).tolist()
        with Largest() as seen:
            (found,) = headscope.analyze(model, ids=ids, engine="streaming", maps="pooled").maps
        tile = -(-length // 512)
        cells = -(-length // tile)
        assert found.weights.shape == found.peak.shape == (2, cells, cells)
        assert found.weights.nbytes + found.peak.nbytes <= 2 * 2 * 512**2 * 4
        assert seen.cells < 2**20 + 2**18, "no tensor holds more than two blocks"
        assert (found.tile, found.tokens) == (tile, (length, length))
        sizes = np.minimum(tile, length - np.arange(0, length, tile))
        np.testing.assert_allclose((found.weights * sizes).sum(-1), 1, atol=1e-4)
        assert found.peak[0, 0, 0] == 1 and not found.peak[:, *np.triu_indices(cells, 1)].any()


def test_long_texts_are_pooled_from_exact_weights() -> None:
    model, ids = tiny_llama(), np.random.default_rng(1).integers(0, 50, 1100).tolist()
    found = headscope.analyze(model, ids=ids, engine="streaming", maps="pooled", head=1).maps
    exact = headscope.analyze(model, ids=ids, engine="layerwise", maps=True, head=1).maps
    tile = found[0].tile
    assert tile == 3 and found[0].queries[-1] == "1098–1099"
    for reduce, values in ((np.mean, found[0].weights), (np.max, found[0].peak)):
        assert np.abs(values[0] - plain_pool(exact[0].weights[0], tile, reduce)).max() < 1e-5
