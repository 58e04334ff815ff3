"""Zeroing heads on repeated random tokens: against models whose weights are zeroed by hand, and known circuits."""

import itertools
import json
import math
import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Model

from fixtures.building import build_family
from fixtures.circuits import induction_model
from headscope.errors import InputError, ModelError
from headscope.heads.catalogue.ablation_check import ablation_check
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.repeated import repeated_ids
from headscope.models.loading import wrap_model
from headscope.models.selection import parse_selection
from headscope.models.sites import find_sites

CIRCUIT = induction_model()
LOADED = wrap_model(CIRCUIT.model, CIRCUIT.tokenizer)
REPEATED = repeated_ids(LOADED, sequences=2, length=20)
INDUCTION, PREVIOUS = ("self", 1, 3), ("self", 0, 1)
ALL = list(itertools.product((0, 1), range(4)))
NONE = math.log(256)


def probing(loaded, **more):
    sites = find_sites(loaded.model)
    return Probing(loaded, sites, sites, parse_selection("head", None), **more)


def check(*places, loaded=LOADED, repeated=REPEATED, draws=1, top=None, **more):
    ranked = [(place, 1.0 - i / 10) for i, place in enumerate(places)]
    return ablation_check(probing(loaded, **more), ranked, top=top or len(places), draws=draws, repeated=repeated)


def losses(model, repeated):
    """Of the second and the first copy, by sequence, one token after the other."""
    result = []
    for row in repeated.ids:
        with torch.no_grad():
            logits = model(torch.tensor([row])).logits[0].double().numpy()
        logs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logs -= logits.max(-1, keepdims=True)
        n, start = repeated.length, repeated.prefix
        second = [-logs[i - 1, row[i]] for i in range(start + n + 1, start + 2 * n)]
        first = [-logs[i - 1, row[i]] for i in range(start + 1, start + n)]
        result.append((np.mean(second), np.mean(first)))
    return np.array(result)


BASE = losses(CIRCUIT.model, REPEATED)


def brute(*places):
    """What zeroing these heads of the circuit adds."""
    return (losses(CIRCUIT.without(*places), REPEATED) - BASE).mean(0)


def test_without_the_induction_head_nothing_of_the_second_copy_is_known():
    found = check(INDUCTION)
    assert found["base"]["second_copy"] < 5e-3
    assert found["base"]["first_copy"] == pytest.approx(NONE, abs=1e-3)
    assert found["top"]["added"] == pytest.approx(NONE, abs=5e-3)
    assert found["top"]["low"] == pytest.approx(found["top"]["high"], abs=1e-3)
    assert found["top"]["first_copy"]["added"] == pytest.approx(0, abs=1e-4)
    assert found["heads"] == [{"stack": "self", "layer": 1, "head": 3, "score": 1.0}]
    assert found["predictions"] == 2 * 19


@pytest.mark.parametrize("place", ALL)
def test_zeroing_a_head_adds_what_its_zero_weights_do(place):
    found = check(("self", *place))
    assert [found["base"]["second_copy"], found["base"]["first_copy"]] == pytest.approx(BASE.mean(0).tolist(), abs=1e-4)
    assert [found["top"]["added"], found["top"]["first_copy"]["added"]] == pytest.approx(
        brute(place).tolist(), abs=1e-4
    )


def test_draws_are_of_all_other_heads_and_of_those_in_the_same_layer():
    found = check(INDUCTION, draws=40)
    others = [brute(place)[0] for place in ALL if place != (1, 3)]
    assert [found["random"]["min"], found["random"]["max"]] == pytest.approx([min(others), max(others)], abs=1e-4)
    assert max(others) > 5
    share = found["random"]["mean"] / max(others)
    assert 0.02 < share < 0.4  # one of seven
    assert found["random"]["sd"] == pytest.approx(max(others) * math.sqrt(share * (1 - share) * 40 / 39), abs=1e-3)
    assert found["random"]["ratio"] == pytest.approx(found["top"]["added"] / found["random"]["mean"])
    assert found["same_layers"]["max"] == pytest.approx(0, abs=1e-4)
    upper = check(PREVIOUS, draws=40)
    assert upper["same_layers"]["max"] == pytest.approx(max(brute((0, h))[0] for h in (0, 2, 3)), abs=1e-4)
    assert upper["random"]["max"] == pytest.approx(NONE, abs=5e-3)


