"""The single changes that pruning makes to a module: each knows all that it needs before the first one is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class Slot:
    """A parameter or buffer where it lives."""

    owner: nn.Module = field(repr=False)
    name: str

    @property
    def value(self) -> Tensor:
        """Its tensor: a parameter as such."""
        found: Tensor | None = self.owner._parameters.get(self.name)
        found = self.owner._buffers.get(self.name) if found is None else found
        assert found is not None
        return found

    def replace(self, new: Tensor) -> None:
        """Put another tensor there; a parameter stays one, and needs a gradient as before."""
        old = self.owner._parameters.get(self.name)
        if old is None:
            self.owner._buffers[self.name] = new
        else:
            self.owner._parameters[self.name] = nn.Parameter(new, requires_grad=old.requires_grad)
        _say_widths(self.owner)


@dataclass(frozen=True)
class Cut:
    """Keep some entries along one axis of a tensor.

    Attributes:
        index: int64, (kept,): the entries that stay, ascending.
        flat: The axis counts after all axes but the first were flattened into one: heads and their widths lie on
            several axes of the weight.
    """

    slot: Slot
    axis: int
    index: Tensor
    flat: bool = False

    def result(self) -> Tensor:
        """The new tensor, contiguous, in memory of its own. Works without values, too (the meta device)."""
        old = self.slot.value.detach()
        index = self.index.to(old.device)
        if not self.flat or self.axis == 0:
            return old.index_select(self.axis, index).contiguous()
        return old.flatten(1).index_select(1, index).reshape(old.shape[0], -1, *old.shape[2:])


@dataclass(frozen=True)
class Zero:
    """Set entries along one axis of a weight, flattened as in a flat `Cut`, to zero; counted in what a cut leaves."""

    slot: Slot
    axis: int
    index: Tensor

    def apply(self) -> None:
        """A weight that loses nothing is not written to, and nothing happens to one without values."""
        weight = self.slot.value
        if not len(self.index):
            return
        with torch.no_grad():
            # A view, since what flattens is contiguous; written through to the weight.
            weight.detach().flatten(1).index_fill_(self.axis, self.index.to(weight.device), 0.0)


@dataclass(frozen=True)
class Set:
    """Another value for a plain attribute of a module."""

    owner: nn.Module = field(repr=False)
    name: str
    value: Any

    def apply(self) -> None:
        """Set it."""
        setattr(self.owner, self.name, self.value)


@dataclass
class Edits:
    """All changes to one attention module and what lies beside it."""

    cuts: list[Cut] = field(default_factory=list)
    zeros: list[Zero] = field(default_factory=list)
    sets: list[Set] = field(default_factory=list)


def _say_widths(owner: nn.Module) -> None:
    """Let a module's own words for its widths follow its weight."""
    weight = owner._parameters.get("weight")
    if weight is None:
        return
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = weight.shape
    elif isinstance(owner, Conv1D):
        owner.nx, owner.nf = weight.shape
    elif isinstance(owner, nn.Conv1d | nn.Conv2d):
        owner.out_channels, owner.in_channels = weight.shape[:2]
    elif isinstance(owner, nn.Embedding):
        owner.num_embeddings, owner.embedding_dim = weight.shape
