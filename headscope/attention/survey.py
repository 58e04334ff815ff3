"""What a pass over all tiles tells of softmax weights beside sums of rows: the largest, sums by kind, cell and column.

Products of a tile with a few columns would cost as much as the tile itself: each column is a product of its own, of a
matrix and a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attention.tiles import Band, Problem

Cells = Callable[[slice, slice], tuple[Tensor, Tensor, Tensor]]
"""The cells that are meant in a range of rows and a range of keys: example, row and key of each, int64 (cell,)."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """What a survey is of.

    Attributes:
        kinds: bool, (batch, key) each: the keys of a kind.
        cells: The cells of a name.
        counted: bool, (batch, query): rows that count for what keys receive.
    """

    kinds: Mapping[str, Tensor]
    cells: Mapping[str, Cells]
    counted: Tensor


@dataclass(frozen=True)
class Survey:
    """Sums over softmax weights, float32.

    Attributes:
        largest: (batch, num_heads, query): each row's largest weight.
        on: By kind, (batch, num_heads, query): each row's sum over the keys of that kind.
        onto: By name of the cells, (batch, num_heads, query): each row's sum over its own of them.
        received: (batch, num_heads, 2, key): each key's sum over the rows at even, and at odd positions.
    """

    largest: Tensor
    on: Mapping[str, Tensor]
    onto: Mapping[str, Tensor]
    received: Tensor


class Surveying:
    """A survey that is being made, tile by tile.

    Args:
        problem: The computation.
        wanted: What the survey is of.
    """

    def __init__(self, problem: Problem, wanted: Wanted) -> None:
        self.problem, self.wanted = problem, wanted
        batch, kv_heads = problem.key.shape[:2]
        groups, view = problem.groups, problem.visibility
        self.largest = problem.query.new_zeros(batch, kv_heads, view.rows * groups)
        self.on = {name: torch.zeros_like(self.largest) for name in wanted.kinds}
        self.onto = {name: problem.query.new_zeros(kv_heads, groups, batch, view.rows) for name in wanted.cells}
        self.received = problem.query.new_zeros(batch, kv_heads, 2, groups, view.keys)
        # Many texts have no token of some kind.
        self.columns = {name: mark.float() for name, mark in wanted.kinds.items() if bool(mark.any())}

    def add(self, band: Band, wide: slice, powers: Tensor) -> None:
        """Add a tile's rows.

        Args:
            band, wide: Where it is.
            powers: Exponentials that are not divided by their rows' sums yet, (batch * kv_head, rows * group, keys).
        """
        into = self.problem.over_rows(self.largest, band)
        torch.maximum(into, powers.amax(dim=-1), out=into)
        grid = self._grid(band, powers)
        groups = self.problem.groups
        for name, column in self.columns.items():
            rows = self.on[name][band.examples, band.heads, band.rows.start * groups : band.rows.stop * groups]
            for number, marks in enumerate(column[band.examples, wide]):
                flat = grid[number].reshape(-1, powers.shape[-1])
                rows[number] += torch.mv(flat, marks).view(rows[number].shape)
        heads = self._heads_of(grid)
        for name, of in self.wanted.cells.items():
            example, row, key = _of_band(band, of(band.rows, wide), len(self.wanted.counted))
            place = grid.stride(0) * (example - band.examples.start) + grid.stride(2) * (row - band.rows.start)
            values = torch.take(powers, heads + (place + key - wide.start))
            into = self.onto[name].flatten(2)[band.heads]
            into.index_add_(2, example * self.problem.visibility.rows + row, values)

    def receive(self, band: Band, wide: slice, powers: Tensor, scale: Tensor) -> None:
        """Add what a tile's keys receive; the tile is written over.

        Args:
            band, wide, powers: As for `add`.
            scale: (batch * kv_head, rows * group): what the band's rows have to be divided by.
        """
        grid = self._grid(band, powers)
        shares = self.wanted.counted[band.examples, None, band.rows, None] / scale.view(grid.shape[:-1])
        grid.mul_(shares[..., None])
        for parity in (0, 1):
            rows = grid[:, :, (parity - band.rows.start) % 2 :: 2]
            self.received[band.examples, band.heads, parity, :, wide] += rows.sum(dim=2)

    def finish(self, scale: Tensor) -> Survey:
        """What was found, given what all rows have to be divided by, (batch, kv_head, query * group)."""
        batch, kv_heads, _ = scale.shape
        groups = self.problem.groups

        def by_head(values: Tensor) -> Tensor:
            return values.view(batch, kv_heads, -1, groups).transpose(2, 3).flatten(1, 2)

        by_row = by_head(scale)
        return Survey(
            largest=by_head(self.largest / scale),
            on={name: by_head(sums / scale) for name, sums in self.on.items()},
            onto={n: sums.permute(2, 0, 1, 3).flatten(1, 2) / by_row for n, sums in self.onto.items()},
            received=self.received.transpose(2, 3).flatten(1, 2),
        )

    @staticmethod
    def _heads_of(grid: Tensor) -> Tensor:
        """int64, (kv_head, group, 1): how far each head's values lie from the first one's, for `torch.take`."""
        kv_heads, groups = (torch.arange(grid.shape[i], device=grid.device) * grid.stride(i) for i in (1, 3))
        return (kv_heads[:, None] + groups)[..., None]

    def _grid(self, band: Band, powers: Tensor) -> Tensor:
        """(example, kv_head, rows, group, keys)."""
        examples, rows = (s.stop - s.start for s in (band.examples, band.rows))
        return powers.view(examples, -1, rows, self.problem.groups, powers.shape[-1])


def _of_band(band: Band, cells: tuple[Tensor, Tensor, Tensor], examples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Those of the band's examples, of so many."""
    if band.examples.stop - band.examples.start == examples:
        return cells
    inside = (cells[0] >= band.examples.start) & (cells[0] < band.examples.stop)
    example, row, key = (places[inside] for places in cells)
    return example, row, key
