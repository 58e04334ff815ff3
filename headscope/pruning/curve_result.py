"""What a curve shows: frozen, without torch and transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headscope.pruning.outcome import Sizes, sizes_dict
from headscope.pruning.report import finite
from headscope.results import ModelInfo

CURVE_SCHEMA = "headscope/curve@1"


@dataclass(frozen=True)
class Point:
    """What one method costs at one share.

    Attributes:
        share, count: Of heads or groups that went.
        added: The loss that was added, a prediction: nats, or 1 - cosine.
        low, high: Its 95 % interval over texts; of several random choices the least and the most.
        seeds: How many choices were made by chance; 1 where chance plays no part.
    """

    method: str
    repaired: bool
    share: float
    count: int
    added: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True)
class Curve:
    """Losses by method and share.

    Attributes:
        loss: What was measured: `causal` and the like, in nats, or `output`: 1 - cosine.
        unit, units: What went, `head` or `kv-group`, and how many there were.
        base: The loss of the whole model.
        sizes: Texts and tokens of what they were for; no text was for two things.
    """

    model: ModelInfo
    loss: str
    unit: str
    units: int
    base: float
    points: tuple[Point, ...]
    sizes: Sizes
    seed: int
    versions: Mapping[str, str]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "schema": CURVE_SCHEMA,
            "versions": dict(self.versions),
            "model": self.model.to_dict(),
            "loss": self.loss,
            "unit": self.unit,
            "units": self.units,
            "base": self.base,
            "points": [{name: finite(value) for name, value in p.__dict__.items()} for p in self.points],
            "sizes": sizes_dict(self.sizes),
            "seed": self.seed,
            "warnings": list(self.warnings),
        }
