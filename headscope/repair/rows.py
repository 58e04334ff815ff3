"""Which rows of a batch's activations are tokens of a text, and which of them are held back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.models.batches import Batch

# One text in so many judges the ridge.
HOLD_BACK = 5


@dataclass(frozen=True)
class Rows:
    """Rows of activations whose leading axes are flattened.

    Attributes:
        fitted, held: int64: places of the tokens that are fitted, and of those that are held back. No padding.
    """

    fitted: Tensor
    held: Tensor


def rows_of(batch: Batch, axis: str, shape: torch.Size, texts: int) -> Rows:
    """The tokens among a batch's rows.

    Every fifth text is held back, by its place among all texts, so that batches do not matter; of fewer than five texts
    the last fifth of each.

    Args:
        axis: The axis of the batch that the rows come from; where it has none, nothing is padding.
        shape: Of the activations, (batch, n, features), (batch * n, features) or (n, batch, features).
        texts: How many there are in all batches.
    """
    rows, size = shape[:-1].numel(), len(batch.order)
    if rows % size:
        size = 1
    n = rows // size
    tokens = batch.axes.get(axis)
    lengths = torch.full((size,), n)
    if tokens is not None and size == len(tokens.lengths) and n >= tokens.special.shape[1]:
        lengths = tokens.lengths
    positions = torch.arange(n).expand(size, n)
    if texts >= HOLD_BACK and size == len(batch.order):
        held = (torch.tensor(batch.order) % HOLD_BACK == HOLD_BACK - 1)[:, None].expand(size, n)
    else:
        held = positions >= lengths[:, None] - lengths[:, None] // HOLD_BACK
    real = positions < lengths[:, None]
    if len(shape) > 2 and tuple(shape[:2]) == (n, size) != (size, n):
        real, held = real.mT, held.mT
    real, held = real.flatten(), held.flatten()
    return Rows((real & ~held).nonzero().flatten(), (real & held).nonzero().flatten())
