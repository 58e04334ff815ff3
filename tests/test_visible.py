"""What a row may look at comes from masks of every kind, however sharp the heads are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel, GPTNeoConfig, GPTNeoModel, XLNetConfig, XLNetModel

import headscope
from fixtures import constructed
from fixtures.building import build_family
from headscope.capture.feed import Axis, mass_of, matrix_of
from headscope.capture.layerwise import Call, run
from headscope.capture.visible import masked_visible, open_cells, unmasked_visible
from headscope.models.sites import find_sites
from tests import reference
from tests.judging import Judge, compare
from tests.test_analyze_families import judged

SHARP = 100.0

# From what is open, bool (batch, 1, query, key), to a mask as models write it.
MASKS = {
    "the lowest float": lambda seen: torch.where(seen, 0.0, torch.finfo(torch.float32).min),
    "the lowest half": lambda seen: torch.where(seen, 0.0, torch.finfo(torch.float16).min).half(),
    "minus infinity": lambda seen: torch.where(seen, 0.0, -torch.inf),
    "minus ten thousand": lambda seen: torch.where(seen, 0.0, -10000.0).bfloat16(),
    "with a bias a head": lambda seen: torch.where(seen, 0.0, -torch.inf) - torch.tensor([0.5, 40.0])[:, None, None],
    "true is open": lambda seen: seen,
    "true is hidden": lambda seen: ~seen,
    "ones are open": lambda seen: seen.int(),
    "ones are hidden": lambda seen: (~seen).float(),
    "longer than the keys": lambda seen: torch.cat([seen, torch.zeros_like(seen)], dim=-1),
    "without a head axis": lambda seen: torch.where(seen, 0.0, -torch.inf)[:, 0],
}


def one_hot(seen, seed):
    """Mass (batch, query, key) of two heads that each put all their weight on one open key a row."""
    rng = np.random.default_rng(seed)
    scores = np.where(seen[:, None, 0].numpy(), rng.random((len(seen), 2, *seen.shape[2:])), -1)
    return torch.tensor(np.eye(seen.shape[-1])[scores.argmax(-1)].sum(1), dtype=torch.float32)


def a_view(causal, window, lengths):
    size = max(lengths)
    grid = torch.tensor(reference.visibility(size, causal=causal, window=window))
    real = torch.arange(size) < torch.tensor(lengths)[:, None]
    return grid & real[:, None, None, :] | torch.eye(size, dtype=torch.bool), real


@pytest.mark.parametrize("kind", MASKS)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 3]),
)
def test_a_mask_of_any_kind_says_what_is_open_for_heads_of_any_sharpness(kind, seed, lengths, causal, window):
    seen, real = a_view(causal, window, lengths)
    found = masked_visible(one_hot(seen, seed), [MASKS[kind](seen)], real, real)
    assert found.shape[1] == 1
    for b, n in enumerate(lengths):
        assert torch.equal(found.expand(len(lengths), -1, -1, -1)[b, 0, :n, :n], seen[b, 0, :n, :n])


@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=3), seed=st.integers(0, 99))
def test_a_mask_of_keys_alone(lengths, seed):
    seen, real = a_view(False, None, lengths)
    for mask in (real, real.long(), ~real):
        found = masked_visible(one_hot(seen, seed), [mask], real, real)
        assert all(found[b, 0, :n, :n].all() and not found[b, 0, :n, n:].any() for b, n in enumerate(lengths))


def test_several_masks_all_hide():
    """GPT-Neo adds a causal mask to scores that its own table of windows has already cut."""
    causal, table = torch.ones(6, 6, dtype=torch.bool).tril(), torch.ones(20, 20, dtype=torch.bool).triu(-1)
    seen = causal & table[:6, :6]
    real = torch.ones(1, 6, dtype=torch.bool)
    masks = [torch.where(causal, 0.0, -torch.inf)[None, None], table[None, None]]
    assert torch.equal(masked_visible(one_hot(seen[None, None], 0), masks, real, real)[0, 0], seen)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(1, 1, 4, 4).triu(1), torch.ones(4, 4, dtype=torch.bool).tril(), torch.ones(3, 4, 4), torch.ones(1, 9)],
)
def test_a_mask_that_hides_nothing_or_does_not_fit_is_left_out(mask):
    """As one that a model adds instead of masking with it, or that belongs to other tokens."""
    real = torch.ones(1, 4, dtype=torch.bool)
    found = masked_visible(torch.ones(1, 4, 4), [mask], real, real)
    assert found is None or found.all()


@given(st.integers(1, 12), st.booleans(), st.sampled_from([None, True, False]))
def test_without_a_mask_only_a_model_that_looks_at_all_that_is_past_is_causal(size, looks_back, declared):
    real = torch.ones(1, size, dtype=torch.bool)
    mass = torch.ones(1, size, size).tril() if looks_back else torch.eye(size)[None]
    found = unmasked_visible(mass, real, real, cross=False, causal=declared)[0, 0]
    expected = declared or (declared is None and (looks_back or size <= 3))
    assert torch.equal(found, torch.ones(size, size, dtype=torch.bool).tril() if expected else torch.ones_like(found))
    ahead = torch.ones(1, size, size)
    assert unmasked_visible(ahead, real, real, cross=False, causal=declared).all()
    assert unmasked_visible(mass, real, real, cross=True, causal=declared).all()


def test_open_cells_of_the_head_that_sees_most():
    slopes = -torch.tensor([100.0, 3000.0])[:, None, None] * torch.arange(4.0)
    assert open_cells(slopes, 3, 4).shape == (1, 1, 3, 4) and open_cells(slopes, 3, 4).all()
    assert open_cells(torch.tensor([[0.0, -1e4]]), 1, 2).tolist() == [[[[True, False]]]]


def test_a_module_that_shows_no_mask_tells_by_its_weights():
    """Padding is never open; a triangle that is in full use is causal where the module says nothing of itself."""
    site = find_sites(build_family("bloom"))[0]
    assert not site.causal
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    for weights in (seen / seen.sum(-1, keepdim=True), torch.full((4, 4), 0.25)):
        axis = Axis(torch.tensor([4, 3]), torch.zeros(2, 4, dtype=torch.bool))
        batch = torch.stack([weights, weights.masked_fill(torch.arange(4) == 3, 0)])[:, None]
        visible = matrix_of(Call(site, 0, batch, None), axis, axis).visible
        expected = (seen if weights[0, 3] == 0 else torch.ones(4, 4, dtype=torch.bool)).expand(2, 1, 4, 4).clone()
        expected[1, :, :, 3] = False
        assert torch.equal(visible, expected)


# ------------------------------------------------------------------ whole models
def xlnet():
    torch.manual_seed(0)
    return XLNetModel(XLNetConfig(vocab_size=40, d_model=16, n_layer=2, n_head=2, d_inner=16)).eval()


@pytest.mark.parametrize("name", ["deberta_v2", "bloom", "falcon_mqa", "mpt", "xlnet"])
def test_masks_are_found_where_a_module_computes_attention_itself(name):
    """Among what it is given, whatever its name and order of axes, and it says what is padding."""
    model = xlnet() if name == "xlnet" else build_family(name)
    inputs = {"input_ids": torch.tensor([[20, 21, 22, 23], [24, 25, 5, 5]])}
    inputs["attention_mask"] = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    real, found = inputs["attention_mask"].bool(), []

    def take(call):
        found.append(masked_visible(mass_of(call.weights), call.masks, real, real))

    run(model, find_sites(model), inputs, take)
    causal = name not in ("deberta_v2", "xlnet")
    for seen in found:
        expected = (real[:, None, :] & torch.ones(4, 4, dtype=torch.bool).tril(0 if causal else 4))[real]
        assert torch.equal(seen.expand(2, 1, 4, 4)[:, 0][real], expected)


def sharpened(name):
    """The family's model with query projections so large that nearly all weights are exactly 0 or 1."""
    model = build_family(name)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if any(part in path for part in ("query", "q_proj", "q_lin", "Wqkv", "c_attn", ".q.")):
                parameter.mul_(SHARP)
    return model


