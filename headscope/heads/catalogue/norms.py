"""Norms over features, told by what they do to numbers: neither their names nor how they keep their gains matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# What rounding of half-precision models leaves, relative.
_ROUNDING = 2e-2
# Below this a vector is zero.
_LEAST = 1e-12


@dataclass(frozen=True, eq=False)
class Norm:
    """x -> gain * x / rms(x), with the mean over features taken off x first where it is `centred`. Biases left out.

    Attributes:
        gain: float32, (features,).
    """

    gain: Tensor
    centred: bool

    def before(self, weights: Tensor) -> Tensor:
        """Weights that read the norm's result, (..., features), as float32 ones that read x, but for its scale."""
        return self._middle(weights.float() * self.gain)

    def after(self, results: Tensor) -> Tensor:
        """What becomes of things that add up to x, float32 (..., features), but for its scale."""
        return self._middle(results.float()) * self.gain

    def of(self, x: Tensor) -> Tensor:
        """What becomes of x itself, float32 (..., features), its scale included."""
        middle = self._middle(x.float())
        return self.after(x) / middle.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=_LEAST)

    def _middle(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=-1, keepdim=True) if self.centred else x


def norm_of(module: nn.Module, like: Tensor) -> Norm | None:
    """A module that takes (..., features) as a norm over features, None where it is none."""
    generator = torch.Generator().manual_seed(0)
    rows = like.numel() // like.shape[-1]
    # Large, with a mean, and of two scales: then a norm's epsilon does not matter, and nothing else looks like one.
    scale = torch.tensor([16.0, 64.0]).repeat(rows)[:rows, None]
    x = (scale * (torch.rand(rows, like.shape[-1], generator=generator) - 0.3)).to(like.dtype).float()
    try:
        with torch.no_grad():
            up, down = (module.forward((s * x).reshape(like.shape).to(like)).float().cpu() for s in (1.0, -1.0))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    result = ((up - down) / 2).reshape(rows, -1)
    for centred in (False, True):
        u = x - x.mean(dim=-1, keepdim=True) if centred else x
        u = u / u.square().mean(dim=-1, keepdim=True).sqrt()
        gain = (result * u).sum(dim=0) / u.square().sum(dim=0)
        if bool(gain.any()) and bool((result - gain * u).abs().max() <= _ROUNDING * gain.abs().max()):
            return Norm(gain.to(like.device), centred)
    return None
