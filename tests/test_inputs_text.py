"""Texts and token ids: special tokens, limits, unknown tokens, batches padded on the right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from headscope.errors import InputError, ModelError
from headscope.models.batches import TokenSequence, group_by_length
from headscope.models.inputs import Prepared, prepare
from headscope.models.limits import text_limit
from headscope.models.loading import LoadedModel, load_model, wrap_model
from headscope.models.quiet import quiet
from headscope.models.text_inputs import read_texts, shorten
from tests.tiny_checkpoints import VOCABULARY, byte_bpe, save, tiny_model, unigram, wordpiece

TEXTS = ["the cat sat on the mat because it was tired", "a dog", "don't", "a house . un believ able the cat", "it was"]
TOKENIZERS = {
    "bert": wordpiece,
    "roberta": byte_bpe,
    "gpt2": byte_bpe,
    "llama": unigram,
    "t5": unigram,
    "bart": byte_bpe,
}


def loaded_as(family: str, tokenizer: PreTrainedTokenizerBase | None = None, **changes: object) -> LoadedModel:
    model = tiny_model(family, generating=family in ("t5", "bart"), **changes)
    return wrap_model(model, tokenizer or TOKENIZERS[family]())


def attentions(loaded: LoadedModel, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        result = loaded.model(**inputs, output_attentions=True)
    keys = [k for k in ("attentions", "encoder_attentions") if result.get(k) is not None]
    return list(result[keys[0]])


def rows(prepared: Prepared) -> dict[int, tuple[int, int]]:
    """The batch and the row of each of the user's examples."""
    return {text: (b, row) for b, batch in enumerate(prepared.batches) for row, text in enumerate(batch.order)}


@pytest.mark.parametrize("family", TOKENIZERS)
def test_batches_give_what_single_texts_give(family: str) -> None:
    loaded = loaded_as(family)
    decoder = None if family not in ("t5", "bart") else ["the mat"]
    together = prepare(loaded, texts=TEXTS, decoder_texts=decoder)
    assert together.texts == len(TEXTS)
    assert sorted(rows(together)) == list(range(len(TEXTS)))
    for i, text in enumerate(TEXTS):
        alone = prepare(loaded, texts=[text], decoder_texts=decoder)
        ids = alone.batches[0].inputs["input_ids"]
        assert loaded.tokenizer is not None
        assert ids.tolist() == [loaded.tokenizer(text)["input_ids"]]
        batch, row = together.batches[rows(together)[i][0]], rows(together)[i][1]
        n = ids.shape[1]
        assert int(batch.axes["text"].lengths[row]) == n
        assert batch.axes["text"].labels[row] == alone.batches[0].axes["text"].labels[0]
        assert not batch.axes["text"].special[row, n:].any()
        for a, b in zip(attentions(loaded, batch.inputs), attentions(loaded, alone.batches[0].inputs), strict=True):
            np.testing.assert_allclose(a[row, :, :n, :n], b[0], atol=1e-5)
            np.testing.assert_allclose(a[row, :, :n, n:], 0, atol=1e-6)
    assert together.tokens == sum(len(loaded.tokenizer(t)["input_ids"]) for t in TEXTS)
    assert together.first_tokens == together.batches[rows(together)[0][0]].axes["text"].labels[rows(together)[0][1]]


def test_segments_are_passed_on() -> None:
    prepared = prepare(loaded_as("bert"), texts=TEXTS)
    for batch in prepared.batches:
        assert batch.inputs["token_type_ids"].shape == batch.inputs["input_ids"].shape
    assert "token_type_ids" not in prepare(loaded_as("llama", wordpiece()), texts=["the cat"]).batches[0].inputs


def test_special_tokens_are_the_tokenizers_own() -> None:
    axis = prepare(loaded_as("bert"), texts=["the [MASK] sat"]).batches[0].axes["text"]
    assert axis.labels[0] == ("[CLS]", "the", "[MASK]", "sat", "[SEP]")
    assert axis.special.tolist() == [[True, False, True, False, True]]
    assert axis.words[0] == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("text", ["", "  ", "\n\t ", "\u00a0"])
def test_empty_texts_are_refused_and_counted(text: str) -> None:
    with pytest.raises(InputError, match="the text is empty"):
        prepare(loaded_as("gpt2"), texts=[text])
    with pytest.raises(InputError, match="text 1 is empty"):
        prepare(loaded_as("gpt2"), texts=["the cat", text])


def test_batches_are_bound_by_padding_and_by_tokens() -> None:
    lengths = [1, 1, 2, 3, 40, 41, 42, 80, 5, 5, 5, 6]
    groups = group_by_length(lengths, max_padding=0.05, max_tokens=100)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        cells = len(group) * max(lengths[i] for i in group)
        assert cells <= 100 and sum(lengths[i] for i in group) >= 0.95 * cells
    assert sorted(map(len, groups)) == [1, 1, 1, 1, 1, 2, 2, 3]
    # One that is longer than a batch may be has a batch of its own.
    assert group_by_length([500, 3], max_tokens=100) == [(1,), (0,)]


