"""The streaming engine on models: the numbers of layer by layer, no matrix, a check of itself, nothing left behind."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
)
from transformers.models.bert import modeling_bert
from transformers.models.llama import modeling_llama

import headscope
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from headscope.attention import streaming as attention_streaming
from headscope.attention import visibility
from headscope.capture import agreement, streaming
from headscope.capture.streaming import StreamedCall
from headscope.errors import ModelError
from headscope.models.sites import find_sites

IDS = list(range(20, 32))
THROUGH_THE_INTERFACE = [
    name
    for name, family in FAMILIES.items()
    if family.stacks and any(site.uses_interface for site in find_sites(build_family(name)))
]
SIZES = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 8192}


@pytest.fixture
def strangers(monkeypatch):
    """No model has been compared with eager attention before."""
    monkeypatch.setattr(agreement, "_agreed", {})


def tiny(model_class, config_class, **options):
    torch.manual_seed(0)
    return model_class(config_class(**SIZES, **HEADS, **options)).eval()


def values(result):
    return np.array(
        [[np.nan if v is None else v for v in (*h.metrics.values(), *h.chance.values())] for h in result.heads]
    )


def check_same(first, second, tolerance=1e-5):
    assert [(h.stack, h.layer, h.head, h.kv_head) for h in first.heads] == [
        (h.stack, h.layer, h.head, h.kv_head) for h in second.heads
    ]
    ours, theirs = values(first), values(second)
    assert (np.isnan(ours) == np.isnan(theirs)).all()
    assert np.nanmax(np.abs(ours - theirs) / np.maximum(1, np.abs(theirs))) < tolerance
    assert [h.pattern for h in first.heads] == [h.pattern for h in second.heads]
    assert first.model == second.model and first.warnings == second.warnings


@pytest.mark.parametrize("name", THROUGH_THE_INTERFACE)
def test_every_metric_is_that_of_the_layerwise_engine(name):
    model, inputs = build_family(name), example_inputs(FAMILIES[name])
    ours = headscope.analyze(model, inputs=inputs, metrics="all", engine="streaming")
    theirs = headscope.analyze(model, inputs=inputs, metrics="all", engine="layerwise")
    assert (ours.engine, theirs.engine) == ("streaming", "layerwise")
    check_same(ours, theirs)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 300])
@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [
        (LlamaModel, LlamaConfig, {}),
        (MistralModel, MistralConfig, {"sliding_window": 37}),
        (Gemma2Model, Gemma2Config, {"sliding_window": 20, "attn_logit_softcapping": 2.0}),
    ],
)
def test_lengths_around_a_tile_padded_and_not(length, model_class, config_class, options):
    model = tiny(model_class, config_class, **options)
    ids = torch.randint(3, 90, (3, length))
    mask = torch.ones_like(ids)
    mask[1, length // 2 + 1 :] = 0
    for inputs in ({"input_ids": ids[:1]}, {"input_ids": ids, "attention_mask": mask}, _left(ids, mask)):
        ours, theirs = (
            headscope.analyze(model, inputs=inputs, metrics="all", engine=e) for e in ("streaming", "layerwise")
        )
        check_same(ours, theirs)


def _left(ids, mask):
    return {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_numbers_are_those_of_the_queries_and_keys_in_float32(dtype):
    model, inputs = build_family("llama").to(dtype), example_inputs(FAMILIES["llama"])
    shown, sinks = {}, {}

    def take(call):
        rows = call.weights.rows(range(call.weights.shape[2]))
        shown[call.site.layer] = rows
        sinks[call.site.layer] = call.weights.at(attention_streaming.Target(key=0))

    recorded = {}
    plain = streaming.problem_of

    def problem_of(module, given, masks, eager):
        recorded[module.layer_idx] = {**given}
        return plain(module, given, masks, eager)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "problem_of", problem_of)
        streaming.run(model, find_sites(model), inputs, take, "named")
    for layer, given in recorded.items():
        query, key = given["query"].double(), given["key"].double().repeat_interleave(4, dim=1)
        assert given["query"].dtype == dtype
        scores = (query @ key.mT * given["scaling"]).masked_fill(~_closed(given, query, key), -torch.inf)
        counted = inputs["attention_mask"].bool()[:, None, :, None]
        off = (shown[layer] - scores.softmax(dim=-1)).masked_fill(~counted, 0).nan_to_num(nan=1)
        assert float(off.abs().max()) < 5e-6


def _closed(given, query, key):
    open_cells = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    return open_cells if given["attention_mask"] is None else given["attention_mask"]


@pytest.mark.parametrize(("length", "engine"), [(100, "layerwise"), (1100, "streaming")])
def test_auto_reads_short_half_precision_from_its_own_matrices(length, engine):
    model = tiny(LlamaModel, LlamaConfig).bfloat16()
    assert headscope.analyze(model, ids=[5] * length).engine == engine
    assert headscope.analyze(model.float(), ids=[5] * length).engine == "streaming"


# ------------------------------------------------------------------ memory
class Largest(TorchDispatchMode):
    """The most values in a tensor that any operation has made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("metrics", ["core", "all"])
