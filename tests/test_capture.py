"""Running somebody's model: what is captured is what it computes, and nothing of it stays changed."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    Cache,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    IBertConfig,
    IBertModel,
)

import headscope
from fixtures.building import build_family, example_inputs, reference_attentions
from fixtures.families import FAMILIES
from headscope.capture import evaluation, recording
from headscope.capture.layerwise import run
from headscope.capture.session import Capture
from headscope.errors import HeadscopeError, ModelError, ResourceError
from headscope.heads import measuring
from headscope.models.sites import find_sites

IDS = list(range(20, 32))


def tiny_bert(**options):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, **options
    )
    return BertModel(config)


def tiny_gpt2(**options):
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=64, **options))


def state_of(model):
    """All that a caller could find changed."""
    return {
        "training": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "order": [list(m._forward_hooks) for m in model.modules()],
        "attention": [c._attn_implementation for c in evaluation.configs_of(model)],
        "configs": [c.to_dict() for c in evaluation.configs_of(model)],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grads": [p.grad is None for p in model.parameters()],
        "forwards": [m.forward.__func__ for m in model.modules() if hasattr(m.forward, "__func__")],
        "interface": AttentionInterface.get_interface,
        "grad_mode": torch.is_grad_enabled(),
        "random": torch.random.get_rng_state().tolist(),
    }


def unusual(model):
    """A model as its owner may have set it up."""
    model.train()
    next(iter(model.children())).eval()
    list(model.parameters())[1].requires_grad_(False)
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.append(1))
    return model


def with_dropout(name):
    model = build_family(name)
    for module in model.modules():
        for key in ("dropout", "attention_dropout", "dropout_prob", "attn_dropout"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.5)
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    return model


@pytest.mark.parametrize("name", ["bert", "deberta_v2", "gpt2", "bloom", "llama", "t5", "whisper", "clip"])
def test_a_model_in_training_is_measured_as_in_evaluation_and_left_as_it_was(name):
    model, inputs = unusual(with_dropout(name)), example_inputs(FAMILIES[name])
    model.set_attn_implementation("sdpa" if name in ("bert", "gpt2", "llama", "clip", "whisper") else "eager")
    before, weights = state_of(model), copy.deepcopy(model.state_dict())
    result = headscope.analyze(model, inputs=inputs)
    assert state_of(model) == before
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert result.heads == headscope.analyze(build_family(name), inputs=inputs).heads
    assert not result.warnings


def test_each_part_of_a_composite_keeps_its_own_attention():
    model: CLIPModel = build_family("clip")
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    assert model.config.text_config._attn_implementation == "sdpa"
    before = state_of(model)
    result = headscope.analyze(model, inputs=example_inputs(FAMILIES["clip"]))
    assert {h.stack for h in result.heads} == {"text", "vision"}
    assert state_of(model) == before


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_decoder_text_is_generated_without_dropout_and_without_a_trace(name):
    model = unusual(with_dropout(name))
    before = state_of(model)
    first, second = (headscope.analyze(model, ids=IDS) for _ in range(2))
    assert {h.stack for h in first.heads} == {"encoder", "decoder", "cross"}
    assert first.to_dict() == second.to_dict() and state_of(model) == before
    assert first.heads == headscope.analyze(build_family(name), ids=IDS).heads


class Broken(Exception):
    pass


def broken_forward(*_):
    raise Broken("boom\nmore")


@pytest.mark.parametrize("family", [tiny_bert, tiny_gpt2])
def test_a_model_that_fails_is_left_as_it_was(family):
    model = unusual(family())
    handle = list(model.modules())[-3].register_forward_pre_hook(broken_forward)
    before = state_of(model)
    with pytest.raises(ModelError, match=r"fails on this input: boom$") as error:
        headscope.analyze(model, ids=IDS)
    assert isinstance(error.value.__cause__, Broken) and state_of(model) == before
    handle.remove()
    assert len(headscope.analyze(model, ids=IDS).heads) == 4, "and works again"


@pytest.mark.parametrize("fault", [Broken("ours"), KeyboardInterrupt()])
def test_a_consumer_that_fails_is_not_taken_for_the_model(fault):
    model = unusual(tiny_bert())
    before = state_of(model)

    def take(call):
        raise fault

    with pytest.raises(type(fault)) as error:
        run(model, find_sites(model), {"input_ids": torch.tensor([IDS])}, take)
    assert error.value is fault and state_of(model) == before


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
                                   RuntimeError("DefaultCPUAllocator: not enough memory: you tried")])  # fmt: skip
def test_too_little_memory_is_called_that(fault):
    model = tiny_bert()

    def full(*_):
        raise fault

    model.encoder.register_forward_pre_hook(full)
    with pytest.raises(ResourceError, match=r"out of memory in the forward pass .*input_ids \(1, 12\)"):
        headscope.analyze(model, ids=IDS)


def test_two_models_in_two_threads_and_one_model_in_four():
    models = {"bert": tiny_bert(), "gpt2": tiny_gpt2()}
    alone = {name: headscope.analyze(model, ids=IDS).heads for name, model in models.items()}
    original, found, faults = AttentionInterface.get_interface, [], []

    def work(name):
        try:
            for _ in range(3):
                found.append(headscope.analyze(models[name], ids=IDS).heads == alone[name])
        except HeadscopeError as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("bert", "gpt2", "bert", "gpt2", "bert")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and found == [True] * 15
    assert AttentionInterface.get_interface is original


def test_two_models_that_share_a_config_do_not_disturb_each_other():
    first = tiny_bert(attn_implementation="sdpa")
    second = BertModel(first.config)
    inner = []

    def take(call):
        if not inner:
            inner.append(headscope.analyze(second, ids=IDS))

    run(first, find_sites(first), {"input_ids": torch.tensor([IDS])}, take)
    assert len(inner[0].heads) == 4 and first.config._attn_implementation == "sdpa"


def test_another_threads_forward_is_not_recorded():
    """Somebody uses the model while it is measured: his pass has other tokens and is his own."""
    model = tiny_bert(attn_implementation="eager").eval()
    shapes = []

    def take(call):
        shapes.append(call.weights.shape[-1])
        if len(shapes) == 1:
            other = threading.Thread(target=lambda: model(torch.tensor([[5, 6, 7]])))
            other.start()
            other.join()

    run(model, find_sites(model), {"input_ids": torch.tensor([IDS])}, take)
    assert shapes == [12, 12]


# ------------------------------------------------------------------ what is captured
@pytest.mark.parametrize("name", ["bert", "deberta_v2", "mistral", "gpt_oss", "bloom", "t5", "albert", "clip"])
def test_both_engines_give_the_very_same_numbers(name):
    model, inputs = build_family(name), example_inputs(FAMILIES[name])
    layerwise_result = headscope.analyze(model, inputs=inputs, metrics="all", engine="layerwise")
    full = headscope.analyze(model, inputs=inputs, metrics="all", engine="full")
    assert (layerwise_result.engine, full.engine) == ("layerwise", "full")
    assert layerwise_result.to_dict() | {"engine": 0} == full.to_dict() | {"engine": 0}


@pytest.mark.parametrize("name", ["gpt2", "deberta_v2", "bloom", "albert"])
def test_layers_are_forgotten_one_by_one(name):
    """While a layer is measured, no other layer's matrix is alive, whether the model was asked for weights or not."""
    model = build_family(name)
    alive, others = [], []

    def take(call):
        gc.collect()
        others.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(call.weights if call.weights._base is None else call.weights._base))

    run(model, find_sites(model), {"input_ids": torch.tensor([IDS])}, take)
    assert others == [0] * len(find_sites(model))


