"""Frozen results that the layers hand on. NumPy only: no torch, no transformers.

All numbers are 0-based. Layers are the model's own numbers, heads are those of the original model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas

    from headscope.attention.explain import Step
    from headscope.heads.catalogue.result import Catalogue, TypeRecord
    from headscope.heads.medium import Medium

ANALYSIS_SCHEMA = "headscope/analysis@1"

# A head's label is stable where the head has it by itself on this share of texts or more.
STABLE = 0.9
# Where it is not, another label that this share of texts or more has is worth a name: the head splits.
SPLITS = 0.1

# Rows and columns of a pooled map at most: two pixels each in a head's picture, and 2 MB a head for mean and maximum.
MOST_CELLS = 512


@dataclass(frozen=True)
class Stack:
    """A run of attention layers: `self`, `encoder`, `decoder`, `cross`, `text`, `vision`, `audio`, or a module path."""

    name: str
    layers: tuple[int, ...]
    num_heads: tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    """What a model is. `num_layers`, `num_heads` and their like are None where layers differ."""

    name: str
    type: str
    class_name: str
    dtype: str
    device: str
    num_layers: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    hidden_size: int | None
    stacks: tuple[Stack, ...]

    def to_dict(self) -> dict[str, Any]:
        """The `model` object of the JSON contract."""
        return {
            "name": self.name,
            "type": self.type,
            "class": self.class_name,
            "dtype": self.dtype,
            "device": self.device,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden_size,
            "stacks": [{"name": s.name, "layers": list(s.layers), "num_heads": list(s.num_heads)} for s in self.stacks],
        }


@dataclass(frozen=True)
class InputInfo:
    """What was measured: number of texts, of tokens over all of them, of texts cut short, the first text's tokens."""

    texts: int
    tokens: int
    truncated: int
    first_tokens: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The `inputs` object of the JSON contract."""
        return {
            "texts": self.texts,
            "tokens": self.tokens,
            "truncated": self.truncated,
            "first_tokens": list(self.first_tokens),
        }


@dataclass(frozen=True)
class CorpusInfo:
    """Where texts came from and which of them were measured.

    Attributes:
        name: The path, pattern or dataset.
        skipped: Texts that could not be read.
        sample: How many were drawn at random; None for all.
        until: The width of interval at which to stop; None for none. `reached`: whether all were that narrow.
        seed: Of the order in which texts are drawn.
    """

    name: str
    skipped: int
    sample: int | None
    until: float | None
    reached: bool
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """The `corpus` object of the JSON."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class RuleInfo:
    """The rule set that gave the labels, and its thresholds by metric."""

    name: str
    thresholds: Mapping[str, float]


@dataclass(frozen=True)
class Spread:
    """A metric over several texts: standard deviation and a 95 % interval of the mean (None for one text)."""

    sd: float | None
    low: float | None
    high: float | None
    texts: int

    def to_dict(self) -> dict[str, Any]:
        """One value of the `spread` object of the JSON contract."""
        return {"sd": self.sd, "low": self.low, "high": self.high, "texts": self.texts}


