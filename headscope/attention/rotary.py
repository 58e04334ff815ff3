"""Rotary positions: queries and keys are turned by an angle that grows with their position.

Su et al. 2021, RoFormer (arXiv 2104.09864), section 3.2: the dimensions of a head form pairs; pair t of the token at
position p is turned by the angle p · inv_freq[t]. A dot product of two turned vectors depends on the positions only
through their difference. `frequencies` has the frequencies; here they are applied.

Two layouts of the pairs are in use. Half-split (GPT-NeoX, Llama): pair t is the dimensions t and t + m, with m pairs.
Interleaved (RoFormer, GPT-J, Cohere): pair t is the dimensions 2t and 2t + 1. Dimensions from 2m on stay as they are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headscope.attention.shapes import check_broadcast


def rotary_cos_sin(
    positions: ArrayLike, inv_freq: NDArray[np.floating], attention_factor: float = 1.0
) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Return the cosines and sines of all angles.

    Args:
        positions: (n,) or (batch, n), token positions from 0.
        inv_freq: (m,), radians a token. Its dtype is the dtype of the computation: models compute float32 angles,
            which at position p are off by up to p · 6e-8, so give float32 to follow one at high positions.
        attention_factor: Multiplies both; 1 except for yarn and longrope.

    Returns:
        cos and sin, each (n, m) or (batch, n, m), in the dtype of `inv_freq`.
    """
    factor = inv_freq.dtype.type(attention_factor)
    angles = np.asarray(positions).astype(inv_freq.dtype)[..., None] * inv_freq  # ([batch,] n, m)
    return np.cos(angles) * factor, np.sin(angles) * factor


def apply_rotary(x: ArrayLike, cos: ArrayLike, sin: ArrayLike, *, interleaved: bool = False) -> NDArray[np.float64]:
    """Turn queries or keys.

    Args:
        x: (…, heads, n, head_dim).
        cos: (n, m) or (…, n, m) with 2m ≤ head_dim, from `rotary_cos_sin`; the same for all heads.
        sin: Like `cos`.
        interleaved: Pairs of neighbours instead of half-split pairs.

    Returns:
        float64 (…, heads, n, head_dim).

    Raises:
        ValueError: `cos` does not fit `x`.
    """
    x = np.asarray(x, dtype=np.float64)
    cos = np.asarray(cos, dtype=np.float64)[..., None, :, :]  # (…, 1, n, m)
    sin = np.asarray(sin, dtype=np.float64)[..., None, :, :]  # (…, 1, n, m)
    m = cos.shape[-1]
    if 2 * m > x.shape[-1]:
        raise ValueError(f"apply_rotary: {m} pairs do not fit in a head of {x.shape[-1]} dimensions")
    check_broadcast("apply_rotary", "cos", cos.shape, (*x.shape[:-1], m))
    first = slice(0, 2 * m, 2) if interleaved else slice(0, m)
    second = slice(1, 2 * m, 2) if interleaved else slice(m, 2 * m)
    turned = x.copy()  # (…, heads, n, head_dim)
    turned[..., first] = x[..., first] * cos - x[..., second] * sin  # (…, heads, n, m)
    turned[..., second] = x[..., second] * cos + x[..., first] * sin  # (…, heads, n, m)
    return turned
