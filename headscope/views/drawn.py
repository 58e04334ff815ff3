"""What a picture shows of an attention map: the weights themselves, or means or largest weights of tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.results import AttentionMap
from headscope.views.figure_base import PLAIN, Look, decades, place_bar, weight_scale
from headscope.views.heatmaps import DPI
from headscope.views.pooling import pooled

# A matrix whose sides differ by more keeps the short one whole: tiles are then parts of a row, or of a column.
_OBLONG = 3


@dataclass(frozen=True)
class Drawn:
    """What a picture shows of a map.

    Attributes:
        weights: float32, (heads, query, key): weights, or tiles' means or largest weights.
        kind: `mean` or `largest`; empty where nothing is pooled.
        tile: Sides of a tile, in query and key tokens.
        tokens: How many query and key tokens there are.
        positions: The map came pooled, and has positions for labels.
        look: What the user chose.
    """

    weights: NDArray[np.float32]
    kind: str
    tile: tuple[int, int]
    tokens: tuple[int, int]
    positions: bool
    look: Look = PLAIN

    @staticmethod
    def of(attention: AttentionMap, largest: bool, cells: int, look: Look = PLAIN) -> Drawn:
        """At most `cells` rows and columns.

        Of a map that did not come pooled each tile shows its largest weight: a mean would wash out the diagonals, which
        are one cell wide.
        """
        rows, columns = attention.weights.shape[1:]
        if attention.tile == 1 and max(rows, columns) > max(cells, _OBLONG * min(rows, columns)):
            return _oblong(attention, cells, look)
        small = pooled(attention, cells)
        tokens = small.tokens or (small.weights.shape[1], small.weights.shape[2])
        tile = (small.tile, small.tile)
        if small.peak is not None and (largest or attention.tile == 1):
            return Drawn(small.peak, "largest", tile, tokens, attention.tile > 1, look)
        return Drawn(small.weights, "mean" if small.tile > 1 else "", tile, tokens, attention.tile > 1, look)

    @property
    def title(self) -> str:
        """For the title of a pooled map, of which there are two pictures."""
        return f" – {self.kind} of {self._tiles}" if self.positions else ""

    @property
    def _tiles(self) -> str:
        return f"{self.tile[0]} × {self.tile[1]} tokens"

    def largest(self, index: int) -> float:
        """The largest value of one head; of means, that of whole tiles: one of few tokens may be far above."""
        weights = self.weights[index]
        if self.kind == "mean":
            rows, columns = (max(1, count // side) for count, side in zip(self.tokens, self.tile, strict=True))
            weights = weights[:rows, :columns]
        return float(np.fmax.reduce(weights, axis=None, initial=0.0))

    def top(self, index: int) -> float:
        """The value of one head's last colour: its largest, or the user's."""
        return self.largest(index) if self.look.vmax is None else self.look.vmax

    def scale(self, largest: float) -> Normalize:
        """Colours of weights from 0 to `largest`."""
        return weight_scale(largest, 4 if self.positions else 2)

    def bar(self, figure: Figure, largest: float, label: str, place: tuple[float, float, float]) -> None:
        """A colour bar at (left, top, height) in inches, with a note on what a cell is where it is a tile."""
        note = f",\n{self.kind} of {self._tiles}" if self.kind else ""
        name = "fourth-root scale" if self.positions else "square-root scale"
        bar = place_bar(figure, self.scale(largest), *place, f"{label}{note},\n{name}", self.look.cmap)
        if self.positions:
            ticks = decades(largest)
            texts = [np.format_float_positional(t, precision=2, fractional=False, trim="-") for t in ticks]
            bar.set_ticks(ticks, labels=texts)

    def inches(self, usual: float) -> float:
        """The longer side: `usual`, or near it with a whole number of pixels a cell."""
        if not self.positions:
            return usual
        cells = max(self.tokens) / self.tile[0]
        return max(1, round(usual * DPI / cells)) * cells / DPI


def _oblong(attention: AttentionMap, cells: int, look: Look) -> Drawn:
    """The largest weight of every so many keys of a row, or queries of a column."""
    tokens = (attention.weights.shape[1], attention.weights.shape[2])
    axis = 1 if tokens[0] > tokens[1] else 2
    step = -(-max(tokens) // cells)
    weights = np.fmax.reduceat(attention.weights, np.arange(0, max(tokens), step), axis=axis)
    return Drawn(weights, "largest", (step, 1) if axis == 1 else (1, step), tokens, False, look)