def test_no_tensor_grows_with_the_square_of_the_length(metrics, strangers, monkeypatch):
    monkeypatch.setattr(visibility, "CELLS", 1 << 16)
    model, length = tiny(LlamaModel, LlamaConfig), 3000
    options = {"ids": [5, 6, 7, 8, 9] * (length // 5), "metrics": metrics}
    with Largest() as largest:
        result = headscope.analyze(model, **options)
    assert result.engine == "streaming" and result.inputs.tokens == length
    assert largest.numel < length**2 / 10


def test_only_keys_in_a_window_are_computed(monkeypatch):
    """Products of queries and keys are counted: those of a band along the diagonal, whatever the length."""
    model, cells = tiny(MistralModel, MistralConfig, sliding_window=50), []
    plain = torch.bmm

    def bmm(a, b, **options):
        cells.append(a.shape[0] * a.shape[1] * b.shape[2])
        return plain(a, b, **options)

    monkeypatch.setattr(torch, "bmm", bmm)
    streaming.run(model, find_sites(model), {"input_ids": torch.randint(3, 90, (1, 2000))}, lambda call: None, "named")
    assert 2 * 4 * 2000 * 50 < sum(cells) < 2 * 4 * 2000 * 200


def test_a_plainly_causal_model_makes_no_mask():
    views = []
    model = tiny(LlamaModel, LlamaConfig)
    inputs = {"input_ids": torch.tensor([IDS])}
    streaming.run(model, find_sites(model), inputs, lambda call: views.append(call.weights.visibility), "named")
    assert all(view.causal and view.open is None for view in views) and len(views) == 2
    assert views[0] is views[1], "layers that are masked alike share what is known of it"


# ------------------------------------------------------------------ nothing left behind
def registered():
    return (
        AttentionInterface.get_interface,
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
    )


@pytest.mark.parametrize("mode", ["named", "eager"])
def test_every_registration_is_undone(mode):
    model, before = build_family("llama"), registered()
    inputs = {"input_ids": torch.tensor([IDS])}
    streaming.run(model, find_sites(model), inputs, lambda call: None, mode)
    assert registered() == before

    def fail(call):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        streaming.run(model, find_sites(model), inputs, fail, mode)
    assert registered() == before
    with pytest.raises(ModelError):
        streaming.run(model, find_sites(model), {"input_ids": torch.tensor([[10**6]])}, fail, mode)
    assert registered() == before and model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["bert", "llama", "gpt_oss", "t5", "clip", "whisper"])
def test_what_the_model_gives_is_what_it_gives_in_eager(name):
    model, inputs = build_family(name), example_inputs(FAMILIES[name])
    outputs = []
    hook = model.register_forward_hook(lambda *args: outputs.append(args[2][0].clone()))
    expected = model(**inputs, use_cache=False)[0] if "use_cache" in _parameters(model) else model(**inputs)[0]
    for mode in ("named", "eager"):
        streaming.run(model, find_sites(model), inputs, lambda call: None, mode)
    hook.remove()
    for output in outputs[1:]:
        assert float((output - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max()))


def _parameters(model):
    return model.forward.__wrapped__.__code__.co_varnames if hasattr(model.forward, "__wrapped__") else ()


# ------------------------------------------------------------------ the check of itself
def changed(monkeypatch, **parts):
    """Our attention with something wrong in it."""
    plain = attention_streaming.StreamedWeights

    def changed_weights(query, key, value, visibility, terms):
        wrong = copy.copy(terms)
        for name, change in parts.items():
            if name == "value":
                value = change(value)
            else:
                object.__setattr__(wrong, name, change(getattr(terms, name)))
        return plain(query, key, value, visibility, wrong)

    monkeypatch.setattr(streaming, "StreamedWeights", changed_weights)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("llama", {"scaling": lambda s: s * 1.1}),
        ("llama", {"value": lambda v: v * 1.05}),
        ("gpt_oss", {"sinks": lambda s: None}),
        ("t5", {"biases": lambda b: b[:-1]}),
    ],
)
def test_a_difference_from_eager_attention_is_an_error_that_names_the_layer(name, fault, monkeypatch, strangers):
    model, inputs = build_family(name), example_inputs(FAMILIES[name])
    changed(monkeypatch, **fault)
    with pytest.raises(
        ModelError, match=r"streaming does not give what \w+ computes itself: .*0.* differs by"
    ) as error:
        headscope.analyze(model, inputs=inputs)
    assert "--engine layerwise" in error.value.hint
    assert headscope.analyze(model, inputs=inputs, engine="layerwise").heads


