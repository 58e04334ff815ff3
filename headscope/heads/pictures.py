"""Keeping one text's attention for pictures: as it is, or pooled to a screen's resolution while it is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.capture.blocks import RowBlock, Rows
from headscope.errors import InputError, check_type
from headscope.heads.statistics import Layer
from headscope.heads.tokens import token_labels
from headscope.models.inputs import Batch
from headscope.models.pruned import head_numbers
from headscope.models.selection import Selection
from headscope.models.sites import Site
from headscope.results import AttentionMap, tile_labels

Maps = bool | Literal["pooled", "mean"]
"""Which matrices to keep: none, those of the model, of long texts pooled ones, or each layer's mean over its heads."""


def check_maps(maps: Maps) -> None:
    """Raises InputError for text that is neither `pooled` nor `mean`."""
    check_type("maps", maps, (bool, str), "True, False, 'pooled' or 'mean'")
    if isinstance(maps, str) and maps not in ("pooled", "mean"):
        raise InputError(
            f"maps is {maps!r}",
            "Give True for the model's matrices, 'pooled' for pictures, 'mean' for means, or False.",
        )


def tile_of(queries: int, keys: int, most: int) -> int:
    """Side of the square tiles, in tokens, that make at most `most` rows and columns of a matrix."""
    return max(1, -(-max(queries, keys) // most))


@dataclass
class Tiles:
    """The mean and the largest weight of each tile, from rows that come in order and in any portions.

    Where the tile is one token, weights stay as they are and there is no `peak`. Tiles at the far edges may be smaller;
    keys that a row cannot see count as the zeros that they are in the matrix.

    Attributes:
        queries, keys: Size of the matrix, in tokens.
        tile: Side of a tile, in tokens.
        sums: float32, (heads, tile, tile): weights summed.
        peak: float32, (heads, tile, tile): largest weights, None where the tile is one token.
    """

    queries: int
    keys: int
    tile: int
    sums: Tensor
    peak: Tensor | None

    @staticmethod
    def empty(heads: int, queries: int, keys: int, tile: int, device: torch.device) -> Tiles:
        """No rows yet."""
        sums = torch.zeros(heads, -(-queries // tile), -(-keys // tile), device=device)
        return Tiles(queries, keys, tile, sums, torch.full_like(sums, -torch.inf) if tile > 1 else None)

    def add(self, first: int, weights: Tensor) -> None:
        """Add the rows from `first` on, float32 (heads, rows, keys)."""
        if self.peak is None:
            self.sums[:, first : first + weights.shape[1]] = weights
            return
        columns = self.keys // self.tile
        whole = weights[..., : columns * self.tile].view(*weights.shape[:2], columns, self.tile)
        sums, peak = whole.sum(dim=-1), whole.amax(dim=-1)
        if self.keys % self.tile:
            rest = weights[..., columns * self.tile :]
            sums = torch.cat([sums, rest.sum(dim=-1, keepdim=True)], dim=-1)
            peak = torch.cat([peak, rest.amax(dim=-1, keepdim=True)], dim=-1)
        start = 0
        while start < weights.shape[1]:
            row = (first + start) // self.tile
            part = slice(start, (row + 1) * self.tile - first)
            self.sums[:, row] += sums[:, part].sum(dim=1)
            torch.maximum(self.peak[:, row], peak[:, part].amax(dim=1), out=self.peak[:, row])
            start = part.stop

    def mean(self) -> NDArray[np.float32]:
        """Mean weights of all tiles, (heads, tile, tile)."""
        if self.peak is None:
            return self.sums.cpu().numpy()
        rows, columns = (self._sides(n) for n in (self.queries, self.keys))
        return (self.sums / (rows[:, None] * columns)).cpu().numpy()

    def _sides(self, count: int) -> Tensor:
        starts = torch.arange(0, count, self.tile, device=self.sums.device)
        return (count - starts).clamp(max=self.tile)


@dataclass
class _Layer:
    """One layer's selected heads, labels of its rows and columns, and what is known of their weights.

    Attributes:
        heads: Their original numbers.
        places: Where they lie among the layer's heads.
        mean: Keep their mean alone.
    """

    heads: tuple[int, ...]
    places: tuple[int, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    tiles: Tiles
    mean: bool = False

    def add(self, first: int, weights: Tensor) -> bool:
        """Add the rows from `first` on, (all heads, rows, keys), without padding. Whether these are the last."""
        left = self.tiles.queries - first
        part = weights[:, :left, : self.tiles.keys]
        if len(self.places) < len(part):
            part = torch.stack([part[place] for place in self.places])
        if self.mean:
            part = part.mean(dim=0, keepdim=True)
        self.tiles.add(first, part)
        return weights.shape[1] >= left

    def map(self, layer: Layer) -> AttentionMap:
        """Everything, on the CPU."""
        tiles = self.tiles
        if tiles.peak is None:
            return AttentionMap(*layer, () if self.mean else self.heads, tiles.mean(), self.queries, self.keys)
        queries, keys = (tile_labels(n, tiles.tile) for n in (tiles.queries, tiles.keys))
        return AttentionMap(
            *layer,
            self.heads,
            tiles.mean(),
            queries,
            keys,
            tile=tiles.tile,
            peak=tiles.peak.cpu().numpy(),
            tokens=(tiles.queries, tiles.keys),
        )


@dataclass
class Keep:
    """The consumer that keeps the selected heads' attention on one text of a batch, without the batch's padding.

    Attributes:
        batch: The batch that the text is in.
        row: The text's place in it.
        heads: The heads to keep; layers that have none of them are left out.
        words, exclude_special: How the batch's tokens are merged.
        most: Above so many rows or columns matrices are pooled; None pools nothing.
        mean: Keep each layer's mean over those heads alone.
    """

    batch: Batch
    row: int
    heads: Selection
    words: bool
    exclude_special: bool
    most: int | None = None
    mean: bool = False
    _layers: dict[Layer, _Layer] = field(default_factory=dict)
    _done: dict[Layer, AttentionMap] = field(default_factory=dict)
    _labels: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)

    def rows(self, site: Site, rows: Rows) -> None:
        """Add the text's rows."""
        key = (site.stack, site.layer)
        if key in self._done:
            # What follows the text's last row is padding.
            return
        for block in rows.blocks():
            layer = self._layers.get(key) or self._layers.setdefault(key, self._empty(site, block))
            if not layer.heads:
                return
            if layer.add(block.first_row, block.weights[self.row]):
                # A finished layer leaves an accelerator's memory.
                self._done[key] = self._layers.pop(key).map(key)
                return

    def maps(self) -> tuple[AttentionMap, ...]:
        """What was kept, layer by layer."""
        return tuple(self._done.values())

    def _empty(self, site: Site, block: RowBlock) -> _Layer:
        numbers = head_numbers(site.module, block.weights.shape[1])
        heads = self.heads.within(numbers)
        queries, keys = (
            self._labels_of(name, size)
            for name, size in ((site.query_axis, block.view.rows), (site.key_axis, block.view.keys))
        )
        tile = 1 if self.most is None else tile_of(len(queries), len(keys), self.most)
        matrices = min(1, len(heads)) if self.mean else len(heads)
        tiles = Tiles.empty(matrices, len(queries), len(keys), tile, block.weights.device)
        return _Layer(heads, tuple(numbers.index(h) for h in heads), queries, keys, tiles, self.mean)

    def _labels_of(self, name: str, size: int) -> tuple[str, ...]:
        """One label a token of the text, made once for all layers."""
        if (name, size) not in self._labels:
            found = token_labels(self.batch, name, self.row, size, self.words, self.exclude_special)
            self._labels[name, size] = found
        return self._labels[name, size]
