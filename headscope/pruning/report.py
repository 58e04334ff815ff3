"""What pruning hands on: frozen, without torch and transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PRUNE_SCHEMA = "headscope/prune@1"


@dataclass(frozen=True)
class EquivalenceCheck:
    """One run of the pruned model beside the original with the same heads zeroed.

    Attributes:
        batch: What the inputs were, such as `padded right`.
        implementation: Of attention: `eager`, `sdpa`.
        mode: `forward`, or `generate` with a cache.
        dtype: What both models computed in: `float32`, or `float64` where rounding in float32 was above the tolerance.
        max_abs: The largest difference of any output.
        relative: The largest difference of an output divided by the largest number in it.
        effect: What zeroing the heads changes, as `relative`: how much there was to get wrong. None for `generate`.
    """

    batch: str
    implementation: str
    mode: str
    dtype: str
    max_abs: float
    relative: float
    effect: float | None


@dataclass(frozen=True)
class Equivalence:
    """Whether a pruned model computes what the original does with the same heads zeroed.

    Attributes:
        max_abs, relative: The largest over all checks; infinite where one failed or gave no finite numbers.
        checks: In the order in which they ran.
        notes: What was not checked, and why: one line each.
        failures: Why it did not pass, beside differences: one line each.
    """

    max_abs: float
    relative: float
    tolerance: float
    passed: bool
    checks: tuple[EquivalenceCheck, ...]
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The `equivalence` object of the JSON contract; differences that are not finite are null."""
        return {
            "max_abs": finite(self.max_abs),
            "relative": finite(self.relative),
            "tolerance": self.tolerance,
            "passed": self.passed,
            "checks": [{k: finite(v) for k, v in c.__dict__.items()} for c in self.checks],
            "notes": list(self.notes),
            "failures": list(self.failures),
        }


def finite(value: Any) -> Any:
    """None for a number that is not finite, which JSON does not know."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class PruneReport:
    """What `prune_heads` did.

    Attributes:
        heads: All heads that give nothing any more, by `stack.layer`, in original numbers, earlier prunings included.
        zeroed: Those of them that are still in the weights, zeroed.
        params_before, params_after: Numbers in all parameters; shared ones count once.
        notes: One line each.
    """

    heads: Mapping[str, tuple[int, ...]]
    zeroed: Mapping[str, tuple[int, ...]]
    params_before: int
    params_after: int
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The part of the JSON contract's object that is known without running the model."""
        return {
            "schema": PRUNE_SCHEMA,
            "heads": {name: list(heads) for name, heads in self.heads.items()},
            "zeroed": {name: list(heads) for name, heads in self.zeroed.items()},
            "params": {"before": self.params_before, "after": self.params_after},
            "notes": list(self.notes),
        }
