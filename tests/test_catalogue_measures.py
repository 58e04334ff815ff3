"""Measures of types on whole models against plain NumPy on the attention that transformers returns."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch

from fixtures import circuits
from headscope.attention.visibility import Target, Visibility
from headscope.capture import blocks as rows_of
from headscope.capture.blocks import RowBlock
from headscope.capture.evaluation import eager_evaluation
from headscope.capture.uniform import pointing
from headscope.heads.catalogue.observing import TypeStatistics, _above
from headscope.heads.catalogue.text_types import TEXT_TYPES
from headscope.heads.clusters import ClusterSums
from headscope.heads.measuring import Measuring
from headscope.heads.rules import load_rules
from headscope.models.inputs import prepare
from headscope.models.loading import load_model, wrap_model
from headscope.models.selection import parse_selection
from headscope.models.sites import find_sites
from headscope.models.text_inputs import text_sequences
from tests import plain_measures as plain
from tests.test_pictures import Largest, tiny_llama

TYPES = tuple(TEXT_TYPES.values())
TEXTS = (
    "The old cat sat on the mat, and the young dog sat by the river. When the cat saw the dog, it was unable to sit.",
    "One bird, two birds... the small birds came down to the green river and the small birds went away again (slowly).",
    '"They walked home", and they talked.',
)
FAMILIES = {"llama": {}, "gpt2": {}, "mistral": {"window": 4}, "bert": {"causal": False}}


def measured(loaded, texts, engine="streaming", batch_size=None, types=TYPES, **options):
    sites = find_sites(loaded.model)
    heads = parse_selection("head", "all")
    measuring = Measuring(loaded, sites, sites, heads, load_rules("seed"), (), engine=engine, types=types, **options)
    with eager_evaluation(loaded.model):
        return measuring.run(prepare(loaded, texts=list(texts), batch_size=batch_size)).types


def by_hand(loaded, texts, words=False, exclude_special=False, **sight):
    """One list of texts a layer."""
    sequences, _ = text_sequences(loaded, list(texts))
    layers = []
    for tokens in sequences:
        found = plain.texts_of(loaded, tokens, **sight)
        if words or exclude_special:
            found = [plain.grouped(text, tokens, words, exclude_special) for text in found]
        layers.append(found)
    return list(zip(*layers, strict=True))


def sums_of(layers, texts_in_all):
    """What the plain loops give, slowly: of each layer its texts, and sums by measure."""
    return [(texts, plain.sums(texts, texts_in_all)) for texts in layers]


@pytest.fixture(scope="module")
def expected_of(family_dir):
    """`expected_of(name, number)`: the same of a family on the first so many texts, made once."""

    def make(name, number):
        loaded = load_model(str(family_dir(name)))
        return sums_of(by_hand(loaded, TEXTS[:number], **FAMILIES[name]), number)

    return cache(make)


def compare(types, layers):
    """Every number of every layer."""
    assert len(types) == len(layers)
    for (_, layer), found in types.items():
        texts, expected = layers[layer]
        # What no row could show is NaN, if it is there.
        assert {n for n, s in found.measures.items() if s.rows.any()} - {"column"} == expected.keys()
        for name, (value, chance, rows) in expected.items():
            ours = found.measures[name]
            theirs = ClusterSums.of(*(a.reshape(-1, a.shape[-1]) for a in (value, chance, rows)))
            assert np.array_equal(ours.rows, theirs.rows) and np.array_equal(ours.clusters, theirs.clusters), name
            near = {"atol": 2e-5, "equal_nan": True, "err_msg": name}
            for a, b in zip((ours.score, ours.chance), (theirs.score, theirs.chance), strict=True):
                np.testing.assert_allclose(a, b, **near)
            np.testing.assert_allclose(ours.interval(), theirs.interval(), atol=2e-4, equal_nan=True, err_msg=name)
        compare_shares(found, expected["first"])
        for name, others in plain.trivial(texts).items():
            assert {o: v / n for o, (v, n) in found.trivial[name].items()} == pytest.approx(others, abs=1e-6), name
            assert found.alternative(name)[1] == pytest.approx(max(others.values()))
        compare_columns(found, [plain.column(text) for text in texts])


def compare_shares(found, first):
    """On how many texts the first token gets more than 0.3, of those on which even attention would not."""
    value, chance, rows = first.sum(axis=2)
    known = (rows > 0) & (chance <= 0.3 * rows)
    above, of = found.above["first"]
    assert np.array_equal(of, known.sum(axis=0))
    assert np.array_equal(above, ((value > 0.3 * rows) & known).sum(axis=0))


def compare_columns(found, columns):
    known = [c for c in columns if c is not None]
    sums = found.measures["column"]
    assert (sums.rows == len(known)).all()
    if known:
        np.testing.assert_allclose(sums.score, np.mean([c[0] for c in known], axis=0), atol=1e-5)
        np.testing.assert_allclose(sums.chance, np.mean([c[1] for c in known], axis=0), atol=1e-5)
        assert np.array_equal(found.above["column"][0], sum((c[0] > 0.3) & (c[1] < 0.3) for c in known))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("engine", ["streaming", "layerwise", "full"])
def test_every_measure_equals_plain_loops(family_dir, expected_of, name, engine):
    """On one text, and on three of different lengths in one padded batch and in batches of one."""
    loaded = load_model(str(family_dir(name)))
    compare(measured(loaded, TEXTS[:1], engine), expected_of(name, 1))
    for batch_size in (3, 1):
        compare(measured(loaded, TEXTS, engine, batch_size), expected_of(name, 3))


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize(("words", "exclude_special"), [(True, False), (False, True), (True, True)])
def test_measures_of_words_and_without_special_tokens(family_dir, name, words, exclude_special):
    loaded = load_model(str(family_dir(name)))
    options = {"words": words, "exclude_special": exclude_special}
    layers = sums_of(by_hand(loaded, TEXTS, **options, **FAMILIES[name]), 3)
    for batch_size in (3, 1):
        compare(measured(loaded, TEXTS, "auto", batch_size, **options), layers)


@pytest.mark.parametrize("engine", ["streaming", "layerwise"])
def test_heads_that_look_at_nothing_but_special_tokens(engine):
    """Without those their rows do not count, and other layers' rows still do."""
    circuit = circuits.induction_model()
    loaded = dataclasses.replace(wrap_model(circuit.model), tokenizer=circuit.tokenizer)
    texts = ("the old man saw a dog . , the old man saw a dog .", "a cat , a cat . a small bird sat")
    layers = sums_of(by_hand(loaded, texts, exclude_special=True), 2)
    assert any(not text.counts.all() for texts, _ in layers for text in texts)
    compare(measured(loaded, texts, engine, 2, exclude_special=True), layers)


