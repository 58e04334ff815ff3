"""Labels without the tokenizers' signs, and the words that pieces make up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, CLIPTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headscope.models.tokens import TokenReader, join_labels
from tests.tiny_checkpoints import PHRASE, byte_bpe, unigram, wordpiece

SIGNS = ("Ġ", "▁", "##", "Ċ", "�", "</w>")
TOKENIZERS = {"wordpiece": wordpiece(), "byte_bpe": byte_bpe(), "unigram": unigram(), "byt5": ByT5Tokenizer()}


def read(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    encoded = tokenizer(text, return_special_tokens_mask=True)
    reader = TokenReader(tokenizer)
    ids, added = encoded["input_ids"], encoded["special_tokens_mask"]
    special = [bool(m) or n in reader.special for m, n in zip(added, ids, strict=True)]
    return reader.read(ids, special, encoded.word_ids() if encoded.is_fast else None)


def words(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    groups: dict[int, list[str]] = {}
    for label, word in zip(*read(tokenizer, text), strict=True):
        groups.setdefault(word, []).append(label)
    return [join_labels(group) for group in groups.values()]


def clip() -> CLIPTokenizer:
    letters = "abcdefghijklmnopqrstuvwxyz.'"
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(c + "</w>" for c in letters), "at</w>", "cat</w>"]
    return CLIPTokenizer(vocab={n: i for i, n in enumerate(names)}, merges=[("a", "t</w>"), ("c", "at</w>")])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wordpiece", ["[CLS]", "unbelievable", "中", "文", "🙂", "don", "'", "t", "[SEP]"]),
        ("byte_bpe", ["unbelievable", "中文", "🙂", "don't"]),
        ("unigram", ["unbelievable", "中文", "🙂", "don't", "</s>"]),
        ("byt5", ["unbelievable", "中文", "🙂", "don't", "</s>"]),
    ],
)
def test_words_of_four_kinds_of_tokenizer(name: str, expected: list[str]) -> None:
    assert words(TOKENIZERS[name], PHRASE) == expected


def test_word_end_suffixes_join_the_pieces_before_them() -> None:
    assert words(clip(), "the cat sat") == ["<|startoftext|>", "the", "cat", "sat", "<|endoftext|>"]
    assert "cat" in read(clip(), "the cat")[0]


def test_pieces_without_signs_use_the_tokenizers_own_words() -> None:
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert read(tokenizer, "ab c") == (("a", "b", "c"), (0, 0, 1))


def test_newlines_end_words_and_are_shown() -> None:
    labels, numbers = read(byte_bpe(), "the\ncat")
    assert "↵" in labels
    assert words(byte_bpe(), "the\ncat") == ["the", "↵", "cat"]
    assert len(set(numbers)) == 3


def test_broken_characters_show_their_bytes() -> None:
    labels, _ = read(byte_bpe(), "中")
    assert labels == tuple(f"⟨{byte:02X}⟩" for byte in "中".encode())
    assert join_labels(labels) == "中"


def test_numbers_that_do_not_exist_are_shown_as_numbers() -> None:
    for name in ("wordpiece", "byte_bpe", "unigram"):
        assert TokenReader(TOKENIZERS[name]).read([10**6], [False])[0] == ("1000000",)


def test_the_unknown_token_is_a_word_and_others_are_special() -> None:
    reader = TokenReader(wordpiece())
    assert {0, 2, 3, 4} == reader.special
    assert TokenReader(byte_bpe()).special == {0}


TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="⟨⟩␣↵⇥␍▁"), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(TEXT)
@example(PHRASE)
@example("  two   spaces")
def test_bytes_give_back_every_text(text: str) -> None:
    """Words of a byte-level tokenizer, joined, are the text without its spaces: nothing is lost or invented."""
    found = words(TOKENIZERS["byte_bpe"], text)
    plain = "".join(found).translate({ord("␣"): None, ord("↵"): "\n", ord("⇥"): "\t", ord("␍"): "\r"})
    assert plain.replace(" ", "") == text.replace(" ", "")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), TEXT)
def test_labels_carry_no_signs_and_words_count_up(name: str, text: str) -> None:
    labels, numbers = read(TOKENIZERS[name], text)
    assert len(labels) == len(numbers)
    assert all(b - a in (0, 1) for a, b in pairwise(numbers))
    assert not numbers or numbers[0] == 0
    for label in labels:
        assert label
        assert not any(sign in label and sign not in text for sign in SIGNS)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abcdefgh中文", min_size=1, max_size=6), min_size=1, max_size=6))
def test_byte_level_words_are_the_words_between_spaces(parts: list[str]) -> None:
    assert words(TOKENIZERS["byte_bpe"], " ".join(parts)) == parts
