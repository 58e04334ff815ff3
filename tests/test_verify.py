"""The check against real computations, and that it fails when a fault is put between checkpoint and model."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from headscope.errors import InputError, ModelError
from headscope.models.sites import find_sites
from headscope.models.weights import read_weights, write_weights
from headscope.proof.reference import read_reference
from headscope.proof.verify import verify

WITH_ATTENTION = [n for n, f in FAMILIES.items() if f.stacks]


@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_every_family_is_rebuilt(name, family_model):
    model, inputs, family = family_model(name)
    result = verify(model, inputs=inputs)
    assert result.passed and not result.skipped
    assert {(s.stack, s.layer) for s in result.sites} == {(n, i) for n, s in family.stacks.items() for i in s.layers}
    for site in result.sites:
        assert site.max_abs_weights < 2e-6 and site.rel_output < 2e-6
        assert site.mask == "own"
        # DeBERTa's relative terms are inside its own method.
        assert site.positions == ("model" if name == "deberta_v2" else "own")


def test_both_real_models_are_rebuilt_with_our_own_positions_and_masks(packaged_model_name, smollm2_path):
    for name in (packaged_model_name, str(smollm2_path)):
        result = verify(name)
        assert result.passed and not result.skipped
        assert {(s.positions, s.mask) for s in result.sites} == {("own", "own")}
        assert {s.backend for s in result.sites} == {"numpy", "torch"}


# ------------------------------------------------------------------ faults
def loud_llama(**options):
    """A Llama whose attention is far from uniform, so that a fault in it shows."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        rope_parameters=rope,
        attn_implementation="eager",
        **options,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.weight.normal_(0, 0.5)
    return model


def llama_inputs():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 100, (2, 24), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def slices(model, layer):
    site = next(s for s in find_sites(model) if s.layer == layer)
    return site, read_weights(site, model=model).clone()


def key_weights_up(model):
    site, weights = slices(model, 1)
    weights.key[2] *= 1.05
    write_weights(site, weights, model=model)
    return {(1, 2)}


def value_weights_up(model):
    site, weights = slices(model, 2)
    weights.value[3] *= 1.05
    write_weights(site, weights, model=model)
    return {(2, 3)}


def output_weights_up(model):
    site, weights = slices(model, 2)
    weights.output[1] *= 1.05
    write_weights(site, weights, model=model)
    return {(2, None)}


def heads_swapped(model):
    site, weights = slices(model, 0)
    for part in (weights.query, weights.key, weights.value, weights.output):
        part[[0, 3]] = part[[3, 0]]
    write_weights(site, weights, model=model)
    return {(0, 0), (0, 3)}


def scale_changed(model):
    model.model.layers[1].self_attn.scaling *= 1.05
    return {(1, None)}


def rotary_scaling_dropped(model):
    rotary = model.model.rotary_emb
    dim = rotary.inv_freq.shape[0] * 2
    rotary.inv_freq = 1 / 10000 ** (torch.arange(0, dim, 2) / dim)
    return {(0, None), (1, None), (2, None)}


def mask_shifted(model):
    def shift(module, args, kwargs):
        mask = kwargs["attention_mask"].roll(1, dims=-1)
        mask[..., 0] = 0
        return args, {**kwargs, "attention_mask": mask}

    model.model.layers[1].self_attn.register_forward_pre_hook(shift, with_kwargs=True)
    return {(1, None)}