def test_no_cache_of_keys_is_kept():
    model, seen = tiny_gpt2(), []
    for site in find_sites(model):
        site.module.register_forward_pre_hook(
            lambda module, args, kwargs: seen.extend(v for v in (*args, *kwargs.values()) if isinstance(v, Cache)),
            with_kwargs=True,
        )
    model(torch.tensor([IDS]))
    assert len(seen) == 2, "it does keep one by itself"
    headscope.analyze(model, ids=IDS)
    assert len(seen) == 2


def test_weights_are_the_one_output_that_can_be_them():
    """Position biases and hidden states beside them are not taken for them; nor is one of two that might be."""
    states, weights = torch.randn(1, 4, 8), torch.full((1, 2, 4, 4), 0.25)
    bias, whole = torch.randn(1, 2, 4, 4), torch.ones(1, 2, 4, 4, dtype=torch.int64)
    for output in (
        (states, bias, weights),
        (states, weights, None),
        [states, whole, weights],
        ((states, weights), 0.5),
    ):
        assert recording._weights_in(output) is weights
    for output in (
        states,
        (states,),
        (weights,),
        (states, bias),
        (states, weights, weights.clone()),
        None,
        {"a": weights},
    ):
        assert recording._weights_in(output) is None


def test_weights_inside_of_nested_outputs():
    torch.manual_seed(0)
    config = IBertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    result = headscope.analyze(IBertModel(config), ids=IDS)
    assert len(result.heads) == 4 and result.warnings == ()