def test_a_text_on_which_even_attention_is_above_the_threshold_says_nothing():
    value, expected, rows = (
        np.array(a) for a in ([[4.0], [9.0], [2.0], [0]], [[3.0], [4.0], [1], [0]], [[10], [10], [10], [0]])
    )
    above, of = _above([value, expected, rows], 0.3)
    assert (above.tolist(), of.tolist()) == ([1.0], [2.0])


@pytest.mark.parametrize(
    "target", [Target(key=0), Target(key=5), Target(offset=-1), Target(offset=0), Target(offset=2)]
)
@pytest.mark.parametrize("first_key", [0, 1])
def test_a_head_that_looks_at_one_key_sees_what_others_see(target, first_key):
    """Within a window of four, of rows 3 to 11; a key left out is none."""
    torch.manual_seed(0)
    view = Visibility(12, 12, causal=True, open=torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(-3))
    facts = (torch.ones(2, 1, 9, dtype=torch.bool), view, torch.zeros(2, 12) > 0, torch.tensor([12, 12]), False)
    rows = RowBlock(3, *facts, first_key, weights=torch.rand(2, 4, 9, 12))
    found = torch.cat([block.weights for block in pointing(rows, target)], dim=2)
    expected = torch.zeros(9, 12)
    for i in range(3, 12):
        key = target.key if target.key is not None else i + target.offset
        if i - 3 <= key <= i and key >= first_key:
            expected[i - 3, key] = 1
    assert torch.equal(found, expected.expand(found.shape)) and found.shape[1] == 1


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_blocks_of_few_rows_change_nothing(family_dir, expected_of, name, monkeypatch):
    """Blocks that begin at odd rows, and first ones in which no row has a token six places before it."""
    loaded = load_model(str(family_dir(name)))
    layers = expected_of(name, 3)
    monkeypatch.setattr(rows_of, "BLOCK_CELLS", 3000)
    monkeypatch.setattr("headscope.capture.feed.BLOCK_CELLS", 3000)
    monkeypatch.setattr("headscope.attention.visibility.CELLS", 500)
    compare(measured(loaded, TEXTS, "layerwise", 3), layers)
    compare(measured(loaded, TEXTS, "streaming", 3), layers)