def test_beside_the_whole_circuit_no_other_head_matters():
    found = check(INDUCTION, PREVIOUS, draws=20)
    for kind in ("random", "same_layers"):
        assert max(abs(found[kind]["min"]), abs(found[kind]["max"])) < 1e-3
        assert found[kind]["missing"] == 0
    assert found["top"]["added"] > 5


def test_a_draw_is_a_set_of_different_heads_none_of_them_first():
    first = [(0, 0), (1, 3)]
    pairs = {p: brute(*p)[0] for p in itertools.combinations([p for p in ALL if p not in first], 2)}
    same = {p: value for p, value in pairs.items() if p[0][0] != p[1][0]}
    for seed in range(6):
        found = check(*(("self", *p) for p in first), seed=seed)
        assert min(abs(found["random"]["mean"] - v) for v in pairs.values()) < 1e-4
        assert min(abs(found["same_layers"]["mean"] - v) for v in same.values()) < 1e-4


def test_only_the_best_of_a_ranking_are_zeroed():
    found = check(INDUCTION, PREVIOUS, ("self", 0, 0), top=1)
    assert found["top"] == check(INDUCTION)["top"]
    assert len(found["heads"]) == 1


@pytest.fixture(scope="module")
def llama():
    """A Llama of eight heads a layer, of which four share a key-value head, with larger weights than when it is new."""
    model = build_family("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 30
            layer.self_attn.v_proj.weight *= 10
    return wrap_model(model)


def test_heads_of_several_layers_are_zeroed_as_columns_of_their_output_projections(llama):
    repeated = repeated_ids(llama, sequences=5, length=12, seed=3)
    places = [(0, 5), (2, 1), (2, 6)]
    changed = deepcopy(llama.model)
    size = changed.config.head_dim
    for layer, head in places:
        changed.model.layers[layer].self_attn.o_proj.weight.data[:, head * size : (head + 1) * size] = 0
    added = losses(changed, repeated) - losses(llama.model, repeated)
    found = check(*(("self", *p) for p in places), loaded=llama, repeated=repeated)
    assert abs(added[:, 0].mean()) > 1e-3
    for part, values in ((found["top"], added[:, 0]), (found["top"]["first_copy"], added[:, 1])):
        half = stats.t.ppf(0.975, 4) * stats.sem(values)
        expected = [values.mean(), values.mean() - half, values.mean() + half]
        assert [part[name] for name in ("added", "low", "high")] == pytest.approx(expected, abs=2e-5)


def test_how_sequences_are_batched_does_not_matter(llama):
    repeated = repeated_ids(llama, sequences=5, length=12)
    results = [check(("self", 1, 2), loaded=llama, repeated=repeated, batch_size=n, draws=3) for n in (None, 1, 2)]
    for other in results[1:]:
        assert other["top"]["added"] == pytest.approx(results[0]["top"]["added"], abs=1e-5)
        assert other["random"]["sd"] == pytest.approx(results[0]["random"]["sd"], abs=1e-5)


def test_what_it_costs_is_said_before_and_counted(llama):
    repeated = repeated_ids(llama, sequences=5, length=12)
    lines, seen = [], []
    hook = llama.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    try:
        arguments = {"loaded": llama, "repeated": repeated, "batch_size": 2, "draws": 3}
        found = check(("self", 1, 2), say=lambda line: lines.append((line, len(seen))), **arguments)
    finally:
        hook.remove()
    assert (found["forward_passes"], found["tokens"]) == (len(seen), sum(seen)) == (8 * 3 + 1, (8 * 5 + 2) * 25)
    told = "25 forward passes, 8 times over 5 sequences of 25 repeated random tokens, 1,050 tokens in all"
    assert lines == [(f"ablation check: {told}", 0)]


def test_a_seed_gives_the_same_numbers_and_another_one_others(llama):
    repeated = repeated_ids(llama, sequences=2, length=10)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    runs = [check(("self", 1, 2), loaded=llama, repeated=repeated, draws=4, seed=seed) for seed in (5, 5, 6)]
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    for run in runs:
        assert run.pop("seconds") > 0
        json.dumps(run, allow_nan=False)
    assert runs[0] == runs[1]
    assert runs[0]["top"] == runs[2]["top"] and runs[0]["random"] != runs[2]["random"]


def test_the_model_is_left_as_it_was(llama):
    model = deepcopy(llama.model).train()
    model.model.layers[1].eval()
    model.model.layers[0].self_attn.o_proj.weight.requires_grad_(False)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    wanted = [p.requires_grad for p in model.parameters()]
    loaded = wrap_model(model)
    check(("self", 1, 2), loaded=loaded, repeated=repeated_ids(loaded, sequences=2, length=8))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_layers_with_too_few_other_heads_are_told():
    three = check(*(("self", 1, h) for h in (1, 2, 3)))
    assert three["same_layers"]["missing"] == 2
    assert three["same_layers"]["mean"] == pytest.approx(brute((1, 0))[0], abs=1e-4)
    assert three["notes"] == [
        "ablation check: the layers of the 3 zeroed heads have too few others: draws from them have 1"
    ]
    four = check(*(("self", 1, h) for h in range(4)))
    assert four["same_layers"]["missing"] == 4
    assert {four["same_layers"][name] for name in ("mean", "sd", "min", "max", "ratio")} == {None}
    assert "have no others" in four["notes"][0]
    assert check(INDUCTION)["notes"] == []


def test_a_ratio_to_nothing_is_none_and_one_draw_has_no_spread():
    found = check(INDUCTION, PREVIOUS)
    assert found["random"]["sd"] is None and found["random"]["first_copy"]["sd"] is None
    mean = found["random"]["mean"]
    assert (found["random"]["ratio"] is None) == (mean <= 0)
    helpful = check(("self", 0, 0), ("self", 1, 0), draws=3)["random"]
    assert (helpful["ratio"] is None) == (helpful["mean"] <= 0)


def test_too_few_other_heads_are_refused():
    with pytest.raises(InputError, match="has 3 heads beside the first 5, too few to compare with") as error:
        check(*(("self", *p) for p in ALL[:5]))
    assert error.value.hint == "zero 4 heads or fewer"
    for arguments in ({"top": 0}, {"draws": 0}, {"ranked": []}):
        given = {"ranked": [(INDUCTION, 1.0)], "top": 1, "draws": 1} | arguments
        with pytest.raises(InputError, match="nothing to zero"):
            ablation_check(probing(LOADED), repeated=REPEATED, **given)


def test_a_head_that_is_not_there_is_refused():
    with pytest.raises(ModelError, match=r"L1H9 of .* cannot be zeroed"):
        check(("self", 1, 9))


def test_models_that_do_not_predict_the_next_token_are_refused():
    config = BertConfig(vocab_size=40, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = [BertForMaskedLM(config).eval(), BertModel(config).eval(), GPT2Model(CIRCUIT.model.config).eval()]
    reasons = ["is no causal model", "does not predict the next token", "does not predict the next token"]
    for model, reason in zip([*models, build_family("t5")], [*reasons, reasons[-1]], strict=True):
        loaded = wrap_model(model)
        stack = find_sites(model)[0].stack
        with pytest.raises(ModelError, match=reason) as error:
            check((stack, 0, 0), loaded=loaded, repeated=repeated_ids(loaded, sequences=1, length=8))
        assert error.value.hint


def test_a_new_output_head_is_refused():
    loaded = wrap_model(CIRCUIT.model, CIRCUIT.tokenizer)
    loaded.missing = ("lm_head.weight",)
    with pytest.raises(ModelError, match="no trained output head"):
        check(INDUCTION, loaded=loaded)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mpt", "falcon_mqa", "gpt_neox", "gpt_oss", "jamba", "phi3"])
def test_causal_models_of_every_kind_are_taken(family):
    loaded = wrap_model(build_family(family))
    layer = find_sites(loaded.model)[0].layer
    found = check(("self", layer, 0), loaded=loaded, repeated=repeated_ids(loaded, sequences=2, length=8))
    assert found["base"]["second_copy"] > 0 and found["random"]["missing"] == 0
