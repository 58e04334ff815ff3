"""What one more pass over all tiles tells of softmax weights: the largest, sums by kind of key, by cell, by column.

Products of a tile with a few columns would cost as much as the tile itself: each column is a product of its own, of a
matrix and a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attention.tiles import Band, Problem

Cells = Callable[[slice, slice], tuple[Tensor, Tensor, Tensor]]
"""The cells that are meant in a range of rows and a range of keys: example, row and key of each, int64 (cell,)."""


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


def survey(
    problem: Problem,
    tiles: Iterable[tuple[Band, slice, Tensor]],
    scale: Tensor,
    kinds: Mapping[str, Tensor],
    cells: Mapping[str, Cells],
    counted: Tensor,
) -> Survey:
    """Sum over all tiles.

    Args:
        problem: The computation.
        tiles: Its tiles exponentiated, (batch * kv_head, rows * group, keys); they are written over.
        scale: (batch, kv_head, query * group): what they have to be divided by.
        kinds: bool, (batch, key) each: the keys of a kind.
        cells: The cells of a name.
        counted: bool, (batch, query): rows that count for `received`.
    """
    batch, kv_heads, _ = scale.shape
    groups, keys = problem.groups, problem.visibility.keys
    largest = torch.zeros_like(scale)
    on = {name: torch.zeros_like(scale) for name in kinds}
    onto = {name: scale.new_zeros(batch, problem.visibility.rows, kv_heads, groups) for name in cells}
    received = scale.new_zeros(batch, kv_heads, 2, groups, keys)
    # Many texts have no token of some kind.
    columns = {name: mark.float() for name, mark in kinds.items() if bool(mark.any())}
    shares = counted[:, None, :, None] / scale.view(batch, kv_heads, -1, groups)
    for band, wide, powers in tiles:
        examples = range(band.examples.start, band.examples.stop)
        into = problem.over_rows(largest, band)
        torch.maximum(into, powers.amax(dim=-1), out=into)
        grid = powers.view(len(examples), -1, band.rows.stop - band.rows.start, groups, powers.shape[-1])
        for name, column in columns.items():
            rows = on[name][band.examples, band.heads, band.rows.start * groups : band.rows.stop * groups]
            for number, example in enumerate(examples):
                flat = grid[number].reshape(-1, powers.shape[-1])
                rows[number] += torch.mv(flat, column[example, wide]).view(rows[number].shape)
        for name, of in cells.items():
            _sum_cells(grid, band, of(band.rows, wide), wide.start, onto[name])
        # From here on the tile holds weights.
        grid.mul_(shares[band.examples, band.heads, band.rows, :, None])
        for parity in (0, 1):
            rows = grid[:, :, (parity - band.rows.start) % 2 :: 2]
            received[band.examples, band.heads, parity, :, wide] += rows.sum(dim=2)

    def by_head(sums: Tensor) -> Tensor:
        return (sums / scale).view(batch, kv_heads, -1, groups).transpose(2, 3).flatten(1, 2)

    return Survey(
        largest=by_head(largest),
        on={name: by_head(sums) for name, sums in on.items()},
        onto={name: by_head(sums.transpose(1, 2).flatten(2)) for name, sums in onto.items()},
        received=received.transpose(2, 3).flatten(1, 2),
    )


def _sum_cells(grid: Tensor, band: Band, cells: tuple[Tensor, Tensor, Tensor], first_key: int, into: Tensor) -> None:
    """Add to each row what it gives to its own cells.

    Args:
        grid: (example, kv_head, rows, group, keys).
        into: (batch, query, kv_head, group), written to.
    """
    example, row, key = cells
    if len(grid) < len(into):
        inside = (example >= band.examples.start) & (example < band.examples.stop)
        example, row, key = example[inside], row[inside], key[inside]
    values = grid[example - band.examples.start, :, row - band.rows.start, :, key - first_key]
    into.flatten(0, 1)[:, band.heads].index_add_(0, example * into.shape[1] + row, values)
