"""Attention that no model computes, to compare heads with: spread evenly, or all on one key a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from headscope.attention.visibility import Target
from headscope.capture.blocks import EPSILON, RowBlock, Rows


@dataclass(frozen=True)
class UniformRows(Rows):
    """Attention that spreads evenly over the visible keys; results are (batch or 1, 1, rows)."""

    @staticmethod
    def like(rows: Rows) -> UniformRows:
        """Even attention of the same rows on the same keys."""
        facts = (rows.view, rows.special, rows.lengths, rows.cross, rows.first_key)
        return UniformRows(rows.first_row, rows.valid, *facts, tokens=rows.tokens)

    @property
    def num_heads(self) -> int:
        """One result for all heads."""
        return 1

    @cached_property
    def _share(self) -> Tensor:
        return 1 / self.counts.clamp(min=1).float()

    def at(self, target: Target) -> Tensor:
        """Each row's weight on its target."""
        return self._share * (self.sees(target) & self.has(target))

    def total(self) -> Tensor:
        """Each row's sum of weights."""
        return (self.counts > 0).float()

    def entropy(self, scaled: bool = False) -> Tensor:
        """Each row's -sum w ln(w + 1e-9), in nats."""
        # That of a row that sees nothing is 0, as its share is 1.
        return -(self._share + EPSILON).log()

    def on(self, columns: Tensor) -> Tensor:
        """Each row's sum of weights on some keys."""
        counted = columns.clone()
        counted[:, : self.first_key] = False
        total = self.view.sums(counted, counted.device)
        return total[..., self.first_row : self.first_row + self.size] * self._share

    def onto(self, name: str) -> Tensor:
        """Each row's sum of weights on the keys in a relation to it, of `KeyTokens.cells`."""
        return self.counts_of(name) * self._share

    def received(self) -> Tensor:
        """(batch, head, 2, key): each key's sum of weights over the real rows at even, and at odd positions."""
        return torch.stack([block.received() for block in self.blocks()]).sum(dim=0)

    def distance(self) -> Tensor:
        """Each row's sum of w |i - j|, in tokens."""
        total = self.view.remember("distances", lambda: self.view.distances(self.valid.device))
        total = total[..., self.first_row : self.first_row + self.size].double()
        if self.first_key:
            total = total - self.positions * self.sees(Target(key=0))
        return total * self._share

    def largest(self) -> Tensor:
        """Each row's largest weight."""
        return self._share * (self.counts > 0)

    def without_first(self) -> UniformRows:
        """Even attention over all keys but the first."""
        return replace(self, first_key=1)

    def blocks(self) -> Iterator[RowBlock]:
        """The rows with their weights."""
        for start, stop in self.view.chunks():
            first, last = max(start, self.first_row), min(stop, self.first_row + self.size)
            if first < last:
                yield self._block(first, last)

    def _block(self, first: int, last: int) -> RowBlock:
        seen = self.view.cells(first, last, self.valid.device).float()
        seen[..., : self.first_key] = 0
        part = slice(first - self.first_row, last - self.first_row)
        weights = seen * self._share[..., part, None]
        facts = (self.valid[..., part], self.view, self.special, self.lengths, self.cross, self.first_key)
        return RowBlock(first, *facts, weights=weights, tokens=self.tokens)


def pointing(rows: Rows, target: Target) -> Iterator[RowBlock]:
    """The same rows with all weight on one key each, in blocks of one head; rows that do not see theirs have none."""
    for even in UniformRows.like(rows).blocks():
        key = target.positions(even.positions)
        onto = (even.has(target) & even.sees(target)).float()
        weights = torch.zeros_like(even.weights)
        index = key.clamp(0, weights.shape[-1] - 1)[:, None].expand(*weights.shape[:3], 1)
        yield replace(even, weights=weights.scatter(-1, index, onto.expand(weights.shape[:3])[..., None]))
