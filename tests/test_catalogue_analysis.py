"""`analyze` with types: what is asked for, what is left out and why, on models that know nothing."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import headscope
from fixtures.building import build_family, example_inputs
from fixtures.circuits import build_tokenizer as circuit_tokenizer
from fixtures.circuits import induction_model, offset_model
from fixtures.families import FAMILIES
from fixtures.tokenizers import build_tokenizer
from headscope.errors import HeadscopeError, InputError, ModelError
from headscope.heads.catalogue.choice import GROUPS, PROBE_TYPES, choose
from headscope.heads.catalogue.repetition import with_natural
from headscope.heads.catalogue.result import TypeRecord
from headscope.heads.catalogue.text_types import TEXT_TYPES

TEXT = "the cat sat on the mat . the cat sat on the mat because it was tired , and the dog saw it ."
ALL = (*TEXT_TYPES, *PROBE_TYPES)
REPEATING = ("duplicate_token", "induction")
RECORD = ["type", "score", "chance", "eligible", "low", "high", "example", "criteria", "alternative", "p"]
# Beyond those, by type.
MORE = {
    "induction": {"natural", "partners"},
    "duplicate_token": {"natural"},
    "copying": {"spread"},
    "redundant": {"partner", "same_layer", "median_distance"},
} | {name: {"largest_there"} for name in ("self_attend", "previous_token", "next_token", *GROUPS["offset"])}
MORE |= {"first_token": {"texts_above"}, "column_sink": {"texts_above"}}


@cache
def of_family(name, types="all"):
    family, model = FAMILIES[name], build_family(name)
    if not family.tokenizer:
        return headscope.analyze(model, inputs=example_inputs(family), types=types)
    tokenizer = build_tokenizer(family.tokenizer)
    return headscope.analyze(model, TEXT, tokenizer=tokenizer, types=types, max_length=60)


def skipped(analysis):
    return {t.name: t.skipped for t in analysis.catalogue.types if t.skipped is not None}


# ------------------------------------------------------------------ models that know nothing
NOTHING_TO_READ = ("vit", "clip", "whisper")


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "gemma3", "mistral", "jamba", *NOTHING_TO_READ])
def test_all_types_are_measured_or_left_out_with_a_reason(name):
    analysis = of_family(name)
    whole = json.loads(json.dumps(analysis.to_dict(), allow_nan=False))
    catalogue = whole["catalogue"]
    assert [t["name"] for t in catalogue["types"]] == list(catalogue["scores"]) == list(ALL)
    for info in catalogue["types"]:
        scores = catalogue["scores"][info["name"]]
        assert len(scores) == len(whole["heads"])
        assert info["measured"] == sum(score is not None for score in scores)
        assert (info["skipped"] is None) == (info["measured"] > 0)
        assert info["claimed"] == sum(info["name"] in {t["type"] for t in h["types"]} for h in whole["heads"])
    for head, record in ((h, r) for h in whole["heads"] for r in h["types"]):
        assert list(record)[: len(RECORD)] == RECORD
        assert set(record) - set(RECORD) <= MORE.get(record["type"], set())
        score = catalogue["scores"][record["type"]][whole["heads"].index(head)]
        assert record["score"] == score and record["eligible"] > 0
        assert record["low"] is None or record["low"] <= record["score"] <= record["high"]
    reasons = skipped(analysis)
    assert (
        reasons["syntax"] == "give --conllu FILE" and reasons["retrieval"] == "give --haystack FILE and --needles FILE"
    )
    causal = FAMILIES[name].modality == "text" and name != "bert"
    assert ("next_token" in reasons) == causal
    assert (set(REPEATING) <= reasons.keys()) == (name in (*NOTHING_TO_READ, "mistral"))
    assert not any(t.type in REPEATING for h in analysis.heads for t in h.types)


def test_layers_that_see_too_little_are_not_scored():
    """Windows of 4 tokens cannot see the first copy of a sequence; the layer without one can."""
    for name in ("induction", "duplicate_token"):
        scores = of_family("gemma3").catalogue.scores[name]
        measured = {h.layer for h, score in zip(of_family("gemma3").heads, scores, strict=True) if score is not None}
        assert measured == {2}
    assert of_family("mistral").catalogue.types[ALL.index("induction")].measured == 0


CASES = (
    ("vit", "induction", ModelError, "reads no text"),
    ("bert", "copying", ModelError, "no output embedding"),
    ("mistral", "induction", InputError, "no row of the text"),
    ("gpt2", "next_token", InputError, "no row of the text"),
    ("vit", "delimiter", InputError, "no row of the text"),
    ("vit", "repetition,induction", ModelError, "reads no text"),
    ("bert", "all,copying", ModelError, "no output embedding"),
)


@pytest.mark.parametrize(("name", "types", "error", "reason"), CASES)
def test_what_cannot_be_measured_is_an_error_where_it_was_named(name, types, error, reason):
    with pytest.raises(error, match=reason) as caught:
        of_family(name, types)
    assert "\n" not in caught.value.message
    assert of_family(name, "all")


@pytest.mark.parametrize("seed", range(10))
def test_random_weights_have_no_induction_heads(seed):
    config = GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config).eval()
        for parameter in model.parameters():
            parameter.data.add_(0.5 * torch.randn_like(parameter) * (parameter.dim() > 1))
    analysis = headscope.analyze(model, ids=[list(range(5, 25))], types="repetition", seed=seed)
    assert not [h.name for h in analysis.heads if {t.type for t in h.types} & {*REPEATING}]
    assert None not in analysis.catalogue.scores["induction"]


def test_records_of_texts_do_not_stand_in_for_random_tokens():
    def record(name, score):
        return TypeRecord(name, score, 0.1, 9, None, None)

    natural = {("self", 0, 0): (record("induction", 0.9), record("broad", 0.2)), ("self", 1, 0): ()}
    found = with_natural({("self", 1, 0): (record("induction", 0.5),)}, natural, REPEATING)
    assert found["self", 0, 0] == (natural["self", 0, 0][1],)
    assert [(r.score, r.details) for r in found["self", 1, 0]] == [(0.5, {"natural": None})]


# ------------------------------------------------------------------ focus
def test_what_explains_a_head_keeps_it_from_being_focused_also_where_only_that_is_asked_for():
    circuit = offset_model()
    for types in ("focused", "entropy", "positional,entropy"):
        analysis = headscope.analyze(circuit.model, TEXT * 3, tokenizer=circuit.tokenizer, types=types)
        found = {t.type for h in analysis.heads for t in h.types}
        assert "focused" not in found and set(analysis.catalogue.scores) >= found
        assert max(analysis.catalogue.scores["focused"]) > 0.9


# ------------------------------------------------------------------ what is looked at
def test_only_heads_that_are_looked_at_are_recorded_and_counted():
    circuit = induction_model()
    options = {"tokenizer": circuit.tokenizer, "types": ["induction", "previous_token"]}
    whole = headscope.analyze(circuit.model, TEXT * 3, **options)
    layer = headscope.analyze(circuit.model, TEXT * 3, **options, layer=1)
    one = headscope.analyze(circuit.model, TEXT * 3, **options, layer=1, head=3)
    found = {}
    for number, analysis in ((8, whole), (4, layer), (1, one)):
        assert {len(s) for s in analysis.catalogue.scores.values()} == {number} == {len(analysis.heads)}
        (found[number],) = [t for t in analysis.head(1, 3).types if t.type == "induction"]
    # The same head, and the smallest p-value of all: Holm multiplies it by the number of heads.
    assert found[8].p == pytest.approx(8 * found[1].p) and found[4].p == pytest.approx(4 * found[1].p)
    assert {(f.score, f.eligible) for f in found.values()} == {(found[8].score, found[8].eligible)}
    # Partners are looked for among heads that are looked at.
    assert "partners" in found[8].details and "partners" not in found[1].details


def test_pruned_models_keep_the_numbers_of_their_heads():
    model = induction_model().model
    headscope.prune_heads(model, "0:0,2;1:0,2")
    analysis = headscope.analyze(model, TEXT * 3, tokenizer=circuit_tokenizer(), types="repetition,previous_token")
    claims = {(h.layer, h.head): {t.type for t in h.types} - {"copying"} for h in analysis.heads}
    assert claims == {(0, 1): {"previous_token"}, (0, 3): set(), (1, 1): {"duplicate_token"}, (1, 3): {"induction"}}
    (one,) = [t for t in analysis.head(1, 3).types if t.type == "induction"]
    assert [(p["layer"], p["head"]) for p in one.details["partners"]] == [(0, 1)]


def test_models_with_little_room_get_copies_of_several_lengths():
    """Else a head that looks at a fixed distance would pass for one that looks for repetition."""
    config = GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=1)
    analysis = headscope.analyze(GPT2LMHeadModel(config), ids=[list(range(5, 25))], types="induction")
    # A beginning, and two copies of 16, 21, 26 and 31 tokens, five times.
    assert analysis.catalogue.summary["repeated_tokens"] == 5 * sum(1 + 2 * n for n in (16, 21, 26, 31))


# ------------------------------------------------------------------ the same again
def without_seconds(analysis):
    found = json.loads(json.dumps(analysis.to_dict(), allow_nan=False))
    for info in found["catalogue"]["types"]:
        del info["seconds"]
    if found["catalogue"]["ablation"]:
        del found["catalogue"]["ablation"]["seconds"]
    return json.dumps(found)


def test_the_same_seed_gives_the_same_bytes_and_the_users_model_is_left_as_it_was():
    circuit = induction_model()
    model = circuit.model.train()
    model.config._attn_implementation = "sdpa"
    hooked = model.transformer.h[0].register_forward_hook(lambda *_: None)
    model.transformer.wte.weight.requires_grad_(False)
    before, modules = deepcopy(model.state_dict()), dict(model.named_modules())
    options = {"tokenizer": circuit.tokenizer, "types": "all", "ablate_check": True}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again = (without_seconds(headscope.analyze(model, TEXT * 3, **options, seed=4)) for _ in range(2))
    assert first == again
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and all(m.training for m in model.modules())
    assert model.config._attn_implementation == "sdpa" and modules == dict(model.named_modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not model.transformer.wte.weight.requires_grad
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]
    assert hooks == [model.transformer.h[0]] and len(hooks[0]._forward_hooks) == 1
    hooked.remove()
    options = {"tokenizer": circuit.tokenizer, "types": "copying"}
    one, other = (without_seconds(headscope.analyze(model, TEXT, **options, seed=seed)) for seed in (0, 1))
    assert one != other


def test_the_ablation_check_zeroes_the_induction_head():
    circuit = induction_model()
    analysis = headscope.analyze(circuit.model, TEXT, tokenizer=circuit.tokenizer, ablate_check=True)
    ablation = analysis.catalogue.ablation
    assert list(analysis.catalogue.scores) == ["induction"]
    assert [(h["layer"], h["head"]) for h in ablation["heads"]] == [(1, 3)]
    assert ablation["base"]["second_copy"] < 0.1 and ablation["top"]["added"] > 4


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_the_ablation_check_needs_a_causal_model(name):
    family = FAMILIES[name]
    given = {"inputs": example_inputs(family)}
    with pytest.raises(ModelError):
        headscope.analyze(build_family(name), **given, ablate_check=True)


# ------------------------------------------------------------------ what is asked for
def test_choose():
    assert choose(None) is None
    assert choose("all").names == choose(["all"]).names == ALL
    assert choose("induction, previous_token").names == ("previous_token", "induction")
    assert choose(["sink"]).names == ("first_token", "column_sink", "special_token", "delimiter")
    assert set(choose("positional").names) == {"self_attend", "previous_token", "next_token", "local_window"} | set(
        GROUPS["offset"]
    )
    assert choose(None, ablate=True).names == ("induction",)
    assert set().union(*GROUPS.values()) | PROBE_TYPES.keys() == set(ALL)


REFUSED = (
    ({"types": "inductoin"}, "'inductoin'"),
    ({"types": ""}, "no type"),
    ({"types": []}, "no type"),
    ({"types": " , "}, "no type"),
    ({"types": "syntax"}, "--conllu"),
    ({"types": "retrieval"}, "--haystack FILE and --needles"),
    ({"types": "all", "haystack": __file__}, "--needles FILE"),
    ({"types": "induction", "conllu": __file__}, "syntax"),
    ({"types": None, "mentions": __file__}, "--types"),
    ({"types": "all", "mentions": "/no/such/file"}, "/no/such/file"),
    ({"types": "previous_token", "ablate": True}, "induction"),
)


@pytest.mark.parametrize(("arguments", "part"), REFUSED)
def test_choose_refuses(arguments, part):
    with pytest.raises(InputError) as caught:
        choose(**arguments)
    assert part in caught.value.message and isinstance(caught.value, HeadscopeError)
    if part == "'inductoin'":
        assert all(name in caught.value.hint for name in (*ALL, *GROUPS, "all"))
