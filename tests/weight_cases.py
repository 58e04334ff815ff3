"""Small models that have the rows of the layout table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from headscope.models.sites import Site
from headscope.models.weights import HeadShape


def ramp(*shape: int) -> torch.Tensor:
    """Values between -1 and 1 that differ from place to place."""
    return torch.arange(math.prod(shape)).float().mul(0.7).sin().view(shape)


TEXT = {"input_ids": torch.arange(10, 22).view(2, 6)}
PICTURE = {"pixel_values": ramp(2, 3, 32, 32)}
BERT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
GPT = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
VIT = {k: v for k, v in BERT.items() if k not in ("vocab_size", "pad_token_id")} | {"image_size": 32, "patch_size": 8}


FOUR_OF_EIGHT = HeadShape(4, 4, 8, 8)


@dataclass(frozen=True)
class Case:
    """A small model that has a layout.

    Attributes:
        layout: The row's name.
        model_class: In transformers.
        config: Keywords of its config.
        inputs: Keywords of its forward.
        shape: Heads and widths of every site of that layout.
        between: What may lie between projections and scores: rotations, factors.
    """

    layout: str
    model_class: str
    config: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    shape: HeadShape = FOUR_OF_EIGHT
    between: tuple[str, ...] = ("same", "turned")


CROSS = TEXT | {"encoder_hidden_states": ramp(2, 5, 32)}
CASES = (
    Case("q_proj/dense", "PhiModel", BERT | {"num_key_value_heads": 2}, TEXT, HeadShape(4, 2, 8, 8)),
    Case("q_proj/Wo", "ModernBertDecoderModel", BERT, TEXT),
    Case(
        "q_proj/projection_layer", "InternVLVisionModel", VIT | {"image_size": [32, 32], "patch_size": [8, 8]}, PICTURE
    ),
    Case(
        "query/output",
        "Pix2StructVisionModel",
        {
            "hidden_size": 32,
            "patch_embed_hidden_size": 26,
            "d_ff": 48,
            "d_kv": 6,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "seq_len": 64,
        },
        {"flattened_patches": (3 + 2 * ramp(2, 6, 28)).floor()},
        HeadShape(4, 4, 6, 6),
    ),
    Case(
        "query/proj",
        "PvtV2Model",
        {
            "hidden_sizes": [32, 32, 32, 32],
            "depths": [1] * 4,
            "num_attention_heads": [4, 4, 4, 4],
            "mlp_ratios": [2] * 4,
            "image_size": 32,
        },
        PICTURE,
    ),
    Case(
        "linear_q",
        "Wav2Vec2BertModel",
        BERT | {"feature_projection_input_dim": 20, "conv_depthwise_kernel_size": 3},
        {"input_features": ramp(2, 7, 20)},
    ),
    # Its queries get a bias for contents and another one for positions.
    Case(
        "q_head",
        "FunnelBaseModel",
        {
            "vocab_size": 60,
            "d_model": 32,
            "n_head": 4,
            "d_head": 6,
            "d_inner": 48,
            "block_sizes": [2],
            "pad_token_id": 0,
        },
        TEXT,
        HeadShape(4, 4, 6, 6),
        ("same", "other"),
    ),
    Case(
        "Wq",
        "CTRLModel",
        {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 32},
        TEXT,
    ),
    Case(
        "project_q",
        "CpmAntModel",
        {
            "vocab_size": 60,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "dim_head": 6,
            "dim_ff": 48,
            "prompt_length": 4,
            "prompt_types": 8,
            "segment_types": 8,
        },
        {"input_ids": torch.arange(10, 22, dtype=torch.int32).view(2, 6)},
        HeadShape(4, 4, 6, 6),
    ),
    Case("q_attn/c_attn", "GPT2Model", GPT | {"add_cross_attention": True}, CROSS),
    Case("c_attn", "GPTBigCodeModel", GPT | {"multi_query": True}, TEXT, HeadShape(4, 1, 8, 8)),
    Case("c_attn", "GPTBigCodeModel", GPT | {"multi_query": False}, TEXT),
    Case("c_attn", "OpenAIGPTModel", GPT, TEXT),
    Case("query_key_value", "FalconModel", BERT | {"multi_query": False}, TEXT),
    Case("query_key_value", "PersimmonModel", BERT | {"qk_layernorm": False}, TEXT),
    Case(
        "qkv/proj",
        "MgpstrModel",
        {
            "image_size": [32, 32],
            "patch_size": 8,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_token_length": 4,
        },
        PICTURE,
    ),
    Case("qkv/projection", "BlipVisionModel", VIT, PICTURE),
    Case("qkv", "TimesformerModel", VIT | {"num_frames": 2}, {"pixel_values": ramp(2, 2, 3, 32, 32)}),
    Case("Wqkv/Wo", "ModernBertModel", BERT, TEXT),
    Case(
        "Wqkv/out_proj",
        "DbrxModel",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "vocab_size": 60,
            "max_seq_len": 32,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1e3},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 32},
        },
        TEXT,
        HeadShape(4, 2, 8, 8),
    ),
    Case(
        "qkv_proj/out_proj",
        "CodeGenModel",
        GPT | {"n_head": 8, "n_embd": 64, "rotary_dim": 4},
        TEXT,
        HeadShape(8, 8, 8, 8),
    ),
    Case(
        "qkv_proj/o_proj",
        "Phi3Model",
        BERT | {"num_key_value_heads": 2, "eos_token_id": 1, "bos_token_id": 2},
        TEXT,
        HeadShape(4, 2, 8, 8),
    ),
    Case(
        "att_proj",
        "BarkSemanticModel",
        {
            "input_vocab_size": 60,
            "output_vocab_size": 60,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "block_size": 32,
        },
        TEXT,
    ),
    Case(
        "in_proj",
        "DebertaModel",
        BERT | {"relative_attention": False, "pos_att_type": []},
        TEXT,
        between=("same", "scaled"),
    ),
)


def build(case: Case) -> transformers.PreTrainedModel:
    kind = getattr(transformers, case.model_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind._from_config(kind.config_class(**case.config), attn_implementation="eager").float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def site_of(module: nn.Module) -> Site:
    return Site("attention", module, "self", 0, 0, False, False, "text", "text")
