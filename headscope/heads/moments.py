"""Sums over texts that merge in any order: count, mean, central moments, lowest and highest value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Moments:
    """What is known of values of which none is kept; arrays of one shape, such as (head,).

    `a + b` is what both saw: a commutative monoid with `Moments.none` as its zero, to float64 rounding. The same parts
    added in the same order give the same bits, and adding none changes nothing.

    Attributes:
        count: How many values, int64.
        mean: Their mean, float64; NaN where there is none.
        m2, m3: Sums of squared and of cubed deviations from the mean.
        low, high: Lowest and highest value; inf and -inf where there is none.
    """

    count: NDArray[np.int64]
    mean: NDArray[np.float64]
    m2: NDArray[np.float64]
    m3: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Moments:
        """The moments of no values."""
        return cls.of(np.empty((0, *shape)))

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Moments:
        """The moments over the first axis of `values`, (text, ...); NaN is left out.

        Two passes, and the mean is summed from the lowest value on: equal values deviate by exactly nothing, and one
        value is its own mean bit for bit.
        """
        values = np.asarray(values, dtype=np.float64)
        measured = ~np.isnan(values)
        count = np.asarray(measured.sum(axis=0, dtype=np.int64))
        low = np.asarray(values.min(axis=0, initial=np.inf, where=measured))
        high = np.asarray(values.max(axis=0, initial=-np.inf, where=measured))
        above = np.where(measured, values - low, 0.0).sum(axis=0)
        mean = np.where(count > 0, low + above / np.maximum(count, 1), np.nan)
        apart = np.where(measured, values - mean, 0.0)
        squares = apart * apart
        return cls(count, mean, squares.sum(axis=0), (squares * apart).sum(axis=0), low, high)

    def __add__(self, other: Moments) -> Moments:
        """Both together.

        Chan, Golub and LeVeque (1983), "Algorithms for computing the sample variance", for the mean and `m2`; Pébay
        (2008), "Formulas for robust, one-pass parallel computation of covariances and arbitrary-order statistical
        moments", equation 2.2, for `m3`.

        Raises:
            ValueError: The shapes differ.
        """
        if self.count.shape != other.count.shape:
            raise ValueError(f"cannot add moments of shape {other.count.shape} to moments of shape {self.count.shape}")
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        # Where one of them saw nothing there is no step between their means.
        step = np.where((self.count > 0) & (other.count > 0), other.mean - self.mean, 0.0)
        within = self.m2 + other.m2
        between = step * step * self.count * share
        skewed = between * step * (1 - 2 * share) + 3 * step * ((1 - share) * other.m2 - share * self.m2)
        return Moments(
            count=count,
            mean=np.where(self.count > 0, self.mean, other.mean) + step * share,
            m2=within + between,
            m3=self.m3 + other.m3 + skewed,
            low=np.minimum(self.low, other.low),
            high=np.maximum(self.high, other.high),
        )

    @property
    def sd(self) -> NDArray[np.float64]:
        """Standard deviation, `ddof` 1; NaN below two values."""
        return np.sqrt(np.where(self.count > 1, self.m2, np.nan) / np.maximum(self.count - 1, 1))

    def take(self, index: Any) -> Moments:
        """The moments at a NumPy index: a number, a slice, a list of numbers, or several of them as a tuple."""
        return Moments(*(np.asarray(part[index]) for part in self.to_arrays().values()))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by name, for `numpy.savez`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Moments:
        """What `to_arrays` gave. Raises KeyError where an array is missing."""
        return cls(**{f.name: np.asarray(arrays[f.name]) for f in fields(cls)})