def test_a_model_that_masks_only_as_eager_is_streamed_as_eager(monkeypatch, strangers):
    """Under another name it makes no mask at all, and does not say that it is causal."""
    plain = modeling_llama.create_causal_mask

    def create(config, **options):
        return plain(config=config, **options) if config._attn_implementation == "eager" else None

    monkeypatch.setattr(modeling_llama, "create_causal_mask", create)
    model = build_family("llama")
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    inputs = example_inputs(FAMILIES["llama"])
    ours = headscope.analyze(model, inputs=inputs, metrics="all", engine="streaming")
    assert set(agreement._agreed.values()) == {"eager"} and ours.engine == "streaming"
    check_same(ours, headscope.analyze(model, inputs=inputs, metrics="all", engine="layerwise"))


def test_the_check_runs_once_and_leaves_no_trace(monkeypatch, strangers):
    runs = []
    plain = agreement._eager
    monkeypatch.setattr(agreement, "_eager", lambda *args: runs.append(args[2]) or plain(*args))
    model, length = build_family("bert"), 120
    ids = [list(range(20, 20 + n)) for n in (5, 60, 90)]
    before = torch.random.get_rng_state()
    for _ in range(2):
        headscope.analyze(model, ids=ids, batch_size=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    (inputs,) = runs
    assert inputs["input_ids"].shape == (2, 48), "the shortest and the longest text, and only the first tokens"
    assert inputs["attention_mask"].sum(dim=1).tolist() == [5, 48] and length > 48


def test_an_argument_that_is_not_known_is_left_to_the_model(monkeypatch, strangers):
    """Its own function is called, and read layer by layer, in the same pass."""
    plain = modeling_bert.eager_attention_forward

    def halved(module, query, key, value, mask, *, sharpness=None, **options):
        return plain(module, query * (sharpness or 1), key, value, mask, **options)

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", halved)
    model, calls = build_family("bert"), []
    unusual = model.encoder.layer[1].attention.self
    forward = unusual.forward
    unusual.forward = lambda *args, **kwargs: forward(*args, sharpness=3.0, **kwargs)
    inputs = example_inputs(FAMILIES["bert"])
    streaming.run(model, find_sites(model), inputs, calls.append, "named")
    assert [isinstance(call, StreamedCall) for call in calls] == [True, False, True]
    ours, theirs = (
        headscope.analyze(model, inputs=inputs, metrics="all", engine=e) for e in ("streaming", "layerwise")
    )
    check_same(ours, theirs)


def test_products_that_torch_may_round_are_summed_in_float32(strangers):
    model, inputs = build_family("llama"), example_inputs(FAMILIES["llama"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = (headscope.analyze(model, inputs=inputs, engine=e) for e in ("streaming", "layerwise"))
    exact = headscope.analyze(model, inputs=inputs, engine="streaming")
    assert ours.engine == "streaming"
    check_same(ours, theirs, tolerance=3e-2)
    check_same(ours, exact, tolerance=3e-2)


def test_what_is_no_number_in_one_layer_is_none_in_the_next():
    """Also where only the next is asked for, and where the kind of model is known already."""
    model, ids = build_family("bert"), {"input_ids": torch.tensor([IDS])}
    headscope.analyze(model, inputs=ids)
    with torch.no_grad():
        model.encoder.layer[0].attention.self.query.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="NaN"):
        headscope.analyze(model, inputs=ids, layer=2)