FAULTS = [
    key_weights_up,
    value_weights_up,
    output_weights_up,
    heads_swapped,
    scale_changed,
    rotary_scaling_dropped,
    mask_shifted,
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_fault_between_checkpoint_and_model_is_caught(fault, backend):
    model = loud_llama()
    reference = read_reference(model, inputs=llama_inputs())
    assert verify(model, reference=reference, backend=backend).passed
    expected = fault(model)
    result = verify(model, reference=reference, backend=backend)
    assert not result.passed
    failed = {s.layer: s.worst_head for s in result.sites if not s.passed}
    assert set(failed) == {layer for layer, _ in expected}
    for layer, head in failed.items():
        heads = {h for found, h in expected if found == layer}
        assert heads == {None} or head in heads


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_against_the_saved_checkpoint(fault, tmp_path):
    model = loud_llama()
    model.save_pretrained(tmp_path)
    assert verify(model, inputs=llama_inputs(), checkpoint=str(tmp_path), backend="numpy").passed
    fault(model)
    assert not verify(model, inputs=llama_inputs(), checkpoint=str(tmp_path), backend="numpy").passed


def test_a_constant_key_bias_cancels_in_the_softmax(family_model):
    model, inputs, _ = family_model("bert")
    model = build_family("bert")
    reference = read_reference(model, inputs=inputs)
    site = find_sites(model)[1]
    weights = read_weights(site, model=model).clone()
    weights.key_bias[0] += 0.3
    write_weights(site, weights, model=model)
    assert verify(model, reference=reference).passed
    weights.query_bias[0] += 0.3
    write_weights(site, weights, model=model)
    result = verify(model, reference=reference)
    assert {(s.layer, s.worst_head) for s in result.sites if not s.passed} == {(1, 0)}


# ------------------------------------------------------------------ the rest
def test_half_precision_passes_with_wider_tolerances():
    for dtype in (torch.bfloat16, torch.float16):
        model = build_family("llama").to(dtype)
        result = verify(model, inputs=example_inputs(FAMILIES["llama"]))
        assert result.passed and result.dtype == str(dtype).removeprefix("torch.")
        assert result.tolerance["weights"] > 1e-5


def test_nothing_rebuilt_is_not_passed():
    model = build_family("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj = torch.nn.Sequential(layer.self_attn.q_proj, torch.nn.GELU())
    result = verify(model, inputs=example_inputs(FAMILIES["llama"]))
    assert not result.passed and not result.sites
    assert len(result.skipped) == len(model.model.layers) and all(s.reason for s in result.skipped)


def test_the_model_is_left_as_it_was():
    model = build_family("deberta_v2").train()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    verify(model, inputs=example_inputs(FAMILIES["deberta_v2"]))
    assert model.training
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert all("disentangled_attention_bias" not in vars(m) for m in model.modules())


def test_selection_and_bad_arguments(family_model):
    model, inputs, _ = family_model("t5")
    result = verify(model, inputs=inputs, stack="cross", layer=-1)
    assert {(s.stack, s.layer) for s in result.sites} == {("cross", 1)}
    with pytest.raises(InputError, match="unknown backend"):
        verify(model, inputs=inputs, backend="jax")
    with pytest.raises(InputError, match="layer 7"):
        verify(model, inputs=inputs, layer=7)
    with pytest.raises(ModelError, match="no attention"):
        verify(family_model("mamba")[0], inputs=family_model("mamba")[1])


def test_the_result_is_plain_json(family_model):
    import json

    model, inputs, _ = family_model("gpt2")
    result = verify(model, inputs=inputs).to_dict()
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["schema"] == "headscope/verify@1"
    assert set(result["sites"][0]) >= {
        "stack",
        "layer",
        "backend",
        "max_abs_weights",
        "max_abs_output",
        "rel_output",
        "positions",
        "mask",
        "passed",
    }
    assert all(math.isfinite(s["rel_output"]) for s in result["sites"])


def test_a_mask_that_looks_ahead_is_named_even_without_a_reference():
    model = loud_llama()
    assert not verify(model, inputs=llama_inputs(), backend="numpy").warnings
    mask_shifted(model)
    result = verify(model, inputs=llama_inputs(), backend="numpy")
    assert {s.layer for s in result.sites if s.mask == "model"} == {1}
    assert len(result.warnings) == 1 and "later ones in a causal model (layers 1)" in result.warnings[0]


def test_norms_on_values_and_on_whole_projections_are_rebuilt():
    from transformers import Gemma4TextConfig, Gemma4TextModel, Olmo2Config, Olmo2Model

    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    gemma = Gemma4TextModel(
        Gemma4TextConfig(
            **small,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            global_head_dim=8,
            vocab_size_per_layer_input=64,
            hidden_size_per_layer_input=8,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=4,
        )
    )
    olmo = Olmo2Model(Olmo2Config(**small, num_attention_heads=4, num_key_value_heads=2))
    with torch.no_grad():
        for parameter in (*gemma.parameters(), *olmo.parameters()):
            parameter.add_(0.1 * torch.randn_like(parameter))
    for model in (gemma, olmo):
        result = verify(model, inputs={k: v % 64 for k, v in llama_inputs().items()}, backend="both")
        assert result.passed and not result.skipped
        assert {(s.positions, s.mask) for s in result.sites} == {("own", "own")}


# ------------------------------------------------------------------ what must not fail
def test_padding_on_the_left_passes(family_model):
    for name in ("llama", "bert"):
        model, inputs, _ = family_model(name)
        shifted = {key: tensor.clone() for key, tensor in inputs.items()}
        for tensor in shifted.values():
            tensor[1] = tensor[1].roll(4)
        assert verify(model, inputs=shifted, backend="numpy").passed


def test_positions_of_the_caller_are_the_models(family_model):
    model, inputs, _ = family_model("llama")
    positions = torch.stack([torch.arange(12), torch.arange(12).flip(0)])
    result = verify(model, inputs=inputs | {"position_ids": positions}, backend="numpy")
    assert result.passed and {s.positions for s in result.sites} == {"model"}


def test_a_model_in_training_with_fused_attention_passes_and_stays_so(family_model):
    model, inputs, _ = family_model("llama")
    fused = LlamaForCausalLM._from_config(model.config, attn_implementation="sdpa").train()
    fused.load_state_dict(model.state_dict())
    assert verify(fused, inputs=inputs, backend="numpy").passed
    assert fused.training and fused.config._attn_implementation == "sdpa"


def test_large_scores_widen_what_is_allowed():
    model, inputs = build_family("llama"), example_inputs(FAMILIES["llama"])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(60)
    result = verify(model, inputs=inputs)
    assert result.passed and not result.warnings
    assert 1e-5 < max(s.allowed_weights for s in result.sites) < 1e-3
    rough = verify(model.to(torch.bfloat16), inputs=inputs)
    assert any("use float32" in warning for warning in rough.warnings)


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "bart", "vit", "whisper", "clip"])
def test_inputs_are_made_up_for_every_kind_of_model(name, family_model):
    result = verify(family_model(name)[0], backend="numpy")
    assert result.passed and not result.skipped


