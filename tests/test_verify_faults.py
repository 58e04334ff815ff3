"""Faults between checkpoint and model, of every kind that weights, positions and masks can have: caught and named."""

import pytest
import torch

from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from headscope.models.sites import find_sites
from headscope.models.weights import read_weights, write_weights
from headscope.proof.reference import read_reference
from headscope.proof.verify import verify

SEPARATE_FUSED_GROUPED = ["bert", "gpt2", "gpt_neox", "llama", "phi3", "falcon_gqa", "bloom", "vit"]
PARTS = ("query", "key", "value", "output")


def site_of(model, stack, layer):
    return next(s for s in find_sites(model) if (s.stack, s.layer) == (stack, layer))


def rewrite(model, stack, layer, change):
    """Change a copy of a site's per-head weights and write it back."""
    site = site_of(model, stack, layer)
    weights = read_weights(site, model=model).clone()
    change(weights)
    write_weights(site, weights, model=model)
    return weights


def failures(result):
    """The sites that differ, each with its worst head."""
    return {(s.stack, s.layer): s.worst_head for s in result.sites if not s.passed}


def heads_of(weights, part, numbers):
    """The query heads that use heads `numbers` of a part."""
    count, used = weights.query.shape[0], getattr(weights, part).shape[0]
    return {h for h in range(count) if h * used // count in numbers}


def checked_after(model, inputs, fault):
    """The check against what was read before the fault; it passes before."""
    reference = read_reference(model, inputs=inputs)
    assert verify(model, reference=reference, backend="numpy").passed
    fault()
    return verify(model, reference=reference, backend="numpy")


# ------------------------------------------------------------------ weights
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", [*SEPARATE_FUSED_GROUPED, "bart"])
def test_two_heads_swapped_in_one_projection(name, part):
    model, family = build_family(name), FAMILIES[name]
    stack = "cross" if "cross" in family.stacks else "self"
    layer = family.stacks[stack].layers[-1]
    weights = read_weights(site_of(model, stack, layer), model=model)
    last = getattr(weights, part).shape[0] - 1

    def swap(weights):
        for tensor in (getattr(weights, part), getattr(weights, f"{part}_bias") if part != "output" else None):
            if tensor is not None:
                tensor[[0, last]] = tensor[[last, 0]]

    result = checked_after(model, example_inputs(family), lambda: rewrite(model, stack, layer, swap))
    found = failures(result)
    assert set(found) == {(stack, layer)}
    assert found[stack, layer] in heads_of(weights, part, {0, last})


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "deberta_v2", "mpt", "qwen3_next"])
def test_one_heads_slice_changed(name, part):
    model, family = build_family(name), FAMILIES[name]
    layer = family.stacks["self"].layers[0]

    def louder(weights):
        # Only half of the head: norms on queries and keys undo what all of it does.
        getattr(weights, part)[1, ::2] *= 1.1

    weights = read_weights(site_of(model, "self", layer), model=model)
    result = checked_after(model, example_inputs(family), lambda: rewrite(model, "self", layer, louder))
    found = failures(result)
    assert set(found) == {("self", layer)}
    assert found["self", layer] in heads_of(weights, part, {1})


def test_a_changed_gate_is_caught():
    model, family = build_family("qwen3_next"), FAMILIES["qwen3_next"]

    def half(weights):
        weights.gate[2] *= 0.5

    result = checked_after(model, example_inputs(family), lambda: rewrite(model, "self", 3, half))
    assert failures(result) == {("self", 3): 2}


def test_a_changed_output_bias_belongs_to_no_head():
    model = build_family("bert")

    def shift(weights):
        weights.output_bias.add_(0.1)

    result = checked_after(model, example_inputs(FAMILIES["bert"]), lambda: rewrite(model, "self", 1, shift))
    assert failures(result) == {("self", 1): None}


