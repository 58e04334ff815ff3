"""The consumer that keeps, of a batch's last rows, the key with the largest weight: no matrix is ever made."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.attention.visibility import Visibility
from headscope.capture.blocks import Rows, StreamedRows
from headscope.heads.catalogue.needles import Prompt
from headscope.heads.statistics import Layer
from headscope.models.sites import Site


@dataclass(frozen=True, eq=False)
class Tops:
    """One layer's rows of one trial.

    Attributes:
        key: int64, (head, row): the key with the largest weight.
        weight: float32, (head, row): that weight.
        seen: bool, (row, position): whether a row may look at each of the needle's positions.
        counts: int64, (row,): how many keys it may look at.
    """

    key: NDArray[np.int64]
    weight: NDArray[np.float32]
    seen: NDArray[np.bool_]
    counts: NDArray[np.int64]


@dataclass
class TopKeys:
    """The consumer that keeps the largest weight of each of a batch's last rows, and where it is."""

    first: int = 0
    _keys: dict[Layer, list[Tensor]] = field(default_factory=dict)
    _weights: dict[Layer, list[Tensor]] = field(default_factory=dict)
    _views: dict[Layer, Visibility] = field(default_factory=dict)

    def start(self, first: int) -> None:
        """Forget everything; rows from `first` on are wanted."""
        self.first, self._keys, self._weights, self._views = first, {}, {}, {}

    def rows(self, site: Site, rows: Rows) -> None:
        """Take those of the rows that are wanted."""
        last = rows.first_row + rows.size
        if rows.cross or last <= self.first:
            return
        if isinstance(rows, StreamedRows):
            weights = rows.weights.rows(range(self.first, last))
            self._keep((site.stack, site.layer), rows.view, weights)
            return
        for block in rows.blocks():
            self._keep((site.stack, site.layer), rows.view, block.weights[:, :, max(self.first - block.first_row, 0) :])

    def _keep(self, layer: Layer, view: Visibility, weights: Tensor) -> None:
        if weights.shape[2]:
            weight, key = weights.max(dim=-1)
            self._keys.setdefault(layer, []).append(key.cpu())
            self._weights.setdefault(layer, []).append(weight.cpu())
            self._views[layer] = view

    def of(self, row: int, prompt: Prompt, size: int) -> dict[Layer, Tops]:
        """By layer, what there is of one text's `size` rows from the prompt's last one on."""
        start = len(prompt.ids) - 1 - self.first
        part = slice(start, start + size)
        result = {}
        for layer, view in self._views.items():
            device = torch.device("cpu")
            seen = view.cells(self.first + start, self.first + start + size, device)
            seen = seen[min(row, len(seen) - 1), 0]
            key, weight = (torch.cat(t[layer], dim=2)[row, :, part] for t in (self._keys, self._weights))
            on = seen[:, prompt.positions.start : prompt.positions.stop]
            result[layer] = Tops(key.numpy(), weight.float().numpy(), on.numpy(), seen.sum(dim=-1).numpy())
        return result
