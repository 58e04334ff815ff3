"""What cannot be measured is refused or reported, with the reason, and the rest is measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DiffLlamaConfig, DiffLlamaModel, LongT5Config, LongT5Model, SwinConfig, SwinModel
from transformers.models.bert import modeling_bert
from transformers.models.llama import modeling_llama

import headscope
from fixtures.building import build_family, reference_attentions
from fixtures.families import FAMILIES
from headscope.capture import agreement
from headscope.capture.feed import Axis
from headscope.capture.session import Capture
from headscope.errors import ModelError
from headscope.models.sites import find_sites
from tests.test_capture import IDS, tiny_gpt2


@pytest.fixture(autouse=True)
def strangers(monkeypatch):
    """No model has been compared with eager attention before: these tests change what it does."""
    monkeypatch.setattr(agreement, "_agreed", {})


def test_a_leaking_causal_mask_is_reported(monkeypatch):
    model = build_family("llama")
    assert not headscope.analyze(model, ids=IDS).warnings
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: None)
    agreement._agreed.clear()
    result = headscope.analyze(model, ids=IDS)
    (warning,) = result.warnings
    assert "self: attention above the diagonal in a causal model (layers 0, 1, 2)" in warning


def test_a_mask_that_only_pretends_is_reported(monkeypatch):
    """The mask says causal, but the attention function does not apply it."""
    plain = modeling_llama.eager_attention_forward

    def ignoring(module, query, key, value, attention_mask, **options):
        return plain(module, query, key, value, None, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", ignoring)
    with pytest.raises(
        ModelError, match=r"streaming does not give what \w+ computes itself: model\.layers\.0\.self_attn"
    ):
        headscope.analyze(build_family("llama"), ids=IDS)
    result = headscope.analyze(build_family("llama"), ids=IDS, engine="layerwise")
    assert any("above the diagonal" in line for line in result.warnings)
    assert result.heads[0].chance["sink"] == pytest.approx(1 / 12), "so all keys are open"


def test_images_have_nothing_ahead_to_look_at():
    """Some towers say that they are causal, without being so."""
    model = build_family("vit")
    for site in find_sites(model):
        site.module.is_causal = True
    result = headscope.analyze(model, inputs={"pixel_values": torch.randn(1, 3, 32, 32)})
    assert result.warnings == () and result.heads[0].chance["sink"] == pytest.approx(1 / 17)


def test_attention_to_padding_is_refused(monkeypatch):
    monkeypatch.setattr(modeling_bert, "create_bidirectional_mask", lambda **_: None)
    model = build_family("bert")
    with pytest.raises(ModelError, match=r"looks at padding: up to \d+\.\d% of a row") as error:
        headscope.analyze(model, ids=[IDS, IDS[:5]], batch_size=2)
    assert "one text at a time" in error.value.hint
    assert headscope.analyze(model, ids=[IDS, IDS[:5]], batch_size=1).inputs.texts == 2


@pytest.mark.parametrize("family", ["bert", "bloom"])
def test_weights_that_are_not_numbers_are_refused(family):
    model = build_family(family)
    with torch.no_grad():
        dict(model.named_parameters())[
            "encoder.layer.1.attention.self.query.weight"
            if family == "bert"
            else "transformer.h.1.self_attention.query_key_value.weight"
        ][0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"\(layer 1\) returned NaN attention weights"):
        headscope.analyze(model, ids=IDS)


def scaled_rows(module, factor):
    plain = module.forward

    def forward(*args, **kwargs):
        output = plain(*args, **kwargs)
        return (output[0], output[1] * factor, *output[2:])

    module.forward = forward


@pytest.mark.parametrize("factor", [0.6, 1.5])
def test_rows_that_do_not_sum_to_one_without_a_sink_are_left_out(factor):
    model = build_family("deberta_v2")
    scaled_rows(model.encoder.layer[1].attention.self, factor)
    result = headscope.analyze(model, ids=IDS)
    assert {h.layer for h in result.heads} == {0, 2}
    (warning,) = result.warnings
    assert "layer 1 is left out: encoder.layer.1.attention.self (layer 1) returned values that are not" in warning
    assert f"a row sums to {factor}" in warning
    for layer in model.encoder.layer[::2]:
        scaled_rows(layer.attention.self, factor)
    with pytest.raises(ModelError, match="not attention weights: a row sums to"):
        headscope.analyze(model, ids=IDS)
    with pytest.raises(ModelError, match=r"\(layer 2\)"):
        headscope.analyze(model, ids=IDS, layer=2)


def test_a_layer_that_is_unreadable_on_one_text_is_left_out_of_all():
    """Of numbers and of pictures: a mean over some of the texts would not be what it says."""
    model = build_family("deberta_v2")
    module = model.encoder.layer[1].attention.self
    plain = module.forward

    def forward(states, *args, **kwargs):
        output = plain(states, *args, **kwargs)
        return (output[0], output[1] * (2 if states.shape[1] > 5 else 1), *output[2:])

    module.forward = forward
    result = headscope.analyze(model, ids=[IDS[:3], IDS], batch_size=1, maps=True)
    assert {h.layer for h in result.heads} == {m.layer for m in result.maps} == {0, 2}
    assert result.model.stacks[0].layers == (0, 2)
    (warning,) = result.warnings
    assert "layer 1 is left out" in warning


def test_a_learned_sink_is_reported_and_kept_apart_from_the_first_token():
    model, family = build_family("gpt_oss"), FAMILIES["gpt_oss"]
    inputs = {"input_ids": torch.tensor([IDS])}
    weights = reference_attentions(family, model, inputs)["self"]
    result = headscope.analyze(model, ids=IDS)
    unseen = 1 - np.mean([w.sum(-1).mean() for w in weights.values()])
    assert any(f"on average {unseen:.1%} of the attention goes to a learned sink" in line for line in result.warnings)
    for head in result.heads:
        assert head.metrics["sink"] == pytest.approx(weights[head.layer][0, head.head, :, 0].mean(), abs=1e-5)


def test_a_module_that_runs_twice_is_refused():
    """Differential attention calls the attention function twice a layer: neither call is the layer's attention."""
    torch.manual_seed(0)
    config = DiffLlamaConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    with pytest.raises(ModelError, match="computes attention more than once in one forward pass"):
        headscope.analyze(DiffLlamaModel(config), ids=IDS)


