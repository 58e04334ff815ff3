"""Multi-head attention in NumPy, float64, written to be read from top to bottom.

One layer of attention does this with a text of n tokens, each a vector of d_model numbers:

1. project:  three matrices turn every token vector into a query, a key and a value;
2. split:    each of the three is cut into `heads` narrow vectors, so that every head works on its own;
3. scores:   a head compares each query with each key: score[i, j] = q_i · k_j / √d_k;
4. softmax:  each row of scores becomes weights that sum to 1: how much token i takes from token j;
5. context:  token i receives the weighted mean of the values: context_i = Σ_j weight[i, j] · v_j;
6. merge:    the heads' contexts are laid side by side, and an output matrix mixes them into d_model numbers.

Source: Vaswani et al. 2017, "Attention Is All You Need" (arXiv 1706.03762), sections 3.2.1 and 3.2.2.

Shapes are written on every line. "…" stands for any batch axes, also none; n_q queries look at n_k keys.
A boolean mask says True where looking is blocked.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headscope.attention.shapes import (
    check_attention_shapes,
    check_batch,
    check_broadcast,
    check_head_groups,
    check_shape,
    check_sizes,
    check_width,
    mask_position_for_heads,
)

Array = NDArray[np.float64]


def project(x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None) -> Array:
    """Map every token vector: x · weight + bias.

    Args:
        x: (…, n, d_in).
        weight: (d_in, d_out), the orientation of the textbook; torch's Linear stores the transpose.
        bias: (d_out,), or None for none.

    Returns:
        (…, n, d_out).
    """
    y = _float64(x) @ _float64(weight)  # (…, n, d_in) · (d_in, d_out) → (…, n, d_out)
    return y if bias is None else y + _float64(bias)  # (…, n, d_out) + (d_out,)


def split_heads(x: ArrayLike, num_heads: int) -> Array:
    """Cut each token vector into `num_heads` equal pieces and give every head its own matrix.

    Args:
        x: (…, n, heads · width); head 0 has the first `width` columns.
        num_heads: How many pieces.

    Returns:
        (…, heads, n, width).

    Raises:
        ValueError: The last axis is not a multiple of `num_heads`.
    """
    x = _float64(x)
    check_sizes("split_heads", {"num_heads": num_heads})
    if x.shape[-1] % num_heads:
        raise ValueError(f"split_heads: width {x.shape[-1]} is not a multiple of {num_heads} heads")
    width = x.shape[-1] // num_heads
    pieces = x.reshape(*x.shape[:-1], num_heads, width)  # (…, n, heads, width)
    return pieces.swapaxes(-3, -2)  # (…, heads, n, width)


def merge_heads(context: ArrayLike) -> Array:
    """Lay the heads' vectors side by side again; the inverse of `split_heads`.

    Args:
        context: (…, heads, n, width).

    Returns:
        (…, n, heads · width).
    """
    side_by_side = _float64(context).swapaxes(-3, -2)  # (…, n, heads, width)
    return side_by_side.reshape(*side_by_side.shape[:-2], -1)  # (…, n, heads · width)


def repeat_heads(x: ArrayLike, num_heads: int) -> Array:
    """Give each of `num_heads` query heads its key or value head: query head h uses head h // group.

    Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245); with one head, multi-query attention
    (Shazeer 2019, arXiv 1911.02150); with as many heads as queries have, nothing changes.

    Args:
        x: (…, kv_heads, n, width).
        num_heads: Query heads.

    Returns:
        (…, heads, n, width).

    Raises:
        ValueError: `num_heads` is not a multiple of kv_heads.
    """
    x = _float64(x)
    check_head_groups("repeat_heads", num_heads, x.shape[-3])
    return np.repeat(x, num_heads // x.shape[-3], axis=-3)  # (…, heads, n, width)


def scores(query: ArrayLike, key: ArrayLike, scale: float | None = None) -> Array:
    """Compare each query with each key: (q_i · k_j) · scale.

    Args:
        query: (…, heads, n_q, d_k).
        key: (…, heads, n_k, d_k).
        scale: Factor on the dot products; None for 1/√d_k.

    Returns:
        (…, heads, n_q, n_k).
    """
    query, key = _float64(query), _float64(key)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return query @ key.swapaxes(-1, -2) * factor  # (…, heads, n_q, d_k) · (…, heads, d_k, n_k) → (…, heads, n_q, n_k)


def soft_cap(values: ArrayLike, cap: float) -> Array:
    """Squeeze scores smoothly into (−cap, cap): cap · tanh(scores / cap) (Gemma 2, arXiv 2408.00118, section 2)."""
    return cap * np.tanh(_float64(values) / cap)  # same shape


def softmax(values: ArrayLike, sinks: ArrayLike | None = None) -> Array:
    """Turn each row of scores into weights: exp(s_j) / Σ exp(s).

    Args:
        values: (…, heads, n_q, n_k); −inf where looking is blocked.
        sinks: (heads,), a learned extra score a head, or None. It takes part in every row's softmax and is then
            dropped, so that the row sums to less than 1 (gpt-oss; "StreamingLLM", arXiv 2309.17453, section 3.3).

    Returns:
        (…, heads, n_q, n_k). A row without a single visible key is all zeros, where the formula would give 0/0.
    """
    values = _float64(values)
    sink = None if sinks is None else _float64(sinks)[:, None, None]  # (heads, 1, 1)
    largest = values.max(axis=-1, keepdims=True, initial=-np.inf)  # (…, heads, n_q, 1)
    if sink is not None:
        largest = np.maximum(largest, sink)  # (…, heads, n_q, 1)
    # Taking the largest score away changes nothing in the quotient, and exp cannot overflow any more.
    largest = np.where(np.isneginf(largest), 0.0, largest)  # (…, heads, n_q, 1)
    exponentials = np.exp(values - largest)  # (…, heads, n_q, n_k)
    total = exponentials.sum(axis=-1, keepdims=True)  # (…, heads, n_q, 1)
    if sink is not None:
        total = total + np.exp(sink - largest)  # (…, heads, n_q, 1)
    return exponentials / np.where(total == 0, 1.0, total)  # (…, heads, n_q, n_k)


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    scale: float | None = None,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Scaled dot-product attention of all heads: softmax(query · keyᵀ · scale + bias) · value.

    In this order: scale, soft cap, bias, mask, softmax with sinks.

    Args:
        query: (…, heads, n_q, d_k).
        key: (…, kv_heads, n_k, d_k); heads must be a multiple of kv_heads, see `repeat_heads`.
        value: (…, kv_heads, n_k, d_v).
        scale: Factor on the dot products; None for 1/√d_k.
        mask: Boolean, broadcasts to (…, heads, n_q, n_k); True is blocked.
        bias: Added to the scores, broadcasts to (…, heads, n_q, n_k): ALiBi, relative positions.
        softcap: See `soft_cap`; None for none.
        sinks: (heads,), see `softmax`; None for none.

    Returns:
        context (…, heads, n_q, d_v) and weights (…, heads, n_q, n_k). Queries that see no key get zeros in both.

    Raises:
        ValueError: Shapes that do not fit, or a mask that is not boolean.
    """
    query, key, value = _float64(query), _float64(key), _float64(value)
    check_attention_shapes("attention", query.shape, key.shape, value.shape)
    num_heads = query.shape[-3]
    key = repeat_heads(key, num_heads)  # (…, heads, n_k, d_k)
    value = repeat_heads(value, num_heads)  # (…, heads, n_k, d_v)

    logits = scores(query, key, scale)  # (…, heads, n_q, n_k)
    if softcap is not None:
        logits = soft_cap(logits, softcap)  # (…, heads, n_q, n_k)
    if bias is not None:
        bias = _float64(bias)
        check_broadcast("attention", "bias", bias.shape, logits.shape)
        logits = logits + bias  # (…, heads, n_q, n_k)
    if mask is not None:
        mask = _boolean(mask)
        check_broadcast("attention", "mask", mask.shape, logits.shape)
        logits = np.where(mask, -np.inf, logits)  # (…, heads, n_q, n_k)
    if sinks is not None:
        check_shape("attention", "sinks", np.shape(sinks), (num_heads,))
    weights = softmax(logits, sinks)  # (…, heads, n_q, n_k)
    context = weights @ value  # (…, heads, n_q, n_k) · (…, heads, n_k, d_v) → (…, heads, n_q, d_v)
    return context, weights


