"""What texts showed of one layer's heads, type by type, as sums that merge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.heads.catalogue.result import Example
from headscope.heads.clusters import ClusterSums

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LayerTypes:
    """Sums over texts of one layer's measures; `a + b` holds the texts of both.

    Attributes:
        measures: By measure's name, over clusters of rows, (head,) each.
        trivial: By measure and by what a head looks at that passes for it (`first_token`, …): what such a head scores
            on the same rows, summed, and the number of rows.
        above: By measure: on how many texts each head is above the measure's threshold, and on how many it was
            measured, float64 (head,) each.
        examples: By measure, an example a head, None where there is none.
    """

    measures: Mapping[str, ClusterSums]
    trivial: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    above: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)
    examples: Mapping[str, tuple[Example | None, ...]] = field(default_factory=dict)

    def __add__(self, other: LayerTypes) -> LayerTypes:
        """Both together; of examples the first."""
        return LayerTypes(
            measures={
                n: _sum(self.measures.get(n), other.measures.get(n)) for n in _names(self.measures, other.measures)
            },
            trivial={
                n: _pooled(self.trivial.get(n, {}), other.trivial.get(n, {}))
                for n in _names(self.trivial, other.trivial)
            },
            above={n: _added(self.above.get(n), other.above.get(n)) for n in _names(self.above, other.above)},
            examples={
                n: _first(self.examples.get(n, ()), other.examples.get(n, ()))
                for n in _names(self.examples, other.examples)
            },
        )

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays by name, for `numpy.savez`."""
        texts = {
            "measures": list(self.measures),
            "above": list(self.above),
            "trivial": {name: dict(found) for name, found in self.trivial.items()},
            "examples": {
                name: [None if e is None else e.to_dict() for e in found] for name, found in self.examples.items()
            },
        }
        numbers = [[getattr(sums, f.name) for f in fields(ClusterSums)] for sums in self.measures.values()]
        return {
            "plain": np.frombuffer(json.dumps(texts).encode(), dtype=np.uint8),
            "sums": np.array(numbers),
            "texts_above": np.array(list(self.above.values())),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> LayerTypes:
        """What `to_arrays` gave. Raises KeyError where an array is missing."""
        plain = json.loads(arrays["plain"].tobytes())
        return cls(
            measures={n: ClusterSums(*sums) for n, sums in zip(plain["measures"], arrays["sums"], strict=True)},
            trivial={n: {k: (v[0], v[1]) for k, v in found.items()} for n, found in plain["trivial"].items()},
            above={n: (a[0], a[1]) for n, a in zip(plain["above"], arrays["texts_above"], strict=True)},
            examples={
                n: tuple(None if e is None else Example.from_dict(e) for e in found)
                for n, found in plain["examples"].items()
            },
        )

    def scores(self, place: int) -> dict[str, float]:
        """One head's measures by name, and the share of texts above a threshold as `share:NAME`; those measured."""
        found = {name: float(values[place]) for name, values in self._scores.items()}
        return {name: value for name, value in found.items() if not np.isnan(value)}

    @cached_property
    def _scores(self) -> dict[str, Floats]:
        """Of all heads, float64 (head,); NaN where nothing was measured."""
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = {f"share:{name}": above / texts for name, (above, texts) in self.above.items()}
        return {name: sums.score for name, sums in self.measures.items()} | shares

    def alternative(self, measure: str) -> tuple[str, float] | None:
        """What passes best for a measure without being it, and its score."""
        found = {name: value / rows for name, (value, rows) in self.trivial.get(measure, {}).items() if rows}
        return max(found.items(), key=lambda item: item[1], default=None)


def _names(a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    return list(dict.fromkeys((*a, *b)))


def _sum(a: ClusterSums | None, b: ClusterSums | None) -> ClusterSums:
    if a is None or b is None:
        found = a if b is None else b
        assert found is not None
        return found
    return a + b


def _pooled(
    a: Mapping[str, tuple[float, float]], b: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    none = (0.0, 0.0)
    pairs = {n: (a.get(n, none), b.get(n, none)) for n in _names(a, b)}
    return {n: (x[0] + y[0], x[1] + y[1]) for n, (x, y) in pairs.items()}


def _added(a: tuple[Floats, Floats] | None, b: tuple[Floats, Floats] | None) -> tuple[Floats, Floats]:
    if a is None or b is None:
        found = a if b is None else b
        assert found is not None
        return found
    return a[0] + b[0], a[1] + b[1]


def _first(a: tuple[Example | None, ...], b: tuple[Example | None, ...]) -> tuple[Example | None, ...]:
    if not a or not b:
        return a or b
    return tuple(x or y for x, y in zip(a, b, strict=True))
