"""Which keys each row may look at: from the masks that a module was given, never from what its heads happen to use.

A head that is sharp enough gives exact zeros where it could have looked, so zeros alone say little. They only tell a
causal model from one that is not where no mask is known, and which way round a mask of zeros and ones is meant.

Shapes: `mass` is (batch, query, key), the weights summed over heads; `query` and `key` are bool, (batch, n), False at
padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# What an additive mask adds to hide a key is below this in every half precision; biases of position stay far above.
CLOSED = -5000.0


def masked_visible(mass: Tensor, masks: Sequence[Tensor], query: Tensor, key: Tensor) -> Tensor | None:
    """What all masks together let a row look at, bool (batch or 1, 1, query, key); None where none of them masks.

    Args:
        masks: Additive ones, or such of zeros and ones, which hide either. One that does not fit the weights, or that
            the weights show not to hide what it says, is left out.
    """
    counted = query[:, :, None] & key[:, None, :]
    used = (mass > 0) & counted
    seen: Tensor | None = None
    for mask in masks:
        readings = (cells for grid in _grids(mask, mass.shape) for cells in _readings(grid))
        cells = next((c for c in readings if not bool((used & ~c[:, 0]).any())), None)
        if cells is not None:
            seen = cells if seen is None else seen & cells
    return seen


def open_cells(mask: Tensor, rows: int, keys: int) -> Tensor:
    """bool, (batch or 1, 1, query, key): where an additive mask, or a boolean one of what is open, lets any head look.

    `mask` broadcasts to (batch, head, query, key); more keys than `keys` are cut off.
    """
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))[..., :keys]
    seen = mask > CLOSED if mask.is_floating_point() else mask.bool()
    return seen.any(dim=1, keepdim=True).expand(-1, 1, rows, keys)


def unmasked_visible(mass: Tensor, query: Tensor, key: Tensor, *, cross: bool, causal: bool | None) -> Tensor:
    """Without a mask, bool (1, 1, query, key): all keys, or those up to the row's own in a causal model.

    Args:
        causal: Whether the module says that it is causal; None where it says nothing and its weights have to tell.
            They do where no head looks above the diagonal, but at half of what is below it or more.
    """
    rows, keys = mass.shape[1:]
    everything = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=mass.device)
    if cross or causal is False or rows != keys:
        return everything
    counted = query[:, :, None] & key[:, None, :]
    used = ((mass > 0) & counted).any(dim=0)
    below = everything[0, 0].tril()
    if bool((used & ~below).any()):
        return everything
    enough = causal or 2 * int((used & below).sum()) >= int((counted.any(dim=0) & below).sum())
    return everything.tril() if enough else everything


def _readings(grid: Tensor) -> list[Tensor]:
    """What a mask of four axes can mean, likeliest first."""
    rows, keys = grid.shape[2:]
    if grid.is_floating_point() and bool((grid < 0).any()):
        return [open_cells(grid, rows, keys)]
    ones = grid > 0.5 if grid.is_floating_point() else grid.bool()
    return [open_cells(ones, rows, keys), open_cells(~ones, rows, keys)]


def _grids(mask: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """A mask with all four axes and the weights' rows and keys, in each way in which it fits."""
    batch = shape[0]
    if mask.ndim == 2 and mask.shape[0] == batch:
        yield from _cut(mask[:, None, None, :], shape)
    if mask.ndim == 3 and mask.shape[0] == batch:
        yield from _cut(mask[:, None], shape)
    else:
        yield from _cut(mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)), shape)


def _cut(mask: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    batch, rows, keys = shape
    if mask.ndim != 4 or mask.shape[0] not in (1, batch) or mask.shape[-1] < keys:
        return
    if mask.shape[2] > rows and mask.shape[2] == mask.shape[3]:
        mask = mask[:, :, :rows]
    if mask.shape[2] in (1, rows):
        yield mask[..., :keys].expand(-1, -1, rows, -1)
