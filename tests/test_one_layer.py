"""Arrays of one layer are those of `analyze`, and bare weights get the labels that it gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headscope
from fixtures import constructed
from fixtures.building import build_family
from fixtures.families import FAMILIES
from fixtures.tokenizers import build_tokenizer
from headscope.errors import InputError
from tests import reference

TEXT = "the cat sat on the mat"


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "deberta_v2", "bloom"])
@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("rules", ["seed", "calibrated"])
def test_both_agree_with_analyze(name, layer, rules):
    model, tokenizer = build_family(name), build_tokenizer(FAMILIES[name].tokenizer)
    found = headscope.extract_attention_patterns(TEXT, model, layer, tokenizer=tokenizer)
    size, heads = len(tokenizer(TEXT).input_ids), FAMILIES[name].stacks["self"].num_heads
    assert found["weights"].shape == (heads, size, size) and found["weights"].dtype == np.float32
    assert len(found["tokens"]) == size and found["keys"] == found["tokens"]
    result = headscope.analyze(model, TEXT, layer=layer, tokenizer=tokenizer, rules=rules)
    for weights in (found["weights"], torch.tensor(found["weights"]), found["weights"].tolist()):
        records = headscope.analyze_head_patterns(weights, found["tokens"], rules=rules)
        assert [r["head"] for r in records] == list(range(heads))
        for record, head in zip(records, result.heads, strict=True):
            assert (record["pattern"], record["runner_up"]) == (head.pattern, head.runner_up)
            for metric, value in record["metrics"].items():
                assert (value is None) == (head.metrics[metric] is None)
                assert value is None or abs(value - head.metrics[metric]) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rules", ["seed", "calibrated"])
def test_the_constructed_heads_by_their_ideal_weights(causal, rules):
    kinds = constructed.GPT2_KINDS if causal else constructed.BERT_KINDS
    ids = [20, constructed.CONTENT_ID, *range(21, 31)]
    weights = np.stack([constructed.ideal_weights(kind, ids, causal=causal) for kind in kinds])
    records = headscope.analyze_head_patterns(weights, rules=rules)
    assert [r["pattern"] for r in records] == [getattr(constructed.KINDS[kind], rules) for kind in kinds]


@pytest.mark.parametrize(
    ("weights", "label"),
    [
        (np.eye(6), "self_attend"),
        (np.eye(6)[[0] * 6], "attention_sink"),
        (np.eye(6)[[0, 0, 1, 2, 3, 4]], "prev_token"),
        (np.eye(6)[[1, 2, 3, 4, 5, 5]], "next_token"),
        (np.full((6, 6), 1 / 6), "broad"),
        (reference.uniform(np.tril(np.ones((6, 6)))), "broad"),
        (np.eye(6)[[3] * 6], "focused"),
    ],
)
def test_one_head_alone_is_told_by_the_calibrated_rules(weights, label):
    """Zeros where one sharp head does not look are no mask."""
    (record,) = headscope.analyze_head_patterns(weights[None], rules="calibrated")
    assert record["pattern"] == label


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_metrics_of_bare_weights_equal_plain_numpy(seed, size, heads, causal):
    rng = np.random.default_rng(seed)
    seen = reference.visibility(size, causal=causal)
    weights = np.where(seen, rng.random((heads, size, size)) + 0.01, 0)
    weights /= weights.sum(-1, keepdims=True)
    before = weights.copy()
    records = headscope.analyze_head_patterns(weights)
    assert np.array_equal(weights, before)
    for record, head in zip(records, weights, strict=True):
        expected = reference.metrics(head, seen, np.zeros(size, bool))
        assert record["metrics"].keys() == {"sink", "prev_token", "self_attend", "entropy"}
        for name, value in record["metrics"].items():
            assert (value is None) == (expected[name] is None)
            assert value is None or abs(value - expected[name]) < 1e-5
        assert (record["pattern"], record["runner_up"]) == reference.seed_labels(expected)


def test_weights_as_they_come_out_of_a_model():
    """With gradients, in half precision, of one token."""
    model = build_family("gpt2")
    attentions = model(torch.tensor([[20, 21, 22, 23]]), output_attentions=True).attentions
    assert attentions[0].requires_grad
    whole = headscope.analyze_head_patterns(attentions[0][0])
    half = headscope.analyze_head_patterns(attentions[0][0].detach().bfloat16())
    for a, b in zip(whole, half, strict=True):
        assert abs(a["metrics"]["sink"] - b["metrics"]["sink"]) < 2**-7
    (one,) = headscope.analyze_head_patterns([[[1.0]]], ["word"])
    assert one["pattern"] == "attention_sink" and one["metrics"]["prev_token"] is None
    assert headscope.analyze_head_patterns([[[1.0]]], rules="calibrated")[0]["pattern"] == "unmeasurable"


def test_rows_that_a_sink_has_shortened_are_taken():
    weights = 0.6 * np.eye(4)[[0] * 4]
    (record,) = headscope.analyze_head_patterns(weights[None])
    assert record["pattern"] == "attention_sink" and record["metrics"]["sink"] == pytest.approx(0.6)


WRONG = {
    "no heads": np.zeros((0, 3, 3)),
    "no tokens": np.zeros((2, 0, 0)),
    "one matrix": np.eye(3),
    "a batch": np.eye(3)[None, None],
    "not square": np.ones((2, 3, 4)) / 4,
    "a number": 1.0,
    "nothing": [],
    "scores": np.array([[[2.0, -1.0], [0.0, 1.0]]]),
    "rows of two": 2 * np.eye(3)[None],
    "not numbers": np.full((1, 2, 2), np.nan),
    "infinite": np.full((1, 2, 2), np.inf),
    "text": [["a", "b"]],
    "ragged": [[[1.0], [0.5, 0.5]]],
    "none": None,
    "complex": np.eye(3)[None] * 1j,
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_attention_is_refused(case):
    with pytest.raises(InputError, match="analyze_head_patterns: ") as error:
        headscope.analyze_head_patterns(WRONG[case])
    assert "\n" not in str(error.value)


def test_tokens_and_rules_are_checked():
    with pytest.raises(InputError, match=r"shape \(1, 3, 3\), expected \(heads, 2, 2\), one row a token"):
        headscope.analyze_head_patterns(np.eye(3)[None], ["a", "b"])
    with pytest.raises(InputError, match="unknown rules 'best'"):
        headscope.analyze_head_patterns(np.eye(3)[None], rules="best")


def test_layers_are_those_of_the_model():
    model, tokenizer = build_family("t5"), build_tokenizer(FAMILIES["t5"].tokenizer)
    with pytest.raises(InputError, match=r"layer 0 exists in several stacks \(encoder, decoder, cross\)") as error:
        headscope.extract_attention_patterns(TEXT, model, 0, tokenizer=tokenizer)
    assert "stack=" in error.value.hint
    found = headscope.extract_attention_patterns(TEXT, model, 2, tokenizer=tokenizer)
    assert found["weights"].shape[0] == 4 and len(found["tokens"]) == found["weights"].shape[1]
    cross = headscope.extract_attention_patterns(
        TEXT, model, -1, tokenizer=tokenizer, stack="cross", decoder_texts="the dog"
    )
    assert cross["weights"].shape[1:] == (len(cross["tokens"]), len(cross["keys"]))
    for layer in (5, -9, "x", None):
        with pytest.raises(InputError):
            headscope.extract_attention_patterns(TEXT, model, layer, tokenizer=tokenizer)


def test_one_layer_at_a_time():
    for layer, count in (("all", 3), ("0-1", 2)):
        with pytest.raises(InputError, match=f"layer {layer} names {count} layers"):
            headscope.extract_attention_patterns(
                TEXT, build_family("bert"), layer, tokenizer=build_tokenizer("wordpiece")
            )


def test_words_and_special_tokens_as_in_analyze():
    model, tokenizer = build_family("bert"), build_tokenizer("wordpiece")
    found = headscope.extract_attention_patterns(
        "unbelievable cats", model, 0, tokenizer=tokenizer, words=True, exclude_special=True
    )
    assert found["tokens"] == ["unbelievable", "cats"]
    assert np.allclose(found["weights"].sum(-1), 1, atol=1e-6)
