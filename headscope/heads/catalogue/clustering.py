"""Grouping things by the distances between them, and drawing them in the plane. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tree:
    """A tree of clusters: things are numbered from 0, and merge k makes the cluster `count` + k.

    Attributes:
        count: How many things there are.
        merges: The two clusters of each merge and their distance; distances never fall.
    """

    count: int
    merges: tuple[tuple[int, int, float], ...]

    def order(self) -> list[int]:
        """The things so that those of every cluster stand together; larger parts first."""
        members = [[i] for i in range(self.count)]
        for a, b, _ in self.merges:
            first, second = sorted((members[a], members[b]), key=len, reverse=True)
            members.append([*first, *second])
        return members[-1] if members else []

    def cut(self, height: float) -> list[int]:
        """Each thing's cluster once all merges of at most this distance are made: numbered from 0, largest first."""
        clusters = {i: [i] for i in range(self.count)}
        for number, (a, b, distance) in enumerate(self.merges, start=self.count):
            if distance <= height:
                clusters[number] = clusters.pop(a) + clusters.pop(b)
        return numbered(list(clusters.values()), self.count)


def numbered(clusters: list[list[int]], count: int) -> list[int]:
    """Each of `count` things' cluster, numbered by size; of equal ones, that of the lowest thing is first."""
    result = [0] * count
    for number, members in enumerate(sorted(clusters, key=lambda found: (-len(found), min(found)))):
        for i in members:
            result[i] = number
    return result


def average_linkage(distance: Floats) -> Tree:
    """Merge the two closest clusters until one is left; clusters are as far apart as their members on average.

    Also called UPGMA (Sokal and Michener, 1958). Time grows with the cube of the number of things at worst, in practice
    with its square.

    Args:
        distance: (thing, thing): symmetric, finite.
    """
    count = len(distance)
    between = distance.astype(np.float64)
    np.fill_diagonal(between, np.inf)
    names, sizes = list(range(count)), np.ones(count)
    nearest = between.argmin(axis=1) if count else np.zeros(0, np.int64)
    merges = []
    for number in range(count, 2 * count - 1):
        a = int(between[np.arange(count), nearest].argmin())
        b = int(nearest[a])
        a, b = min(a, b), max(a, b)
        merges.append((names[a], names[b], float(between[a, b])))
        names[a] = number
        joined = (sizes[a] * between[a] + sizes[b] * between[b]) / (sizes[a] + sizes[b])
        joined[[a, b]] = np.inf
        sizes[a] += sizes[b]
        between[a], between[:, a] = joined, joined
        between[b], between[:, b] = np.inf, np.inf
        _look_again(between, nearest, a, b)
    return Tree(count, tuple(merges))


def _look_again(between: Floats, nearest: NDArray[np.int64], a: int, b: int) -> None:
    """Set `nearest` right after b was merged into a."""
    stale = np.flatnonzero((nearest == a) | (nearest == b))
    stale = np.union1d(stale, [a, b])
    nearest[stale] = between[stale].argmin(axis=1)
    closer = between[:, a] < between[np.arange(len(nearest)), nearest]
    nearest[closer] = a


def classical_scaling(distance: Floats) -> Floats:
    """Places in the plane whose distances come as near to the given ones as a projection can, float64 (thing, 2).

    Squared distances, centred by rows and columns, are inner products; their two largest eigenvectors are the plane
    (Torgerson, 1952, Psychometrika 17). Of both axes the side with the thing that is farthest out is positive.
    """
    count = len(distance)
    places = np.zeros((count, 2))
    if count < 2:
        return places
    squares = distance**2
    means = squares.mean(axis=0)
    products = -(squares - means - means[:, None] + squares.mean()) / 2
    values, vectors = np.linalg.eigh(products)
    axes = vectors[:, ::-1][:, :2] * np.sqrt(np.maximum(values[::-1][:2], 0.0))
    far = axes[np.abs(axes).round(9).argmax(axis=0), range(axes.shape[1])]
    places[:, : axes.shape[1]] = axes * np.where(far < 0, -1.0, 1.0)
    return places