@pytest.mark.parametrize("name", ["bert", "deberta_v2", "bloom", "falcon_mqa", "falcon_gqa", "mpt", "mistral", "t5"])
def test_chance_is_right_where_most_weights_are_zero(name):
    model, inputs, tokenizer, judges = judged(name, sharpened(name))
    # Scores of a thousand and more are known to three decimals only: the same weights take the same rounding.
    options = {"metrics": "sink,relative_entropy", "engine": "layerwise"}
    result = headscope.analyze(model, inputs=inputs, tokenizer=tokenizer, **options)
    assert min(h.metrics["relative_entropy"] for h in result.heads) < 0.2
    compare(result, judges, ["sink", "prev_token", "self_attend", "entropy"])


@pytest.mark.parametrize("kind", ["itself", "first_token", "previous_token"])
@pytest.mark.parametrize("length", [2, 3, 9])
def test_a_layer_whose_heads_all_do_one_thing_is_no_window(kind, length):
    """A bidirectional model of which no head ever looks ahead: it is neither causal nor windowed."""
    model = BertModel(constructed.build_bert().config)
    constructed._silence(model)
    alike = constructed.build_bert(gain=4096.0)
    size, rows = alike.config.hidden_size, constructed.HEAD_DIM
    with torch.no_grad():
        model.embeddings.load_state_dict(alike.embeddings.state_dict())
        for layer in model.encoder.layer:
            for head in range(alike.config.num_attention_heads):
                here = slice(head * rows, (head + 1) * rows)
                query, bias, key = constructed._projections(kind, size, 4096.0)
                layer.attention.self.query.weight[here], layer.attention.self.key.weight[here] = query, key
                layer.attention.self.query.bias[here] = bias
    result = headscope.analyze(model, ids=list(range(20, 20 + length)), rules="calibrated")
    label = {"itself": "self_attend", "first_token": "attention_sink", "previous_token": "prev_token"}[kind]
    for head in result.heads:
        assert head.pattern == label or (length == 2 and kind == "previous_token")
        assert head.chance["sink"] == pytest.approx(1 / length)


