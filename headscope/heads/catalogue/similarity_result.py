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
            log(2): 0 where rows are equal, 1 where no two rows share a key.
        clusters: Each head's cluster, numbered from 0 by size.
        redundant: Pairs that are closer than `threshold`, closest first, each with its distance.
        position: float64, (head, 2): the heads on a map that keeps distances as well as two dimensions can.
        rows: Rows that were compared.
    """

    heads: tuple[Place, ...]
    distance: NDArray[np.float64]
    clusters: tuple[int, ...]
    redundant: tuple[tuple[Place, Place, float], ...]
    threshold: float
    position: NDArray[np.float64]
    rows: int

    def to_dict(self) -> dict[str, Any]:
        """The `similarity` object of the JSON."""
        return {
            "heads": [list(place) for place in self.heads],
            "distance": np.round(self.distance, 6).tolist(),
            "clusters": list(self.clusters),
            "redundant": [{"a": list(a), "b": list(b), "distance": d} for a, b, d in self.redundant],
            "threshold": self.threshold,
            "position": np.round(self.position, 6).tolist(),
            "rows": self.rows,
        }