def output_projection(context: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None) -> Array:
    """Merge the heads and mix them.

    Args:
        context: (…, heads, n_q, d_v).
        weight: (heads · d_v, d_model).
        bias: (d_model,), or None.

    Returns:
        (…, n_q, d_model).
    """
    return project(merge_heads(context), weight, bias)  # (…, n_q, heads · d_v) · (heads · d_v, d_model)


class MultiHeadAttention:
    """One layer of multi-head attention with its weights.

    The weights are plain attributes and may be replaced: `W_q` (d_model, heads · head_dim), `W_k` (context_dim,
    kv_heads · head_dim), `W_v` (context_dim, kv_heads · value_dim), `W_o` (heads · value_dim, d_model), and, with
    `bias=True`, `b_q`, `b_k`, `b_v`, `b_o` (None without). So may `scale`, `softcap` and `sinks` (see `attention`).

    Args:
        d_model: Width of the token vectors, in and out.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; None for one a query head.
        head_dim: Width of one query and key; None for d_model / num_heads.
        value_dim: Width of one value; None for head_dim.
        context_dim: Width of the vectors that keys and values are made of; None for d_model.
        bias: Whether the projections add a bias (zero at first).
        scale: Factor on the dot products; None for 1/√head_dim.
        softcap: See `soft_cap`; None for none.
        sinks: (heads,), see `softmax`; None for none.
        seed: Of the random weights, normal with variance 1/d_in.

    Raises:
        TypeError: A size is no whole number.
        ValueError: d_model is not a multiple of num_heads and no head_dim is given, num_kv_heads does not divide
            num_heads, or a size is less than 1.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        *,
        context_dim: int | None = None,
        bias: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: ArrayLike | None = None,
        seed: int = 0,
    ) -> None:
        sizes = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        sizes |= {"head_dim": head_dim, "value_dim": value_dim, "context_dim": context_dim}
        check_sizes("MultiHeadAttention", sizes)
        if head_dim is None and d_model % num_heads:
            raise ValueError(f"MultiHeadAttention: d_model {d_model} is not a multiple of {num_heads} heads")
        self.d_model = d_model
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        self.context_dim = d_model if context_dim is None else context_dim
        self.scale, self.softcap = scale, softcap
        self.sinks = None if sinks is None else _float64(sinks)  # (heads,)
        check_head_groups("MultiHeadAttention", self.num_heads, self.num_kv_heads)

        rng = np.random.default_rng(seed)
        shapes = self.weight_shapes()
        self.W_q, self.W_k, self.W_v, self.W_o = (rng.normal(0, shape[0] ** -0.5, shape) for shape in shapes)
        self.b_q, self.b_k, self.b_v, self.b_o = (np.zeros(shape[1]) if bias else None for shape in shapes)

    def weight_shapes(self) -> tuple[tuple[int, int], ...]:
        """Return the shapes of W_q, W_k, W_v and W_o."""
        return (
            (self.d_model, self.num_heads * self.head_dim),
            (self.context_dim, self.num_kv_heads * self.head_dim),
            (self.context_dim, self.num_kv_heads * self.value_dim),
            (self.num_heads * self.value_dim, self.d_model),
        )

    def forward(
        self,
        x: ArrayLike,
        mask: ArrayLike | None = None,
        *,
        context: ArrayLike | None = None,
        bias: ArrayLike | None = None,
    ) -> tuple[Array, Array]:
        """Compute the layer.

        Args:
            x: (…, n_q, d_model).
            mask: Boolean, True is blocked: (n_q, n_k), (…, n_q, n_k) or (…, heads, n_q, n_k).
            context: (…, n_k, context_dim), what is looked at in cross-attention; None for x itself.
            bias: Added to the scores, broadcasts to (…, heads, n_q, n_k).

        Returns:
            output (…, n_q, d_model) and weights (…, heads, n_q, n_k).

        Raises:
            ValueError: Shapes that do not fit.
        """
        x = _float64(x)
        context = x if context is None else _float64(context)
        self._check(x, context)
        if mask is not None:
            mask = _boolean(mask)
            if mask_position_for_heads("MultiHeadAttention", mask.ndim, x.ndim):
                mask = mask[..., None, :, :]  # (…, 1, n_q, n_k)

        query = split_heads(project(x, self.W_q, self.b_q), self.num_heads)  # (…, heads, n_q, head_dim)
        key = split_heads(project(context, self.W_k, self.b_k), self.num_kv_heads)  # (…, kv_heads, n_k, head_dim)
        value = split_heads(project(context, self.W_v, self.b_v), self.num_kv_heads)  # (…, kv_heads, n_k, value_dim)
        mixed, weights = attention(
            query, key, value, scale=self.scale, mask=mask, bias=bias, softcap=self.softcap, sinks=self.sinks
        )  # (…, heads, n_q, value_dim) and (…, heads, n_q, n_k)
        return output_projection(mixed, self.W_o, self.b_o), weights  # (…, n_q, d_model) and (…, heads, n_q, n_k)

    __call__ = forward

    def _check(self, x: Array, context: Array) -> None:
        for name, shape in zip(("W_q", "W_k", "W_v", "W_o"), self.weight_shapes(), strict=True):
            check_shape("MultiHeadAttention", name, np.shape(getattr(self, name)), shape)
        check_width("MultiHeadAttention", "x", x.shape, self.d_model)
        check_width("MultiHeadAttention", "context", context.shape, self.context_dim)
        check_batch("MultiHeadAttention", {"x": x.shape[:-2], "context": context.shape[:-2]})


def _float64(x: ArrayLike) -> Array:
    return np.asarray(x, dtype=np.float64)


def _boolean(mask: ArrayLike) -> NDArray[np.bool_]:
    mask = np.asarray(mask)
    if mask.dtype != np.bool_:
        raise ValueError(f"mask must be boolean with True for blocked, got {mask.dtype}; use bias to add to scores")
    return mask