def test_the_windows_of_a_module_that_keeps_its_own_table():
    config = GPTNeoConfig(
        hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=3,
        vocab_size=40, max_position_embeddings=32, intermediate_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPTNeoModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.mul_(3000)
    check_single(
        model, torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]]), {0: {"causal": True}, 1: {"causal": True, "window": 3}}
    )


def test_a_model_whose_weights_come_in_another_order():
    check_single(xlnet(), torch.tensor([[5, 6, 7, 8, 9]]), {0: {}, 1: {}})


def test_a_longer_and_a_shorter_text_see_their_own_tokens_only():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = BertModel(config).eval()
    result = headscope.analyze(model, ids=[[5, 6, 7, 8], [5]], batch_size=2, metrics="sink,self_attend")
    assert {round(h.chance["sink"], 6) for h in result.heads} == {round((1 / 4 + 1) / 2, 6)}


def check_single(model, ids, views):
    result = headscope.analyze(model, ids=ids[0].tolist(), rules="calibrated")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    judges = {}
    for layer, weights in enumerate(attentions):
        visible = reference.visibility(ids.shape[1], **views[layer])
        for head in range(weights.shape[1]):
            text = (weights[0, head].double().numpy(), visible, np.zeros(ids.shape[1], bool))
            judges["self", layer, head] = Judge([text])
    compare(result, judges)
