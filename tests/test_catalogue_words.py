"""Words and the words that they attend to, against plain NumPy on transformers' own weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from fixtures.building import build_family
from fixtures.families import FAMILIES
from fixtures.tokenizers import WORDS, build_tokenizer, word_level
from headscope.capture.blocks import RowBlock
from headscope.errors import InputError, ModelError
from headscope.heads.catalogue.attended import Visible, attended_words
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.words import word_batches
from headscope.models.batches import TokenSequence
from headscope.models.loading import wrap_model
from headscope.models.selection import parse_selection
from headscope.models.sites import find_sites

SENTENCES = (
    ("The", "unbelievable", "cats", "sat", "restless", "."),
    ("naïve", "River", "stars", "reworked"),
    ("dog",),
    ("we", "find", "the", "tiredness", "of", "birds", "unable", "to", "look", "away", "!"),
)
KINDS = ("bert", "gpt2", "llama", "mistral", "t5")


def probing_of(name, tokenizer=None, **more):
    model = build_family(name)
    loaded = wrap_model(model, tokenizer=tokenizer or build_tokenizer(FAMILIES[name].tokenizer))
    sites = find_sites(model)
    return Probing(loaded, sites, sites, parse_selection("head", "all"), **more)


def pieces(tokenizer, words):
    """Each token's word, from tokenizing every word by itself; all words but the first follow a space."""
    byte_level = tokenizer.backend_tokenizer.pre_tokenizer.__class__.__name__ == "ByteLevel"
    spelled = [(" " if byte_level and i else "") + word for i, word in enumerate(words)]
    return [i for i, word in enumerate(spelled) for _ in tokenizer.tokenize(word)]


def around(tokenizer, words):
    """Ids of the sentence, and each token's word with -1 for special tokens."""
    encoded = tokenizer(" ".join(words), return_special_tokens_mask=True)
    numbers = iter(pieces(tokenizer, words))
    return encoded.input_ids, [-1 if own else next(numbers) for own in encoded.special_tokens_mask]


def rows_of(batches, axis="text"):
    """Words by sentence, of one axis."""
    return {i: list(words) for batch in batches for i, words in zip(batch.order, batch.axes[axis].words, strict=True)}


def merged(weights, visible, words):
    """One row and one column a word: columns summed, rows averaged; (head, word, word) and what is visible."""
    words = np.array(words)
    count = words.max() + 1
    mean = np.stack([weights[:, words == i].mean(axis=1) for i in range(count)], axis=1)
    summed = np.stack([mean[:, :, words == j].sum(axis=2) for j in range(count)], axis=2)
    seen = np.array([[visible[words == i][:, words == j].any() for j in range(count)] for i in range(count)])
    return summed, seen


@pytest.mark.parametrize("name", KINDS)
def test_tokens_know_their_words(name):
    probing = probing_of(name)
    found = word_batches(probing, SENTENCES)
    assert found.kept == (0, 1, 2, 3) and found.words == SENTENCES and found.notes == ()
    expected = {i: around(probing.loaded.tokenizer, words)[1] for i, words in enumerate(SENTENCES)}
    assert rows_of(found.batches) == expected
    if name == "t5":
        assert rows_of(found.batches, "decoder") == {i: [-1, *words[:-1]] for i, words in expected.items()}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("engine", ["streaming", "layerwise"])
def test_attended_words_are_those_of_plain_numpy(name, engine):
    probing = probing_of(name, engine=engine, batch_size=3)
    model, tokenizer = probing.loaded.model, probing.loaded.tokenizer
    found = attended_words(probing, word_batches(probing, SENTENCES))
    for i, words in enumerate(SENTENCES):
        ids, numbers = around(tokenizer, words)
        decoder = [model.config.decoder_start_token_id or 0, *ids[:-1]] if name == "t5" else None
        extra = {} if decoder is None else {"decoder_input_ids": torch.tensor([decoder])}
        with torch.no_grad():
            output = model(input_ids=torch.tensor([ids]), output_attentions=True, **extra)
        stacks = {"self": output.get("attentions"), "encoder": output.get("encoder_attentions")}
        stacks["decoder"] = output.get("decoder_attentions")
        checked = 0
        for stack, layers in stacks.items():
            for layer, weights in enumerate(layers or ()):
                own = [-1, *numbers[:-1]] if stack == "decoder" else numbers
                check_layer(found, (stack, layer), i, weights[0].double().numpy(), own, name)
                checked += 1
        assert checked == len(found.by_layer)


