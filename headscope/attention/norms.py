"""Normalisations that some models put on queries and keys, over the last axis; in NumPy, float64.

Whether a model normalises one head's vector or the whole projection is a matter of what is passed: split heads
(…, heads, n, head_dim) for the first, (…, n, heads · head_dim) for the second. A weight of each head's own is
(heads, 1, head_dim).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def rms_norm(
    x: ArrayLike, weight: ArrayLike | None = None, *, eps: float = 1e-6, weight_offset: float = 0.0
) -> NDArray[np.float64]:
    """Divide by the root mean square (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4).

    Args:
        x: (…, width).
        weight: Broadcasts to x; None for no weight.
        eps: Added to the mean square.
        weight_offset: Added to the weight; 1 in models that store weight − 1 (Gemma).

    Returns:
        (…, width).
    """
    x = np.asarray(x, dtype=np.float64)
    y: NDArray[np.float64] = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    return y if weight is None else y * (np.asarray(weight, dtype=np.float64) + weight_offset)


def layer_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, *, eps: float = 1e-5
) -> NDArray[np.float64]:
    """Subtract the mean and divide by the standard deviation (Ba et al. 2016, arXiv 1607.06450, section 3).

    Args:
        x: (…, width).
        weight: Broadcasts to x; None for none.
        bias: Broadcasts to x; None for none.
        eps: Added to the variance.

    Returns:
        (…, width).
    """
    x = np.asarray(x, dtype=np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    y: NDArray[np.float64] = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    y = y if weight is None else y * np.asarray(weight, dtype=np.float64)
    return y if bias is None else y + np.asarray(bias, dtype=np.float64)
