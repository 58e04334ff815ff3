"""Rows that show a type, with the tokens that they looked at: found while attention is read, kept as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headscope.capture.blocks import RowBlock, Rows, StreamedRows
from headscope.heads.catalogue.result import Example, Looked
from headscope.heads.statistics import Layer
from headscope.heads.tokens import token_labels
from headscope.models.batches import Batch
from headscope.models.sites import Site

# Mean value from which a head has an example, keys that are named, tokens around the row, rows read anew a layer.
_LEAST, _KEYS, _AROUND, _MOST_ROWS = 0.3, 3, 12, 8


@dataclass(frozen=True)
class _Wanted:
    """A row that shows a measure best so far."""

    name: str
    head: int
    text: int
    row: int
    value: float


@dataclass
class Examples:
    """Keeps one example a measure and head, of the first batch in which there is one.

    Attributes:
        batch: The batch that is read.
        words, exclude_special: How its tokens are merged.
    """

    batch: Batch
    words: bool = False
    exclude_special: bool = False
    _wanted: dict[tuple[str, int], _Wanted] = field(default_factory=dict)
    _best: dict[Layer, dict[tuple[str, int], tuple[float, Example]]] = field(default_factory=dict)
    _heads: dict[Layer, int] = field(default_factory=dict)
    _labels: dict[tuple[str, int, int], tuple[str, ...]] = field(default_factory=dict)

    def look(self, site: Site, rows: Rows, name: str, value: Tensor, eligible: Tensor) -> None:
        """Choose each head's best row, of those that were just measured."""
        known = self._best.get((site.stack, site.layer), {})
        masked = value.masked_fill(~eligible, -1.0)
        heads, size = masked.shape[1:]
        self._heads[site.stack, site.layer] = heads
        if rows.size == rows.view.rows:
            counted = eligible.expand(masked.shape).sum(dim=(0, 2)).clamp(min=1)
            often = masked.clamp(min=0).sum(dim=(0, 2)) / counted >= _LEAST
        else:
            # Of some rows, the mean over all is not known yet.
            often = masked.amax(dim=(0, 2)) >= _LEAST
        if not bool(often.any()):
            return
        best = masked.transpose(0, 1).flatten(1).max(dim=1)
        for head, (shown, at, flat) in enumerate(zip(*(t.tolist() for t in (often, *best)), strict=True)):
            if shown and ((name, head) not in known or known[name, head][0] < 0.9 * at):
                self._wanted[name, head] = _Wanted(name, head, flat // size, flat % size, at)

    def keep(self, site: Site, rows: Rows) -> None:
        """Read the chosen rows and forget the choice."""
        layer = (site.stack, site.layer)
        wanted, self._wanted = list(self._wanted.values()), {}
        if not wanted:
            return
        chosen = _most_wanted(wanted, _MOST_ROWS) if isinstance(rows, StreamedRows) else wanted
        weights = _rows_of(rows, sorted({w.row for w in chosen}))
        places = {row: i for i, row in enumerate(sorted({w.row for w in chosen}))}
        if weights is None:
            return
        for w in chosen:
            values, keys = weights[w.text, w.head, places[w.row]].topk(min(_KEYS, weights.shape[-1]))
            pairs = list(zip(values.tolist(), keys.tolist(), strict=True))
            example = self._example(site, w.text, rows.first_row + w.row, pairs, rows.view.rows, rows.view.keys)
            self._best.setdefault(layer, {})[w.name, w.head] = (w.value, example)

    def of(self, layer: Layer) -> dict[str, tuple[Example | None, ...]]:
        """What was kept of a layer: by measure, an example a head or None."""
        found, heads = self._best.get(layer, {}), self._heads.get(layer, 0)
        names = dict.fromkeys(name for name, _ in found)
        return {n: tuple(found[n, h][1] if (n, h) in found else None for h in range(heads)) for n in names}

    def _example(
        self, site: Site, text: int, row: int, pairs: Sequence[tuple[float, int]], rows: int, keys: int
    ) -> Example:
        queries, columns = self._names(site.query_axis, text, rows), self._names(site.key_axis, text, keys)
        near = " ".join(queries[max(0, row - _AROUND) : row + _AROUND + 1])
        looked = tuple(
            Looked(key, columns[key], round(value, 6)) for value, key in pairs if value > 0.01 or value == pairs[0][0]
        )
        return Example(near, row, queries[row], tuple(k for k in looked if k.position < len(columns)))

    def _names(self, axis: str, text: int, size: int) -> tuple[str, ...]:
        key = (axis, text, size)
        if key not in self._labels:
            self._labels[key] = token_labels(self.batch, axis, text, size, self.words, self.exclude_special)
        return self._labels[key]


def _most_wanted(wanted: Sequence[_Wanted], most: int) -> list[_Wanted]:
    """Those in the rows that show most, at most so many rows."""
    best: dict[int, float] = {}
    for w in wanted:
        best[w.row] = best.get(w.row, 0.0) + w.value
    rows = set(sorted(best, key=lambda row: -best[row])[:most])
    return [w for w in wanted if w.row in rows]


def _rows_of(rows: Rows, places: list[int]) -> Tensor | None:
    """The weights of some rows, (batch, head, len(places), key)."""
    if isinstance(rows, StreamedRows):
        return rows.weights.rows(places)
    if isinstance(rows, RowBlock):
        return rows.weights[:, :, places]
    return torch.cat([b.weights for b in rows.blocks()], dim=2)[:, :, places]
