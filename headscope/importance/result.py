"""What scoring found: the score of every head and group, and what sets of them cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headscope.capture.outputs import Output, Unit
from headscope.importance.method import Scored, Task
from headscope.results import ModelInfo

IMPORTANCE_SCHEMA = "headscope/importance@1"


@dataclass(frozen=True)
class HeadScore:
    """One head's score: the more, the more it costs to remove it; its standard error over texts where there is one."""

    stack: str
    layer: int
    head: int
    score: float
    error: float | None = None

    @property
    def number(self) -> int:
        """Its number among units of its kind."""
        return self.head


@dataclass(frozen=True)
class GroupScore:
    """The score of the heads that share one key-value head; those only that still give something."""

    stack: str
    layer: int
    kv_group: int
    heads: tuple[int, ...]
    score: float
    error: float | None = None

    @property
    def number(self) -> int:
        """Its number among units of its kind."""
        return self.kv_group


@dataclass(frozen=True)
class LayerCurve:
    """What sets of one layer's units cost.

    Attributes:
        unit: `head` or `kv-group`.
        order: Numbers of all units in the order in which they should go.
        losses: What is lost when the first k are gone, k = 0, 1, …: one number more than units, the first is 0.
    """

    stack: str
    layer: int
    unit: str
    order: tuple[int, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Importance:
    """Scores of one model's heads; `to_dict` is the JSON contract's object.

    Attributes:
        method: The name of an importance method.
        replace: What removed heads were replaced by, `zero` or `mean`.
        normalised: Whether each layer's scores are divided by their L2 norm.
        loss: The kind of loss that was used; None for none.
        heads, kv_groups: In order of stack, layer and number; layers that share a module have the same scores.
        curves: Where the method knows what sets of units cost.
        texts, tokens: How many were scored on; 0 for a method that needs none.
    """

    model: ModelInfo
    method: str
    replace: str
    normalised: bool
    loss: str | None
    heads: tuple[HeadScore, ...]
    kv_groups: tuple[GroupScore, ...]
    curves: tuple[LayerCurve, ...]
    texts: int
    tokens: int
    seed: int
    warnings: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The object that `headscope importance -f json` prints; numbers that are not finite are null."""
        return {
            "schema": IMPORTANCE_SCHEMA,
            "method": self.method,
            "replace": self.replace,
            "normalised": self.normalised,
            "model": self.model.to_dict(),
            "loss": self.loss,
            "texts": self.texts,
            "tokens": self.tokens,
            "seed": self.seed,
            "heads": [_record(h) for h in self.heads],
            "kv_groups": [_record(g) for g in self.kv_groups],
            "curves": [_record(c) for c in self.curves],
            "warnings": list(self.warnings),
            "versions": dict(self.versions),
        }


def _record(found: HeadScore | GroupScore | LayerCurve) -> dict[str, Any]:
    return {name: _plain(value) for name, value in vars(found).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------ from scores
def importance_result(
    task: Task,
    scored: Scored,
    *,
    model: ModelInfo,
    method: str,
    warnings: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
) -> Importance:
    """Scores with the names of what was scored, and on what.

    Args:
        task: What was scored.
        scored: What the method gave for it.
        versions: Of packages, by name.
    """
    heads: list[HeadScore] = []
    groups: list[GroupScore] = []
    curves: list[LayerCurve] = []
    for output in task.outputs:
        for site in output.sites:
            heads += (HeadScore(site.stack, site.layer, u.number, s, e) for u, s, e in _rows(output, "head", scored))
            groups += (
                GroupScore(site.stack, site.layer, u.number, u.heads, s, e)
                for u, s, e in _rows(output, "kv-group", scored)
            )
            curves += _curves(output, site.stack, site.layer, scored)
    return Importance(
        model,
        method,
        task.replace,
        task.normalise,
        None if task.data is None else task.data.loss.kind,
        tuple(heads),
        tuple(groups),
        tuple(curves),
        0 if task.data is None else task.data.texts,
        0 if task.data is None else task.data.tokens,
        task.seed,
        tuple(warnings),
        dict(versions or {}),
    )


def _rows(output: Output, unit: str, scored: Scored) -> Iterator[tuple[Unit, float, float | None]]:
    found = scored.get((unit, output.name))
    if found is None:
        return
    errors = [None] * len(found.scores) if found.errors is None else [_finite(e) for e in found.errors.tolist()]
    yield from zip(output.units(unit), found.scores.tolist(), errors, strict=True)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _curves(output: Output, stack: str, layer: int, scored: Scored) -> Iterator[LayerCurve]:
    for (unit, name), found in scored.items():
        if name == output.name and found.order is not None and found.losses is not None:
            units = output.units(unit)
            order = tuple(units[place].number for place in found.order)
            yield LayerCurve(stack, layer, unit, order, tuple(found.losses.tolist()))
