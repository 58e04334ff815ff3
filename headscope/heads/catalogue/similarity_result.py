"""How far apart heads are. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.heads.catalogue.result import Place


@dataclass(frozen=True, eq=False)
class Similarity:
    """Distances between heads of layers whose rows and columns are the same tokens.

    Attributes:
        heads: The heads, in the order of the matrix.
        distance: float64, (head, head): square root of the mean Jensen-Shannon divergence over rows, in units of
            log(2): 0 where rows are equal, 1 where no two rows share a key; NaN between heads that do not compare.
        clusters: Each head's cluster, numbered from 0 by size.
        redundant: Pairs that are closer than `threshold`, closest first, each with its distance.
        position: float64, (head, 2): the heads on a map that keeps distances as well as two dimensions can; a map of
            its own for each group of heads that compare.
        rows: Rows that were compared, of the group with the most.
        cut: The distance up to which clusters are merged.
    """

    heads: tuple[Place, ...]
    distance: NDArray[np.float64]
    clusters: tuple[int, ...]
    redundant: tuple[tuple[Place, Place, float], ...]
    threshold: float
    position: NDArray[np.float64]
    rows: int
    cut: float = 0.0

    def groups(self) -> list[NDArray[np.int64]]:
        """Indices of heads that compare with each other, group by group."""
        return groups_of(np.isfinite(self.distance))

    def to_dict(self) -> dict[str, Any]:
        """The `similarity` object of the JSON; null between heads that do not compare."""
        rounded = np.round(self.distance, 6).tolist()
        return {
            "heads": [list(place) for place in self.heads],
            "distance": [[None if d != d else d for d in row] for row in rounded],
            "clusters": list(self.clusters),
            "redundant": [{"a": list(a), "b": list(b), "distance": d} for a, b, d in self.redundant],
            "threshold": self.threshold,
            "cut": self.cut,
            "position": np.round(self.position, 6).tolist(),
            "rows": self.rows,
        }


def groups_of(linked: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Indices of the things that are linked with each other, directly or through others, bool (thing, thing)."""
    count = len(linked)
    lowest = np.arange(count)
    while True:
        reached = np.minimum(lowest, np.where(linked, lowest, count).min(axis=1, initial=count))
        if (reached == lowest).all():
            return [np.flatnonzero(lowest == i) for i in np.unique(lowest)]
        lowest = reached
