"""Relative positions in buckets, with one learned bias a bucket and head (Raffel et al. 2019, T5, arXiv 1910.10683).

Section 2.1 of the paper describes the scheme: near distances have a bucket each, far ones share buckets that widen
logarithmically up to `max_distance`, and everything farther falls in the last.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headscope.attention.masks import relative_positions


def relative_buckets(
    relative: ArrayLike, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> NDArray[np.int64]:
    """Sort relative positions into buckets.

    With m buckets a direction, distances below e = m // 2 have a bucket each, and distance d ≥ e falls in bucket
    e + ⌊(m − e) · ln(d / e) / ln(max_distance / e)⌋, at most m − 1.

    Args:
        relative: Key position minus query position, integers of any shape.
        bidirectional: Encoders: half of the buckets look back, the other half ahead. Decoders (False): all look back,
            and keys ahead count as distance 0.
        num_buckets: All buckets, both directions together.
        max_distance: Distance from which on everything shares the last bucket.

    Returns:
        int64 of the same shape, in [0, num_buckets).
    """
    relative = np.asarray(relative, dtype=np.int64)
    per_direction = num_buckets // 2 if bidirectional else num_buckets
    offset = np.where(relative > 0, per_direction, 0) if bidirectional else np.zeros_like(relative)
    distance = np.abs(relative) if bidirectional else np.maximum(-relative, 0)
    exact = per_direction // 2
    # float32 and this order of operations decide on which side of a bucket's edge a distance falls.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    steps = ratio / np.float32(math.log(max_distance / exact)) * np.float32(per_direction - exact)
    far = np.minimum(exact + steps.astype(np.int64), per_direction - 1)
    buckets: NDArray[np.int64] = offset + np.where(distance < exact, distance, far)
    return buckets


def relative_bias(
    table: ArrayLike,
    num_queries: int,
    num_keys: int | None = None,
    *,
    bidirectional: bool,
    max_distance: int = 128,
    first_query: int = 0,
) -> NDArray[np.float64]:
    """Look the bias up for every pair of tokens.

    Args:
        table: (num_buckets, heads), the learned biases.
        num_queries: n_q.
        num_keys: n_k; None for n_q.
        bidirectional: Keys ahead have buckets of their own, see `relative_buckets`.
        max_distance: Distance from which on everything shares the last bucket.
        first_query: Position of the first query row.

    Returns:
        (heads, n_q, n_k), to be added to the scores.
    """
    table = np.asarray(table, dtype=np.float64)  # (num_buckets, heads)
    relative = relative_positions(num_queries, num_queries if num_keys is None else num_keys, first_query)  # (n_q, n_k)
    buckets = relative_buckets(
        relative, bidirectional=bidirectional, num_buckets=table.shape[0], max_distance=max_distance
    )  # (n_q, n_k)
    return np.moveaxis(table[buckets], -1, 0)  # (n_q, n_k, heads) → (heads, n_q, n_k)