@dataclass(frozen=True)
class HeadRecord:
    """One head: its label, its metrics and what chance would give.

    Attributes:
        metrics: Value by metric name; None where nothing could be measured. Entropies are in nats, distances in tokens,
            everything else is a share of attention between 0 and 1.
        chance: What a head that spreads uniformly over its visible keys scores on the same rows, by metric name.
        at_chance: Names of the metrics that are no better than chance.
        rest_pattern: For an attention sink, the label of the weights without the first column, else None.
        spread: With several texts, the spread by metric name, else None.
        types: The types of the head catalogue that the head has.
        stability: Share of texts on which the head by itself has the label `pattern`, of those that show any of the
            rules' metrics; None below two such texts. The label is stable from `STABLE` on.
        second: Of a label that is not stable, the other label that most texts have, if `SPLITS` of them have it.
        second_share: Share of texts that have it.
    """

    stack: str
    layer: int
    head: int
    kv_head: int
    pattern: str
    runner_up: str | None
    metrics: Mapping[str, float | None]
    chance: Mapping[str, float | None]
    at_chance: tuple[str, ...] = ()
    rest_pattern: str | None = None
    spread: Mapping[str, Spread] | None = None
    types: tuple[TypeRecord, ...] = ()
    stability: float | None = None
    second: str | None = None
    second_share: float | None = None

    @property
    def name(self) -> str:
        """The head's short name, `L5H3`."""
        return f"L{self.layer}H{self.head}"

    def to_dict(self) -> dict[str, Any]:
        """One record of the `heads` list of the JSON contract."""
        return {
            "stack": self.stack,
            "layer": self.layer,
            "head": self.head,
            "kv_head": self.kv_head,
            "pattern": self.pattern,
            "runner_up": self.runner_up,
            "metrics": dict(self.metrics),
            "chance": dict(self.chance),
            "at_chance": list(self.at_chance),
            "rest_pattern": self.rest_pattern,
            "spread": None if self.spread is None else {k: v.to_dict() for k, v in self.spread.items()},
            "types": [t.to_dict() for t in self.types],
            "stability": self.stability,
            "second": self.second,
            "second_share": self.second_share,
        }


@dataclass(frozen=True)
class AttentionMap:
    """The attention matrices of one layer on one text, for pictures.

    Matrices of long texts may be pooled: each cell then stands for a square tile of `tile` × `tile` tokens, less at the
    far edges. Keys that a row cannot see count in a tile's mean as the zeros that they are in the matrix.

    Attributes:
        heads: The head numbers, in the order of the first axis of `weights`; none where that is a mean over heads.
        weights: float32, (heads, query, key); pooled, the mean of each tile.
        queries: One readable label a row; pooled, the positions that it stands for, such as `32–63`.
        keys: One readable label a column, in the same way.
        tile: Side of a tile, in tokens; 1 where nothing is pooled.
        peak: float32, (heads, query, key): the largest weight of each tile; None where nothing is pooled.
        tokens: How many query and key tokens there are; None where nothing is pooled: as many as rows and columns.
    """

    stack: str
    layer: int
    heads: tuple[int, ...]
    weights: NDArray[np.float32]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    tile: int = 1
    peak: NDArray[np.float32] | None = None
    tokens: tuple[int, int] | None = None


def tile_labels(count: int, tile: int) -> tuple[str, ...]:
    """The positions that each tile of `count` tokens stands for: `0–31`, `32–63`, and the last of the rest."""
    ends = ((start, min(start + tile, count) - 1) for start in range(0, count, tile))
    return tuple(str(first) if first == last else f"{first}–{last}" for first, last in ends)


@dataclass(frozen=True)
class Analysis:
    """Everything that one analysis found; `to_dict` is the JSON contract's object.

    Attributes:
        maps: The first text's attention, for pictures.
        media: For stacks that read no text, by name: the image or sound that the maps lie on.
    """

    model: ModelInfo
    engine: str
    rules: RuleInfo
    inputs: InputInfo
    heads: tuple[HeadRecord, ...]
    versions: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    maps: tuple[AttentionMap, ...] = field(default=(), repr=False)
    corpus: CorpusInfo | None = None
    catalogue: Catalogue | None = None
    media: Mapping[str, Medium] = field(default_factory=dict, repr=False)

    def head(self, layer: int, head: int, stack: str | None = None) -> HeadRecord:
        """The record of one head. Raises KeyError where there is none, or where `stack` is needed to tell two apart."""
        found = [h for h in self.heads if (h.layer, h.head) == (layer, head) and stack in (None, h.stack)]
        if len(found) != 1:
            raise KeyError(f"L{layer}H{head} of stack {stack or 'any'}: {len(found)} heads match")
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """The object that `headscope analyze -f json` prints; maps and media are left out."""
        return {
            "schema": ANALYSIS_SCHEMA,
            "versions": dict(self.versions),
            "model": self.model.to_dict(),
            "engine": self.engine,
            "rules": {"name": self.rules.name, "thresholds": dict(self.rules.thresholds)},
            "inputs": self.inputs.to_dict(),
            "corpus": None if self.corpus is None else self.corpus.to_dict(),
            "heads": [h.to_dict() for h in self.heads],
            "catalogue": None if self.catalogue is None else self.catalogue.to_dict(),
            "warnings": list(self.warnings),
        }

    def to_dataframe(self) -> pandas.DataFrame:
        """One row a head, one column a metric. Raises ImportError where pandas is not installed."""
        import pandas

        from headscope.views.records import flat_records

        return pandas.DataFrame(flat_records(self))

    def _repr_html_(self) -> str:
        from headscope.views.notebook import analysis_html

        return analysis_html(self)


