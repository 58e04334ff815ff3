"""Layers of small random models rebuilt by hand from the pieces: projections, positions, masks, attention."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomModel,
    FalconConfig,
    FalconModel,
    Gemma2Config,
    Gemma2Model,
    GPT2Config,
    GPT2Model,
    GptOssConfig,
    GptOssModel,
    LlamaConfig,
    LlamaModel,
    MptConfig,
    MptModel,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5Model,
)

from headscope.attention import masks
from headscope.attention.alibi import alibi_key_bias, alibi_slopes, round_to_bfloat16
from headscope.attention.frequencies import rotary_frequencies
from headscope.attention.norms import layer_norm, rms_norm
from headscope.attention.reference import attention, output_projection, project, split_heads
from headscope.attention.relative import relative_bias
from headscope.attention.rotary import apply_rotary, rotary_cos_sin

N = 11
SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_LIKE = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16}


def run(kind, config, site, implementation="eager"):
    """Build the model with weights large enough to matter, and run it once.

    Returns:
        The attention module at `site`, the arguments of its forward, its output, and its weights if it gave any.
    """
    torch.manual_seed(0)
    config._attn_implementation = implementation
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    module = model.get_submodule(site)
    seen = []
    handle = module.register_forward_hook(lambda _, args, keywords, result: seen.append((args, keywords, result)),
                                          with_kwargs=True)  # fmt: skip
    inputs = {"input_ids": torch.arange(2 * N).view(2, N) % 50}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :5] + 3
    with torch.no_grad():
        model(**inputs, output_attentions=implementation == "eager")
    handle.remove()
    (args, keywords, result) = seen[0]
    names = list(inspect.signature(module.forward).parameters)
    arguments = {**dict(zip(names, args, strict=False)), **keywords}
    weights = [tensor for tensor in result[1:] if isinstance(tensor, torch.Tensor)]
    return module, arguments, numbers(result[0]), numbers(weights[-1]) if weights else None


def numbers(tensor):
    return tensor.detach().double().numpy()


def linear(x, layer):
    return project(x, numbers(layer.weight).T, None if layer.bias is None else numbers(layer.bias))


def check(query, key, value, out, wanted_output, wanted_weights, **options):
    context, weights = attention(query, key, value, **options)
    assert wanted_weights.std() > 0.05, "weights too even to tell anything"
    np.testing.assert_allclose(weights, wanted_weights, atol=1e-5)
    output = output_projection(context, *out)
    assert np.abs(output - wanted_output).max() < 1e-4 * np.abs(wanted_output).max()


def output_of(layer):
    return numbers(layer.weight).T, None if layer.bias is None else numbers(layer.bias)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_llama_with_grouped_heads_and_scaled_rotary(rope):
    config = LlamaConfig(**LLAMA_LIKE, rope_parameters=ROPES[rope], max_position_embeddings=8)
    module, given, output, weights = run(LlamaModel, config, "layers.1.self_attn")
    x = numbers(given["hidden_states"])
    inv_freq, factor = rotary_frequencies(ROPES[rope], 8, max_position_embeddings=8, seq_len=N)
    turn = rotary_cos_sin(np.arange(N), inv_freq, factor)
    query = apply_rotary(split_heads(linear(x, module.q_proj), 4), *turn)
    key = apply_rotary(split_heads(linear(x, module.k_proj), 2), *turn)
    value = split_heads(linear(x, module.v_proj), 2)
    check(query, key, value, output_of(module.o_proj), output, weights, mask=masks.causal_mask(N))


def test_qwen3_with_norms_on_queries_and_keys():
    config = Qwen3Config(**LLAMA_LIKE, rope_parameters=ROPES["default"])
    module, given, output, weights = run(Qwen3Model, config, "layers.0.self_attn")
    x = numbers(given["hidden_states"])
    turn = rotary_cos_sin(np.arange(N), rotary_frequencies(ROPES["default"], 8)[0])
    norms = {name: numbers(getattr(module, name).weight) for name in ("q_norm", "k_norm")}
    query = apply_rotary(rms_norm(split_heads(linear(x, module.q_proj), 4), norms["q_norm"]), *turn)
    key = apply_rotary(rms_norm(split_heads(linear(x, module.k_proj), 2), norms["k_norm"]), *turn)
    value = split_heads(linear(x, module.v_proj), 2)
    check(query, key, value, output_of(module.o_proj), output, weights, mask=masks.causal_mask(N))


@pytest.mark.parametrize("layer", [0, 1])
def test_gemma2_with_soft_cap_and_window(layer):
    config = Gemma2Config(
        **LLAMA_LIKE, rope_parameters=ROPES["default"], sliding_window=4, attn_logit_softcapping=2.0,
        query_pre_attn_scalar=3,
    )  # fmt: skip
    module, given, output, weights = run(Gemma2Model, config, f"layers.{layer}.self_attn")
    x = numbers(given["hidden_states"])
    turn = rotary_cos_sin(np.arange(N), rotary_frequencies(ROPES["default"], 8)[0])
    query = apply_rotary(split_heads(linear(x, module.q_proj), 4), *turn)
    key = apply_rotary(split_heads(linear(x, module.k_proj), 2), *turn)
    value = split_heads(linear(x, module.v_proj), 2)
    mask = masks.sliding_window_mask(N, window=4) if layer == 0 else masks.causal_mask(N)
    options = {"mask": mask, "softcap": 2.0, "scale": 3**-0.5}
    check(query, key, value, output_of(module.o_proj), output, weights, **options)


def test_gpt_oss_with_sinks():
    config = GptOssConfig(
        **LLAMA_LIKE, rope_parameters=ROPES["default"], sliding_window=4, num_local_experts=2, num_experts_per_tok=1
    )
    module, given, output, weights = run(GptOssModel, config, "layers.0.self_attn")
    x = numbers(given["hidden_states"])
    turn = rotary_cos_sin(np.arange(N), rotary_frequencies(ROPES["default"], 8)[0])
    query = apply_rotary(split_heads(linear(x, module.q_proj), 4), *turn)
    key = apply_rotary(split_heads(linear(x, module.k_proj), 2), *turn)
    value = split_heads(linear(x, module.v_proj), 2)
    options = {"mask": masks.sliding_window_mask(N, window=4), "sinks": numbers(module.sinks)}
    check(query, key, value, output_of(module.o_proj), output, weights, **options)


def test_gpt2_with_one_matrix_for_queries_keys_and_values():
    config = GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=N)
    module, given, output, weights = run(GPT2Model, config, "h.1.attn")
    x = numbers(given["hidden_states"])
    together = project(x, numbers(module.c_attn.weight), numbers(module.c_attn.bias))
    query, key, value = (split_heads(part, 4) for part in np.split(together, 3, axis=-1))
    out = numbers(module.c_proj.weight), numbers(module.c_proj.bias)
    check(query, key, value, out, output, weights, mask=masks.causal_mask(N))


@pytest.mark.parametrize("stack", ["encoder", "decoder", "cross"])
def test_t5_with_bucketed_positions(stack):
    config = T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=16, num_layers=1, num_heads=4,
                      relative_attention_num_buckets=8, relative_attention_max_distance=9)  # fmt: skip
    site = {
        "encoder": "encoder.block.0.layer.0.SelfAttention",
        "decoder": "decoder.block.0.layer.0.SelfAttention",
        "cross": "decoder.block.0.layer.1.EncDecAttention",
    }[stack]
    module, given, output, weights = run(T5Model, config, site)
    x = numbers(given["hidden_states"])
    source = numbers(given["key_value_states"]) if stack == "cross" else x
    query = split_heads(linear(x, module.q), 4)
    key, value = split_heads(linear(source, module.k), 4), split_heads(linear(source, module.v), 4)
    n = x.shape[1]
    options = {"scale": 1.0, "mask": masks.causal_mask(n) if stack == "decoder" else None}
    if stack != "cross":
        table = numbers(module.relative_attention_bias.weight)
        options["bias"] = relative_bias(table, n, bidirectional=stack == "encoder", max_distance=9)
    check(query, key, value, output_of(module.o), output, weights, **options)


def test_bloom_with_alibi():
    config = BloomConfig(vocab_size=50, hidden_size=48, n_layer=2, n_head=6)
    module, given, output, weights = run(BloomModel, config, "h.0.self_attention")
    x = numbers(given["hidden_states"])
    together = linear(x, module.query_key_value).reshape(2, N, 6, 3, 8)
    query, key, value = (together[:, :, :, part].swapaxes(1, 2) for part in range(3))
    options = {"bias": alibi_key_bias(alibi_slopes(6), np.arange(N)), "mask": masks.causal_mask(N)}
    added = output - numbers(given["residual"])
    check(query, key, value, output_of(module.dense), added, weights, **options)


def test_falcon_scales_and_rounds_its_alibi():
    """The fused path gives no weights; the eager one of transformers 5.24 adds the bias a second time with the mask."""
    config = FalconConfig(**SMALL, alibi=True, new_decoder_architecture=False, multi_query=True, bias=True)
    module, given, wanted, _ = run(FalconModel, config, "h.0.self_attention", "sdpa")
    together = split_heads(linear(numbers(given["hidden_states"]), module.query_key_value), 6)
    query, key, value = together[:, :4], together[:, 4:5], together[:, 5:]
    rounded = alibi_key_bias(round_to_bfloat16(alibi_slopes(4)), round_to_bfloat16(np.arange(N)))
    bias = round_to_bfloat16(rounded) / np.sqrt(8)
    context, _ = attention(query, key, value, bias=bias, mask=masks.causal_mask(N))
    output = output_projection(context, *output_of(module.dense))
    assert np.abs(output - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_mpt_counts_from_the_last_token():
    config = MptConfig(vocab_size=50, d_model=48, n_heads=6, n_layers=2, max_seq_len=N)
    config.attn_config.alibi_bias_max = 8
    module, given, output, weights = run(MptModel, config, "blocks.0.attn")
    x = numbers(given["hidden_states"])
    together = linear(x, module.Wqkv)
    query, key, value = (split_heads(part, 6) for part in np.split(together, 3, axis=-1))
    options = {"bias": alibi_key_bias(alibi_slopes(6), np.arange(1 - N, 1)), "mask": masks.causal_mask(N)}
    check(query, key, value, output_of(module.out_proj), output, weights, **options)


def test_norms_are_torchs():
    x = torch.randn(2, 3, 5, dtype=torch.float64) + 1
    weight, bias = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    functional = torch.nn.functional
    np.testing.assert_allclose(rms_norm(x, weight, eps=0.1), functional.rms_norm(x, (5,), weight, 0.1), rtol=1e-12)
    np.testing.assert_allclose(rms_norm(x, weight - 1, weight_offset=1), rms_norm(x, weight), rtol=1e-12)
    np.testing.assert_allclose(rms_norm(x, eps=0.1), functional.rms_norm(x, (5,), None, 0.1), rtol=1e-12)
    theirs = functional.layer_norm(x, (5,), weight, bias, 0.1)
    np.testing.assert_allclose(layer_norm(x, weight, bias, eps=0.1), theirs, rtol=1e-10)
    np.testing.assert_allclose(layer_norm(x), functional.layer_norm(x, (5,)), rtol=1e-10)
