"""The consumer that turns row blocks into one number a metric, a head and a text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.capture.blocks import RowBlock
from headscope.heads.metrics import RowValues, Variant, could_differ, uniform, without_first
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
class HeadStatistics:
    """Sums every metric of `variants` over the rows it is fed, text by text.

    A metric's chance is summed over the same rows as its value. Memory is a few numbers a head, whatever the length.
    """

    variants: tuple[Variant, ...]
    _sums: dict[Layer, dict[str, _Sums]] = field(default_factory=dict)
    _uniform: dict[tuple[int, bool], tuple[RowBlock, dict[str, RowValues]]] = field(default_factory=dict)

    def rows(self, site: Site, block: RowBlock) -> None:
        """Add a row block to the sums of its layer."""
        self.block((site.stack, site.layer), block)

    def block(self, layer: Layer, block: RowBlock) -> None:
        """Add a row block to the sums of `layer`."""
        sums = self._sums.setdefault(layer, {})
        for rest in (False, True):
            variants = [v for v in self.variants if v.rest == rest and (v.metric.cross or not block.cross)]
            if variants:
                self._add(sums, variants, without_first(block) if rest else block, rest)

    def _add(self, sums: dict[str, _Sums], variants: Iterable[Variant], block: RowBlock, rest: bool) -> None:
        by_chance = self._chance_rows(block, rest)
        values: dict[str, RowValues] = {}
        for v in variants:
            name = v.metric.name
            if name not in values:
                values[name] = v.metric.rows(block)
            value, eligible = values[name]
            if name not in by_chance:
                by_chance[name] = v.metric.rows(uniform(block))
            if v.adjusted:
                eligible = eligible & could_differ(v.metric, block)
            _accumulate(sums.setdefault(v.name, _Sums()), value, by_chance[name][0], eligible)

    def _chance_rows(self, block: RowBlock, rest: bool) -> dict[str, RowValues]:
        """Row values of uniform attention, shared by all layers that see the same keys."""
        known = self._uniform.get((block.first_row, rest))
        if known is None or not _same_view(known[0], block):
            known = (block, {})
            self._uniform[block.first_row, rest] = known
        return known[1]

    def finish(self) -> dict[Layer, dict[str, Values]]:
        """The batch's values by layer and metric; the sums start anew."""
        result = {layer: {name: _values(name, s) for name, s in sums.items()} for layer, sums in self._sums.items()}
        self._sums, self._uniform = {}, {}
        return result


def _same_view(known: RowBlock, block: RowBlock) -> bool:
    return (
        known.special is block.special
        and known.visible.shape == block.visible.shape
        and torch.equal(known.visible, block.visible)
    )


def _accumulate(sums: _Sums, value: Tensor, chance: Tensor, eligible: Tensor) -> None:
    counted = eligible.expand(value.shape)
    zero = torch.zeros((), dtype=torch.float64, device=value.device)
    sums.value = sums.value + torch.where(counted, value.double(), zero).sum(dim=-1)
    sums.chance = sums.chance + torch.where(counted, chance.double(), zero).sum(dim=-1)
    sums.count = sums.count + counted.sum(dim=-1)


def _values(name: str, sums: _Sums) -> Values:
    value, chance, count = (
        torch.as_tensor(t).cpu().numpy().astype(np.float64) for t in (sums.value, sums.chance, sums.count)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, expected = np.where(count > 0, value / count, np.nan), np.where(count > 0, chance / count, np.nan)
        if "_adjusted" in name:
            return Values((mean - expected) / (1 - expected), np.where(count > 0, 0.0, np.nan))
    return Values(mean, expected)
