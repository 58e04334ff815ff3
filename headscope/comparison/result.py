"""What a comparison of two models found. NumPy only: no torch, no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.results import ModelInfo, RuleInfo, Spread

COMPARE_SCHEMA = "headscope/compare@1"


@dataclass(frozen=True)
class HeadChange:
    """One head in both models; layer and head are numbers of the original model.

    Attributes:
        stack: As the first model calls it, or the second where the first has no such stack.
        pattern_a, pattern_b: Its label in each model, None in one that does not have the head.
        metrics_a, metrics_b: Means over texts, None where nothing could be measured.
        delta: Mean over texts of the second model's value less the first's, by metric; over the texts on which both
            have one.
        spread: Of these differences, with a 95 % interval of their mean; None for one text.
        distance: Root of the mean Jensen-Shannon divergence of the two models' rows on the same tokens, in units of log
            2: 0 the same, 1 no key in common. None where it could not be measured.
        stability_a, stability_b: Share of texts on which the head by itself has its label; None below two texts.
    """

    stack: str
    layer: int
    head: int
    pattern_a: str | None
    pattern_b: str | None
    metrics_a: Mapping[str, float | None]
    metrics_b: Mapping[str, float | None]
    delta: Mapping[str, float | None]
    spread: Mapping[str, Spread] | None
    distance: float | None
    stability_a: float | None = None
    stability_b: float | None = None

    @property
    def name(self) -> str:
        """The head's short name, `L5H3`."""
        return f"L{self.layer}H{self.head}"

    @property
    def in_both(self) -> bool:
        """Whether both models have the head."""
        return self.pattern_a is not None and self.pattern_b is not None

    @property
    def changed(self) -> bool:
        """Whether both models have the head, with another label each."""
        return self.in_both and self.pattern_a != self.pattern_b

    def clear(self, metric: str) -> bool:
        """Whether the interval of a metric's difference leaves out 0."""
        spread = None if self.spread is None else self.spread.get(metric)
        if spread is None or spread.low is None or spread.high is None:
            return False
        return not spread.low <= 0 <= spread.high

    def to_dict(self) -> dict[str, Any]:
        """One record of the `heads` list of the JSON contract."""
        values = {name: dict(v) if isinstance(v, Mapping) else v for name, v in self.__dict__.items()}
        spread = None if self.spread is None else {name: s.to_dict() for name, s in self.spread.items()}
        return {**values, "spread": spread, "changed": self.changed}


@dataclass(frozen=True)
class Match:
    """A head of the first model and the head of the second that the best matching gives it.

    Attributes:
        stack: As the first model calls it.
        a, b: Layer and head in each model.
        distance: Between the two, as in `HeadChange`.
    """

    stack: str
    a: tuple[int, int]
    b: tuple[int, int]
    distance: float

    @property
    def similarity(self) -> float:
        """1 - distance: 1 the same, 0 no key in common."""
        return 1 - self.distance

    @property
    def names(self) -> tuple[str, str]:
        """Both heads' short names."""
        (a, i), (b, j) = self.a, self.b
        return f"L{a}H{i}", f"L{b}H{j}"

    def to_dict(self) -> dict[str, Any]:
        """One record of the `matching` list of the JSON contract."""
        a, b = self.names
        return {"a": a, "b": b, "similarity": self.similarity, "stack": self.stack}


@dataclass(frozen=True, eq=False)
class Between:
    """Distances between all heads of one stack of both models.

    Attributes:
        stack: As the first model calls it.
        heads_a, heads_b: Layer and head of the rows and of the columns.
        distance: float32, (head of the first, head of the second); NaN where no row says anything of both.
        rows: How many rows are behind it.
    """

    stack: str
    heads_a: tuple[tuple[int, int], ...]
    heads_b: tuple[tuple[int, int], ...]
    distance: NDArray[np.float32]
    rows: int


@dataclass(frozen=True)
class Comparison:
    """Everything that a comparison found; `to_dict` is the JSON contract's object.

    Attributes:
        a, b: The two models.
        texts, tokens: How many were measured; tokens in each model.
        heads: Every head that one of them has, in order of stack, layer, head.
        removed: In each model, heads that pruning took out, by `STACK.LAYER`; numbers of the original model.
        matching: The best matching, in the order of the first model's heads; empty where rows do not compare.
        rows: Rows behind the distances of `heads`.
        between: All distances, by stack; those of the matching.
    """

    a: ModelInfo
    b: ModelInfo
    rules: RuleInfo
    texts: int
    tokens: tuple[int, int]
    heads: tuple[HeadChange, ...]
    removed: tuple[Mapping[str, tuple[int, ...]], Mapping[str, tuple[int, ...]]]
    matching: tuple[Match, ...]
    rows: int
    between: tuple[Between, ...]
    versions: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def head(self, layer: int, head: int, stack: str | None = None) -> HeadChange:
        """One head. Raises KeyError where there is none, or where `stack` is needed to tell two apart."""
        found = [h for h in self.heads if (h.layer, h.head) == (layer, head) and stack in (None, h.stack)]
        if len(found) != 1:
            raise KeyError(f"L{layer}H{head} of stack {stack or 'any'}: {len(found)} heads match")
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """The object that `headscope compare -f json` prints; `between` is left out."""
        return {
            "schema": COMPARE_SCHEMA,
            "versions": dict(self.versions),
            "models": [self.a.name, self.b.name],
            "details": [self.a.to_dict(), self.b.to_dict()],
            "rules": {"name": self.rules.name, "thresholds": dict(self.rules.thresholds)},
            "inputs": {"texts": self.texts, "tokens": list(self.tokens), "rows": self.rows},
            "heads": [h.to_dict() for h in self.heads],
            "removed": {
                side: {name: list(heads) for name, heads in removed.items()}
                for side, removed in zip(("a", "b"), self.removed, strict=True)
            },
            "matching": [m.to_dict() for m in self.matching],
            "warnings": list(self.warnings),
        }