def test_a_text_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to read"):
        prepare(loaded_as("bert"), texts=["\u200b\u200d"])
    with pytest.raises(InputError, match="not valid Unicode at character 4"):
        prepare(loaded_as("bert"), texts=["the \udc80"])
    with pytest.raises(InputError, match="not a string"):
        prepare(loaded_as("bert"), texts=[b"the"])  # type: ignore[list-item]  # on purpose


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_long_texts_are_cut_to_the_models_limit_and_counted(family: str) -> None:
    loaded = loaded_as(family)
    prepared = prepare(loaded, texts=["the cat " * 60, "a dog"])
    assert prepared.truncated == 1
    assert "text 0 cut to 40 tokens" in " ".join(prepared.warnings)
    batch, row = rows(prepared)[0]
    axis = prepared.batches[batch].axes["text"]
    assert int(axis.lengths[row]) == 40
    if family == "bert":
        assert (axis.labels[row][0], axis.labels[row][-1]) == ("[CLS]", "[SEP]")
    with pytest.raises(InputError, match="the limit is 40"):
        prepare(loaded, texts=["the cat " * 60], strict_length=True)
    assert prepare(loaded, texts=["a dog"], strict_length=True).truncated == 0


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "roberta"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_cutting_before_tokens_are_described_gives_the_same(family: str, side: str) -> None:
    loaded = loaded_as(family)
    assert loaded.tokenizer is not None
    loaded.tokenizer.truncation_side = side
    texts = ["the cat sat on the mat because it was tired", "a dog", "don't believe it 中文 🙂 unbelievable " * 3]
    whole = read_texts(loaded, texts)[1]
    for limit in (3, 4, 7, 12, 1000):
        for one, full in zip(read_texts(loaded, texts, limit=limit)[1], whole, strict=True):
            expected = shorten(full.sequence, limit, from_left=side == "left")
            assert (one.sequence.ids, one.sequence.special) == (expected.ids, expected.special)
            assert one.sequence.type_ids == expected.type_ids
            assert (one.length, one.made) == (full.length, full.made) == (len(full.sequence), full.made)
            # Where a character is cut through, what is left of its bytes has another label.
            same = [a == b for a, b in zip(one.sequence.labels, expected.labels, strict=True)]
            assert same.count(False) <= 3
            assert one.words <= full.words and one.unknown <= full.unknown


def test_cutting_keeps_what_the_tokenizer_itself_would_keep() -> None:
    loaded, text = loaded_as("bert"), "the cat sat on the mat because it was tired"
    assert loaded.tokenizer is not None
    for length in range(3, 14):
        ids = prepare(loaded, texts=[text], max_length=length).batches[0].inputs["input_ids"]
        assert ids.tolist() == [loaded.tokenizer(text, truncation=True, max_length=length)["input_ids"]]
    with pytest.raises(InputError, match="no room"):
        prepare(loaded, texts=[text], max_length=2)
    with pytest.raises(InputError, match="needs 1 or more"):
        prepare(loaded, texts=[text], max_length=0)


def test_limits_of_kinds_of_positions() -> None:
    tokenizer = byte_bpe()
    assert text_limit(tiny_model("bert"), tokenizer) == 40
    assert text_limit(tiny_model("bert"), tokenizer, 1000) == 40
    assert text_limit(tiny_model("roberta"), tokenizer) == 38
    assert text_limit(tiny_model("llama"), tokenizer) == 40
    assert text_limit(tiny_model("llama"), tokenizer, 1000) == 1000
    assert text_limit(tiny_model("t5"), tokenizer) is None
    assert text_limit(tiny_model("t5"), tokenizer, 7) == 7
    tokenizer.model_max_length = 12
    assert text_limit(tiny_model("bert"), tokenizer) == 12
    assert text_limit(tiny_model("bert"), tokenizer, 30) == 30
    assert text_limit(tiny_model("t5"), tokenizer) is None


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "bart"])
def test_the_limit_is_what_the_model_can_take(family: str) -> None:
    """One token more would be outside the position table."""
    loaded = loaded_as(family)
    limit = text_limit(loaded.model, loaded.tokenizer)
    assert limit is not None
    ids = torch.full((1, limit + 1), 7)
    extra = {"decoder_input_ids": ids[:, :2]} if family == "bart" else {}
    with torch.no_grad():
        loaded.model(input_ids=ids[:, :limit], **extra)
        with pytest.raises((IndexError, RuntimeError)):
            loaded.model(input_ids=ids, **extra)


def test_tokenizers_without_a_vocabulary_are_refused(tmp_path: Path) -> None:
    for family in ("bert", "gpt2", "t5", "roberta", "bart"):
        loaded = load_model(str(save(tmp_path / family, family)))
        with pytest.raises(ModelError) as caught:
            prepare(loaded, texts=["the cat sat"])
        assert "--tokenizer" in (caught.value.hint or "")
        assert "--ids" in (caught.value.hint or "")


