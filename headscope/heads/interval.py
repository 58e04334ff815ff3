"""A 95 % interval of a mean over texts, from sums alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headscope.heads.moments import Moments

# With fewer texts an interval is rough: it may hold the true mean less often than 95 %.
ROUGH_BELOW = 20

# Two-sided 95 % points of Student's t for 0 to 9 degrees of freedom; above, `student_t` uses a series.
_T975 = (np.nan, 12.7062047, 4.3026527, 3.1824463, 2.7764451, 2.5705818, 2.4469119, 2.3646243, 2.3060041, 2.2621572)
_Z975 = 1.959963984540054

# How much more than its Edgeworth term the skewness of a sample widens the interval; see `interval`.
_UNSEEN = 4.0


def rough(texts: int) -> tuple[str, ...]:
    """The warning for intervals over few texts; none for one text, which has no interval, and for enough."""
    if not 1 < texts < ROUGH_BELOW:
        return ()
    return (f"intervals over {texts} texts are rough: {ROUGH_BELOW} or more are needed",)


def interval(moments: Moments) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The 95 % interval of the mean: lower and upper ends, of the moments' shape; NaN below two values.

    mean ± t · sd / √n · (1 + (1 + 4 (1 - v)) · g² / n)

    Student's t interval, widened by skewness: by the second-order term of the Edgeworth expansion of |t| it is too
    narrow by a share of about g² / n, g the skewness (Hall, 1992, "The bootstrap and Edgeworth expansion", chapter 2).
    A sample seldom has the rare large values and so shows less skewness than there is, except where there are just two
    values: `v` is its variance over the largest that its mean, lowest and highest value allow (Bhatia and Davis, 2000,
    "A better bound on the variance"), 1 on two points. The factor 4 was fitted on simulated samples.

    The mean is always in the middle, so the ends may lie beyond a metric's range, as those of the t interval may.
    Equal values give an interval of no width: right for a constant metric, and where a rare second value was just not
    seen nothing in the sample tells how far away it would be.
    """
    count = np.maximum(moments.count, 1)
    error = moments.sd / np.sqrt(count)
    half = student_t(moments.count - 1) * error * (1 + _widening(moments))
    return moments.mean - half, moments.mean + half


def _widening(moments: Moments) -> NDArray[np.float64]:
    """(1 + 4 (1 - v)) · g² / n; 0 where nothing varies."""
    count = np.maximum(moments.count, 1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # g² / n with g² = (m3 / n)² / (m2 / n)³, each factor small enough to be squared. It is below 1 for any sample.
        skewness = (moments.m3 / moments.m2 / np.sqrt(moments.m2)) ** 2
        largest = (moments.high - moments.mean) * (moments.mean - moments.low)
        variance = moments.m2 / count / largest
    seen = np.clip(np.where(np.isfinite(variance), variance, 1.0), 0.0, 1.0)
    return (1 + _UNSEEN * (1 - seen)) * np.minimum(np.where(np.isfinite(skewness), skewness, 0.0), 1.0)


def student_t(freedom: NDArray[np.int64]) -> NDArray[np.float64]:
    """Two-sided 95 % points of Student's t, good to 1e-5 (Abramowitz and Stegun, 26.7.5); NaN below one."""
    z, many = _Z975, np.maximum(freedom, 1).astype(np.float64)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    series = z + sum(term / many**power for power, term in enumerate(terms, 1))
    return np.where(freedom < len(_T975), np.array(_T975)[np.clip(freedom, 0, len(_T975) - 1)], series)
