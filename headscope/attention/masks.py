"""Who may look at whom. Every mask is a boolean NumPy array (n_q, n_k), True for blocked, the same for all heads.

Query row i stands at position `first_query` + i and key column j at position j: with cached keys the queries are the
last tokens, and `first_query` is the number of tokens before them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def relative_positions(num_queries: int, num_keys: int, first_query: int = 0) -> NDArray[np.int64]:
    """Return key position minus query position, int64 (n_q, n_k): negative looks back, positive looks ahead."""
    query = np.arange(first_query, first_query + num_queries)[:, None]  # (n_q, 1)
    key = np.arange(num_keys)[None, :]  # (1, n_k)
    return key - query  # (n_q, n_k)


def causal_mask(num_queries: int, num_keys: int | None = None, *, first_query: int = 0) -> Mask:
    """Block every key after the query (Vaswani et al. 2017, section 3.2.3).

    Args:
        num_queries: n_q.
        num_keys: n_k; None for n_q.
        first_query: Position of the first query row.

    Returns:
        (n_q, n_k).
    """
    return relative_positions(num_queries, num_queries if num_keys is None else num_keys, first_query) > 0


def sliding_window_mask(num_queries: int, num_keys: int | None = None, *, window: int, first_query: int = 0) -> Mask:
    """Causal mask that also blocks keys `window` or more tokens back: j is visible if 0 ≤ i − j < window.

    The query itself counts as one of the `window` tokens, as in Mistral 7B (arXiv 2310.06825, section 2) and Gemma.

    Args:
        num_queries: n_q.
        num_keys: n_k; None for n_q.
        first_query: Position of the first query row.
        window: Tokens in the window, at least 1.

    Returns:
        (n_q, n_k).
    """
    ahead = relative_positions(num_queries, num_queries if num_keys is None else num_keys, first_query)
    return (ahead > 0) | (ahead <= -window)


def two_sided_window_mask(
    num_queries: int, num_keys: int | None = None, *, distance: int, first_query: int = 0
) -> Mask:
    """Block keys more than `distance` tokens away on either side: j is visible if |i − j| ≤ distance.

    Encoders with local layers use it (ModernBERT, arXiv 2412.13663, section 2.1.2, has 64 tokens a side).

    Args:
        num_queries: n_q.
        num_keys: n_k; None for n_q.
        first_query: Position of the first query row.
        distance: Farthest visible token, 0 for the token itself only.

    Returns:
        (n_q, n_k).
    """
    ahead = relative_positions(num_queries, num_queries if num_keys is None else num_keys, first_query)
    return np.abs(ahead) > distance


def chunked_mask(num_queries: int, num_keys: int | None = None, *, chunk_size: int, first_query: int = 0) -> Mask:
    """Causal mask within chunks of `chunk_size` tokens: nothing of an earlier chunk is visible (Llama 4).

    Args:
        num_queries: n_q.
        num_keys: n_k; None for n_q.
        first_query: Position of the first query row.
        chunk_size: Tokens in a chunk.

    Returns:
        (n_q, n_k).
    """
    query = np.arange(first_query, first_query + num_queries)[:, None]  # (n_q, 1)
    key = np.arange(num_queries if num_keys is None else num_keys)[None, :]  # (1, n_k)
    blocked: Mask = (key > query) | (key // chunk_size != query // chunk_size)  # (n_q, n_k)
    return blocked
