"""Repeated random tokens: what is drawn, what is put around it, and what is refused."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

from fixtures.circuits import BOS_ID, NUM_SPECIAL, induction_model
from fixtures.tokenizers import build_tokenizer, word_level
from headscope.errors import InputError, ModelError
from headscope.heads.catalogue.repeated import repeated_ids, usable_ids
from headscope.models.loading import wrap_model
from headscope.models.text_inputs import id_sequences

CIRCUIT = induction_model()
LOADED = wrap_model(CIRCUIT.model, CIRCUIT.tokenizer)


def gpt2(tokenizer, vocab=None, positions=128, **config):
    size = vocab or len(tokenizer)
    names = {"bos_token_id": None, "eos_token_id": None} | config
    model = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=8, n_layer=1, n_head=2, n_positions=positions, **names))
    return wrap_model(model, tokenizer)


def bert(tokenizer, positions=64):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return wrap_model(
        BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=positions, pad_token_id=0, **sizes)),
        tokenizer,
    )


@given(sequences=st.integers(1, 6), length=st.integers(2, 40), copies=st.integers(2, 3), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_sequence_is_bos_and_then_the_same_different_tokens_again(sequences, length, copies, seed):
    found = repeated_ids(LOADED, sequences=sequences, length=length, copies=copies, seed=seed)
    assert (len(found.ids), found.prefix, found.length, found.copies, found.seed) == (
        sequences,
        1,
        length,
        copies,
        seed,
    )
    for row in found.ids:
        first = row[1 : 1 + length]
        assert row == [BOS_ID] + first * copies
        assert len(set(first)) == length
        assert min(first) >= NUM_SPECIAL and max(first) < 256
        assert [[row[i] for i in found.span(c)] for c in range(copies)] == [first] * copies


@given(seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_a_seed_gives_the_same_and_more_sequences_only_add(seed):
    few, many = (repeated_ids(LOADED, sequences=n, seed=seed).ids for n in (3, 5))
    assert few == many[:3] and len(set(map(tuple, many))) == 5
    assert repeated_ids(LOADED, sequences=3, seed=seed + 1).ids != few


def test_no_generator_of_others_is_touched():
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    repeated_ids(LOADED)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_every_usable_token_is_drawn_about_as_often():
    rows = repeated_ids(LOADED, sequences=400, length=40).ids
    counts = np.bincount([n for row in rows for n in row[1:41]], minlength=256)
    usable = usable_ids(LOADED)
    assert set(np.flatnonzero(counts)) == set(usable.tolist())
    expected = 400 * 40 / len(usable)
    assert counts[usable].min() > expected / 2 and counts[usable].max() < expected * 2


def test_cls_and_sep_are_around_as_the_tokenizer_puts_them():
    tokenizer = build_tokenizer("wordpiece")
    loaded = bert(tokenizer)
    found = repeated_ids(loaded, length=10)
    assert found.prefix == 1
    for row in found.ids:
        assert (row[0], row[-1], len(row)) == (tokenizer.cls_token_id, tokenizer.sep_token_id, 22)
        assert not set(row[1:-1]) & set(tokenizer.all_special_ids)
        assert row[1:11] == row[11:21]
    special = id_sequences(loaded, found.ids)[0].special
    assert special == (True, *[False] * 20, True)


def test_bos_is_put_before_where_the_tokenizer_has_one_but_does_not_add_it():
    tokenizer = build_tokenizer("byte_bpe")
    assert tokenizer("a word").input_ids[0] != tokenizer.bos_token_id
    found = repeated_ids(gpt2(tokenizer), length=12)
    assert all(row[0] == tokenizer.bos_token_id and row.count(row[0]) == 1 and len(row) == 25 for row in found.ids)


def test_bos_that_the_tokenizer_adds_is_not_put_before_twice():
    tokenizer = build_tokenizer("unigram_bos")
    found = repeated_ids(gpt2(tokenizer), length=12)
    assert found.prefix == 1 and all(row.count(tokenizer.bos_token_id) == 1 for row in found.ids)


def test_nothing_is_put_before_where_there_is_no_bos():
    tokenizer = build_tokenizer("unigram_eos")
    config = T5Config(vocab_size=len(tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    found = repeated_ids(wrap_model(T5EncoderModel(config), tokenizer), length=9)
    assert found.prefix == 0
    assert all(row[:9] == row[9:18] and row[18:] == [tokenizer.eos_token_id] for row in found.ids)


def test_an_encoder_decoder_gets_no_bos_that_its_tokenizer_does_not_add(family_model):
    model = family_model("bart")[0]
    tokenizer = build_tokenizer("byte_bpe")
    assert tokenizer.bos_token_id is not None
    assert repeated_ids(wrap_model(model, tokenizer), length=8).prefix == 0


def test_tokens_that_stand_for_no_text_are_left_out():
    words = [
        "alpha",
        "[unused7]",
        " ",
        "\u00a0",
        "<extra_id_3>",
        "▁",
        "beta",
        "<|reserved_special_token_4|>",
        "unusual",
    ]
    tokenizer = word_level([*words, *(f"w{i}" for i in range(8)), "later"])
    tokenizer.add_tokens(["added"])
    known = tokenizer.get_vocab()
    usable = set(usable_ids(gpt2(tokenizer, vocab=known["later"])).tolist())
    wanted = ["alpha", "▁", "beta", "unusual", *(f"w{i}" for i in range(8))]
    assert usable == {known[word] for word in wanted}


def test_parts_of_characters_are_left_out():
    tokenizer = build_tokenizer("byte_bpe")
    usable = usable_ids(gpt2(tokenizer))
    assert all("\ufffd" not in tokenizer.decode([n]) and tokenizer.decode([n]).strip() for n in usable)
    assert len(usable) > 50


def test_without_a_tokenizer_the_configuration_says_which_tokens_are_special():
    loaded = gpt2(None, vocab=40, bos_token_id=3, eos_token_id=[5, 6], pad_token_id=9, image_token_id=11)
    assert usable_ids(loaded).tolist() == [n for n in range(40) if n not in (3, 5, 6, 9, 11)]
    found = repeated_ids(loaded, length=20)
    assert found.prefix == 1 and all(row[0] == 3 for row in found.ids)
    without = repeated_ids(gpt2(None, vocab=40, bos_token_id=50256), length=20)
    assert without.prefix == 0 and all(len(row) == 40 for row in without.ids)


@pytest.mark.parametrize(("positions", "length"), [(64, 31), (18, 8), (19, 8), (20, 9)])
def test_copies_are_shortened_to_the_models_limit(positions, length):
    found = repeated_ids(bert(build_tokenizer("wordpiece"), positions), length=50)
    assert found.length == length and len(found.ids[0]) == 2 + 2 * length


def test_copies_are_shortened_to_the_vocabulary():
    assert repeated_ids(gpt2(None, vocab=12)).length == 12
    with pytest.raises(ModelError, match="room for 7 different tokens 2 times, needs 8"):
        repeated_ids(gpt2(None, vocab=7))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ModelError, match="room for 7 different tokens 2 times, needs 8"):
        repeated_ids(bert(build_tokenizer("wordpiece"), 17))
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=4, patch_size=2)
    with pytest.raises(ModelError, match="reads no text"):
        repeated_ids(wrap_model(ViTModel(config)))
    for name, value in (("sequences", 0), ("length", 1), ("copies", 1), ("seed", -1)):
        with pytest.raises(InputError, match=f"{name} is {value}, needs"):
            repeated_ids(LOADED, **{name: value})


def test_a_tokenizer_that_does_not_fit_the_model_is_refused():
    tokenizer = word_level([f"w{i}" for i in range(30)], around=True)
    assert repeated_ids(bert(tokenizer), length=8).prefix == 1
    small = gpt2(tokenizer, vocab=3)
    with pytest.raises(ModelError):
        repeated_ids(small)
