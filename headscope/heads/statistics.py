"""The consumer that turns row blocks into one number a metric, a head and a text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.capture.blocks import Rows
from headscope.capture.uniform import UniformRows
from headscope.heads.metrics import RowValues, Variant, could_differ
from headscope.models.sites import Site

Layer = tuple[str, int]
"""A stack's name and a layer number."""


@dataclass(frozen=True)
class Values:
    """One metric of one layer, float64 (text, head): NaN where nothing could be measured."""

    value: NDArray[np.float64]
    chance: NDArray[np.float64]


@dataclass
class _Sums:
    """Sums over rows, float64 (batch, head)."""

    value: Tensor | float = 0.0
    chance: Tensor | float = 0.0
    count: Tensor | float = 0.0


@dataclass
class _Even:
    """What even attention on the same keys gives, shared by all layers that see them: values by metric.

    `sums` has chance and count by variant, where no layer's own weights decide which rows count.
    """

    rows: UniformRows
    values: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass
class HeadStatistics:
    """Sums every metric of `variants` over the rows it is fed, text by text.

    A metric's chance is summed over the same rows as its value. Memory is a few numbers a head, whatever the length.
    """

    variants: tuple[Variant, ...]
    _sums: dict[Layer, dict[str, _Sums]] = field(default_factory=dict)
    _even: dict[tuple[int, ...], _Even] = field(default_factory=dict)

    def rows(self, site: Site, rows: Rows) -> None:
        """Add rows to the sums of their layer."""
        self.add((site.stack, site.layer), rows)

    def add(self, layer: Layer, rows: Rows) -> None:
        """Add rows to the sums of `layer`."""
        sums = self._sums.setdefault(layer, {})
        for rest in (False, True):
            variants = [v for v in self.variants if v.rest == rest and (v.metric.cross or not rows.cross)]
            if variants:
                self._add(sums, variants, rows.without_first() if rest else rows)

    def _add(self, sums: dict[str, _Sums], variants: Iterable[Variant], rows: Rows) -> None:
        even = self._evenly(rows)
        values: dict[str, RowValues] = {}
        for v in variants:
            name = v.metric.name
            if name not in values:
                values[name] = v.metric.rows(rows)
            value, eligible = values[name]
            if name not in even.values:
                even.values[name] = v.metric.rows(even.rows)[0]
            if v.adjusted:
                eligible = eligible & could_differ(v.metric, even.rows)
            by_chance = even.sums.get(v.name) or _expected(even.values[name], eligible)
            if not v.rest:
                even.sums[v.name] = by_chance
            _accumulate(sums.setdefault(v.name, _Sums()), value, eligible, *by_chance)

    def _evenly(self, rows: Rows) -> _Even:
        # The entry holds the view, the special tokens and the lengths, so that their ids stay theirs.
        key = (id(rows.view), id(rows.special), id(rows.lengths), rows.first_row, rows.first_key)
        if key not in self._even:
            self._even[key] = _Even(UniformRows.like(rows))
        return self._even[key]

    def finish(self) -> dict[Layer, dict[str, Values]]:
        """The batch's values by layer and metric; the sums start anew."""
        result = {layer: {name: _values(name, s) for name, s in sums.items()} for layer, sums in self._sums.items()}
        self._sums, self._even = {}, {}
        return result


def _expected(chance: Tensor, eligible: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of chance values, float64, and the number of rows that count, (batch or 1, head or 1) each."""
    counted = eligible & torch.ones_like(chance, dtype=torch.bool)
    return chance.masked_fill(~counted, 0).sum(dim=-1, dtype=torch.float64), counted.sum(dim=-1)


def _accumulate(sums: _Sums, value: Tensor, eligible: Tensor, chance: Tensor, count: Tensor) -> None:
    value = value.masked_fill(~eligible, 0).sum(dim=-1, dtype=torch.float64)
    sums.value = sums.value + value
    sums.chance = sums.chance + chance.expand(value.shape)
    sums.count = sums.count + count.expand(value.shape)


def _values(name: str, sums: _Sums) -> Values:
    value, chance, count = (
        torch.as_tensor(t).cpu().numpy().astype(np.float64) for t in (sums.value, sums.chance, sums.count)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        # Where nothing counts both sums are 0, and 0 / 0 is NaN.
        mean, expected = value / count, chance / count
        if "_adjusted" in name:
            return Values((mean - expected) / (1 - expected), np.where(count > 0, 0.0, np.nan))
    return Values(mean, expected)