def check_layer(found, layer, sentence, weights, numbers, name):
    size = weights.shape[-1]
    query, key = np.arange(size)[:, None], np.arange(size)[None]
    both_ways = name == "bert" or layer[0] == "encoder"
    window = 4 if name == "mistral" else size
    visible = np.full((size, size), True) if both_ways else (key <= query) & (key > query - window)
    weights, seen = merged(weights, visible, numbers)
    count = len(seen)
    here, other = np.arange(count), ~np.eye(count, dtype=bool)
    rest = np.where(seen & other, weights, -1)
    target, weight = found.by_layer[layer][sentence], found.weights[layer][sentence]
    assert target.dtype == np.int32 and target.shape == (len(weights), count)
    alone = ~(seen & other).any(axis=1)
    assert (target[:, alone] == -1).all() and (weight[:, alone] == 0).all()
    assert (target[:, ~alone] == rest.argmax(axis=-1)[:, ~alone]).all()
    np.testing.assert_allclose(weight[:, ~alone], rest.max(axis=-1)[:, ~alone], rtol=1e-4, atol=1e-6)
    view = found.visible[layer]
    told = np.array([view.sees(sentence, here, np.full(count, j)) for j in here]).T
    assert (told == seen).all()
    assert (view.others(sentence) == (seen & other).sum(axis=1)).all()
    assert view.causal == (not both_ways)


def test_layers_that_see_the_same_share_what_they_see():
    probing = probing_of("t5")
    found = attended_words(probing, word_batches(probing, SENTENCES))
    views = {stack: {id(v) for (s, _), v in found.visible.items() if s == stack} for stack in ("encoder", "decoder")}
    assert [len(v) for v in views.values()] == [1, 1] and views["encoder"] != views["decoder"]


def test_a_token_across_two_words_belongs_to_the_first():
    # GPT-2's tokenizer splits "don't" as "don" and "'t", treebanks as "do" and "n't".
    probing = probing_of("gpt2", tokenizer=word_pieces({"don": 0, "'t": 1, "Ġcat": 2}))
    found = word_batches(probing, [("do", "n't", "cat")], [(False, True, True)])
    assert rows_of(found.batches) == {0: [0, 1, 2]}
    assert found.notes == ("1 token across two words counted to the first of them",)


def word_pieces(vocab):
    """A byte-level tokenizer of a few whole pieces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({**vocab, "<unk>": len(vocab)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_without_a_space_between_words_pieces_are_told_apart():
    probing = probing_of("bert")
    found = word_batches(probing, [("cats", "'", "house", ".")], [(False, True, False, True)])
    assert rows_of(found.batches) == {0: [-1, 0, 0, 1, 2, 3, -1]}


def test_words_without_tokens_and_long_sentences_drop_their_sentence():
    merging = word_pieces({"gonna": 0, "Ġcat": 1, "cat": 2})
    probing = probing_of("gpt2", tokenizer=merging)
    long = ["cat"] * 129
    found = word_batches(probing, [("gon", "na"), ("cat", "cat"), long], [(False, True), (True, True), [True] * 129])
    assert found.kept == (1,) and found.words == (("cat", "cat"),)
    assert [batch.order for batch in found.batches] == [(0,)]
    assert found.notes == (
        "1 sentence left out: a word without a token of its own",
        "1 sentence left out: more than 128 tokens",
    )
    with pytest.raises(InputError, match="no sentence can be read word by word: 1 sentence left out: a word without"):
        word_batches(probing, [("gon", "na")], [(False, True)])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["ab", "c", "ï", "日本", "."]), st.booleans()), min_size=1, max_size=6))
def test_without_offsets_beginnings_say_which_word_a_token_belongs_to(pairs):
    """A byte is a token, so that the words' bytes can be counted."""
    from headscope.heads.catalogue import words as module

    text = "".join(word + (" " if space and i + 1 < len(pairs) else "") for i, (word, space) in enumerate(pairs))
    line = module._line(0, [word for word, _ in pairs], [space for _, space in pairs])
    assert line.text == text
    tokenizer = ByT5Tokenizer()
    ids = tuple(tokenizer(text)["input_ids"])
    special = (*[False] * (len(ids) - 1), True)
    found = module._by_beginnings(tokenizer, line, TokenSequence(ids, special, ("",) * len(ids), (0,) * len(ids)))
    expected, before = [], False
    for i, (word, space) in enumerate(pairs):
        # A space belongs to the word after it.
        expected += [i] * (len(word.encode()) + before)
        before = space
    assert found is not None and found.words == (*expected, -1)


