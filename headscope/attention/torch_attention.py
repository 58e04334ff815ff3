"""Attention in torch: the twins of the functions in `reference`, and the fused path that gives no weights.

Same meaning, arguments, shapes and order of operations as in `reference`; any device, float32, float64, bfloat16 or
float16, and autograd. Below float32, the softmax alone is computed in float32, as models do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headscope.attention.shapes import (
    check_attention_shapes,
    check_broadcast,
    check_shape,
)


def attention_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention of all heads; see `reference.attention` for every argument.

    Args:
        query: (…, heads, n_q, d_k).
        key: (…, kv_heads, n_k, d_k).
        value: (…, kv_heads, n_k, d_v).
        scale: Factor on the dot products; None for 1/√d_k.
        mask: Boolean, broadcasts to (…, heads, n_q, n_k); True is blocked.
        bias: Added to the scores, broadcasts to (…, heads, n_q, n_k).
        softcap: cap · tanh(scores / cap) before bias and mask; None for none.
        sinks: (heads,), an extra score a head that takes weight and is dropped; None for none.

    Returns:
        context (…, heads, n_q, d_v) and weights (…, heads, n_q, n_k), in the query's dtype. Queries that see no key get
        zeros in both.

    Raises:
        ValueError: Shapes that do not fit, or a mask that is not boolean.
    """
    check_tensors("attention_torch", {"query": query, "key": key, "value": value})
    check_attention_shapes("attention_torch", query.shape, key.shape, value.shape)
    num_heads = query.shape[-3]
    key = key.repeat_interleave(num_heads // key.shape[-3], dim=-3)  # (…, heads, n_k, d_k)
    value = value.repeat_interleave(num_heads // value.shape[-3], dim=-3)  # (…, heads, n_k, d_v)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale

    logits = query @ key.transpose(-1, -2) * factor  # (…, heads, n_q, n_k)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)  # (…, heads, n_q, n_k)
    if bias is not None:
        check_broadcast("attention_torch", "bias", bias.shape, logits.shape)
        logits = logits + bias  # (…, heads, n_q, n_k)
    if mask is not None:
        _check_mask("attention_torch", mask, logits.shape)
        logits = logits.masked_fill(mask, -math.inf)  # (…, heads, n_q, n_k)
    if sinks is not None:
        check_shape("attention_torch", "sinks", sinks.shape, (num_heads,))
    weights = softmax_torch(logits, sinks).to(query.dtype)  # (…, heads, n_q, n_k)
    return weights @ value, weights  # (…, heads, n_q, d_v) and (…, heads, n_q, n_k)


def softmax_torch(values: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Turn each row of scores into weights; see `reference.softmax`.

    Args:
        values: (…, heads, n_q, n_k); −inf where looking is blocked.
        sinks: (heads,), or None.

    Returns:
        (…, heads, n_q, n_k), float64 for float64 scores, else float32; zeros in rows without a visible key.
    """
    values = values if values.dtype == torch.float64 else values.float()
    sink = None if sinks is None else sinks.to(values.dtype)[:, None, None]  # (heads, 1, 1)
    # The shift cancels in the quotient, so no gradient has to flow through it.
    largest = values.detach().amax(dim=-1, keepdim=True)  # (…, heads, n_q, 1)
    if sink is not None:
        largest = torch.maximum(largest, sink.detach())  # (…, heads, n_q, 1)
    largest = largest.masked_fill(largest == -math.inf, 0.0)  # (…, heads, n_q, 1)
    exponentials = torch.exp(values - largest)  # (…, heads, n_q, n_k)
    total = exponentials.sum(dim=-1, keepdim=True)  # (…, heads, n_q, 1)
    if sink is not None:
        total = total + torch.exp(sink - largest)  # (…, heads, n_q, 1)
    return exponentials / total.masked_fill(total == 0, 1.0)  # (…, heads, n_q, n_k)


def efficient_mha(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention through torch's fused scaled_dot_product_attention, which never builds the weights and returns none.

    Its boolean masks mean the opposite of ours: there True is visible, here True is blocked; the mask is turned around
    here. A bias and a mask together become one float mask with −inf where blocked.

    Args:
        query: (…, heads, n_q, d_k).
        key: (…, kv_heads, n_k, d_k).
        value: (…, kv_heads, n_k, d_v).
        scale: Factor on the dot products; None for 1/√d_k.
        mask: Boolean, broadcasts to (…, heads, n_q, n_k); True is blocked.
        bias: Added to the scores, broadcasts to (…, heads, n_q, n_k).
        softcap: Must be None: the fused kernels have none.
        sinks: Must be None: the fused kernels have none.
        causal: Block keys after the query without building a mask; needs n_q = n_k, and neither mask nor bias.

    Returns:
        context (…, heads, n_q, d_v). Queries that see no key get zeros.

    Raises:
        ValueError: `softcap` or `sinks` given, `causal` with a mask, a bias or n_q ≠ n_k, or shapes that do not fit.
    """
    for name, argument in (("softcap", softcap), ("sinks", sinks)):
        if argument is not None:
            raise ValueError(f"efficient_mha: {name} cannot be fused; use attention_torch")
    check_tensors("efficient_mha", {"query": query, "key": key, "value": value})
    check_attention_shapes("efficient_mha", query.shape, key.shape, value.shape)
    scores_shape = (*query.shape[:-1], key.shape[-2])
    if causal and (mask is not None or bias is not None or query.shape[-2] != key.shape[-2]):
        raise ValueError("efficient_mha: causal needs as many keys as queries, and neither mask nor bias")
    if bias is not None:
        check_broadcast("efficient_mha", "bias", bias.shape, scores_shape)
    if mask is not None:
        _check_mask("efficient_mha", mask, scores_shape)
    fused_mask = _fused_mask(mask, bias, query.dtype)
    context = scaled_dot_product_attention(
        query, key, value, attn_mask=fused_mask, is_causal=causal, scale=scale, enable_gqa=True
    )  # (…, heads, n_q, d_v)
    if mask is None:
        return context
    sees_nothing = mask.expand(*mask.shape[:-1], key.shape[-2]).all(dim=-1, keepdim=True)  # (…, n_q or 1, 1)
    # Kernels have differed in such rows: zeros, NaN, or the mean of all values.
    return context.masked_fill(sees_nothing, 0.0)


def check_tensors(operation: str, tensors: Mapping[str, Any], weights: torch.dtype | None = None) -> None:
    """Check that arguments are tensors of one dtype, that of the weights where there are any.

    Raises:
        TypeError: One is no tensor.
        ValueError: Dtypes differ, where autocast does not make them one.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{operation}: {name} must be a torch tensor, got {type(tensor).__name__}")
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()} | (
        {} if weights is None else {"weights": weights}
    )
    if len(set(dtypes.values())) > 1 and not torch.is_autocast_enabled(next(iter(tensors.values())).device.type):
        raise ValueError(f"{operation}: dtypes differ: {', '.join(f'{name} {kind}' for name, kind in dtypes.items())}")


def _fused_mask(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if bias is None:
        return None if mask is None else ~mask
    return bias.to(dtype) if mask is None else torch.where(mask, -math.inf, bias.to(dtype))


def _check_mask(operation: str, mask: Tensor, scores: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"{operation}: mask must be boolean with True for blocked, got {mask.dtype}; use bias to add")
    check_broadcast(operation, "mask", mask.shape, scores)


def apply_rotary_torch(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn queries or keys; see `rotary.apply_rotary`.

    Args:
        x: (…, heads, n, head_dim).
        cos: (n, m) or (…, n, m) with 2m ≤ head_dim; the same for all heads.
        sin: Like `cos`.
        interleaved: Pairs of neighbours instead of half-split pairs.

    Returns:
        (…, heads, n, head_dim), in the dtype of `x`.
    """
    cos, sin = cos.to(x.dtype)[..., None, :, :], sin.to(x.dtype)[..., None, :, :]  # (…, 1, n, m)
    m = cos.shape[-1]
    first = slice(0, 2 * m, 2) if interleaved else slice(0, m)
    second = slice(1, 2 * m, 2) if interleaved else slice(m, 2 * m)
    turned = x.clone()  # (…, heads, n, head_dim)
    turned[..., first] = x[..., first] * cos - x[..., second] * sin  # (…, heads, n, m)
    turned[..., second] = x[..., second] * cos + x[..., first] * sin  # (…, heads, n, m)
    return turned