def test_all_layers_of_a_module_that_runs_too_often_are_left_out():
    """One layer more than the config says: which call is whose is not known, so none is shown."""
    model = build_family("albert")
    group = model.encoder.albert_layer_groups[0]
    layer = group.albert_layers[0]
    group.albert_layers = nn.ModuleList([layer])
    plain = group.forward
    group.forward = lambda states, *args, **kwargs: plain(plain(states, *args, **kwargs), *args, **kwargs)
    with pytest.raises(ModelError, match="more than once"):
        headscope.analyze(model, ids=IDS)


def test_windows_of_an_image_are_refused():
    """Four windows in the first layer; in the second, one window holds the whole image."""
    torch.manual_seed(0)
    config = SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4)
    model, inputs = SwinModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}
    result = headscope.analyze(model, inputs=inputs)
    assert [(h.layer, h.head) for h in result.heads] == [(1, 0), (1, 1)]
    (warning,) = result.warnings
    assert "layer 0 is left out: " in warning and "of shape (8, 1, 16, 16) for a batch of 2" in warning
    with pytest.raises(ModelError, match="not one matrix an example") as error:
        headscope.analyze(model, inputs=inputs, layer=0)
    assert "windows" in error.value.hint


@pytest.mark.parametrize("chosen", ["all", "0,2"])
def test_weights_of_another_rank_are_no_heads(chosen, monkeypatch):
    plain = modeling_llama.eager_attention_forward

    def first_head_only(module, *args, **kwargs):
        context, weights = plain(module, *args, **kwargs)
        return context, weights[:, 0] if module.layer_idx == 1 else weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", first_head_only)
    result = headscope.analyze(build_family("llama"), ids=IDS, layer=chosen, engine="layerwise")
    assert result.model.stacks[0].layers == (0, 2) and result.model.num_heads == 8
    assert [line for line in result.warnings if "layer 1 is left out" in line] == list(result.warnings)
    assert bool(result.warnings) == (chosen == "all")


