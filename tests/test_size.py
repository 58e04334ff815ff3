"""Sizes from configurations against the textbook, against formulas, and against models that really run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel, DeepseekV3Config, DeepseekV3Model, GPT2Config, LlamaConfig

import headscope
from fixtures.families import FAMILIES
from headscope.attention.tiles import tile_cells
from headscope.errors import InputError, ModelError
from headscope.sizing.configs import config_stacks
from headscope.sizing.result import TILE_CELLS, LayerSize, StackSize
from tests.test_loading_gguf import KV_HEADS, write
from tests.tiny_checkpoints import tiny_model

WITH_ATTENTION = [name for name, family in FAMILIES.items() if family.stacks]
KIB, MIB, GIB = 2**10, 2**20, 2**30


def only(result: Any) -> StackSize:
    """The one row of a result."""
    (row,) = result.models
    return row


# ------------------------------------------------------------------ the textbook
def test_bert_base() -> None:
    row = only(headscope.size(BertConfig()))
    assert (row.num_layers, row.num_heads, row.hidden_size, row.head_dim) == (12, 12, 768, 64)
    assert (row.qkv_params_per_layer, row.o_params_per_layer) == (1_769_472, 589_824)
    assert row.attention_params == 12 * 4 * 768**2
    assert row.total_params == 109_482_240
    assert row.attention_share == pytest.approx(28_311_552 / 109_482_240)
    assert row.length == 512 and row.kv_cache_bytes_per_token is None and row.kv_cache_bytes is None


def test_bert_large() -> None:
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    row = only(headscope.size(config))
    assert (row.num_heads, row.hidden_size, row.head_dim) == (16, 1024, 64)
    assert (row.qkv_params_per_layer, row.o_params_per_layer) == (3_145_728, 1_048_576)
    assert row.total_params == 335_141_888


def test_gpt3_by_its_numbers() -> None:
    row = only(headscope.size(hidden_size=12288, num_heads=96, num_layers=96, name="GPT-3"))
    assert (row.name, row.num_layers, row.head_dim) == ("GPT-3", 96, 128)
    assert (row.qkv_params_per_layer, row.o_params_per_layer) == (452_984_832, 150_994_944)
    assert row.attention_params == 96 * 4 * 12288**2
    assert row.total_params is None and row.attention_share is None
    whole = only(
        headscope.size(hidden_size=12288, num_heads=96, num_layers=96, intermediate_size=4 * 12288, vocab_size=50257)
    )
    assert whole.total_params == 96 * 12 * 12288**2 + 50257 * 12288
    assert whole.attention_share == pytest.approx(0.332, abs=1e-3)


def test_one_layer_of_32_heads_at_8192_tokens() -> None:
    row = only(headscope.size(hidden_size=4096, num_heads=32, num_layers=1, length=8192))
    assert row.layer_matrix_bytes == row.attention_matrix_bytes == 8 * GIB
    assert row.layer_matrix_bytes // 4 == 2_147_483_648
    assert row.streaming_bytes == 16 * MIB


def test_llama3_70b_has_an_eighth_of_the_cache() -> None:
    sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
    config = LlamaConfig(
        **sizes, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False, dtype="bfloat16",
        max_position_embeddings=8192, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    row = only(headscope.size(config))
    assert (row.num_layers, row.num_heads, row.num_kv_heads, row.head_dim) == (80, 64, 8, 128)
    assert row.total_params == 70_553_706_496
    assert row.kv_cache_bytes_per_token == 320 * KIB == 80 * 2 * 8 * 128 * 2
    assert row.kv_cache_bytes == 8192 * 320 * KIB
    assert row.kv_cache_share == 1 / 8
    assert row.qkv_params_per_layer == 8192 * (64 + 2 * 8) * 128
    numbers = only(headscope.size(hidden_size=8192, num_heads=64, num_layers=80, num_kv_heads=8, dtype="bfloat16"))
    assert numbers.kv_cache_bytes_per_token == row.kv_cache_bytes_per_token
    assert numbers.attention_params == row.attention_params


def test_tied_weights_count_once() -> None:
    row = only(headscope.size(GPT2Config(architectures=["GPT2LMHeadModel"])))
    assert row.total_params == 124_439_808
    assert (row.qkv_params_per_layer, row.o_params_per_layer) == (3 * 768**2, 768**2)


# ------------------------------------------------------------------ against models that run
@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_heads_weights_and_matrices_of_every_family(name: str, family_model: Callable[[str], Any]) -> None:
    model, _inputs, family = family_model(name)
    rows = {row.stack: row for row in headscope.size(model.config).models}
    assert rows.keys() == family.stacks.keys()
    for stack, spec in family.stacks.items():
        row = rows[stack]
        assert tuple(layer.layer for layer in row.layers) == spec.layers
        assert (row.num_heads, row.num_kv_heads) == (spec.num_heads, spec.num_kv_heads)
    real = {row.stack: row for row in headscope.size(model).models}
    whole = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    assert {row.total_params for row in real.values()} == {whole}
    for stack, row in rows.items():
        assert [layer.qkv_params for layer in row.layers] == [layer.qkv_params for layer in real[stack].layers]


OUTPUTS = {
    "self": "attentions",
    "encoder": "encoder_attentions",
    "decoder": "decoder_attentions",
    "cross": "cross_attentions",
}


@pytest.mark.parametrize("name", [n for n in WITH_ATTENTION if set(FAMILIES[n].stacks) <= set(OUTPUTS)])
def test_matrices_are_as_large_as_those_the_model_returns(name: str, family_model: Callable[[str], Any]) -> None:
    model, inputs, _family = family_model(name)
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    for row in headscope.size(model).models:
        found = [w for w in outputs[OUTPUTS[row.stack]] if w is not None]
        batch, _, length, keys = found[0].shape
        asked = headscope.size(model, length=length, batch_size=batch).models
        sized = next(r for r in asked if r.stack == row.stack)
        assert sized.length == length
        assert sized.attention_matrix_bytes * keys == sum(w.numel() * 4 for w in found) * sized.key_length
        assert sized.layer_matrix_bytes * len(found) == sized.attention_matrix_bytes


def kept_numbers(cache: Any, batch: int) -> dict[int, int]:
    """Numbers a token that each layer of a real cache keeps."""
    kept = {}
    for place, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if torch.is_tensor(keys):
            kept[place] = (keys.numel() // keys.shape[-2] + values.numel() // values.shape[-2]) // batch
    return kept


@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_the_cache_is_the_one_that_generation_keeps(name: str, family_model: Callable[[str], Any]) -> None:
    model, inputs, _family = family_model(name)
    rows = {row.stack: row for row in headscope.size(model.config).models}
    with torch.no_grad():
        ways = {"use_cache": True} if {"input_ids", "decoder_input_ids"} & set(inputs) else {}
        cache = getattr(model(**inputs, **ways), "past_key_values", None)
    if cache is None:
        assert {row.kv_cache_bytes_per_token for row in rows.values()} == {None}
        return
    both = {"decoder": "self_attention_cache", "cross": "cross_attention_cache"}
    real = {stack: getattr(cache, part) for stack, part in both.items()} if hasattr(cache, both["cross"]) else {}
    for stack, row in rows.items():
        found = real.get(stack, cache if not real and stack in ("self", "text") else None)
        kept = {} if found is None else kept_numbers(found, len(next(iter(inputs.values()))))
        assert row.kv_cache_bytes_per_token == (sum(kept.values()) * 4 or None)
        if kept:
            assert {layer.layer: layer.cached for layer in row.layers} == kept


@pytest.mark.parametrize("query_rank", [None, 24])
def test_latent_attention_keeps_one_narrow_vector(query_rank: int | None) -> None:
    config = DeepseekV3Config(
        vocab_size=50, hidden_size=32, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=query_rank, kv_lora_rank=20, qk_rope_head_dim=6,
        qk_nope_head_dim=10, v_head_dim=12, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=2,
    )  # fmt: skip
    row = only(headscope.size(config))
    with torch.no_grad():
        model = DeepseekV3Model(config).eval()
        cache = model(torch.arange(7)[None], use_cache=True).past_key_values
    assert {layer.layer: layer.cached for layer in row.layers} == kept_numbers(cache, 1) == {0: 26, 1: 26}
    assert row.kv_cache_bytes_per_token == 2 * 26 * 4
    assert row.kv_cache_share == pytest.approx(26 / (4 * (16 + 12)))
    attention = model.layers[0].self_attn
    queries = [attention.q_proj] if query_rank is None else [attention.q_a_proj, attention.q_b_proj]
    parts = [*queries, attention.kv_a_proj_with_mqa, attention.kv_b_proj]
    assert row.qkv_params_per_layer == sum(part.weight.numel() for part in parts)
    assert row.o_params_per_layer == attention.o_proj.weight.numel()
    (stack,) = config_stacks(config)
    assert {(s.qkv_params, s.o_params, s.cached, s.head_dim) for s in stack.shapes} == {
        (row.qkv_params_per_layer, row.o_params_per_layer, 26, row.head_dim)
    }
    assert any("latent" in note for note in row.notes)


# ------------------------------------------------------------------ formulas against shapes
def assert_formulas_agree(config: Any, known: dict[str, str]) -> int:
    """Compare the formulas with the shapes, stack by stack; how many stacks both know."""
    stated = {stack.stack: stack for stack in config_stacks(config)}
    compared = 0
    for row in headscope.size(config).models:
        stack = stated.get(row.stack)
        if row.source != "projections" or stack is None or config.model_type in known:
            continue
        shapes = {x.layer: (x.num_heads, x.num_kv_heads, x.qkv_params, x.o_params) for x in row.layers}
        formulas = {
            layer: (shape.num_heads, shape.num_kv_heads, shape.qkv_params, shape.o_params)
            for layer, shape in zip(stack.layers, stack.shapes, strict=True)
        }
        assert shapes == formulas, (config.model_type, row.stack)
        compared += 1
    return compared


@pytest.mark.parametrize("name", [n for n in WITH_ATTENTION if n not in ("clip", "qwen3_next")])
def test_formulas_agree_with_the_shapes_of_every_family(name: str, family_model: Callable[[str], Any]) -> None:
    assert assert_formulas_agree(family_model(name)[0].config, {}) == len(FAMILIES[name].stacks)


def test_a_gate_beside_the_queries_counts_with_them(family_model: Callable[[str], Any]) -> None:
    config = family_model("qwen3_next")[0].config
    row = only(headscope.size(config))
    (stack,) = config_stacks(config)
    shape = stack.shapes[0]
    assert row.qkv_params_per_layer == shape.qkv_params + shape.hidden_size * shape.num_heads * shape.head_dim
    assert any("gate" in note for note in row.notes)
    assert (row.num_layers, len(row.layers)) == (4, 2)
    assert any("2 of 4 layers are not attention" in note for note in row.notes)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 9), st.integers(1, 3))
def test_numbers_and_a_model_of_these_numbers_agree(
    kv_heads: int, group: int, half: int, hidden: int, layers: int
) -> None:
    numbers = {"hidden_size": 4 * hidden, "num_key_value_heads": kv_heads, "head_dim": 2 * half}
    config = transformers.MistralConfig(
        **numbers,
        sliding_window=None,
        num_attention_heads=kv_heads * group,
        num_hidden_layers=layers,
        intermediate_size=8,
        vocab_size=16,
    )
    model = only(headscope.size(config, length=10))
    told = only(
        headscope.size(
            hidden_size=4 * hidden,
            num_heads=kv_heads * group,
            num_layers=layers,
            num_kv_heads=kv_heads,
            head_dim=2 * half,
            length=10,
        )
    )
    same = ("qkv_params_per_layer", "o_params_per_layer", "attention_params", "attention_matrix_bytes",
            "layer_matrix_bytes", "kv_cache_bytes_per_token", "kv_cache_bytes", "kv_cache_share")  # fmt: skip
    assert {n: getattr(model, n) for n in same} == {n: getattr(told, n) for n in same}


# ------------------------------------------------------------------ windows, lengths, dtypes
def test_windows_bound_the_cache(family_model: Callable[[str], Any]) -> None:
    config = family_model("gemma3")[0].config
    for length in (3, 4, 100):
        row = only(headscope.size(config, length=length))
        each = row.kv_cache_bytes_per_token // 3
        assert row.kv_cache_bytes == each * (2 * min(length, 4) + length)
        assert "2 of 3 layers keep no more than 4 tokens" in row.notes
    # The matrices of a window are whole all the same: what it hides is only masked.
    assert row.attention_matrix_bytes == 3 * 4 * 100**2 * 4


def test_lengths_come_from_the_model_unless_given() -> None:
    roberta = transformers.RobertaConfig(max_position_embeddings=514)
    assert only(headscope.size(roberta)).length == 512
    long = only(headscope.size(BertConfig(), length=600))
    assert long.length == 600 and any("more than the model's own 512" in note for note in long.notes)
    t5 = {row.stack: row.length for row in headscope.size(transformers.T5Config()).models}
    assert t5 == {"encoder": 2048, "decoder": 2048, "cross": 2048}


def test_towers_have_lengths_of_their_own() -> None:
    clip = {row.stack: row for row in headscope.size(transformers.CLIPConfig(), length=10).models}
    assert (clip["text"].length, clip["vision"].length) == (10, 50)
    assert clip["vision"].total_params == clip["text"].total_params
    assert only(headscope.size(transformers.ViTConfig())).length == 197
    assert only(headscope.size(transformers.ViTConfig(), length=50)).length == 50
    whisper = {row.stack: row for row in headscope.size(transformers.WhisperConfig()).models}
    assert {name: (r.length, r.key_length) for name, r in whisper.items()} == {
        "encoder": (1500, 1500),
        "decoder": (448, 448),
        "cross": (448, 1500),
    }
    assert whisper["cross"].attention_matrix_bytes == 4 * 6 * 448 * 1500 * 4
    assert whisper["cross"].kv_cache_bytes == whisper["cross"].kv_cache_bytes_per_token * 1500
    swin = headscope.size(transformers.SwinConfig()).models
    assert all(row.length is None and row.attention_matrix_bytes is None for row in swin)


def test_dtypes_and_batches() -> None:
    half = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=8, dtype="float16")
    row = only(headscope.size(half, length=8))
    assert (row.dtype, row.dtype_bytes, row.attention_matrix_bytes) == ("float16", 2, 2 * 4 * 64 * 2)
    twice = only(headscope.size(half, length=8, dtype=torch.float32, batch_size=3))
    assert twice.attention_matrix_bytes == 6 * row.attention_matrix_bytes
    assert twice.kv_cache_bytes_per_token == 2 * row.kv_cache_bytes_per_token
    assert twice.kv_cache_bytes == 6 * row.kv_cache_bytes
    assert twice.streaming_bytes == 3 * row.streaming_bytes == 3 * 4 * 64 * 4  # float32 in both


def test_streaming_holds_no_more_than_is_said() -> None:
    assert tile_cells(torch.device("cpu")) <= TILE_CELLS


def test_layers_that_share_weights_count_them_once(family_model: Callable[[str], Any]) -> None:
    row = only(headscope.size(family_model("albert")[0].config))
    assert len(row.layers) == 3
    assert row.attention_params == row.qkv_params_per_layer + row.o_params_per_layer
    assert row.attention_matrix_bytes == 3 * row.layer_matrix_bytes


def test_layers_that_differ_have_no_one_number() -> None:
    layers = (LayerSize(0, 4, 4, 8, 8, 100, 50, cached=64), LayerSize(1, 2, 2, 8, 8, 60, 30, cached=None))
    row = StackSize("m", "self", "", 32, 2, layers, None, 10, 10, "float32", 4, 1, True, False, "projections")
    assert (row.num_heads, row.num_kv_heads, row.qkv_params_per_layer) == (None, None, None)
    assert (row.head_dim, row.attention_params) == (8, 240)
    assert (row.attention_matrix_bytes, row.layer_matrix_bytes) == (6 * 100 * 4, 4 * 100 * 4)
    assert row.kv_cache_bytes_per_token is None and row.kv_cache_bytes is None and row.kv_cache_share is None
    json.dumps(row.to_dict(), allow_nan=False)


# ------------------------------------------------------------------ where models come from
def test_a_directory_needs_no_weights(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(family_dir("llama") / "config.json", tmp_path)
    row = only(headscope.size(tmp_path))
    assert (row.name, row.num_heads, row.num_kv_heads) == (str(tmp_path), 8, 2)


def test_a_pruned_directory_has_the_heads_that_are_left(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                                 intermediate_size=16))  # fmt: skip
    headscope.prune_heads(model, {0: [1, 2], 2: [3]})
    headscope.save_pruned(model, tmp_path / "smaller")
    for file in (tmp_path / "smaller").glob("*.safetensors"):
        file.unlink()
    row = only(headscope.size(tmp_path / "smaller"))
    assert [layer.num_heads for layer in row.layers] == [2, 4, 3]
    assert row.num_heads is None and row.head_dim == 8
    assert row.total_params == model.num_parameters()
    assert row.attention_params == (2 + 4 + 3) * 8 * 32 * 4
    assert row.attention_matrix_bytes == (2 + 4 + 3) * 512**2 * 4


def test_a_gguf_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write(model, tmp_path / "tiny.gguf")
    row = only(headscope.size(tmp_path / "tiny.gguf", dtype="float32"))
    real = only(headscope.size(model))
    assert row.num_kv_heads == KV_HEADS
    assert (row.attention_params, row.kv_cache_bytes_per_token) == (
        real.attention_params,
        real.kv_cache_bytes_per_token,
    )


def write_config(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def test_a_type_that_transformers_does_not_know(tmp_path: Path) -> None:
    values = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
              "max_position_embeddings": 64, "torch_dtype": "bfloat16", "use_cache": True,
              "auto_map": {"AutoConfig": "configuration_new.NewConfig"}}  # fmt: skip
    folder = write_config(tmp_path / "new", model_type="brand_new", **values)
    row = only(headscope.size(folder))
    assert (row.source, row.total_params, row.length, row.dtype) == ("config", None, 64, "bfloat16")
    assert (row.qkv_params_per_layer, row.o_params_per_layer) == (32 * (32 + 2 * 16), 32 * 32)
    assert row.kv_cache_bytes_per_token == 3 * 2 * 16 * 2
    assert any("formulas" in note for note in row.notes)
    latent = values | {"kv_lora_rank": 20, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 12}
    row = only(headscope.size(write_config(tmp_path / "latent", model_type="brand_new", **latent)))
    assert row.kv_cache_bytes_per_token == 3 * 26 * 2
    encoder = values | {"use_cache": False}
    assert only(headscope.size(write_config(tmp_path / "e", model_type="brand_new", **encoder))).kv_cache_bytes is None


def test_hybrid_and_windowed_layers_by_configuration_alone(tmp_path: Path) -> None:
    values = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "use_cache": True}
    values |= {"sliding_window": 8, "model_type": "brand_new"}
    values["layer_types"] = ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]
    row = only(headscope.size(write_config(tmp_path / "new", **values), length=100))
    assert [(layer.layer, layer.window) for layer in row.layers] == [(1, 8), (3, None)]
    assert row.kv_cache_bytes == (8 + 100) * 2 * 32 * 4


def test_towers_by_configuration_alone(tmp_path: Path) -> None:
    tower = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    text = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "use_cache": True}
    folder = write_config(tmp_path / "new", model_type="brand_new", text_config=text, vision_config=tower)
    rows = {row.stack: row for row in headscope.size(folder).models}
    assert {name: (row.num_heads, row.num_layers) for name, row in rows.items()} == {"text": (4, 3), "vision": (2, 2)}
    assert rows["vision"].kv_cache_bytes is None and rows["text"].kv_cache_bytes_per_token == 3 * 2 * 32 * 4


def test_the_default_model_and_several() -> None:
    default = only(headscope.size())
    assert (default.num_layers, default.num_heads, default.head_dim) == (6, 12, 32)
    both = headscope.size([BertConfig(), GPT2Config()], hidden_size=8, num_heads=2, num_layers=1)
    assert [row.name for row in both.models] == ["BertConfig", "GPT2Config", "1 × 2 heads, 8 wide"]


def test_a_model_stays_as_it_is(family_model: Callable[[str], Any]) -> None:
    model, _inputs, _family = family_model("llama")
    before = {name: (p.data_ptr(), p.requires_grad, p.grad, p.device) for name, p in model.named_parameters()}
    state, config = torch.random.get_rng_state(), model.config.to_dict()
    headscope.size(model)
    headscope.size(model.config)
    assert {n: (p.data_ptr(), p.requires_grad, p.grad, p.device) for n, p in model.named_parameters()} == before
    assert torch.equal(torch.random.get_rng_state(), state) and model.config.to_dict() == config
    assert not model.training


# ------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hidden_size": 8}, "num_heads, num_layers"),
        ({"name": "x"}, "hidden_size, num_heads, num_layers"),
        ({"hidden_size": 8, "num_heads": 0, "num_layers": 1}, "num_heads is 0"),
        ({"hidden_size": 9, "num_heads": 2, "num_layers": 1}, "cannot be shared out among 2 heads"),
        ({"hidden_size": 8, "num_heads": 4, "num_layers": 1, "num_kv_heads": 3}, "cannot share 3"),
        ({"length": 0}, "length is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"dtype": "int8"}, "'int8' is not a floating-point dtype"),
    ],
)
def test_numbers_that_are_not_right(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        headscope.size(**arguments)


def test_models_that_have_no_size(tmp_path: Path, family_dir: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="has no attention heads"):
        headscope.size(family_dir("mamba"))
    with pytest.raises(ModelError, match="does not say how many"):
        headscope.size(write_config(tmp_path / "silent", model_type="brand_new"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        (tmp_path / "empty").mkdir()
        headscope.size(tmp_path / "empty")
    (tmp_path / "silent" / "config.json").write_text("{")
    with pytest.raises(ModelError):
        headscope.size(tmp_path / "silent")


# ------------------------------------------------------------------ every type of transformers, by sample
# What a configuration of the sample does not tell.
UNTOLD_IN_SAMPLE = {
    "bailing_hybrid": "a gate for each head",
    "conditional_detr": "projections of positions beside those of tokens",
    "qwen3_next": "a gate beside the queries",
    "zamba2": "queries, keys and values are made from two vectors side by side",
}


def test_formulas_agree_with_a_sample_of_all_types() -> None:
    """With the environment variable TINY_MODELS, as for `coverage/run.py`; otherwise there is nothing to compare."""
    folder = os.environ.get("TINY_MODELS")
    if folder is None:
        return
    from subjects import load_library

    tiny = load_library(Path(folder))
    compared = 0
    for model_type in sorted(tiny.iter_model_types())[::13]:
        config = tiny.tiny_config(model_type)
        try:
            compared += assert_formulas_agree(config, UNTOLD_IN_SAMPLE) if config is not None else 0
        except ModelError:  # no attention, or heads that the config does not name
            continue
    assert compared >= 20
