"""What heads' weights say of copying, against matrices with a row and a column a token, in NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from circuit_cases import (
    HEADS,
    PLAIN,
    SIZE,
    VOCAB,
    array,
    built,
    circuit,
    head_weights,
    norms,
    probing,
    random_model,
    repeated_ids,
    state,
)
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from headscope import prune_heads
from headscope.errors import ModelError
from headscope.heads.catalogue.composition import composition, partners_by_zeroing
from headscope.heads.catalogue.copying import GROUPS, copying
from headscope.heads.catalogue.norms import norm_of
from headscope.models.sites import find_sites


def whole_score(model, layer, head, ids=slice(None)):
    """From the matrix with a row and a column a token."""
    _, _, value, output = head_weights(model, layer, head)
    before, behind, last = norms(model, layer)
    embedding = model.get_input_embeddings()(torch.arange(VOCAB))
    if model.config.model_type == "bloom":
        embedding = model.transformer.word_embeddings_layernorm(embedding)
    read, written = array(embedding)[ids], array(model.get_output_embeddings().weight)[ids]
    logits = (written - written.mean(axis=0)) @ last @ behind @ output @ value @ before @ read.T
    eigenvalues = np.linalg.eigvals(logits)
    return eigenvalues.real.sum() / np.abs(eigenvalues).sum()


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM", "BloomForCausalLM"])
def test_scores_are_those_of_the_whole_matrix(name):
    model = built(name)
    found = copying(probing(model))
    expected = {("self", n, h): whole_score(model, n, h) for n in range(3) for h in range(HEADS)}
    assert {place: records[0].score for place, records in found.evidence.items()} == pytest.approx(expected, abs=1e-4)
    assert found.notes == ()


def test_the_interval_leaves_out_groups_of_tokens():
    model = built("LlamaForCausalLM")
    record = copying(probing(model, seed=3)).evidence["self", 1, 2][0]
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3)).numpy()
    left = [whole_score(model, 1, 2, np.setdiff1d(order, part)) for part in np.array_split(order, GROUPS)]
    error = np.sqrt((GROUPS - 1) / GROUPS * sum((x - record.score) ** 2 for x in left))
    assert (record.high - record.low) / 2 == pytest.approx(2.262157 * error, rel=1e-3)
    assert record.eligible == VOCAB


def one_head(sign):
    """A model whose heads hand on, with a sign, what they read; its output embedding is its input embedding."""
    config = transformers.LlamaConfig(**PLAIN | {"num_attention_heads": 1}, tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data = torch.eye(SIZE)
        layer.self_attn.o_proj.weight.data = sign * torch.eye(SIZE)
    return model


@pytest.mark.parametrize("sign", [1, -1])
def test_the_identity_copies_and_its_negative_does_not(sign):
    found = copying(probing(one_head(sign)))
    for (record,) in found.evidence.values():
        assert record.score == pytest.approx(sign, abs=1e-9)
        assert record.claimed == (sign > 0) == bool(record.criteria)
        assert (record.p < 1e-3) == (sign > 0)
    assert found.summary["copying_share"] == float(sign > 0)


def test_random_heads_are_not_claimed():
    found = copying(probing(built("GPT2LMHeadModel")))
    records = [records[0] for records in found.evidence.values()]
    assert not any(r.claimed for r in records)
    # The spread of turned heads is about that of heads that have nothing to do with each other.
    ratios = [r.score / r.details["spread"] for r in records]
    assert 0.4 < np.sqrt(np.mean(np.square(ratios))) < 2


def test_the_induction_head_of_a_circuit_copies():
    found = copying(probing(circuit().model))
    assert [place for place, (r,) in found.evidence.items() if r.claimed] == [("self", 1, 3)]
    assert found.evidence["self", 1, 3][0].score == pytest.approx(1)
    assert found.notes == ("copying: 7 heads write nothing that the output embedding reads",)


def test_only_wanted_heads_are_measured():
    model = built("LlamaForCausalLM")
    everything = copying(probing(model))
    some = copying(replace(probing(model, "1,3"), wanted=find_sites(model)[1:2]))
    assert set(some.evidence) == {("self", 1, 1), ("self", 1, 3)}
    for place, records in some.evidence.items():
        assert records[0].score == pytest.approx(everything.evidence[place][0].score, abs=1e-5)


def test_pruned_heads_keep_their_numbers_and_scores():
    model = random_model("LlamaForCausalLM")
    prune_heads(model, {0: [0, 1], 2: [1, 3]})
    found, before = copying(probing(model)).evidence, copying(probing(built("LlamaForCausalLM"))).evidence
    left = [*((0, h) for h in (2, 3)), *((1, h) for h in range(HEADS)), *((2, h) for h in (0, 2))]
    assert list(found) == [("self", *place) for place in left]
    for place, (record,) in found.items():
        assert record.score == pytest.approx(before[place][0].score, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("BertModel", "has no output embedding"),
        ("BertForMaskedLM", "its result is no term of the sum that the output embedding reads"),
        ("BitNetForCausalLM", "what its output projection takes in is not what its value projection gives"),
    ],
)
def test_models_without_a_direct_path_are_refused(name, reason):
    with pytest.raises(ModelError, match=reason):
        copying(probing(built(name)))


def test_models_are_left_alone():
    model = random_model("GPT2LMHeadModel").train()
    model.transformer.h[0].attn.c_attn.weight.requires_grad_(False)
    before = state(model)
    copying(probing(model))
    composition(probing(model), [("self", 2, 0)], [("self", 0, 0)])
    partners_by_zeroing(probing(model), [("self", 2, 0)], [("self", 0, 0)], repeated_ids(2, 8))
    after = state(model)
    assert before[0] == after[0] and before[2:] == after[2:]
    for (old, wanted, _), (new, wants, gradient) in zip(before[1], after[1], strict=True):
        assert torch.equal(old, new) and wanted == wants and gradient is None


def test_norms_are_told_by_what_they_do():
    gain, like = torch.randn(16), torch.zeros(4, 1, 16)
    layer, rms, gemma = nn.LayerNorm(16), LlamaRMSNorm(16), GemmaRMSNorm(16)
    for module in (layer, rms, gemma):
        module.weight.data = gain.clone()
    layer.bias.data = torch.randn(16)
    x = torch.randn(4, 1, 16)
    for module, centred, expected in ((layer, True, gain), (rms, False, gain), (gemma, False, 1 + gain)):
        norm = norm_of(module, like)
        assert norm.centred == centred
        torch.testing.assert_close(norm.gain, expected, rtol=1e-3, atol=1e-3)
        shift = module.bias if module is layer else 0
        torch.testing.assert_close(norm.of(x) + shift, module(x), rtol=1e-3, atol=1e-3)
    for module in (nn.Identity(), nn.Linear(16, 16), nn.Tanh(), nn.Softmax(dim=-1)):
        assert norm_of(module, like) is None
