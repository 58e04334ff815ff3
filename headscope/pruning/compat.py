"""Helpers that transformers 4 had for pruning and that transformers 5 dropped or left with faults."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def find_pruneable_heads_and_indices(
    heads: Iterable[int], n_heads: int, head_size: int, already_pruned_heads: Iterable[int]
) -> tuple[set[int], Tensor]:
    """Which heads are still to be removed, and which rows of a projection stay.

    Args:
        heads: Heads to remove, in the numbers of the original layer.
        n_heads: Heads that the layer has now.
        head_size: Rows of one head.
        already_pruned_heads: Heads that were removed before, in original numbers.

    Returns:
        The heads without those that are gone, in original numbers; and int64, (rows that stay,), ascending, of the
        layer as it is now.

    Raises:
        IndexError: The layer never had such a head.
    """
    before = {int(h) for h in already_pruned_heads}
    total = n_heads + len(before)
    asked = {int(h) for h in heads}
    if any(not 0 <= h < total for h in asked):
        raise IndexError(f"heads {sorted(asked)} are not all within 0-{total - 1}, the layer's original heads")
    wanted = asked - before
    left = [h for h in range(total) if h not in before]
    stays = torch.tensor([h not in wanted for h in left], dtype=torch.bool)
    return wanted, stays.repeat_interleave(head_size).nonzero().flatten()


def prune_linear_layer(layer: nn.Linear, index: Tensor, dim: int = 0) -> nn.Linear:
    """A new linear layer with some of another one's outputs (`dim` 0) or inputs (`dim` 1).

    Unlike the one in `transformers.pytorch_utils` it keeps the dtype and what needs a gradient.
    """
    new = nn.Linear(1, 1, bias=layer.bias is not None, device="meta")
    _fill(new, layer, index, dim, outputs=0)
    new.out_features, new.in_features = new.weight.shape
    return new


def prune_conv1d_layer(layer: Conv1D, index: Tensor, dim: int = 1) -> Conv1D:
    """As `prune_linear_layer` for GPT-2's layer, whose weight is (in, out): outputs are `dim` 1, inputs `dim` 0."""
    new: Conv1D = Conv1D(1, 1)  # type: ignore[no-untyped-call]  # transformers leaves it without types
    _fill(new, layer, index, dim, outputs=1)
    new.nx, new.nf = new.weight.shape
    return new


def prune_layer(layer: nn.Linear | Conv1D, index: Tensor, dim: int | None = None) -> nn.Linear | Conv1D:
    """`prune_linear_layer` or `prune_conv1d_layer`; without `dim`, outputs are cut.

    Raises:
        TypeError: The layer is neither.
    """
    if isinstance(layer, Conv1D):
        return prune_conv1d_layer(layer, index, 1 if dim is None else dim)
    if isinstance(layer, nn.Linear):
        return prune_linear_layer(layer, index, 0 if dim is None else dim)
    raise TypeError(f"can only prune nn.Linear and Conv1D, not {type(layer).__name__}")


def _fill(new: nn.Linear | Conv1D, old: nn.Linear | Conv1D, index: Tensor, dim: int, outputs: int) -> None:
    index = index.to(old.weight.device)
    new.weight = nn.Parameter(old.weight.detach().index_select(dim, index), requires_grad=old.weight.requires_grad)
    if old.bias is not None:
        bias = old.bias.detach()
        kept = bias.index_select(0, index) if dim == outputs else bias.clone()
        new.bias = nn.Parameter(kept, requires_grad=old.bias.requires_grad)
    new.train(mode=old.training)
