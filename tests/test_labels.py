"""Constructed models, whose heads are right by design: their labels, and what is said of one token."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import headscope
from fixtures import constructed
from fixtures.building import build_family, reference_attentions
from fixtures.families import FAMILIES
from headscope.heads.rules import Rule, RuleSet, load_rules
from tests import reference
from tests.judging import Judge, compare, judged_names

KINDS = {False: constructed.BERT_KINDS, True: constructed.GPT2_KINDS}
TOKENIZERS = {causal: constructed.build_tokenizer(KINDS[causal]) for causal in KINDS}


@cache
def built(causal, dtype=torch.float32):
    return (constructed.build_gpt2 if causal else constructed.build_bert)(dtype=dtype)


def text_of(length, causal):
    """A text that is `length` tokens long, [CLS] and [SEP] included where there are any."""
    return constructed.sample_text(length if causal else length - 2)


def analyze(causal, length, dtype=torch.float32, **options):
    return headscope.analyze(built(causal, dtype), text_of(length, causal), tokenizer=TOKENIZERS[causal], **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [7, 12, 33, 128])
def test_all_labels_are_right(causal, dtype, length):
    kinds = constructed.head_kinds(KINDS[causal])
    seed, calibrated = (analyze(causal, length, dtype, rules=rules) for rules in ("seed", "calibrated"))
    assert {(h.layer, h.head): h.pattern for h in seed.heads} == constructed.labels(KINDS[causal], "seed")
    assert {(h.layer, h.head): h.pattern for h in calibrated.heads} == constructed.labels(KINDS[causal], "calibrated")
    for head in seed.heads:
        kind = constructed.KINDS[kinds[head.layer, head.head]]
        assert head.rest_pattern == kind.rest or (kind.rest is None and head.pattern == "attention_sink")
        ids = TOKENIZERS[causal](text_of(length, causal)).input_ids
        ideal = constructed.ideal_weights(kind.name, ids, causal=causal)
        expected = reference.metrics(ideal, reference.visibility(length, causal=causal), np.zeros(length, bool))
        tolerance = 1e-4 if dtype == torch.float32 else 2**-6
        assert head.metrics["sink"] == pytest.approx(expected["sink"], abs=tolerance)
        assert head.metrics["prev_token"] == pytest.approx(expected["prev_token"], abs=tolerance)


SEED_FINDS = {
    "first_token": ("attention_sink", "focused"),
    "previous_token": ("prev_token", "focused"),
    "itself": ("self_attend", "focused"),
    "content_token": ("focused", "broad"),
    "alike": ("broad", None),
    "next_token": ("focused", "broad"),
}


@pytest.mark.parametrize("causal", [False, True])
def test_runners_up_and_rests_of_the_constructed_heads(causal):
    """What follows from the kinds by hand, and all of it by plain NumPy on transformers' own weights."""
    kinds, ids = constructed.head_kinds(KINDS[causal]), TOKENIZERS[causal](text_of(12, causal)).input_ids
    with torch.no_grad():
        layers = built(causal)(torch.tensor([ids]), output_attentions=True).attentions
    visible, special = reference.visibility(12, causal=causal), np.isin(ids, TOKENIZERS[causal].all_special_ids)
    judges = {
        ("self", layer, head): Judge([(layers[layer][0, head].double().numpy(), visible, special)])
        for layer, head in kinds
    }
    for rules in ("seed", "calibrated"):
        compare(analyze(causal, 12, rules=rules, metrics=",".join(judged_names())), judges, judged_names())
    for head in analyze(causal, 12).heads:
        kind = kinds[head.layer, head.head]
        assert kind not in SEED_FINDS or (head.pattern, head.runner_up) == SEED_FINDS[kind], kind
        assert kind != "first_and_previous" or (head.pattern, head.rest_pattern) == ("attention_sink", "prev_token")
        assert head.pattern == "attention_sink" or head.rest_pattern is None


@pytest.mark.parametrize("causal", [False, True])
def test_the_uniform_head_is_broad_at_every_length(causal):
    """From 2 tokens up to 64; the seed rules call it a sink or a self-attender on short texts, and mark that."""
    at = next(
        place for place, kind in constructed.head_kinds(KINDS[causal]).items() if kind == "alike" and place[0] == 0
    )
    model, ids = built(causal), list(range(20, 84))
    for length in range(2, 65):
        options = {"ids": ids[:length], "layer": at[0], "head": at[1]}
        (head,) = headscope.analyze(model, rules="calibrated", **options).heads
        assert (head.pattern, head.runner_up) == ("broad", None), length
        assert {"sink_adjusted", "self_attend_adjusted", "prev_token_adjusted"} <= set(head.at_chance), length
        if length > 12:
            continue
        (seed,) = headscope.analyze(model, **options).heads
        assert set(seed.at_chance) == {"sink", "prev_token", "self_attend", "entropy"}, length
        if causal and length <= 5:
            assert seed.pattern == "attention_sink"


