"""What reads the results of projections, in architectures that differ in it."""

from __future__ import annotations

import copy

import pytest
import torch
from repair_cases import batch_of, family_batches, llama, random_texts
from torch import nn
from transformers import GraniteConfig

from headscope.capture.outputs import find_outputs
from headscope.repair.places import down_projections
from headscope.repair.streams import find_streams

# Of each family's first layer: the output projection, what reads its stream, and whether that is a LayerNorm.
READERS = {
    "llama": ("model.layers.0.self_attn.o_proj", "model.layers.0.post_attention_layernorm", False),
    "bert": ("encoder.layer.0.attention.output.dense", "encoder.layer.0.attention.output.LayerNorm", True),
    "distilbert": ("transformer.layer.0.attention.out_lin", "transformer.layer.0.sa_layer_norm", True),
    "gpt2": ("transformer.h.0.attn.c_proj", "transformer.h.0.ln_2", True),
    "gpt_neox": ("gpt_neox.layers.0.attention.dense", "gpt_neox.layers.1", True),
    "falcon_gqa": ("transformer.h.0.self_attention.dense", "transformer.h.1", True),
    "bart": ("model.decoder.layers.0.encoder_attn.out_proj", "model.decoder.layers.0.encoder_attn_layer_norm", True),
    "t5": ("decoder.block.0.layer.1.EncDecAttention.o", "decoder.block.0.layer.2", False),
}
DOWN = {
    "llama": ("model.layers.0.mlp.down_proj", "model.layers.1"),
    "bert": ("encoder.layer.0.output.dense", "encoder.layer.0.output.LayerNorm"),
    "gpt2": ("transformer.h.2.mlp.c_proj", "transformer.ln_f"),
    "t5": ("encoder.block.0.layer.1.DenseReluDense.wo", "encoder.block.1"),
    "falcon_gqa": ("transformer.h.0.mlp.dense_4h_to_h", "transformer.h.1"),
}


def streams_of(model, batch, down=False):
    outputs = find_outputs(model)
    paths = {id(m): p for p, m in model.named_modules()}
    modules = {paths[id(o.module)]: o.module for o in outputs}
    if down:
        modules |= {path: model.get_submodule(path) for path in down_projections(model, outputs)}
    return find_streams(model, modules, batch)


@pytest.mark.parametrize("name", READERS)
def test_readers_of_output_projections(family_model, name) -> None:
    model, _, family = family_model(name)
    projection, reader, centred = READERS[name]
    found = streams_of(model, family_batches(family, 8)[0])[0][projection]
    assert (found.event.path, found.scale, found.centred) == (reader, 1.0, centred)
    assert found.joined


@pytest.mark.parametrize("name", DOWN)
def test_readers_of_down_projections(family_model, name) -> None:
    model, _, family = family_model(name)
    projection, reader = DOWN[name]
    found = streams_of(model, family_batches(family, 8)[0], down=True)[0][projection]
    assert (found.event.path, found.joined) == (reader, True)


def test_only_down_projections_are_candidates(family_model) -> None:
    model = family_model("llama")[0]
    assert list(down_projections(model, find_outputs(model))) == [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
    t5 = family_model("t5")[0]
    assert set(down_projections(t5, find_outputs(t5)).values()) == {"text", "decoder"}


def test_behind_a_norm_the_result_itself_is_the_target(family_model) -> None:
    model, _, family = family_model("gemma3")
    for path, stream in streams_of(model, family_batches(family, 8)[0])[0].items():
        assert (stream.event.path, stream.event.key, stream.joined) == (path, None, False)


def test_streams_are_in_the_order_of_the_pass(family_model) -> None:
    model, _, family = family_model("t5")
    streams = streams_of(model, family_batches(family, 8)[0])[0].values()
    ordered = [s.projection for s in sorted(streams, key=lambda s: s.order)]
    assert ordered[:4] == [
        *(f"encoder.block.{i}.layer.0.SelfAttention.o" for i in range(3)),
        "decoder.block.0.layer.0.SelfAttention.o",
    ]
    assert ordered[4] == "decoder.block.0.layer.1.EncDecAttention.o"


def test_results_that_are_scaled_before_they_are_added() -> None:
    model = llama(config=GraniteConfig, residual_multiplier=0.22)
    streams = streams_of(model, batch_of(dict(enumerate(random_texts(3)))))[0]
    assert [s.scale for s in streams.values()] == pytest.approx([0.22] * 3, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_have_the_same_streams(family_model, dtype) -> None:
    model, _, family = family_model("llama")
    batch = family_batches(family, 8)[0]
    wanted, found = streams_of(model, batch)[0], streams_of(copy.deepcopy(model).to(dtype), batch)[0]
    assert {p: (s.event, s.scale) for p, s in found.items()} == {p: (s.event, s.scale) for p, s in wanted.items()}


def test_calls_are_counted(family_model) -> None:
    model, _, family = family_model("albert")
    streams, calls = streams_of(model, family_batches(family, 8)[0])
    assert streams == {} and list(calls.values()) == [3]


class Aside(nn.Module):
    """A sum that a norm reads, and that is used beside it in a way that no module shows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project, self.norm = nn.Embedding(64, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.end = nn.Linear(16, 16)
        self.device, self.aside = torch.device("cpu"), False

    def forward(self, input_ids, attention_mask):
        before = self.embed(input_ids)
        after = before + self.project(before.tanh())
        beside = after.exp() if self.aside else before
        return self.end(self.norm(after) + beside)


@pytest.mark.parametrize("aside", [False, True])
def test_a_stream_that_cannot_be_corrected_where_it_is_read_is_not_taken(aside) -> None:
    torch.manual_seed(0)
    model = Aside().eval()
    model.aside = aside
    streams, _ = find_streams(model, {"project": model.project}, batch_of(dict(enumerate(random_texts(3)))))
    assert streams["project"].event.path == ("project" if aside else "norm")


def test_nothing_is_left_behind(family_model) -> None:
    model, _, family = family_model("llama")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    streams_of(model, family_batches(family, 8)[0])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    hooks = [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks]
    assert all("output_capturing" in str(h) for m in hooks for h in m._forward_hooks.values())
    assert not any(m._forward_pre_hooks for m in hooks)
