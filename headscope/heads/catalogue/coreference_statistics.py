"""Whether a head answers better than something trivial, judged by resampling documents.

Mentions of a document are alike, so documents are drawn, with replacement, and head and baseline are compared on the
same mentions of them (paired bootstrap; Efron and Tibshirani, 1993, "An Introduction to the Bootstrap", chapter 8).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headscope.heads.clusters import ClusterSums, Floats

DRAWS = 2000


def corrected(value: Floats, expected: Floats, rows: Floats, seed: int) -> Floats:
    """P-values of heads that are no better than expected, corrected for the best of so many heads being lucky.

    A head's gain, divided by its standard error, is compared with the largest of all heads' in each draw, where no
    head has a true gain (max-T; Westfall and Young, 1993, "Resampling-Based Multiple Testing", section 2.3). Never
    below the head's own p-value by Student's t, which is larger where documents are few, nor 1 / (DRAWS + 1).

    Args:
        value, expected, rows: (document, head): right answers, those expected, and questions.

    Returns:
        (head,): NaN without a question.
    """
    asked = rows.any(axis=1)
    value, expected, rows = value[asked], expected[asked], rows[asked]
    own = ClusterSums.of(value, expected, rows).p_above()
    if len(rows) < 2:
        return own
    total = np.maximum(rows.sum(axis=0), 1)
    gain = (value - expected).sum(axis=0) / total
    left = value - expected - gain * rows
    error = np.sqrt((left * left).sum(axis=0)) / total
    # What rounding leaves of equal documents is nothing.
    error[error < 1e-9] = 0
    t = _divided(gain, error * np.sqrt(len(rows) / (len(rows) - 1)))
    largest = _divided(_resampled(left, rows, seed), error).max(axis=1)
    # Both are sums of the same numbers in another order.
    more = (largest[:, None] >= t - 1e-9).sum(axis=0)
    return np.where(np.isnan(own), np.nan, np.maximum((1 + more) / (DRAWS + 1), np.nan_to_num(own)))


@dataclass(frozen=True)
class Gain:
    """How much better one head answers than a baseline: the difference, its 95 % interval, and how likely none is."""

    gain: float
    low: float
    high: float
    p: float


def paired_gain(value: Floats, expected: Floats, rows: Floats, seed: int) -> Gain | None:
    """The gain of one head that was chosen on other documents, (document,) each; None below two documents.

    Percentiles of the resampled gains; the p-value is the share of them that is not above 0.
    """
    asked = rows > 0
    if asked.sum() < 2:
        return None
    value, expected, rows = value[asked], expected[asked], rows[asked]
    gains = _resampled((value - expected)[:, None], rows[:, None], seed)[:, 0]
    low, high = np.quantile(gains, [0.025, 0.975])
    p = (1 + (gains <= 0).sum()) / (DRAWS + 1)
    return Gain(float((value - expected).sum() / rows.sum()), float(low), float(high), float(p))


def halves(documents: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents to choose a head on, and documents to score it on: a random half each, the odd one to score on."""
    mixed = np.random.default_rng(seed).permutation(documents)
    return np.sort(mixed[: len(mixed) // 2]), np.sort(mixed[len(mixed) // 2 :])


def _resampled(sums: Floats, rows: Floats, seed: int) -> Floats:
    """Ratios of sums to rows over documents that are drawn again and again, (draw, head)."""
    count = len(rows)
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=DRAWS).astype(np.float64)
    return _divided(drawn @ sums, drawn @ rows, nothing=0.0)


def _divided(a: Floats, b: Floats, nothing: float | None = None) -> Floats:
    """a / b; where b is 0 `nothing`, or infinity where a is above 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(b > 0, a / b, 0.0)
    return ratio if nothing is not None else np.where((b == 0) & (a > 1e-12), np.inf, ratio)
