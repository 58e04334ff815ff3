"""Least squares on sums over tokens: which change of a weight makes up for what is missing from the stream.

With x what goes into a projection and r what its result lacks, both of a token of weight w, the change D of the weight
(in, out) that leaves the least Σ w |r - D'x|² is (Σ w x x' + λ·mean(diag)·I)⁻¹ Σ w x r'. The ridge λ pulls the change
to zero, so the weight to what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Strengths of the ridge that are tried, as shares of the mean of the diagonal.
RIDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)


@dataclass
class Sums:
    """Sums over tokens, in float64.

    Attributes:
        xx, xr: Σ w x x', (in, in), and Σ w x r', (in, out).
        x, r: Σ w x, (in,), and Σ w r, (out,).
        rr: Σ w |r|².
        weight: Σ w.
        tokens: How many.
    """

    xx: Tensor
    xr: Tensor
    x: Tensor
    r: Tensor
    rr: float = 0.0
    weight: float = 0.0
    tokens: int = 0

    @classmethod
    def of_none(cls, weight: Tensor) -> Sums:
        """Of no token, for a weight (in, out)."""
        (inputs, outputs), device = weight.shape, weight.device
        # Not every device knows float64.
        place = torch.device("cpu") if device.type == "mps" else device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=place)

        return cls(zeros(inputs, inputs), zeros(inputs, outputs), zeros(inputs), zeros(outputs))

    def add(self, x: Tensor, r: Tensor, w: Tensor) -> None:
        """Take in tokens.

        Args:
            x, r: (tokens, in) and (tokens, out), float32 or float64: products are computed in it.
            w: (tokens,): weights.
        """
        weighted, device = x * w[:, None], self.xx.device
        self.xx += (weighted.mT @ x).to(device)
        self.xr += (weighted.mT @ r).to(device)
        self.x += weighted.sum(0).to(device)
        self.r += (r.mT @ w).to(device)
        self.rr += float(r.pow(2).sum(-1) @ w)
        self.weight += float(w.sum())
        self.tokens += len(w)

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def fit(self, ridge: float) -> Tensor:
        """The change of the weight, float64, (in, out).

        Raises:
            torch.linalg.LinAlgError: Without a ridge, x lies in a subspace.
        """
        matrix = self.xx.clone()
        matrix.diagonal().add_(ridge * self.xx.diagonal().mean())
        return torch.cholesky_solve(self.xr, torch.linalg.cholesky(matrix))

    def error(self, change: Tensor | None = None) -> float:
        """Σ w |r - D'x|² with a change D, float64, (in, out); None for no change."""
        if change is None:
            return self.rr
        return self.rr + float((change * (self.xx @ change - 2 * self.xr)).sum())

    def variance(self, weight: Tensor) -> float:
        """Σ w |y - ȳ|² of what the projection should give, y = W'x + r, with its weight W, float64, (in, out)."""
        total = self.rr + float((weight * (self.xx @ weight + 2 * self.xr)).sum())
        mean = weight.mT @ self.x + self.r
        return total - float(mean.pow(2).sum()) / self.weight


@dataclass(frozen=True)
class Refit:
    """The best change of a weight.

    Attributes:
        change: float64, (in, out); None if none helps on what was held back.
        ridge: Its λ; None without a change.
        error_before, error_after: Of all tokens, as shares of the variance of what the projection should give.
        held_before, held_after: Of the tokens that were held back, with the change that fits the others best.
    """

    change: Tensor | None
    ridge: float | None
    error_before: float
    error_after: float
    held_before: float
    held_after: float


def refit(rest: Sums, held: Sums, weight: Tensor, ridges: Sequence[float] = RIDGES) -> Refit:
    """Choose the ridge by the error on what was held back, then fit all with it.

    Args:
        rest, held: Sums over tokens that are fitted, and over those that judge the ridge.
        weight: The weight as it is, (in, out).
    """
    weight = weight.to(rest.xx)
    everything = rest + held
    size, held_size = everything.variance(weight), held.variance(weight) if held.tokens else 0.0
    best, least = None, held.rr
    if float(rest.xx.diagonal().sum()) > 0:
        for ridge in ridges:
            error = held.error(rest.fit(ridge))
            if error < least:
                best, least = ridge, error
    change = None if best is None else everything.fit(best)
    return Refit(
        change=change,
        ridge=best,
        error_before=_share(everything.rr, size),
        error_after=_share(everything.error(change), size),
        held_before=_share(held.rr, held_size),
        held_after=_share(least, held_size),
    )


def _share(error: float, size: float) -> float:
    return max(error, 0.0) / size if size > 0 else 0.0


def token_weights(wanted: Tensor, given: Tensor, *, centred: bool) -> Tensor:
    """(tokens,): 1 / mean square of each token's features, or 1 / variance for a norm that takes their mean away.

    That is what the next norm multiplies an error with, squared. Without it, tokens with massive activations count for
    all others together. Of both streams the larger one counts: a token that only one of them makes massive would do the
    same.

    Args:
        wanted, given: (tokens, features), the original's stream and the pruned model's, float32 or float64.
    """
    sizes = [s.var(-1, correction=0) if centred else s.pow(2).mean(-1) for s in (wanted, given)]
    return 1 / (torch.maximum(*sizes) + 1e-6)  # as norms keep from dividing by zero
