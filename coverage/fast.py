"""The types that are looked at on every run: every layout, kind of input, mask and exception at least once."""

from __future__ import annotations

TYPES = (
    # Encoders; XLNet has its axes in another order, Albert shares one module, Funnel pools, the rest bias scores.
    *("bert", "albert", "modernbert", "xlnet", "funnel", "deberta", "deberta-v2", "convbert", "esm", "roformer"),
    # Decoders: each arrangement of fused projections, rotary and ALiBi positions, windows.
    *("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "gpt_neox", "codegen", "openai-gpt", "bloom", "mpt", "falcon", "opt"),
    *("llama", "llama4_text", "gemma3_text"),
    # Soft-capped scores, sinks, latent projections, sparse indexers, layers without attention.
    *("gemma2", "gpt_oss", "granite_swa", "mimo_v2_flash", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
    *("qwen3_next", "jamba"),
    # Encoder-decoders.
    *("t5", "bart", "fsmt", "longt5", "t5gemma2", "whisper", "speecht5"),
    # Images: plain, with registers, in windows, in stages, around a convolution.
    *("vit", "dinov2_with_registers", "beit", "swin", "segformer", "detr", "sam", "qwen2_vl_vision"),
    # Images and text.
    *("clip", "flava", "blip-2", "llava", "idefics", "paligemma", "mllama", "qwen2_vl"),
    # Sounds and series.
    *("wav2vec2", "audio-spectrogram-transformer", "qwen2_5_omni_audio_encoder", "time_series_transformer"),
    # Read at the softmax inside.
    *("wavlm", "squeezebert"),
    # Refused, each for another reason, and one without attention.
    *("longformer", "diffllama", "nemotron_asr_streaming", "big_bird", "timesformer", "mamba"),
)
