"""The attention weights inside torch's own attention functions, computed again from what these are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The weights of `scaled_dot_product_attention` by the formula in torch's documentation of it, and its masks.

    Arguments are torch's, of four axes (batch, head, token, dim) or three. Rows that see nothing get no weights.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    masks = [] if attn_mask is None else [attn_mask]
    if is_causal:
        masks.append(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril())
    for mask in masks:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(dim=-1).masked_fill((scores == -torch.inf).all(dim=-1, keepdim=True), 0)
    return weights, tuple(_four_axes(m) for m in masks if m.ndim in (2, 4))


def layer_masks(given: Mapping[str, Any], weights: Tensor) -> Iterator[Tensor]:
    """The masks of `multi_head_attention_forward`, where ones hide, as such of what is open."""
    keys, pairs = given["key_padding_mask"], given["attn_mask"]
    for mask in (keys, pairs):
        if mask is None:
            continue
        opened = ~mask if mask.dtype == torch.bool else mask
        if mask is keys:
            yield opened[:, None, None, :] if mask.ndim == 2 else _four_axes(opened)
        else:
            yield opened.reshape(weights.shape) if mask.ndim == 3 and weights.ndim == 4 else _four_axes(opened)


def _four_axes(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