def test_text_for_a_model_that_reads_none(family_model):
    with pytest.raises(InputError, match="does not start from text"):
        verify(family_model("vit")[0], "A cat.")


# ------------------------------------------------------------------ what cannot be checked
def test_weights_that_are_not_in_memory_are_named():
    for name in ("llama", "bert"):
        model = build_family(name).to("meta")
        for call in (verify, read_reference):
            with pytest.raises(ModelError, match="not in memory"):
                call(model, inputs=example_inputs(FAMILIES[name]))


def test_weights_that_are_no_numbers_are_named():
    model = build_family("llama")
    reference = read_reference(model, inputs=llama_inputs())
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"layer 1.*NaN"):
        verify(model, inputs=llama_inputs())
    result = verify(model, reference=reference, backend="numpy")
    assert not result.passed
    assert None in {s["max_abs_weights"] for s in result.to_dict()["sites"]}


def test_quantised_projections_are_skipped_with_the_reason():
    class Linear8(torch.nn.Linear):
        """What a quantised layer looks like from outside."""

        def forward(self, x):
            return super().forward(x)

    model = build_family("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.__class__ = Linear8
    result = verify(model, inputs=example_inputs(FAMILIES["llama"]))
    assert not result.passed and all("quantised" in s.reason for s in result.skipped)


def test_the_public_names_are_reachable_from_the_package():
    import headscope

    assert headscope.verify is verify and headscope.read_reference is read_reference
    x = torch.randn(2, 5, 8)
    readable = headscope.MultiHeadAttention(8, 2)
    twin = headscope.MultiHeadAttentionTorch(8, 2)
    output, weights = readable.forward(x.numpy())
    assert output.shape == tuple(twin(x)[0].shape) and weights.shape == (2, 2, 5, 5)
    assert callable(headscope.efficient_mha) and callable(headscope.explain_head)
