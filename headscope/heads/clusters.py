"""Ratios over rows that come in clusters: a mean over eligible rows, its interval, and whether chance explains it.

Neighbouring rows of a text are alike, so rows are no sample; texts are, or, where there are few, stretches of a text.
A score is sum of values / number of eligible rows over all clusters, and its error is that of a ratio estimator
(Cochran, 1977, "Sampling Techniques", section 6.3).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from headscope.heads.interval import student_t

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ClusterSums:
    """Sums over clusters, float64 of one shape each, such as (head,): `a + b` holds the clusters of both.

    Attributes:
        clusters: Clusters with an eligible row.
        rows: Eligible rows.
        value, expected: Their values, and what chance or an alternative gives on the same rows, summed.
        rows2, value2, value_rows, gain2, gain_rows: Sums over clusters of products of a cluster's sums: rows * rows,
            value * value, value * rows, and the same two with gain = value - expected.
    """

    clusters: Floats
    rows: Floats
    value: Floats
    expected: Floats
    rows2: Floats
    value2: Floats
    value_rows: Floats
    gain2: Floats
    gain_rows: Floats

    @classmethod
    def of(cls, value: Floats, expected: Floats, rows: Floats) -> ClusterSums:
        """The sums of clusters' sums, each broadcastable to (cluster, ...)."""
        value, expected, rows = (np.asarray(a, np.float64) for a in np.broadcast_arrays(value, expected, rows))
        gain = value - expected
        products = (rows * rows, value * value, value * rows, gain * gain, gain * rows)
        return cls(*(a.sum(axis=0) for a in ((rows > 0).astype(np.float64), rows, value, expected, *products)))

    def __add__(self, other: ClusterSums) -> ClusterSums:
        """Both together."""
        return ClusterSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def take(self, index: int) -> ClusterSums:
        """Those at an index of the first axis."""
        return ClusterSums(*(getattr(self, f.name)[index] for f in fields(self)))

    @property
    def score(self) -> Floats:
        """Mean value of the eligible rows; NaN without any."""
        return _divided(self.value, self.rows)

    @property
    def chance(self) -> Floats:
        """Mean expected value of the same rows; NaN without any."""
        return _divided(self.expected, self.rows)

    def interval(self) -> tuple[Floats, Floats]:
        """The 95 % interval of the score, low and high; NaN below two clusters."""
        half = student_t(self._freedom) * self._error(self.value2, self.value_rows, self.score)
        return self.score - half, self.score + half

    def p_above(self) -> Floats:
        """One-sided p-value of a score no better than expected; NaN without an eligible row.

        By Student's t of the mean gain; never below 2 ** -clusters, which is all that the signs of so many gains say.
        Far out in the tail p is too small for few gains that are skewed to the left, as where chance is near one.
        """
        gain = self.score - self.chance
        error = self._error(self.gain2, self.gain_rows, gain)
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(error > 0, gain / error, np.where(gain > 0, np.inf, 0.0))
        least = 0.5 ** np.minimum(self.clusters, 1000)
        p = np.maximum(student_survival(t, np.maximum(self._freedom, 1)), least)
        return np.where(self.rows > 0, p, np.nan)

    @property
    def _freedom(self) -> NDArray[np.int64]:
        return (self.clusters - 1).astype(np.int64)

    def _error(self, squares: Floats, with_rows: Floats, ratio: Floats) -> Floats:
        """Standard error of a ratio whose clusters have these sums of squares; NaN below two clusters."""
        left = np.maximum(squares - 2 * ratio * with_rows + ratio * ratio * self.rows2, 0.0)
        # What rounding leaves of equal clusters is nothing.
        left = np.where(left <= 1e-12 * np.maximum(squares, ratio * ratio * self.rows2), 0.0, left)
        spread = _divided(self.clusters, np.maximum(self.clusters - 1, 0)) * left
        return _divided(np.sqrt(spread), self.rows)


def student_survival(t: Floats, freedom: NDArray[np.int64]) -> Floats:
    """P(T > t) of Student's t, by a normal approximation (Wallace, 1959, Annals of Mathematical Statistics 30).

    To 0.01 with one degree of freedom, 1e-3 with five, 1e-4 with twenty.
    """
    v = freedom.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        z = (8 * v + 1) / (8 * v + 3) * np.sqrt(v * np.log1p(t * t / v)) * np.sign(t)
    normal = NormalDist()
    tail = np.vectorize(lambda x: normal.cdf(-x) if np.isfinite(x) else float(x < 0), otypes=[np.float64])
    return np.asarray(tail(z), np.float64)


def holm(p: Floats) -> Floats:
    """P-values corrected for their number (Holm, 1979): at most 5 % risk of any false claim; NaN does not count."""
    flat = p.ravel()
    order = np.argsort(flat)  # NaN last
    known = int(np.isfinite(flat).sum())
    steps = flat[order[:known]] * np.arange(known, 0, -1)
    result = np.full(flat.shape, np.nan)
    result[order[:known]] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return result.reshape(p.shape)


def _divided(a: Floats, b: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(b > 0, a / b, np.nan)
