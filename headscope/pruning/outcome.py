"""What choosing and repairing came to: frozen, without torch and transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headscope.pruning.report import finite

Sizes = Mapping[str, tuple[int, int]]
"""Texts and tokens by what they were for."""


def sizes_dict(sizes: Sizes) -> dict[str, dict[str, int]]:
    """As JSON has them."""
    return {role: {"texts": texts, "tokens": tokens} for role, (texts, tokens) in sizes.items()}


@dataclass(frozen=True)
class Chosen:
    """How the heads that go were chosen.

    Attributes:
        method: The name of the scores.
        unit: `head` or `kv-group`.
        count, of: Units that go, and how many there were.
        predicted: The loss that the method expected to be added by them after the best repair, in nats; None where it
            says nothing.
        loss: What was measured: `causal` and the like, in nats, or `output`: 1 - cosine.
        measured: The loss that was added on the report's texts, a prediction; None where there are none.
        low, high: Its 95 % interval over texts.
        sizes: Of what the data were for; no text was for two things.
    """

    method: str
    unit: str
    count: int
    of: int
    predicted: float | None
    loss: str | None
    measured: float | None
    low: float | None
    high: float | None
    sizes: Sizes

    @property
    def share(self) -> float:
        """Of the units that there were."""
        return self.count / self.of

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        values = {name: finite(value) for name, value in self.__dict__.items() if name != "sizes"}
        return {**values, "share": self.share, "sizes": sizes_dict(self.sizes)}


@dataclass(frozen=True)
class RefitLayer:
    """One projection's refit.

    Attributes:
        name: `self.5`, or the path of a down projection.
        ridge: The strength that was best on held-back texts; None where the weight was left.
        error_before, error_after: Of its target on all repair texts, as a share of the target's size.
    """

    name: str
    ridge: float | None
    error_before: float
    error_after: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: finite(value) for name, value in self.__dict__.items()}


@dataclass(frozen=True)
class RepairOutcome:
    """What a repair came to.

    Attributes:
        applied: Whether the refitted weights are in the model: only if they lose less on the selection texts.
        reason: Why, in a line.
        mlp: Whether down projections were refitted, too.
        texts, tokens: What was refitted on.
        loss_before, loss_after: On the selection texts, without and with it.
    """

    applied: bool
    reason: str
    mlp: bool
    texts: int
    tokens: int
    layers: tuple[RefitLayer, ...]
    loss_before: float
    loss_after: float

    def to_dict(self) -> dict[str, Any]:
        """The `repair` object of the JSON contract."""
        values = {name: finite(value) for name, value in self.__dict__.items() if name != "layers"}
        return {**values, "layers": [layer.to_dict() for layer in self.layers]}