@pytest.mark.parametrize("projection", ["q_norm", "k_norm"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_changed_norm_is_caught(name, projection):
    model = build_family(name)

    def change():
        with torch.no_grad():
            getattr(model.model.layers[1].self_attn, projection).weight[2] += 0.5

    assert set(failures(checked_after(model, example_inputs(FAMILIES[name]), change))) == {("self", 1)}


def test_a_changed_sink_is_caught():
    model = build_family("gpt_oss")

    def change():
        with torch.no_grad():
            model.model.layers[1].self_attn.sinks[2] += 0.5

    assert failures(checked_after(model, example_inputs(FAMILIES["gpt_oss"]), change)) == {("self", 1): 2}


def test_a_changed_table_of_relative_positions_is_caught():
    model = build_family("t5")

    def change():
        with torch.no_grad():
            table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
            table[:4, 2] += 0.5

    found = failures(checked_after(model, example_inputs(FAMILIES["t5"]), change))
    assert found == {("encoder", n): 2 for n in range(3)}


@pytest.mark.parametrize("copied", [True, False])
def test_one_layers_attention_in_anothers_place_is_caught(copied):
    model = build_family("llama")
    layers = model.model.layers

    def replace():
        if copied:
            layers[1].self_attn.load_state_dict(layers[2].self_attn.state_dict())
        else:
            layers[1].self_attn = layers[2].self_attn

    found = failures(checked_after(model, example_inputs(FAMILIES["llama"]), replace))
    assert set(found) == {("self", 1)}


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "bloom"])
def test_a_fault_is_caught_against_a_directory(name, saved):
    model, inputs, directory = build_family(name), example_inputs(FAMILIES[name]), str(saved(name))
    assert verify(model, inputs=inputs, checkpoint=directory, backend="numpy").passed
    stack = next(iter(FAMILIES[name].stacks))

    def change(weights):
        weights.value[0] *= 1.1

    weights = rewrite(model, stack, 1, change)
    found = failures(verify(model, inputs=inputs, checkpoint=directory, backend="numpy"))
    assert set(found) == {(stack, 1)} and found[stack, 1] in heads_of(weights, "value", {0})


# ------------------------------------------------------------------ positions, masks, scores
def rotary_base_changed(model, monkeypatch):
    rotary = model.model.rotary_emb
    rotary.inv_freq = 1 / 5000 ** (torch.arange(0, 2 * len(rotary.inv_freq), 2) / (2 * len(rotary.inv_freq)))


def angles_dropped(model, monkeypatch):
    model.model.rotary_emb.inv_freq.zero_()


def positions_shifted_for_keys(model, monkeypatch):
    from transformers.models.llama import modeling_llama

    turn = modeling_llama.apply_rotary_pos_emb

    def shifted(q, k, cos, sin, **options):
        return turn(q, k, cos, sin, **options)[0], turn(q, k, cos.roll(1, 1), sin.roll(1, 1), **options)[1]

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", shifted)


def groups_interleaved(model, monkeypatch):
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "repeat_kv", lambda x, n: x.repeat(1, n, 1, 1))


@pytest.mark.parametrize("fault", [rotary_base_changed, angles_dropped, positions_shifted_for_keys, groups_interleaved])
def test_a_fault_in_all_layers_is_caught(fault, monkeypatch):
    model = build_family("llama")
    result = checked_after(model, example_inputs(FAMILIES["llama"]), lambda: fault(model, monkeypatch))
    assert set(failures(result)) == {("self", n) for n in range(3)}


def test_a_partial_rotation_that_turns_all_is_caught():
    model = build_family("gpt_neox")

    def turn_all():
        rotary = model.gpt_neox.rotary_emb
        rotary.inv_freq = 1 / 10000 ** (torch.arange(0, 8, 2) / 8)

    found = failures(checked_after(model, example_inputs(FAMILIES["gpt_neox"]), turn_all))
    assert set(found) == {("self", 0), ("self", 1)}


@pytest.mark.parametrize(("name", "place"), [("bloom", "bloom"), ("mpt", "mpt"), ("falcon", "falcon")])
def test_changed_slopes_are_caught(name, place, monkeypatch):
    from importlib import import_module

    if name == "falcon":
        from transformers import FalconConfig, FalconForCausalLM

        torch.manual_seed(0)
        model = FalconForCausalLM(
            FalconConfig(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                alibi=True,
                rope_parameters=None,
            )
        ).eval()
        inputs = {"input_ids": torch.arange(24).reshape(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    else:
        model, inputs = build_family(name), example_inputs(FAMILIES[name])
    module = import_module(f"transformers.models.{place}.modeling_{place}")
    function = next(f for f in ("build_alibi_tensor", "build_mpt_alibi_tensor") if hasattr(module, f))
    build = getattr(module, function)

    def steeper():
        monkeypatch.setattr(module, function, lambda *a, **k: build(*a, **k) * 1.2)

    assert len(failures(checked_after(model, inputs, steeper))) == 2


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_window_off_by_one_is_caught(name):
    model = build_family(name)

    def wider():
        model.config.sliding_window += 1

    found = failures(checked_after(model, example_inputs(FAMILIES[name]), wider))
    assert set(found) == {("self", 0), ("self", 1)}


def test_a_changed_soft_cap_is_caught():
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_logit_softcapping=2.0,
    )
    model = Gemma2Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))

    def change():
        model.layers[1].self_attn.attn_logit_softcapping = 2.2

    inputs = {"input_ids": torch.randint(0, 64, (2, 12))}
    assert set(failures(checked_after(model, inputs, change))) == {("self", 1)}


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "bloom"])
def test_a_masked_out_token_is_caught(name):
    """One key more hidden than the lengths and the causal order say."""
    model, inputs = build_family(name), example_inputs(FAMILIES[name])
    reference = read_reference(model, inputs=inputs)
    hidden = inputs["attention_mask"].clone()
    hidden[:, 2] = 0

    def hide(module, args, kwargs):
        return args, {**kwargs, "attention_mask": hidden}

    model.register_forward_pre_hook(hide, with_kwargs=True)
    found = failures(verify(model, reference=reference, backend="numpy"))
    stacks = FAMILIES[name].stacks
    expected = {(s, n) for s in ("encoder", "cross", "self") if s in stacks for n in stacks[s].layers}
    assert set(found) == expected


