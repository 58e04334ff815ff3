"""Row blocks: what every consumer of attention sees, whichever engine made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headscope.models.sites import Site


@dataclass(frozen=True)
class RowBlock:
    """Some query rows of one layer's attention, for one batch. Sequences are padded on the right.

    Attributes:
        weights: float32, (batch, head, rows, key): softmax weights as the model computes them; zeros at padding.
        first_row: Position of the block's first query row.
        valid: bool, (batch, 1 or head, rows): False for rows that never count, padding first of all.
        visible: bool, (batch or 1, 1, rows, key): the keys that a row may look at (mask, window, padding).
        special: bool, (batch or 1, key): keys that are special tokens.
        lengths: int64, (batch,): real query tokens a sequence.
        cross: Keys are another sequence's tokens, so positions cannot be compared.
        first_key: First key column that counts; 1 where the first column has been removed.
    """

    weights: Tensor
    first_row: int
    valid: Tensor
    visible: Tensor
    special: Tensor
    lengths: Tensor
    cross: bool = False
    first_key: int = 0

    @property
    def positions(self) -> Tensor:
        """int64, (rows,): the position of each row's query token."""
        return torch.arange(self.first_row, self.first_row + self.weights.shape[2], device=self.weights.device)


class Consumer(Protocol):
    """What an engine feeds. A consumer must not keep or change the block's tensors; it may keep sums or copies."""

    def rows(self, site: Site, block: RowBlock) -> None:
        """Take the next row block of `site`; blocks of one site come in order, all of one batch before the next."""
