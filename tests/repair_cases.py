"""Tiny models, texts and batches for repairs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, PreTrainedModel

from fixtures.families import Family
from headscope.models.batches import Batch, TokenSequence, axis_of, mask_of
from headscope.pruning.masking import mask_heads
from headscope.pruning.prune import prune_heads

VOCABULARY = 64


def llama(
    dtype: torch.dtype = torch.float32, config: type[LlamaConfig | GraniteConfig] = LlamaConfig, **more: Any
) -> Any:
    """Three layers of four heads that look at different tokens, with streams of about size one.

    Args:
        config: Granite's is a Llama whose results are scaled before they are added.
    """
    wanted = config(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=48,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(wanted, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.to(dtype).eval()


def random_texts(count: int, seed: int = 0, low: int = 9, high: int = 24) -> list[list[int]]:
    """Token ids of texts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def batch_of(texts: Mapping[int, Sequence[int]], decoder: Mapping[int, Sequence[int]] | None = None) -> Batch:
    """One batch of texts by their numbers, padded on the right."""
    inputs: dict[str, Tensor] = {}
    axes = {}
    for prefix, axis, given in (("", "text", texts), ("decoder_", "decoder", decoder)):
        if given is not None:
            rows = [TokenSequence(tuple(t), (False,) * len(t), ("",) * len(t), (0,) * len(t)) for t in given.values()]
            axes[axis] = axis_of(rows, 0)
            inputs |= {f"{prefix}input_ids": axes[axis].ids, f"{prefix}attention_mask": mask_of(axes[axis])}
    return Batch(inputs, axes, tuple(texts))


def batches_of(texts: Sequence[Sequence[int]], size: int) -> tuple[Batch, ...]:
    """Batches of `size` texts."""
    numbered = list(enumerate(texts))
    return tuple(batch_of(dict(numbered[i : i + size])) for i in range(0, len(numbered), size))


def family_batches(family: Family, count: int = 40, size: int = 8) -> tuple[Batch, ...]:
    """Batches that fit a family that reads text."""
    texts, answers = random_texts(count), random_texts(count, seed=1)
    numbered = list(range(count))
    return tuple(
        batch_of(
            {n: texts[n] for n in numbered[i : i + size]},
            {n: answers[n] for n in numbered[i : i + size]} if family.modality == "seq2seq" else None,
        )
        for i in range(0, count, size)
    )


def masked(model: PreTrainedModel, heads: Mapping[str, Sequence[int]]) -> PreTrainedModel:
    """A copy with zeroed heads."""
    after = copy.deepcopy(model)
    mask_heads(after, heads)
    return after


def cut_out(model: PreTrainedModel, heads: Mapping[str, Sequence[int]]) -> PreTrainedModel:
    """A copy without heads."""
    after = copy.deepcopy(model)
    prune_heads(after, heads, allow_empty=True, ragged="mask")
    return after