# ------------------------------------------------------------------ without a reference
@pytest.mark.parametrize("fault", [rotary_base_changed, angles_dropped])
def test_angles_that_are_not_the_configs_are_a_difference(fault, monkeypatch):
    model, inputs = build_family("llama"), example_inputs(FAMILIES["llama"])
    fault(model, monkeypatch)
    result = verify(model, inputs=inputs, backend="numpy")
    assert set(failures(result)) == {("self", n) for n in range(3)}
    assert {s.positions for s in result.sites} == {"own"}


def test_a_turn_that_is_not_ours_is_named(monkeypatch):
    model, inputs = build_family("llama"), example_inputs(FAMILIES["llama"])
    positions_shifted_for_keys(model, monkeypatch)
    result = verify(model, inputs=inputs, backend="numpy")
    assert {s.positions for s in result.sites} == {"model"}
    assert any("rotary positions" in w and "layers 0-2" in w for w in result.warnings)


@pytest.mark.parametrize("change", [1, -1])
def test_a_window_that_is_not_the_configs_is_named(change):
    model, inputs = build_family("mistral"), example_inputs(FAMILIES["mistral"])
    for layer in model.model.layers:
        layer.self_attn.config = type(model.config)(**{**model.config.to_dict(), "attn_implementation": "eager"})
        layer.self_attn.config.sliding_window += change
    result = verify(model, inputs=inputs, backend="numpy")
    assert {s.mask for s in result.sites} == {"model"}
    assert any("the mask is the model's own" in w and "layers 0-1" in w for w in result.warnings)


def test_a_layer_that_computes_otherwise_is_named(monkeypatch):
    model, inputs = build_family("bloom"), example_inputs(FAMILIES["bloom"])
    model.transformer.h[1].self_attention.inv_norm_factor *= 1.0
    turn = model.transformer.h[1].self_attention.attention_dropout

    class Blur(torch.nn.Module):
        def forward(self, weights):
            return turn(weights.softmax(dim=-1))

    model.transformer.h[1].self_attention.attention_dropout = Blur()
    result = verify(model, inputs=inputs, backend="numpy")
    assert [s.layer for s in result.skipped] == [1]
    assert any("otherwise" in w and "layers 1" in w for w in result.warnings)


# ------------------------------------------------------------------ half precision
BFLOAT16 = ["bert", "gpt2", "gpt_neox", "llama", "qwen3", "gemma3", "gpt_oss", "t5", "bloom", "vit"]
FLOAT16 = ["bert", "llama", "t5"]


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, torch.bfloat16) for n in BFLOAT16] + [(n, torch.float16) for n in FLOAT16]
)
def test_half_precision_passes_and_still_shows_a_fault(name, dtype):
    model, family = build_family(name).to(dtype), FAMILIES[name]
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in example_inputs(family).items()}
    stack = next(iter(family.stacks))

    def louder(weights):
        weights.value[0] *= 1.3

    result = checked_after(model, inputs, lambda: rewrite(model, stack, 1, louder))
    weights = read_weights(site_of(model, stack, 1), model=model)
    found = failures(result)
    assert set(found) == {(stack, 1)} and found[stack, 1] in heads_of(weights, "value", {0})
    assert result.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("part", PARTS)
def test_a_large_fault_in_any_part_shows_in_bfloat16(part):
    model, family = build_family("llama").to(torch.bfloat16), FAMILIES["llama"]

    def louder(weights):
        getattr(weights, part)[1] *= 1.3

    result = checked_after(model, example_inputs(family), lambda: rewrite(model, "self", 1, louder))
    assert set(failures(result)) == {("self", 1)}


def test_norms_in_float32_within_a_model_in_bfloat16():
    model = build_family("qwen3").to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    for module in model.modules():
        if type(module).__name__ == "Qwen3RMSNorm":
            module.register_forward_hook(lambda m, args, out: out.to(torch.bfloat16))
    result = verify(model, inputs=example_inputs(FAMILIES["qwen3"]))
    assert result.passed and not result.skipped and result.dtype == "bfloat16"