def test_a_tokenizer_without_offsets_whose_beginnings_differ_is_refused():
    from headscope.heads.catalogue import words as module

    line = module._line(0, ["ab", "c"], [False, True])
    sequence = TokenSequence((7, 8), (False, False), ("abc", "?"), (0, 0))

    def read(text, add_special_tokens):
        return {"input_ids": [7, 8] if text == "abc" else [3]}

    assert module._by_beginnings(read, line, sequence) is None


def test_faults_of_the_input_are_named():
    probing = probing_of("bert")
    for sentences, spaces, message in [
        ([], None, "there are no sentences"),
        ([("cat",), ()], None, "sentence 1 has no words"),
        ([("cat", " ")], None, "sentence 0 has an empty word"),
        ([("cat", "sat")], [(True,)], "sentence 0 has 2 words and 1 signs of spaces"),
    ]:
        with pytest.raises(InputError, match=message):
            word_batches(probing, sentences, spaces)
    probing.loaded.tokenizer = None
    with pytest.raises(ModelError, match="no tokenizer"):
        word_batches(probing, [("cat",)])


def test_models_without_words_have_no_attended_words():
    probing = probing_of("t5")
    crossing = Probing(probing.loaded, probing.sites, tuple(s for s in probing.sites if s.cross), probing.heads)
    with pytest.raises(ModelError, match="no wanted layer attends from words to words"):
        attended_words(crossing, word_batches(crossing, SENTENCES))


def test_a_row_that_gives_other_words_nothing_attends_to_none():
    from headscope.attention.visibility import Visibility
    from headscope.heads.catalogue.attended import _part

    weights = torch.tensor([[[[1.0, 0, 0], [0, 0.5, 0.5], [0.5, 0.5, 0]]]])
    facts = (torch.ones(1, 1, 3, dtype=torch.bool), Visibility(3, 3), torch.zeros(1, 3, dtype=torch.bool))
    block = RowBlock(0, *facts, lengths=torch.tensor([3]), cross=False, first_key=0, weights=weights)
    part = _part(block)
    assert part is not None and part.word.tolist() == [[[-1, 2, 0]]] and part.weight.tolist() == [[[0, 0.5, 0.5]]]
    gaps = Visibility(3, 3, open=torch.tensor([[[[True, False, True], [True, True, True], [True, True, True]]]]))
    assert _part(RowBlock(0, facts[0], gaps, facts[2], torch.tensor([3]), False, 0, weights=weights)) is None


def test_words_outside_of_the_sentence_are_not_visible():
    view = Visible((np.array([0, 0], np.int32),), (np.array([1, 1], np.int32),))
    assert view.sees(0, np.array([0, 1, 1]), np.array([-1, 2, 0])).tolist() == [False, False, True]
    assert view.others(0).tolist() == [1, 1] and not view.causal


def test_the_model_is_left_as_it_was():
    probing = probing_of("gpt2")
    model = probing.loaded.model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    attended_words(probing, word_batches(probing, SENTENCES))
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_whole_words_are_their_own_tokens():
    probing = probing_of("bert", tokenizer=word_level(WORDS, around=True))
    assert rows_of(word_batches(probing, [("cat", "sat", "mat")]).batches) == {0: [-1, 0, 1, 2, -1]}