@pytest.mark.parametrize(
    ("engine", "used"),
    [("auto", "streaming"), ("streaming", "streaming"), ("layerwise", "layerwise"), ("full", "full")],
)
def test_the_engines_name_chooses_it(engine, used, monkeypatch):
    made = []

    def capture(*args, **kwargs):
        made.append(kwargs["engine"])
        return Capture(*args, **kwargs)

    monkeypatch.setattr(measuring, "Capture", capture)
    assert headscope.analyze(tiny_bert(), ids=IDS, engine=engine).engine == used
    assert made == [used]


@pytest.mark.parametrize("full", [False, True])
def test_the_full_engine_waits_for_the_end(full):
    """And the other one does not: its consumers have had their rows when the forward pass is over."""
    model, seen, at_end = tiny_gpt2(), [], []

    class Consumer:
        def rows(self, site, block):
            seen.append(site.layer)

    model.lm_head.register_forward_hook(lambda *_: at_end.append(list(seen)))
    capture = Capture(
        model, find_sites(model), lambda site: True, (Consumer(),), engine="full" if full else "layerwise"
    )
    capture.batch({"input_ids": torch.tensor([IDS])}, {}, 1)
    assert seen == [0, 1] and at_end == [[] if full else [0, 1]]


@pytest.mark.parametrize("name", ["bert", "llama", "gpt_oss", "t5", "deberta_v2", "bloom"])
def test_half_precision_weights_are_measured_as_they_are(name):
    """Statistics of a bfloat16 model are those of its own matrices, in float32 sums."""
    model, inputs = build_family(name).bfloat16(), example_inputs(FAMILIES[name])
    found = reference_attentions(FAMILIES[name], model, inputs)
    result = headscope.analyze(model, inputs=inputs, metrics="sink,max_weight")
    assert result.model.dtype == "bfloat16"
    for head in result.heads:
        weights = found[head.stack][head.layer][:, head.head]
        lengths = inputs["decoder_attention_mask" if head.stack in ("decoder", "cross") else "attention_mask"].sum(1)
        sink = np.mean([w[:n, 0].mean() for w, n in zip(weights, lengths.tolist(), strict=True)])
        largest = np.mean([w[:n].max(-1).mean() for w, n in zip(weights, lengths.tolist(), strict=True)])
        assert abs(head.metrics["sink"] - sink) < 1e-5 and abs(head.metrics["max_weight"] - largest) < 1e-5
    single = headscope.analyze(build_family(name), inputs=inputs, metrics="sink,max_weight")
    differences = [abs(a.metrics["sink"] - b.metrics["sink"]) for a, b in zip(result.heads, single.heads, strict=True)]
    assert 0 < np.median(differences) < 0.03, "rounding of the weights, and no more"


def test_what_is_selected_is_as_in_the_whole():
    model, inputs = build_family("t5"), example_inputs(FAMILIES["t5"])
    whole = {(h.stack, h.layer, h.head): h for h in headscope.analyze(model, inputs=inputs).heads}
    part = headscope.analyze(model, inputs=inputs, layer="-1", head="0,-1", stack=["cross", "encoder"]).heads
    assert [(h.stack, h.layer, h.head) for h in part] == [
        ("encoder", 2, 0), ("encoder", 2, 3), ("cross", 1, 0), ("cross", 1, 3),
    ]  # fmt: skip
    assert all(h == whole[h.stack, h.layer, h.head] for h in part)