# ------------------------------------------------------------------ examples
@pytest.mark.parametrize(("engine", "cells"), [("streaming", 1 << 19), ("layerwise", 1 << 19), ("layerwise", 3000)])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_examples_show_the_row_that_shows_most_and_its_largest_weights(family_dir, name, engine, cells, monkeypatch):
    """Of rows in blocks, one that shows nearly as much will do."""
    monkeypatch.setattr("headscope.capture.feed.BLOCK_CELLS", cells)
    loaded = load_model(str(family_dir(name)))
    monkeypatch.setattr("headscope.heads.catalogue.examples._MOST_ROWS", 1000)
    (layers, (tokens,)) = by_hand(loaded, TEXTS[:1], **FAMILIES[name]), text_sequences(loaded, list(TEXTS[:1]))[0]
    shown = 0
    for (_, layer), found in measured(loaded, TEXTS[:1], engine).items():
        (text,) = layers[layer]
        rows, scores = plain.rows_of(text, text.weights), found.measures
        for measure in {t.score for t in TYPES} - {"column"} & scores.keys():
            for head, example in enumerate(found.examples.get(measure, [None] * len(text.weights))):
                often = scores[measure].score[head] >= 0.3
                assert example is not None if often else cells == 3000 or example is None
                if example is None:
                    continue
                values = {i: value[head] for i, value in rows[measure]}
                assert values[example.position] > max(values.values()) * (0.9 if cells == 3000 else 1) - 1e-6
                check_example(example, text.weights[head, example.position], tokens)
                shown += 1
    assert shown > 10


def check_example(example, weights, tokens):
    order = np.argsort(-weights)[:3]
    assert example.token == tokens.labels[example.position]
    assert [k.weight for k in example.keys] == pytest.approx([w for w in weights[order] if w > 0.01], abs=2e-5)
    for looked in example.keys:
        assert looked.weight == pytest.approx(weights[looked.position], abs=2e-5)
        assert looked.token == tokens.labels[looked.position]
    around = tokens.labels[max(0, example.position - 12) : example.position + 13]
    assert example.text == " ".join(around)


def test_an_example_of_a_later_text_and_its_words():
    """The induction head of a constructed model; the first text repeats nothing. Words are the tokens here."""
    circuit = circuits.induction_model()
    loaded = dataclasses.replace(wrap_model(circuit.model), tokenizer=circuit.tokenizer)
    texts = ("a cat sat", "the old man saw a small dog . the old man saw a small dog")
    for options in ({}, {"words": True}):
        found = measured(loaded, texts, **options)["self", 1]
        assert found.measures["successors"].score[3] == pytest.approx(1, abs=1e-4)
        assert found.measures["successors"].rows[3] == 7
        example = found.examples["successors"][3]
        assert example.keys[0].weight > 0.99
        words = texts[1].split()
        assert example.token == words[example.position - 1] == words[example.keys[0].position - 2]
        assert example.keys[0].token == words[example.keys[0].position - 1]
        assert all(e is None for e in found.examples["successors"][:3])


# ------------------------------------------------------------------ memory
def test_types_make_nothing_of_the_size_of_a_matrix():
    """In streaming; of 3,000 tokens a matrix has nine million cells."""
    loaded = wrap_model(tiny_llama())
    ids = np.random.default_rng(0).integers(0, 50, 3000).tolist()
    sites, heads = find_sites(loaded.model), parse_selection("head", "all")
    measuring = Measuring(loaded, sites, sites, heads, load_rules("seed"), (), engine="streaming", types=TYPES)
    with eager_evaluation(loaded.model):
        prepared = prepare(loaded, ids=[ids])
        with Largest() as seen:
            found = measuring.run(prepared)
    assert found.engine == "streaming" and found.types["self", 0].measures["successors"].rows.min() > 2000
    assert seen.cells <= 5 << 20


def test_sums_keep_no_matrix(family_dir, monkeypatch):
    """What is kept of a layer while others are read has no tensor as large as its attention."""
    kept = []

    def finish(self, real=TypeStatistics.finish):
        for sums in self._columns.values():
            kept.extend(v.untyped_storage().nbytes() for v in vars(sums).values() if isinstance(v, torch.Tensor))
            assert all(isinstance(v, torch.Tensor) for v in vars(sums).values())
        return real(self)

    monkeypatch.setattr(TypeStatistics, "finish", finish)
    loaded = load_model(str(family_dir("llama")))
    length = len(text_sequences(loaded, [TEXTS[0]])[0][0])
    measured(loaded, TEXTS[:1], "layerwise")
    assert kept and max(kept) <= 8 * 2 * length * 4 < 8 * length * length * 4
