"""Merging words and leaving special tokens out, and the matrices of pictures, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headscope
from fixtures.building import build_family, reference_attentions
from fixtures.families import FAMILIES
from fixtures.tokenizers import build_tokenizer
from headscope.capture.feed import Axis, Matrix, regroup
from headscope.errors import InputError
from tests import reference
from tests.judging import Judge, compare, judged_names

TEXTS = ["unbelievable cats restless", "the cat sat", "sat reworked unable"]
CHOICES = [(True, False), (False, True), (True, True)]


def numbers_of(word_ids):
    """Each token's word, special tokens being words of their own."""
    numbers = []
    for i, word in enumerate(word_ids):
        same = i > 0 and word is not None and word == word_ids[i - 1]
        numbers.append((numbers[-1] if numbers else -1) + (not same))
    return np.array(numbers)


def merged(weights, visible, special, words):
    """(weights, visible, special) with one row and one column a word."""
    member = (words[:, None] == np.arange(words.max() + 1)[None, :]).astype(float)
    average = (member / member.sum(0)).T
    return average @ weights @ member, (member.T @ visible @ member) > 0, special @ member > 0


def without_special(weights, visible, special):
    keep = ~special
    rest = weights[keep][:, keep]
    return rest / rest.sum(1, keepdims=True), visible[keep][:, keep], special[keep]


def expected_text(weights, visible, special, words, merge, exclude):
    text = (weights, visible, special)
    text = merged(*text, words) if merge else text
    return without_special(*text) if exclude else text


def judges_for(name, texts, merge, exclude):
    family = FAMILIES[name]
    model, tokenizer, judges = build_family(name), build_tokenizer(family.tokenizer), {}
    spec = family.stacks["self"]
    parts = {}
    for text in texts:
        encoded = tokenizer(text)
        ids = encoded.input_ids
        attentions = reference_attentions(family, model, {"input_ids": torch.tensor([ids])})["self"]
        special = np.isin(ids, tokenizer.all_special_ids)
        words = numbers_of([None if s else w for w, s in zip(encoded.word_ids(), special, strict=True)])
        for layer, matrix in attentions.items():
            visible = reference.visibility(len(ids), causal=spec.causal, window=spec.window(layer))
            for head in range(matrix.shape[1]):
                one = expected_text(matrix[0, head], visible, special, words, merge, exclude)
                parts.setdefault(("self", layer, head), []).append(one)
    judges = {key: Judge(found) for key, found in parts.items()}
    return model, tokenizer, judges, parts


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral", "roberta", "gpt_oss", "deberta_v2"])
@pytest.mark.parametrize(("merge", "exclude"), CHOICES)
def test_metrics_of_words_and_without_special_tokens(name, merge, exclude):
    model, tokenizer, judges, _ = judges_for(name, TEXTS, merge, exclude)
    for rules, size in (("seed", 1), ("calibrated", 3)):
        result = headscope.analyze(
            model, TEXTS, tokenizer=tokenizer, words=merge, exclude_special=exclude, rules=rules, batch_size=size,
            metrics=",".join(judged_names()),
        )  # fmt: skip
        compare(result, judges, judged_names())
    if merge:
        plain = headscope.analyze(model, TEXTS, tokenizer=tokenizer)
        assert any(a.metrics["sink"] != b.metrics["sink"] for a, b in zip(result.heads, plain.heads, strict=True))


@pytest.mark.parametrize("name", ["bert", "llama", "roberta"])
@pytest.mark.parametrize(("merge", "exclude"), [(False, False), *CHOICES])
def test_maps_are_the_matrices_that_are_measured(name, merge, exclude):
    model, tokenizer, _, parts = judges_for(name, TEXTS, merge, exclude)
    result = headscope.analyze(
        model, TEXTS, tokenizer=tokenizer, words=merge, exclude_special=exclude, maps=True, head="-1,0", layer="1,-1",
        batch_size=2 if merge else 3,
    )  # fmt: skip
    layers = sorted({1, FAMILIES[name].stacks["self"].layers[-1]})
    assert [(m.stack, m.layer) for m in result.maps] == [("self", layer) for layer in layers]
    for found in result.maps:
        count = FAMILIES[name].stacks["self"].num_heads
        assert found.heads == (0, count - 1) and found.weights.dtype == np.float32
        for place, head in enumerate(found.heads):
            weights, _, _ = parts["self", found.layer, head][0]
            assert np.abs(found.weights[place] - weights).max() < 1e-5
            assert np.allclose(found.weights[place].sum(-1), 1, atol=1e-5)
        assert len(found.queries) == len(found.keys) == found.weights.shape[1]
        assert found.queries == found.keys
        labels = [label for label in found.keys if label not in tokenizer.all_special_tokens]
        assert (len(labels) < len(found.keys)) != exclude
        assert "".join(labels).replace("␣", "") == TEXTS[0].replace(" ", "")
        assert not merge or labels == TEXTS[0].split()


def test_words_of_characters_in_several_pieces_are_whole():
    text = "中文 🙂 don't"
    for name in ("gpt2", "llama"):
        tokenizer = build_tokenizer(FAMILIES[name].tokenizer)
        result = headscope.analyze(
            build_family(name), text, tokenizer=tokenizer, words=True, maps=True, layer=0, exclude_special=True
        )
        assert result.maps[0].keys == ("中文", "🙂", "don't")


