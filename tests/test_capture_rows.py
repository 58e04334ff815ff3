"""Rows that are not tokens: pooled keys, latents, picked queries, padding that no mask of tokens tells."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    Florence2VisionConfig,
    InformerConfig,
    InformerModel,
    PerceiverConfig,
    PerceiverModel,
    Phi4MultimodalAudioConfig,
    SegformerConfig,
    SegformerModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)
from transformers.models.florence2.modeling_florence2 import Florence2VisionBackbone
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalAudioModel

import headscope
from headscope.errors import ModelError

POSITIONAL = ("prev_token", "self_attend", "next_token", "mean_distance")
METRICS = ",".join(("sink", "entropy", "max_weight", *POSITIONAL))


def measured(head):
    return {name for name, value in head.metrics.items() if value is not None}


def test_pooled_keys_are_not_the_rows_own_patches():
    """The first layer's 64 patches read 16 pools: sink and entropy are there, a previous patch is not."""
    torch.manual_seed(0)
    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 8], patch_sizes=[3, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[1, 1], initializer_range=1.0, attn_implementation="eager",
    )  # fmt: skip
    model, inputs = SegformerModel(config).eval(), {"pixel_values": torch.randn(2, 3, 32, 32)}
    result = headscope.analyze(model, inputs=inputs, metrics=METRICS)
    with torch.no_grad():
        found = [w.double().numpy() for w in model(**inputs, output_attentions=True).attentions]
    assert [w.shape[2:] for w in found] == [(64, 16), (16, 16)]
    for head in result.heads:
        assert measured(head).isdisjoint(POSITIONAL) == (head.layer == 0)
        weights = found[head.layer][:, head.head]
        assert head.metrics["sink"] == pytest.approx(weights[..., 0].mean(), abs=1e-5)
        assert head.metrics["max_weight"] == pytest.approx(weights.max(-1).mean(), abs=1e-5)
        assert head.metrics["entropy"] == pytest.approx(-(weights * np.log(weights + 1e-9)).sum(-1).mean(), abs=1e-5)


@pytest.mark.parametrize("tokens", [5, 6, 7])
def test_latents_that_read_tokens_are_cross_attention(tokens):
    """Whether or not there are as many of them."""
    torch.manual_seed(0)
    config = PerceiverConfig(
        num_latents=6, d_latents=8, d_model=8, num_blocks=1, num_self_attends_per_block=1, num_self_attention_heads=2,
        num_cross_attention_heads=2,
    )  # fmt: skip
    result = headscope.analyze(PerceiverModel(config), inputs={"inputs": torch.randn(1, tokens, 8)}, metrics=METRICS)
    for head in result.heads:
        assert head.stack in ("cross", "self")
        assert measured(head).isdisjoint(POSITIONAL) == (head.stack == "cross")


def test_queries_that_were_picked_are_left_out():
    torch.manual_seed(0)
    config = InformerConfig(
        prediction_length=4, context_length=8, input_size=1, lags_sequence=[1], d_model=16, num_time_features=1,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )  # fmt: skip
    past, future = {"past_values": torch.randn(1, 9)}, {"future_values": torch.randn(1, 4)}
    times = {"past_time_features": torch.randn(1, 9, 1), "future_time_features": torch.randn(1, 4, 1)}
    inputs = past | future | times | {"past_observed_mask": torch.ones(1, 9)}
    model = InformerModel(config)
    result = headscope.analyze(model, inputs=inputs)
    assert {h.stack for h in result.heads} == {"cross"}
    assert [line.split(":")[0] for line in result.warnings] == ["encoder", "decoder"]
    with pytest.raises(ModelError, match="from tokens that it picks, in no order"):
        headscope.analyze(model, inputs=inputs, stack="encoder")


def test_attention_between_channels_is_left_out():
    torch.manual_seed(0)
    config = Florence2VisionConfig(
        depths=(1,), embed_dim=(8,), num_heads=(2,), num_groups=(2,), patch_size=(3,), patch_stride=(4,),
        patch_padding=(1,), patch_prenorm=(False,), window_size=8,
    )  # fmt: skip
    result = headscope.analyze(Florence2VisionBackbone(config), inputs={"hidden_states": torch.randn(1, 3, 32, 32)})
    assert {h.stack.split(".")[-1] for h in result.heads} == {"window_attn"}
    (warning,) = result.warnings
    assert "channel_attn (Florence2VisionChannelAttention) attends between channels" in warning


def test_only_texts_must_not_look_ahead():
    """An audio encoder whose modules call themselves causal, and whose mask is not."""
    torch.manual_seed(0)
    config = Phi4MultimodalAudioConfig(
        hidden_size=16, intermediate_size=16, num_blocks=1, num_attention_heads=2, ext_pw_out_channel=16,
        depthwise_separable_out_channel=16, nemo_conv_channels=16, input_size=16,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(1, 64, 16), "mask": torch.ones(1, 64, dtype=torch.bool)}
    assert headscope.analyze(Phi4MultimodalAudioModel(config), inputs=inputs).warnings == ()


def test_padded_sounds_say_that_their_padding_counts():
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=[8], conv_kernel=[4],
        conv_stride=[4], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, do_stable_layer_norm=True,
        feat_extract_norm="layer",
    )  # fmt: skip
    inputs = {"input_values": torch.randn(2, 40), "attention_mask": torch.ones(2, 40, dtype=torch.int64)}
    model = Wav2Vec2Model(config)
    assert headscope.analyze(model, inputs=inputs).warnings == ()
    inputs["attention_mask"][1, 20:] = 0
    (warning,) = headscope.analyze(model, inputs=inputs).warnings
    assert "rows of padding count" in warning and "one example at a time" in warning
