"""The consumer that measures types of heads on the texts that are read anyway."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headscope.attention.visibility import Target
from headscope.capture.blocks import Rows
from headscope.capture.uniform import UniformRows, pointing
from headscope.heads.catalogue.columns import ColumnSums, column_sinks
from headscope.heads.catalogue.examples import Examples
from headscope.heads.catalogue.layer_types import LayerTypes
from headscope.heads.catalogue.measures import Measures
from headscope.heads.catalogue.text_types import COLUMN_SINK, TextType
from headscope.heads.clusters import ClusterSums, Floats
from headscope.heads.metrics import RowValues
from headscope.heads.statistics import Layer
from headscope.models.sites import Site

# Clusters of rows at least, over all texts: stretches of a text are taken where there are fewer texts.
CLUSTERS = 32
TRIVIAL = {
    "first_token": Target(key=0),
    "previous_token": Target(offset=-1),
    "own_token": Target(offset=0),
}


@dataclass
class _Shared:
    """What is the same for all layers that see the same: by measure, rows that count and chance, by cluster.

    Where it depends on a head's weights which rows count, it is one layer's own.

    Attributes:
        cluster: float64, (batch, rows, cluster): 1 where a row is in a cluster.
        counts, expected: float64, (batch, cluster, 1).
        trivial: By name, sums over all rows: of the values, and their number.
        held: Whose ids are the key of this entry, so that they stay theirs.
    """

    cluster: Tensor
    held: tuple[object, ...]
    counts: dict[str, Tensor] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)
    trivial: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)


@dataclass
class TypeStatistics:
    """Sums the measures of types over the rows that it is fed.

    Attributes:
        types: What to measure.
        texts: How many there will be: decides how finely each is cut into clusters.
        examples: Finds rows to show; set for each batch, None for none.
    """

    types: Sequence[TextType]
    texts: int
    examples: Examples | None = None
    _values: dict[Layer, dict[str, tuple[Tensor, Tensor, Tensor]]] = field(default_factory=dict)
    _shared: dict[tuple[object, ...], _Shared] = field(default_factory=dict)
    _used: dict[Layer, dict[str, list[_Shared]]] = field(default_factory=dict)
    _columns: dict[Layer, ColumnSums] = field(default_factory=dict)

    def rows(self, site: Site, rows: Rows) -> None:
        """Add rows to the sums of their layer."""
        layer = (site.stack, site.layer)
        shared = self._shared_by(layer, rows)
        for measures in dict.fromkeys(t.measures for t in self.types if t.measures is not None):
            found = measures(rows)
            if found:
                self._known(shared, measures, rows, found)
                self._add(layer, shared, found)
                self._look(site, rows, found)
        if self.examples is not None:
            self.examples.keep(site, rows)
        if not rows.cross and any(t.name == COLUMN_SINK for t in self.types):
            sums = ColumnSums.of(rows)
            self._columns[layer] = self._columns[layer] + sums if layer in self._columns else sums

    def _add(self, layer: Layer, shared: _Shared, found: Mapping[str, RowValues]) -> None:
        """Sums by cluster, all measures in one product."""
        sums = self._values.setdefault(layer, {})
        counted = torch.stack([value.masked_fill(~eligible, 0) for value, eligible in found.values()], dim=1)
        by_cluster = counted.flatten(1, 2).double() @ shared.cluster
        by_cluster = by_cluster.view(*counted.shape[:3], -1).transpose(2, 3)
        for number, name in enumerate(found):
            value = by_cluster[:, number]
            new = (value, shared.expected[name].expand_as(value), shared.counts[name].expand_as(value))
            old = sums.get(name)
            sums[name] = new if old is None else (old[0] + new[0], old[1] + new[1], old[2] + new[2])
            used = self._used.setdefault(layer, {}).setdefault(name, [])
            if not any(one is shared for one in used):
                used.append(shared)

    def _look(self, site: Site, rows: Rows, found: Mapping[str, RowValues]) -> None:
        if self.examples is not None:
            for name in {t.score for t in self.types} & found.keys():
                self.examples.look(site, rows, name, *found[name])

    def finish(self) -> dict[Layer, LayerTypes]:
        """The batch's sums by layer; they start anew."""
        result = {layer: self._layer(layer, sums) for layer, sums in self._values.items()}
        self._values, self._shared, self._used, self._columns = {}, {}, {}, {}
        return result

    # -------------------------------------------------------------- details
    def _shared_by(self, layer: Layer, rows: Rows) -> _Shared:
        own = layer if rows.valid.shape[1] > 1 else None
        key = (id(rows.view), id(rows.tokens), id(rows.lengths), rows.first_row, own)
        if key not in self._shared:
            cluster = _clusters(rows, max(1, CLUSTERS // max(1, self.texts)))
            self._shared[key] = _Shared(cluster, (rows.view, rows.tokens, rows.lengths))
        return self._shared[key]

    def _known(self, shared: _Shared, measures: Measures, rows: Rows, found: Mapping[str, RowValues]) -> None:
        """Find out what layers share, of measures that are new."""
        if found.keys() <= shared.counts.keys():
            return
        even = measures(UniformRows.like(rows))
        whole = torch.ones_like(shared.cluster[..., 0], dtype=torch.bool)[:, None]
        for name, (_, eligible) in found.items():
            counted = (eligible & whole).double()
            shared.counts[name] = (counted @ shared.cluster).mT
            shared.expected[name] = ((even[name][0] * counted) @ shared.cluster).mT
        wanted = {t.score for t in self.types if t.trivial} & found.keys()
        shared.trivial.update({name: {} for name in wanted})
        for other, target in TRIVIAL.items() if wanted else ():
            for name, sums in _pointed(measures, rows, target, wanted).items():
                shared.trivial[name][other] = sums

    def _layer(self, layer: Layer, sums: Mapping[str, tuple[Tensor, Tensor, Tensor]]) -> LayerTypes:
        arrays = {n: tuple(a.cpu().numpy() for a in found) for n, found in sums.items()}
        # All measures at once, (cluster, measure, head) each.
        value, expected, rows = (
            np.stack([found[i].reshape(-1, found[i].shape[-1]) for found in arrays.values()], axis=1) for i in range(3)
        )
        together = ClusterSums.of(value, expected, rows)
        measures = {name: together.take(i) for i, name in enumerate(arrays)}
        above = {}
        for name, threshold in {n: limit for t in self.types for n, limit in t.per_text.items()}.items():
            if name in arrays:
                above[name] = _above([a.sum(axis=1) for a in arrays[name]], threshold)
        trivial: dict[str, dict[str, tuple[float, float]]] = {}
        for name, used in self._used.get(layer, {}).items():
            for shared in used:
                for other, sums_of in shared.trivial.get(name, {}).items():
                    old = trivial.setdefault(name, {}).get(other, (0.0, 0.0))
                    trivial[name][other] = (old[0] + sums_of[0], old[1] + sums_of[1])
        found = LayerTypes(measures, trivial, above, {} if self.examples is None else self.examples.of(layer))
        if layer in self._columns:
            found = found + column_sinks(self._columns[layer])
        return found


def _above(sums: Sequence[Floats], threshold: float) -> tuple[Floats, Floats]:
    """On how many texts each head's mean is above a threshold, and on how many that says something, (head,) each.

    Where even attention is above it, being above it says nothing.

    Args:
        sums: Of each text: values, what chance gives, and rows, (text, head) each.
    """
    value, expected, rows = sums
    known = (rows > 0) & (expected <= threshold * rows)
    return ((value > threshold * rows) & known).sum(axis=0) * 1.0, known.sum(axis=0) * 1.0


def _clusters(rows: Rows, most: int) -> Tensor:
    """float64, (batch, rows, cluster): stretches of equal length of each text, as many as given."""
    lengths = rows.lengths.clamp(min=1)[:, None]
    number = (rows.positions * most // lengths).clamp(max=most - 1)
    return torch.nn.functional.one_hot(number, most).double()


def _pointed(measures: Measures, rows: Rows, target: Target, wanted: Collection[str]) -> dict[str, tuple[float, float]]:
    """What a head that looks at one key a row scores: sums over rows that count, and their number, by measure."""
    sums = dict.fromkeys(wanted, (0.0, 0.0))
    for block in pointing(rows, target):
        found = measures(block)
        for name in wanted:
            value, eligible = found[name]
            counted = eligible & torch.ones_like(value, dtype=torch.bool)
            total = float(torch.where(counted, value, 0).sum(dtype=torch.float64))
            sums[name] = (sums[name][0] + total, sums[name][1] + float(counted.sum()))
    return sums