def test_models_without_a_tokenizer_ask_for_one(tmp_path: Path) -> None:
    loaded = load_model(str(save(tmp_path, "llama")))
    assert loaded.tokenizer is None
    with pytest.raises(ModelError, match="no tokenizer that loads"):
        prepare(loaded, texts=["the cat"])


def test_unknown_tokens_are_counted() -> None:
    loaded = loaded_as("bert")
    assert prepare(loaded, texts=["the cat sat qqqq"]).warnings == ()
    (warning,) = prepare(loaded, texts=["the qqqq"]).warnings
    assert "1 of the 2 tokens of the text" in warning
    (warning,) = prepare(loaded, texts=["the cat", "qqqq zzzz", "qqqq"]).warnings
    assert "2 of the 2 tokens of text 1" in warning
    assert "1 other texts" in warning
    with pytest.raises(ModelError, match="knows none of the text"):
        prepare(loaded, texts=["qqqq zzzz"])
    assert prepare(loaded, texts=["[UNK] [MASK]"]).warnings == ()


def test_an_end_token_that_doubles_as_unknown_is_no_unknown_word() -> None:
    tokenizer = byte_bpe()
    tokenizer.unk_token = "<|endoftext|>"
    prepared = prepare(loaded_as("gpt2", tokenizer), texts=["<|endoftext|>the<|endoftext|>"])
    assert prepared.warnings == ()
    assert prepared.batches[0].axes["text"].special.tolist() == [[True, *[False] * (prepared.tokens - 2), True]]


def test_a_tokenizer_larger_than_the_model_is_refused_before_the_forward() -> None:
    with pytest.raises(ModelError, match="does not fit"):
        prepare(loaded_as("gpt2", vocab_size=20), texts=["the cat"])


def test_ids_are_used_as_they_are() -> None:
    loaded = loaded_as("gpt2")
    prepared = prepare(loaded, ids=[[5, 399, 0], [7]])
    assert prepared.tokens == 4
    inputs = {text: prepared.batches[b].inputs["input_ids"][row] for text, (b, row) in rows(prepared).items()}
    assert inputs[0].tolist() == [5, 399, 0]
    assert int(inputs[1][0]) == 7
    bare = prepare(LoadedModel(loaded.model, "m", None, None, []), ids=[[5, 6, 50]])
    assert bare.first_tokens == ("5", "6", "50")
    assert bare.batches[0].axes["text"].words[0] == (0, 1, 2)


@pytest.mark.parametrize("ids", [[[-1]], [[VOCABULARY]], [[3, 10**12]], [[]], [[1], []], []])
def test_ids_that_do_not_exist(ids: list[list[int]]) -> None:
    with pytest.raises(InputError) as caught:
        prepare(loaded_as("bert"), ids=ids)
    assert caught.value.hint


def test_preparing_leaves_the_tokenizer_as_it_was(tmp_path: Path) -> None:
    loaded = loaded_as("bert")
    assert loaded.tokenizer is not None
    before = loaded.tokenizer.backend_tokenizer.to_str()
    prepare(loaded, texts=["the cat " * 50, "a dog"])
    assert loaded.tokenizer.backend_tokenizer.to_str() == before
    with quiet():
        loaded.tokenizer.save_pretrained(tmp_path)
        assert AutoTokenizer.from_pretrained(tmp_path).padding_side == "right"


def test_left_padding_tokenizers_are_padded_on_the_right_all_the_same() -> None:
    tokenizer = wordpiece()
    tokenizer.padding_side = "left"
    batch = prepare(loaded_as("bert", tokenizer), texts=["the cat sat", "a"]).batches[0]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=80),
    st.one_of(st.none(), st.integers(1, 10)),
    st.booleans(),
)
def test_groups_hold_every_text_once_within_bounds(lengths: list[int], size: int | None, equal: bool) -> None:
    groups = group_by_length(lengths, size, equal_only=equal)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert len(group) <= (size or 32)
        assert size is not None or len(group) == 1 or len(group) * longest**2 <= 4_000_000
        assert not equal or len({lengths[i] for i in group}) == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 3), st.integers(1, 30), st.integers(0, 3), st.integers(1, 40), st.booleans())
def test_shortening_keeps_both_ends(head: int, body: int, tail: int, limit: int, left: bool) -> None:
    special = (*[True] * head, *[False] * body, *[True] * tail)
    whole = TokenSequence(
        tuple(range(len(special))), special, tuple(map(str, range(len(special)))), (0,) * len(special)
    )
    if limit < min(len(whole), head + tail + 1):
        with pytest.raises(InputError, match="no room"):
            shorten(whole, limit, from_left=left)
        return
    short = shorten(whole, limit, from_left=left)
    assert len(short) == min(limit, len(whole))
    assert short.ids[:head] == whole.ids[:head]
    assert tail == 0 or short.ids[-tail:] == whole.ids[-tail:]
    kept = short.ids[head : len(short) - tail]
    assert kept == (whole.ids[head : head + body][-len(kept) :] if left else whole.ids[head : head + len(kept)])
