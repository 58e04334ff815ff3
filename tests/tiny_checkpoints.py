"""Tiny models and tokenizers, built from configurations, for tests of loading and of inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    CLIPConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    T5Config,
    ViTConfig,
    WhisperConfig,
)

from headscope.models.quiet import quiet

VOCABULARY = 400
PHRASE = "unbelievable 中文 🙂 don't"
CORPUS = [
    "the cat sat on the mat because it was tired",
    "a dog, a house. un believ able",
    "don't believe it 中文 🙂",
] * 4


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A configuration of two layers and four heads."""
    size = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    pair = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    pair |= {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 40}
    arguments: dict[str, dict[str, Any]] = {
        "bert": size | text,
        "roberta": size | text | {"pad_token_id": 1},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": VOCABULARY},
        "llama": size | text | {"num_key_value_heads": 2},
        "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY},
        "bart": pair | text,
        "whisper": pair
        | {"vocab_size": VOCABULARY, "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 40}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
        "vit": size | {"image_size": 16, "patch_size": 8},
        "clip": {
            "text_config": size | text | {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
            "vision_config": size | {"image_size": 16, "patch_size": 8},
            "projection_dim": 16,
        },
    }
    classes = {"bert": BertConfig, "roberta": RobertaConfig, "gpt2": GPT2Config, "llama": LlamaConfig, "t5": T5Config}
    classes |= {"bart": BartConfig, "whisper": WhisperConfig, "vit": ViTConfig, "clip": CLIPConfig}
    return classes[family](**(arguments[family] | changes))


def tiny_model(family: str, *, generating: bool = False, **changes: Any) -> PreTrainedModel:
    """A tiny model with random weights, in evaluation mode."""
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if generating else AutoModel
    return auto.from_config(tiny_config(family, **changes), attn_implementation="eager").eval()


def save(directory: Path, family: str, tokenizer: Any = None, *, generating: bool = False, **changes: Any) -> Path:
    """A tiny checkpoint; without a `tokenizer` it holds the model only."""
    with quiet():
        tiny_model(family, generating=generating, **changes).save_pretrained(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
    return directory


def wordpiece() -> PreTrainedTokenizerFast:
    """BERT's kind: lower case, `##` pieces, `[CLS]` and `[SEP]`."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##believ", "##able", "##s", *"中文🙂't.,", "don"]
    pieces += sorted({w.strip(".,") for line in CORPUS for w in line.split()} - set(pieces))
    backend = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def byte_bpe() -> PreTrainedTokenizerFast:
    """GPT-2's kind: bytes, `Ġ`, no padding token, no special tokens added."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(CORPUS[:2], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def unigram() -> PreTrainedTokenizerFast:
    """SentencePiece's kind: `▁`, an end token, byte pieces for what the vocabulary does not have."""
    words = sorted({w for line in CORPUS for w in line.split()} - {"🙂"})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(f"▁{w}", -4.0) for w in words] + [("able", -5.0), ("believ", -5.0), ("文", -5.0), ("▁中", -5.0)]
    pieces += [(f"<0x{n:02X}>", -9.0) for n in range(256)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