def test_what_ran_without_weights_is_named_beside_what_could_be_read():
    torch.manual_seed(0)
    config = LongT5Config(
        vocab_size=60, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_decoder_layers=1, num_heads=2, local_radius=3,
        decoder_start_token_id=0,
    )  # fmt: skip
    inputs = {"input_ids": torch.tensor([IDS]), "decoder_input_ids": torch.tensor([[0, 5, 6]])}
    model = LongT5Model(config)
    result = headscope.analyze(model, inputs=inputs)
    assert {h.stack for h in result.heads} == {"decoder", "cross"}
    (warning,) = result.warnings
    assert warning.startswith("encoder: layers 0-1 are left out: encoder.block.0") and "no attention weights" in warning
    with pytest.raises(ModelError, match="ran but returned no attention weights"):
        headscope.analyze(model, inputs=inputs, stack="encoder")


def test_what_did_not_run_is_named():
    torch.manual_seed(0)
    model = tiny_gpt2(add_cross_attention=True)
    assert headscope.analyze(model, ids=IDS).warnings == ("cross: no attention was computed on this input",)
    with pytest.raises(headscope.HeadscopeError, match="cross: no attention was computed on this input"):
        headscope.analyze(model, ids=IDS, stack="cross")


def test_registers_are_columns_like_others(family_model):
    model, inputs, family = family_model("dinov2_with_registers")
    result = headscope.analyze(model, inputs=inputs, maps=True)
    tokens = 1 + family.config["num_register_tokens"] + 16
    assert {m.weights.shape for m in result.maps} == {(4, tokens, tokens)}
    assert result.heads[0].chance["sink"] == pytest.approx(1 / tokens)


def joining(monkeypatch, extra, hide=False):
    """A BERT before whose tokens `extra` positions are put, as images and prompts are; the last may be padding."""
    model = build_family("bert")
    embeddings = model.embeddings.forward

    def longer(*args, **kwargs):
        states = embeddings(*args, **kwargs)
        return torch.cat([states.new_ones(len(states), extra, states.shape[2]), states], dim=1)

    def mask(config, inputs_embeds, attention_mask=None, **_):
        n = inputs_embeds.shape[1]
        opened = torch.zeros(len(inputs_embeds), 1, n, n)
        opened[..., -1] = -3e38 if hide else 0.0
        return opened

    model.embeddings.forward = longer
    monkeypatch.setattr(modeling_bert, "create_bidirectional_mask", mask)
    return model


def test_positions_that_join_the_tokens_count_as_positions(monkeypatch):
    model = joining(monkeypatch, 5)
    result = headscope.analyze(model, ids=IDS, metrics="all", maps=True)
    n = len(IDS) + 5
    (warning,) = result.warnings
    assert warning.startswith(f"text: {n} positions for {len(IDS)} tokens")
    assert result.heads[0].chance["sink"] == pytest.approx(1 / n) and result.heads[0].metrics["special"] is None
    assert result.maps[0].weights.shape[1:] == (n, n) and result.maps[0].keys == tuple(map(str, range(n)))
    head = result.heads[0]
    assert head.metrics["sink"] == pytest.approx(result.maps[0].weights[0, :, 0].mean(), abs=1e-5)


def test_positions_that_join_the_tokens_are_refused_beside_padding(monkeypatch):
    with pytest.raises(ModelError, match="more positions than tokens, and some are padding"):
        headscope.analyze(joining(monkeypatch, 5, hide=True), ids=IDS)
    with pytest.raises(ModelError, match="not one row and one column a token"):
        headscope.analyze(joining(monkeypatch, 5), ids=[IDS, IDS[:5]], batch_size=2)


@pytest.mark.parametrize("engine", ["layerwise", "streaming"])
def test_what_joined_the_tokens_of_one_batch_says_nothing_of_the_next(monkeypatch, engine):
    with pytest.MonkeyPatch.context() as patch:
        model = joining(patch, 5)
        capture = Capture(model, find_sites(model), lambda site: True, (), engine=engine)
        ids = torch.tensor([IDS, IDS])
        capture.batch({"input_ids": ids}, {"text": Axis.plain(2, 12, ids.device)}, 2)
        assert capture.findings.joined == {"text": (17, 12)}
    agreement._agreed.clear()
    del model.embeddings.forward
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    axis = Axis(mask.sum(dim=1), torch.zeros_like(ids, dtype=torch.bool))
    capture.batch({"input_ids": ids, "attention_mask": mask}, {"text": axis}, 2)
    assert not capture.unreadable
