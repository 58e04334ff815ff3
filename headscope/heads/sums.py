"""Sums over texts of one layer's heads: everything that its records are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headscope.heads.moments import Moments

if TYPE_CHECKING:
    from headscope.heads.rules import RuleSet
    from headscope.heads.statistics import Values


@dataclass(frozen=True, eq=False)
class LayerSums:
    """What a number of texts showed of one layer's heads.

    `a + b` is what the texts of both showed, in any order, to float64 rounding; counts are exact. A metric that only
    one of them has was not measured on the texts of the other.

    Attributes:
        names: The metrics, in alphabetical order.
        value, chance: Moments of each text's value and chance value, (metric, head).
        labels: By label, on how many texts each head has it by itself, int64 (head,). A text on which none of the
            rules' metrics could be measured gives no label.
        texts: How many texts were measured.
    """

    names: tuple[str, ...]
    value: Moments
    chance: Moments
    labels: Mapping[str, NDArray[np.int64]]
    texts: int

    @classmethod
    def of(cls, values: Mapping[str, Values], rules: RuleSet) -> LayerSums:
        """The sums of each text's values, float64 (text, head) by metric name; at least one metric."""
        names = tuple(sorted(values))
        value, chance = (np.stack([getattr(values[n], field) for n in names], axis=1) for field in ("value", "chance"))
        metrics = {name: values[name].value for name in names}
        found = np.where(rules.measured_many(metrics), rules.label_many(metrics), -1)
        return cls(
            names=names,
            value=Moments.of(value),
            chance=Moments.of(chance),
            labels={label: np.sum(found == i, axis=0, dtype=np.int64) for i, label in enumerate(rules.labels)},
            texts=len(value),
        )

    def __add__(self, other: LayerSums) -> LayerSums:
        """Both together. Raises ValueError where the numbers of heads differ."""
        names = tuple(sorted({*self.names, *other.names}))
        return LayerSums(
            names=names,
            value=_arranged(self.value, self.names, names) + _arranged(other.value, other.names, names),
            chance=_arranged(self.chance, self.names, names) + _arranged(other.chance, other.names, names),
            labels=_added(self.labels, other.labels),
            texts=self.texts + other.texts,
        )

    @property
    def values(self) -> dict[str, Moments]:
        """Moments of each text's value, (head,), by metric name."""
        return {name: self.value.take(i) for i, name in enumerate(self.names)}

    @property
    def chances(self) -> dict[str, Moments]:
        """Moments of each text's chance value, (head,), by metric name."""
        return {name: self.chance.take(i) for i, name in enumerate(self.names)}

    @property
    def labelled(self) -> NDArray[np.int64]:
        """On how many texts each head has a label by itself, (head,)."""
        return np.asarray(sum(self.labels.values()), dtype=np.int64)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays by name, for `numpy.savez`."""
        return {
            "names": np.array(self.names),
            "label_names": np.array([*self.labels]),
            "labels": np.array([*self.labels.values()]),
            "texts": np.array(self.texts),
            **{f"value_{name}": array for name, array in self.value.to_arrays().items()},
            **{f"chance_{name}": array for name, array in self.chance.to_arrays().items()},
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> LayerSums:
        """What `to_arrays` gave. Raises KeyError where an array is missing."""
        value, chance = (
            Moments.from_arrays({n.removeprefix(part): arrays[n] for n in arrays if n.startswith(part)})
            for part in ("value_", "chance_")
        )
        labels = dict(zip(arrays["label_names"].tolist(), arrays["labels"], strict=True))
        return cls(tuple(arrays["names"].tolist()), value, chance, labels, int(arrays["texts"]))


def _added(a: Mapping[str, NDArray[np.int64]], b: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    return {n: a[n] + b[n] if n in a and n in b else found for n, found in {**a, **b}.items()}


def _arranged(moments: Moments, names: Sequence[str], wanted: Sequence[str]) -> Moments:
    """Rows of `names` as rows of `wanted`; a row that was not there is one of no values."""
    if tuple(names) == tuple(wanted):
        return moments
    none = Moments.none(moments.count.shape[1:]).to_arrays()
    longer = {name: np.concatenate([array, none[name][None]]) for name, array in moments.to_arrays().items()}
    return Moments.from_arrays(longer).take([names.index(n) if n in names else len(names) for n in wanted])
