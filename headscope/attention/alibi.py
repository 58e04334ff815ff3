"""Attention with linear biases: positions as a penalty on distance (Press et al. 2021, ALiBi, arXiv 2108.12409)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> NDArray[np.float64]:
    """Return every head's slope.

    For n heads with n a power of two, head h (from 0) has 2^(−max_bias · (h + 1) / n): section 3 of the paper. For any
    other count, the slopes of the power of two p below it, then every second slope of 2p heads, starting with its
    first (the authors' released code).

    Args:
        num_heads: At least 1.
        max_bias: Negative exponent of the last slope; 8 in the paper.

    Returns:
        (heads,), all positive.

    Raises:
        ValueError: `num_heads` is below 1.
    """
    if num_heads < 1:
        raise ValueError(f"alibi_slopes: num_heads must be at least 1, got {num_heads}")
    power = 1 << (num_heads.bit_length() - 1)  # the largest power of two not above num_heads
    exponents = np.arange(1, power + 1) / power  # (power,)
    between = np.arange(1, 2 * power, 2) / (2 * power)  # (power,)
    return 2.0 ** (-max_bias * np.concatenate([exponents, between])[:num_heads])  # (heads,)


def alibi_key_bias(slopes: ArrayLike, key_positions: ArrayLike) -> NDArray[np.float64]:
    """Return slope · key position, the same for all queries: the form of BLOOM, Falcon and MPT.

    Under a causal mask it differs from −slope · (i − j) by slope · i, a constant in each row, which softmax cancels;
    so positions may be counted from anywhere (MPT counts from −(n − 1) up to 0). Without a causal mask it is another
    formula.

    Args:
        slopes: (heads,).
        key_positions: (n_k,) or (batch, n_k).

    Returns:
        (heads, 1, n_k) or (batch, heads, 1, n_k).
    """
    positions = np.asarray(key_positions, dtype=np.float64)[..., None, None, :]  # ([batch,] 1, 1, n_k)
    return np.asarray(slopes, dtype=np.float64)[:, None, None] * positions  # ([batch,] heads, 1, n_k)


def round_to_bfloat16(values: ArrayLike) -> NDArray[np.float64]:
    """Round finite numbers to the nearest bfloat16, ties to even, and return them as float64.

    Falcon rounds slopes, positions and their product this way, and scales the bias with the scores:
    bias = round(round(slope) · round(position)) / √head_dim.
    """
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    last_kept = (bits >> 16) & 1
    rounded = (bits + 0x7FFF + last_kept) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)
