"""One head's computation as a list of small steps, for teaching: what is computed, from what, in which shape.

The steps repeat `reference.attention` for a single head, so their numbers are the real ones, only cut to a corner that
fits on a screen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headscope.attention import reference

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """One step of a head's computation.

    Attributes:
        name: What the step makes: "scores", "weights".
        formula: How, in one line.
        shape: Shape of the whole result.
        axes: Names of its axes.
        values: float64, the result's corner: its first rows and columns.
    """

    name: str
    formula: str
    shape: tuple[int, int]
    axes: tuple[str, str]
    values: Array


def make_step(
    name: str, formula: str, array: ArrayLike, axes: tuple[str, str], *, rows: int = 4, columns: int = 4
) -> Step:
    """Describe a matrix as a step, keeping its first rows and columns.

    Args:
        name: What the step makes.
        formula: How, in one line.
        array: (n, m), the whole result.
        axes: Names of the two axes.
        rows: Rows to keep.
        columns: Columns to keep.

    Raises:
        ValueError: `array` has not two axes.
    """
    array = np.asarray(array, dtype=np.float64)
    if array.ndim != 2:
        raise ValueError(f"make_step: {name} must have two axes, got shape {array.shape}")
    return Step(name, formula, (array.shape[0], array.shape[1]), axes, array[:rows, :columns].copy())


def explain(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    scale: float | None = None,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    sink: float | None = None,
    output_weight: ArrayLike | None = None,
    rows: int = 4,
    columns: int = 4,
) -> tuple[Step, ...]:
    """List the steps from one head's queries, keys and values to its context, and to its part of the output.

    Steps before the query (projection, norms, rotation) are the caller's: see `make_step`.

    Args:
        query: (n_q, d_k), as it enters the scores.
        key: (n_k, d_k).
        value: (n_k, d_v).
        scale: Factor on the dot products; None for 1/√d_k.
        mask: Boolean, broadcasts to (n_q, n_k); True is blocked. None for none.
        bias: Added to the scores, broadcasts to (n_q, n_k); None for none.
        softcap: See `reference.soft_cap`; None for none.
        sink: The head's extra score, see `reference.softmax`; None for none.
        output_weight: (d_v, d_model), the head's rows of the output matrix, to show what it adds to the layer's output.
        rows: Rows of every matrix to keep.
        columns: Columns of every matrix to keep.

    Returns:
        Steps in order: query, key, value, scores, then capped scores, bias, biased scores and masked scores where
        there are such, weights, context, and output with `output_weight`.

    Raises:
        ValueError: Shapes that do not fit.
    """
    query, key, value = (np.asarray(x, dtype=np.float64)[None] for x in (query, key, value))  # (1, n, d) each
    sinks = None if sink is None else [sink]
    context, weights = reference.attention(
        query, key, value, scale=scale, mask=mask, bias=bias, softcap=softcap, sinks=sinks
    )  # (1, n_q, d_v) and (1, n_q, n_k)

    found = [
        ("query", "Q: one row for each token that looks", query[0], ("n_q", "d_k")),
        ("key", "K: one row for each token that is looked at", key[0], ("n_k", "d_k")),
        ("value", "V: what each of those tokens has to give", value[0], ("n_k", "d_v")),
        *_score_steps(query, key, scale, mask, bias, softcap),
        ("weights", _softmax_formula(sink), weights[0], ("n_q", "n_k")),
        ("context", "C = W · V", context[0], ("n_q", "d_v")),
    ]
    if output_weight is not None:
        part = reference.project(context[0], output_weight)  # (n_q, d_v) · (d_v, d_model) → (n_q, d_model)
        found.append(("output", "C · W_o: what this head adds to the layer's output", part, ("n_q", "d_model")))
    return tuple(make_step(*step, rows=rows, columns=columns) for step in found)


def _score_steps(
    query: Array,
    key: Array,
    scale: float | None,
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    softcap: float | None,
) -> list[tuple[str, str, Array, tuple[str, str]]]:
    """Repeat `reference.attention` up to the softmax; query (1, n_q, d_k) and key (1, n_k, d_k)."""
    width = query.shape[-1]
    logits = reference.scores(query, key, scale)[0]  # (n_q, n_k)
    factor = f" / √{width}" if scale is None else "" if scale == 1 else f" · {scale:.4g}"
    steps = [("scores", f"S = Q · Kᵀ{factor}", logits)]
    if softcap is not None:
        logits = reference.soft_cap(logits, softcap)  # (n_q, n_k)
        steps.append(("capped scores", f"S = {softcap:g} · tanh(S / {softcap:g})", logits))
    if bias is not None:
        added = np.broadcast_to(np.asarray(bias, dtype=np.float64), logits.shape)  # (n_q, n_k)
        logits = logits + added  # (n_q, n_k)
        steps += [("bias", "B: what the distance between the tokens adds", added), ("biased scores", "S + B", logits)]
    if mask is not None:
        logits = np.where(mask, -np.inf, logits)  # (n_q, n_k)
        steps.append(("masked scores", "S, with −∞ where the mask blocks", logits))
    return [(name, formula, array, ("n_q", "n_k")) for name, formula, array in steps]


def _softmax_formula(sink: float | None) -> str:
    if sink is None:
        return "W = softmax(S): in each row, exp(s) over the sum of exp(s)"
    return f"W = softmax(S): in each row, exp(s) over the sum of exp(s) and exp({sink:.4g}), the sink"
