"""Which column, if any, draws attention from everywhere: chosen on the rows at even positions, scored on the others.

Gu et al. 2025 ask this of the first token. Asked of every token, the largest of many means would be large by chance
alone, had it not been chosen on other rows than those that it is measured on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headscope.attention.visibility import Target, Visibility
from headscope.capture.blocks import Rows
from headscope.heads.catalogue.kinds import OTHER_SPECIAL, PUNCTUATION
from headscope.heads.catalogue.layer_types import LayerTypes
from headscope.heads.catalogue.text_types import COLUMN, SINK
from headscope.heads.clusters import ClusterSums

# Rows of each half that must see a column: fewer say nothing of "everywhere".
_LEAST_ROWS = 8


@dataclass(frozen=True, eq=False)
class ColumnSums:
    """Sums over the rows of one batch.

    Attributes:
        received: float32, (batch, head, half, key): weights from other rows, summed.
        counts, expected: (batch, half, key): other rows that see a key, and what even attention of those gives it.
        ordinary: bool, (batch or 1, key): keys that are asked about.
    """

    received: Tensor
    counts: Tensor
    expected: Tensor
    ordinary: Tensor

    @staticmethod
    def of(rows: Rows) -> ColumnSums:
        """Those of some rows, of which no tensor is kept."""
        received = rows.received().clone()
        own, real = Target(offset=0), rows.positions < rows.lengths[:, None]
        halves = torch.stack([real & (rows.positions % 2 == parity) for parity in (0, 1)], dim=1)
        weights = rows.at(own).masked_fill(~(real[:, None] & rows.has(own) & rows.sees(own)), 0)
        diagonal = weights[:, :, None] * halves[:, None]
        keys = min(rows.size, received.shape[-1] - rows.first_row)
        received[..., rows.first_row : rows.first_row + keys] -= diagonal[..., :keys]
        return ColumnSums(received, *_columns_of(rows), _ordinary(rows))

    def __add__(self, other: ColumnSums) -> ColumnSums:
        """Together with more rows of the same layer and batch."""
        return replace(self, received=self.received + other.received)

    def chosen(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each text and head: the column, its mean weight on odd rows, what even attention gives it, whether any is.

        (batch, head) each.
        """
        mean = self.received / self.counts[:, None].clamp(min=1)
        allowed = (self.counts >= _LEAST_ROWS).all(dim=1) & self.ordinary
        column = mean[:, :, 0].masked_fill(~allowed[:, None], -1.0).argmax(dim=-1)
        score = mean[:, :, 1].gather(-1, column[..., None])[..., 0]
        chance = (self.expected[:, 1] / self.counts[:, 1].clamp(min=1)).expand(len(column), -1).gather(-1, column)
        return column, score, chance, allowed.any(dim=-1)[:, None].expand(column.shape)


def column_sinks(found: ColumnSums) -> LayerTypes:
    """One cluster a text: the score of the column that was chosen."""
    _, score, chance, known = found.chosen()
    value, expected, rows = (
        np.asarray((t * known).double().cpu().numpy()) for t in (score, chance, torch.ones_like(score))
    )
    above = ((value > SINK) & (expected < SINK) & (rows > 0)).sum(axis=0) * 1.0
    return LayerTypes({COLUMN: ClusterSums.of(value, expected, rows)}, above={COLUMN: (above, rows.sum(axis=0))})


def _ordinary(rows: Rows) -> Tensor:
    """bool, (batch, key): keys that no other type is about: not the first, not special, no punctuation."""
    keep = torch.ones_like(rows.special)
    keep[:, 0] = False
    keep = keep & ~rows.special
    if rows.tokens is not None:
        for name in (OTHER_SPECIAL, PUNCTUATION):
            if name in rows.tokens.marks:
                keep = keep & ~rows.tokens.marks[name]
    return keep


def _columns_of(rows: Rows) -> tuple[Tensor, Tensor]:
    """Other rows of each half that see a column, and what even attention of those gives it, (batch, half, key)."""
    view, lengths = rows.view, rows.lengths
    found: tuple[Tensor, Tensor] = view.remember(("columns", lengths), lambda: _count(view, lengths))
    return found


def _count(view: Visibility, lengths: Tensor) -> tuple[Tensor, Tensor]:
    counts, expected = torch.zeros(()), torch.zeros(())
    for start, stop in view.chunks():
        cells = view.cells(start, stop, lengths.device)[:, 0].float()
        share = cells / cells.sum(dim=-1, keepdim=True).clamp(min=1)
        positions = torch.arange(start, stop, device=lengths.device)
        own = positions[:, None] == torch.arange(view.keys, device=lengths.device)
        counted = (positions < lengths[:, None]).float()
        halves = torch.stack([counted * (positions % 2 == 0), counted * (positions % 2 == 1)], dim=1)
        counts = counts + halves @ cells.masked_fill(own, 0)
        expected = expected + halves @ share.masked_fill(own, 0)
    return counts, expected
