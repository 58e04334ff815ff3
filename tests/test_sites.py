"""Attention sites: which modules, which stack, which layer, whose tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    BridgeTowerVisionConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    Pix2StructConfig,
    Pix2StructForConditionalGeneration,
    ResNetConfig,
    ResNetModel,
    RoFormerConfig,
    RoFormerModel,
)
from transformers.models.bridgetower.modeling_bridgetower import BridgeTowerVisionModel

from fixtures.building import build_family
from fixtures.families import FAMILIES
from headscope.errors import InputError, ModelError
from headscope.models.sites import find_sites, select_stacks

TINY = {"vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}


def stacks_of(sites):
    return {name: tuple(s.layer for s in sites if s.stack == name) for name in dict.fromkeys(s.stack for s in sites)}


def axes_of(sites):
    return {s.stack: (s.query_axis, s.key_axis) for s in sites}


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.stacks])
def test_the_sites_of_a_family_are_what_its_row_says(name, family_model):
    model, _, family = family_model(name)
    sites = find_sites(model)
    assert stacks_of(sites) == {stack: spec.layers for stack, spec in family.stacks.items()}
    modules = dict(model.named_modules(remove_duplicate=False))
    for site in sites:
        assert modules[site.path] is site.module
        assert site.cross == (site.stack == "cross")
        assert site.layout is not None
        assert site.has_sink != family.stacks[site.stack].sums_to_one
        if family.modality == "text" and family.stacks[site.stack].causal:
            assert site.causal or not site.uses_interface
        if not family.stacks[site.stack].causal:
            assert not site.causal
    text = {"self": ("text",) * 2}
    images = {"self": ("vision",) * 2}
    two = {"encoder": ("text",) * 2, "decoder": ("decoder",) * 2, "cross": ("decoder", "text")}
    sounds = {"encoder": ("audio",) * 2, "decoder": ("decoder",) * 2, "cross": ("decoder", "audio")}
    both = {"text": ("text",) * 2, "vision": ("vision",) * 2}
    expected = {"text": text, "vision": images, "seq2seq": two, "audio": sounds, "text+vision": both}
    assert axes_of(sites) == expected[family.modality]


def test_what_has_no_attention_and_what_cannot_be_read_is_told_apart():
    with pytest.raises(ModelError, match="MambaForCausalLM has no attention heads: none of its modules") as error:
        find_sites(build_family("mamba"))
    assert "State-space" in error.value.hint
    with pytest.raises(ModelError, match="ResNetModel has no attention heads"):
        find_sites(ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])))
    vision = BridgeTowerVisionConfig(hidden_size=64, num_hidden_layers=1, image_size=32, patch_size=16)
    with pytest.raises(ModelError, match=r"in a way that cannot be read yet .*BridgeTowerResidualAttention"):
        find_sites(BridgeTowerVisionModel(vision))


def test_layers_that_share_a_module_are_its_calls():
    sites = find_sites(build_family("albert"))
    assert [(s.layer, s.call) for s in sites] == [(0, 0), (1, 1), (2, 2)]
    assert len({id(s.module) for s in sites}) == 1


def test_a_hybrid_keeps_its_own_layer_numbers():
    for name in ("jamba", "qwen3_next"):
        sites = find_sites(build_family(name))
        assert [(s.layer, s.call) for s in sites] == [(1, 0), (3, 0)]
        assert all(f".{s.layer}." in s.path for s in sites)


def test_a_decoder_with_cross_attention_has_a_stack_for_it():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, add_cross_attention=True))
    assert stacks_of(find_sites(gpt2)) == {"self": (0, 1), "cross": (0, 1)}
    assert axes_of(find_sites(gpt2)) == {"self": ("text", "text"), "cross": ("text", "other")}
    bert = BertModel(BertConfig(**TINY, is_decoder=True, add_cross_attention=True))
    assert stacks_of(find_sites(bert)) == {"self": (0, 1), "cross": (0, 1)}
    assert [s.causal for s in find_sites(bert)] == [not s.cross for s in find_sites(bert)]


def test_a_decoder_whose_modules_do_not_say_so_themselves():
    for decoder in (False, True):
        model = RoFormerModel(RoFormerConfig(**TINY, embedding_size=16, is_decoder=decoder))
        assert [s.causal for s in find_sites(model)] == [decoder, decoder]


def test_a_second_decoder_reads_the_decoders_tokens_too():
    model = build_family("t5")
    model.extra = nn.ModuleDict({"decoder": copy.deepcopy(model.decoder)})
    axes = axes_of(find_sites(model))
    assert axes["extra.decoder.block"] == ("decoder", "decoder")
    assert axes["extra.decoder.block"] == axes["decoder"] and axes["cross"] == ("decoder", "text")


def test_an_encoder_and_a_decoder_of_different_families():
    decoder = GPT2Config(vocab_size=40, n_embd=16, n_layer=3, n_head=4)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**TINY), decoder)
    sites = find_sites(EncoderDecoderModel(config))
    assert stacks_of(sites) == {"encoder": (0, 1), "decoder": (0, 1, 2), "cross": (0, 1, 2)}
    assert axes_of(sites) == {"encoder": ("text",) * 2, "decoder": ("decoder",) * 2, "cross": ("decoder", "text")}


def test_cross_attention_by_its_long_name():
    text = {"vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 16}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "d_kv": 8, "d_ff": 16}
    config = Pix2StructConfig(text_config=text, vision_config=vision)
    sites = find_sites(Pix2StructForConditionalGeneration(config))
    assert stacks_of(sites) == {"encoder": (0,), "decoder": (0, 1), "cross": (0, 1)}
    assert axes_of(sites)["cross"] == ("decoder", "vision")


# ------------------------------------------------------------------ choosing stacks
def chosen(sites, *names):
    return {(s.stack, s.layer) for s in select_stacks(sites, names)}


def test_a_stacks_name_means_that_stack_and_no_more():
    """In T5 the cross-attention is below `decoder.` too."""
    sites = find_sites(build_family("t5"))
    assert chosen(sites, "decoder") == {("decoder", 0), ("decoder", 1)}
    assert chosen(sites, "cross") == {("cross", 0), ("cross", 1)}
    assert chosen(sites, "cross", "encoder") == {(s.stack, s.layer) for s in sites if s.stack != "decoder"}
    assert select_stacks(sites, None) == sites
    assert select_stacks(sites, iter(["cross", "encoder", "decoder"])) == sites, "in the model's order"


def test_a_module_path_means_all_below_it():
    sites = find_sites(build_family("t5"))
    assert chosen(sites, "decoder.block.1") == {("decoder", 1), ("cross", 1)}
    assert chosen(sites, sites[2].path) == {("encoder", 2)}
    assert chosen(sites, "encoder.block.0", "cross") == {("encoder", 0), ("cross", 0), ("cross", 1)}
    deep = BertModel(BertConfig(**TINY | {"num_hidden_layers": 12}))
    assert chosen(find_sites(deep), "encoder.layer.1") == {("self", 1)}, "1 is not the beginning of 10"


@pytest.mark.parametrize("name", ["", ".", "encode", "encoder.", "encoder.block.9", "[red]", "x" * 999, "vision\nall"])
def test_an_unknown_stack_is_refused_even_beside_a_known_one(name):
    sites = find_sites(build_family("t5"))
    for names in ([name], ["cross", name]):
        with pytest.raises(InputError, match="does not exist in this model") as error:
            select_stacks(sites, names)
        assert "Stacks: encoder, decoder, cross" in error.value.hint
        assert "\n" not in str(error.value) and len(str(error.value)) < 120


def test_sites_do_not_depend_on_the_weights_device_or_mode():
    with torch.device("meta"):
        model = BertModel(BertConfig(**TINY))
    assert stacks_of(find_sites(model.train())) == {"self": (0, 1)}