VERIFY_SCHEMA = "headscope/verify@1"


@dataclass(frozen=True)
class SiteCheck:
    """One attention site, rebuilt and compared.

    Attributes:
        backend: `numpy` or `torch`.
        max_abs_weights: Largest difference of attention weights.
        max_abs_output, rel_output: Largest difference of the site's output, and that divided by the largest output;
            None where the output cannot be compared.
        allowed_weights, allowed_output: What `max_abs_weights` and `rel_output` may be: the tolerance, or more where
            scores are so large that the dtype has no digits left for it.
        positions, mask: `own`, or `model` where the model's own tensors were taken.
        worst_head: The head that differs most; None where the output differs and no head is to blame.
        worst_position: Query and key position of the largest difference of weights.
    """

    stack: str
    layer: int
    backend: str
    max_abs_weights: float
    allowed_weights: float
    max_abs_output: float | None
    rel_output: float | None
    allowed_output: float
    positions: str
    mask: str
    passed: bool
    worst_head: int | None
    worst_position: tuple[int, int]

    def to_dict(self) -> dict[str, Any]:
        """One record of the `sites` list of the JSON contract; differences that are not finite are null."""
        values = {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in self.__dict__.items()}
        return {**values, "worst_position": list(self.worst_position)}


@dataclass(frozen=True)
class SkippedSite:
    """A site that could not be rebuilt, and why."""

    stack: str
    layer: int
    reason: str


@dataclass(frozen=True)
class Verification:
    """What `verify` found; `to_dict` is the JSON contract's object."""

    model: str
    passed: bool
    dtype: str
    tolerance: Mapping[str, float]
    sites: tuple[SiteCheck, ...]
    skipped: tuple[SkippedSite, ...]
    warnings: tuple[str, ...]
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The object that `headscope verify -f json` prints."""
        return {
            "schema": VERIFY_SCHEMA,
            "passed": self.passed,
            "tolerance": dict(self.tolerance),
            "sites": [s.to_dict() for s in self.sites],
            "skipped": [dict(s.__dict__) for s in self.skipped],
            "model": self.model,
            "dtype": self.dtype,
            "warnings": list(self.warnings),
            "versions": dict(self.versions),
        }


@dataclass(frozen=True)
class HeadExplanation:
    """One head's computation, step by step.

    Attributes:
        name: `L5H3`.
        tokens: Labels of the query tokens and of the key tokens.
        steps: In order, each with its formula, shape and first numbers.
    """

    name: str
    stack: str
    tokens: tuple[tuple[str, ...], tuple[str, ...]]
    steps: tuple[Step, ...]

    def to_dict(self) -> dict[str, Any]:
        """The object that `headscope verify --explain` prints as JSON; infinite scores are null."""
        return {
            "schema": "headscope/explain@1",
            "name": self.name,
            "stack": self.stack,
            "queries": list(self.tokens[0]),
            "keys": list(self.tokens[1]),
            "steps": [
                {
                    "name": step.name,
                    "formula": step.formula,
                    "shape": list(step.shape),
                    "axes": list(step.axes),
                    "values": [[v if np.isfinite(v) else None for v in row] for row in step.values.tolist()],
                }
                for step in self.steps
            ],
        }