@pytest.mark.parametrize("causal", [False, True])
def test_a_uniform_head_on_one_token_of_many_texts(causal):
    result = headscope.analyze(built(causal), ids=[[20], [21, 22], [23]], rules="calibrated")
    kinds = constructed.head_kinds(KINDS[causal])
    broad = [h for h in result.heads if kinds[h.layer, h.head] == "alike"]
    assert {(h.pattern, h.runner_up) for h in broad} == {("broad", None)}
    assert {h.spread["sink_adjusted"].texts for h in broad} == {1} and {h.spread["sink"].texts for h in broad} == {3}


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_oss", "deberta_v2", "bloom", "t5", "bart"])
@pytest.mark.parametrize("rules", ["seed", "calibrated"])
def test_one_token_is_measured_where_it_can_be_and_marked(name, rules):
    model = build_family(name)
    inputs = {"input_ids": torch.tensor([[21]])}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[22]])
    result = headscope.analyze(model, inputs=inputs, metrics="all", rules=rules)
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert "NaN" not in text and json.loads(text)["schema"] == "headscope/analysis@1"
    for head in result.heads:
        whole = head.metrics["sink"]
        assert head.chance["sink"] == 1 and "sink" in head.at_chance
        assert whole == pytest.approx(1) if name != "gpt_oss" else 0 < whole < 1
        assert "entropy" in head.at_chance or name == "gpt_oss"
        for metric in ("prev_token", "next_token", "relative_entropy", "sink_adjusted", "entropy_rest"):
            assert head.metrics[metric] is None and head.chance[metric] is None and metric not in head.at_chance
        expected = "unmeasurable" if rules == "calibrated" else "attention_sink" if whole > 0.4 else head.pattern
        assert head.pattern == expected and head.rest_pattern is None


def test_labels_of_several_texts_are_those_of_the_mean_metrics():
    """Not the most frequent label, and not the label of all rows together."""
    model = build_family("llama")
    rows = [list(range(20, 20 + n)) for n in (2, 3, 9, 17)]
    causal = [reference.visibility(len(row), causal=True) for row in rows]
    weights = [
        reference_attentions(FAMILIES["llama"], model, {"input_ids": torch.tensor([row])})["self"] for row in rows
    ]
    results = {rules: headscope.analyze(model, ids=rows, rules=rules) for rules in ("seed", "calibrated")}
    for place in range(len(results["seed"].heads)):
        seed, calibrated = (results[rules].heads[place] for rules in ("seed", "calibrated"))
        texts = [(w[seed.layer][0, seed.head], v, np.zeros(len(v), bool)) for w, v in zip(weights, causal, strict=True)]
        judge = Judge(texts)
        assert (seed.pattern, seed.runner_up, seed.rest_pattern) == judge.seed()
        assert (calibrated.pattern, calibrated.runner_up) == judge.calibrated()
        for metric, spread in seed.spread.items():
            values = [v for v in judge.per_text(metric) if v is not None]
            assert spread.texts == len(values)
            assert spread.sd == pytest.approx(np.std(values, ddof=1), abs=1e-5)
            assert math.isclose((spread.low + spread.high) / 2, np.mean(values), abs_tol=1e-5)


# ------------------------------------------------------------------ many at once
TIES = load_rules("calibrated")
MIXED = RuleSet(
    "mixed",
    (
        Rule("a", "sink", 0.3, above=True),
        Rule("b", "entropy", 0.5, above=False),
        Rule("a", "prev_token", 0.5, above=True),
        Rule("c", "entropy", 0.7, above=True),
        Rule("d", "sink", 0.6, above=True),
        Rule("broad", "self_attend", 0.2, above=False),
    ),
    otherwise="broad",
)
RULE_SETS = [
    load_rules("seed"),
    TIES,
    load_rules("seed").without_sink(),
    TIES.without_sink(),
    MIXED,
    dataclasses.replace(MIXED, largest=True),
    dataclasses.replace(MIXED, largest=True, unmeasurable="broad"),
    dataclasses.replace(MIXED, rules=(), unmeasurable="none"),
]
CELLS = st.sampled_from([math.nan, 0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0]) | st.floats(-2, 2)


@settings(deadline=None)
@given(rules=st.sampled_from(RULE_SETS), data=st.data())
def test_labels_of_many_are_those_of_each(rules, data):
    """Thresholds and ties included; NaN and a metric that is missing are what was not measured."""
    names = data.draw(st.sets(st.sampled_from([*rules.metrics, "special"])))
    values = {name: data.draw(arrays(np.float64, (2, 3), elements=CELLS)) for name in sorted(names)}
    labels, measured = rules.label_many(values), rules.measured_many(values)
    assert labels.dtype == np.int64 and labels.shape == measured.shape == ((2, 3) if values else ())
    for place in np.ndindex(labels.shape):
        metrics = {name: None if np.isnan(v[place]) else float(v[place]) for name, v in values.items()}
        assert rules.labels[labels[place]] == rules.label(metrics)[0]
        assert measured[place] == any(metrics.get(name) is not None for name in rules.metrics)


def test_the_labels_that_rules_can_give():
    assert load_rules("seed").labels == ("attention_sink", "prev_token", "self_attend", "focused", "broad")
    assert TIES.labels[-3:] == ("focused", "broad", "unmeasurable") and len(TIES.labels) == 7
    assert MIXED.labels == ("a", "b", "c", "d", "broad")
    assert RULE_SETS[-1].labels == ("broad", "none")