def test_cross_attention_merges_each_side_by_its_own_words():
    model, tokenizer = build_family("t5"), build_tokenizer(FAMILIES["t5"].tokenizer)
    source, target = "unbelievable cat", "the restless dog"
    decoder = [0, *tokenizer(target).input_ids[:-1]]
    inputs = {"input_ids": torch.tensor([tokenizer(source).input_ids]), "decoder_input_ids": torch.tensor([decoder])}
    weights = reference_attentions(FAMILIES["t5"], model, inputs)["cross"]
    rows = numbers_of([None, *(w for w in tokenizer(target).word_ids()[:-1])])
    columns = numbers_of(tokenizer(source).word_ids())
    result = headscope.analyze(
        model, source, decoder_texts=target, tokenizer=tokenizer, words=True, stack="cross", maps=True
    )
    for found in result.maps:
        for head in found.heads:
            average = (rows[None, :] == np.arange(rows.max() + 1)[:, None]).astype(float)
            average /= average.sum(1, keepdims=True)
            member = (columns[:, None] == np.arange(columns.max() + 1)[None, :]).astype(float)
            expected = average @ weights[found.layer][0, head] @ member
            assert np.abs(found.weights[head] - expected).max() < 1e-5
        assert found.keys[:2] == ("unbelievable", "cat") and found.queries[1:] == ("the", "restless", "dog")
        assert found.weights.shape == (4, 4, 3)


def test_nothing_but_special_tokens_is_refused():
    model, tokenizer = build_family("bert"), build_tokenizer("wordpiece")
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id]
    for rows in ([special], [[20, 21], special]):
        for words in (False, True):
            with pytest.raises(InputError, match="nothing is left of the text without its special tokens"):
                headscope.analyze(model, ids=rows, tokenizer=tokenizer, exclude_special=True, words=words)
    assert headscope.analyze(model, ids=[special], tokenizer=tokenizer, words=True).heads


def test_images_have_neither_words_nor_special_tokens():
    model = build_family("vit")
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    plain = headscope.analyze(model, inputs=inputs, maps=True)
    for options in ({"words": True}, {"exclude_special": True}):
        again = headscope.analyze(model, inputs=inputs, maps=True, **options)
        for a, b in zip(plain.heads, again.heads, strict=True):
            assert all(abs(a.metrics[name] - b.metrics[name]) < 1e-5 for name in a.metrics)
    assert plain.maps[0].keys == tuple(map(str, range(17)))


def test_one_token_left_is_measured_as_one_token():
    model, tokenizer = build_family("bert"), build_tokenizer("wordpiece")
    result = headscope.analyze(model, "cat", tokenizer=tokenizer, exclude_special=True)
    for head in result.heads:
        assert head.metrics["sink"] == pytest.approx(1) and head.metrics["prev_token"] is None
        assert head.chance["sink"] == 1


# ------------------------------------------------------------------ the regrouping itself
def matrix_with_padding(lengths, seed, garbage):
    """Random attention of which padded query rows hold `garbage`, as some models leave there."""
    rng, size = np.random.default_rng(seed), max(lengths)
    weights = rng.random((len(lengths), 2, size, size))
    for b, n in enumerate(lengths):
        weights[b, :, :, n:] = 0
        weights[b] /= weights[b].sum(-1, keepdims=True)
        weights[b, :, n:] = garbage
    axis = Axis(torch.tensor(lengths), torch.zeros(len(lengths), size, dtype=torch.bool))
    visible = axis.valid[:, None, None, :].expand(-1, 1, size, -1)
    return Matrix(torch.tensor(weights, dtype=torch.float32), visible, axis, axis, axis.valid[:, None])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    seed=st.integers(0, 999),
    garbage=st.sampled_from([0.0, 1.0, float("nan"), float("inf")]),
    renormalise=st.booleans(),
)
def test_rows_still_sum_to_one_whatever_padding_holds(lengths, seed, garbage, renormalise):
    matrix = matrix_with_padding(lengths, seed, garbage)
    before, rng = matrix.weights.clone(), np.random.default_rng(seed)
    groups = torch.full((len(lengths), max(lengths)), -1)
    for b, n in enumerate(lengths):
        groups[b, :n] = torch.tensor(numbers_of([int(w) for w in np.cumsum(rng.random(n) < 0.5)]))
    result = regroup(matrix, (groups, groups), renormalise)
    assert torch.equal(torch.nan_to_num(matrix.weights), torch.nan_to_num(before)), "the model's matrix is not touched"
    for b, n in enumerate(lengths):
        count = int(groups[b].max()) + 1
        assert result.query.lengths[b] == result.key.lengths[b] == count
        assert torch.allclose(result.weights[b, :, :count, :count].sum(-1), torch.ones(2, count), atol=1e-5)
        member = groups[b, :n].numpy()[:, None] == np.arange(count)[None, :]
        expected = (member / member.sum(0)).T @ before[b, :, :n, :n].numpy() @ member
        assert np.abs(result.weights[b, :, :count, :count].numpy() - expected).max() < 1e-5
        assert result.valid[b, ..., :count].all() and not result.valid[b, ..., count:].any()


def test_rows_with_nothing_left_do_not_count():
    """A row that looks at special tokens alone says nothing of the others."""
    weights = torch.tensor([[[[1.0, 0, 0], [1, 0, 0], [0.5, 0.25, 0.25]]]])
    axis = Axis(torch.tensor([3]), torch.tensor([[True, False, False]]))
    matrix = Matrix(weights, torch.ones(1, 1, 3, 3, dtype=torch.bool), axis, axis, axis.valid[:, None])
    groups = torch.tensor([[-1, 0, 1]])
    result = regroup(matrix, (groups, groups), renormalise=True)
    assert result.valid.tolist() == [[[False, True]]]
    assert result.weights[0, 0, 1].tolist() == [0.5, 0.5]
