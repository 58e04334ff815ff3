"""Head metrics: each a mean over query rows, written once as a function on row blocks.

A metric is a decorated function that gives one value a row and says which rows can show it. Everything else follows
from it: its chance value is the same function on uniform attention, its `_rest` variant the same function on the
weights without the first column, its `_adjusted` variant (value - chance) / (1 - chance) over the rows that could have
gone either way. Values are float32 a row and summed in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headscope.capture.blocks import RowBlock
from headscope.errors import InputError

RowValues = tuple[Tensor, Tensor]
"""Values (batch, head, rows) and the rows that can show the metric, bool, broadcastable to them."""


@dataclass(frozen=True)
class Metric:
    """A named metric.

    Attributes:
        rows: From a block to row values.
        direction: `high` where more means more of the behaviour, `low` where less does, None where neither.
        cross: Whether it makes sense when keys are another sequence.
        target: For a share of attention on one key: that key's position for each row, else None.
        unit: `share`, `nats` or `tokens`.
    """

    name: str
    rows: Callable[[RowBlock], RowValues]
    direction: str | None
    cross: bool
    unit: str
    target: Callable[[RowBlock], Tensor] | None = None


METRICS: dict[str, Metric] = {}
CORE = ("sink", "prev_token", "self_attend", "entropy")


def metric(
    direction: str | None, unit: str = "share", cross: bool = True
) -> Callable[[Callable[[RowBlock], RowValues]], Callable[[RowBlock], RowValues]]:
    """Register a function on row blocks as the metric of the function's name."""

    def register(function: Callable[[RowBlock], RowValues]) -> Callable[[RowBlock], RowValues]:
        METRICS[function.__name__] = Metric(function.__name__, function, direction, cross, unit)
        return function

    return register


def target_metric(
    cross: bool = False, seen: bool = False
) -> Callable[[Callable[[RowBlock], Tensor]], Callable[[RowBlock], Tensor]]:
    """Register the share of attention on one key a row; the function gives that key's position for each row.

    Args:
        cross: Whether it makes sense when keys are another sequence.
        seen: Only rows that may look at that key can show it; without, a key out of sight counts as 0.
    """

    def register(function: Callable[[RowBlock], Tensor]) -> Callable[[RowBlock], Tensor]:
        def rows(block: RowBlock) -> RowValues:
            values, eligible = _on_target(block, function(block))
            return values, eligible & _sees(block, function(block)) if seen else eligible

        METRICS[function.__name__] = Metric(function.__name__, rows, "high", cross, "share", function)
        return function

    return register


# ------------------------------------------------------------------ the metrics
@target_metric(cross=True)
def sink(block: RowBlock) -> Tensor:
    """Mean over rows of `w[i, 0]`."""
    return torch.zeros_like(block.positions)


@target_metric()
def prev_token(block: RowBlock) -> Tensor:
    """Mean over rows i >= 1 of `w[i, i-1]`."""
    return block.positions - 1


@target_metric()
def self_attend(block: RowBlock) -> Tensor:
    """Mean of `w[i, i]`."""
    return block.positions


@metric("low", unit="nats")
def entropy(block: RowBlock) -> RowValues:
    """Mean over rows of -sum w ln(w + 1e-9), in nats."""
    return _entropy(block.weights), block.valid


@target_metric(seen=True)
def next_token(block: RowBlock) -> Tensor:
    """Mean over rows i < n-1 of `w[i, i+1]`; not measurable in a causal model."""
    return block.positions + 1


@metric("high")
def special(block: RowBlock) -> RowValues:
    """Mean over rows of the mass on special tokens; not measurable in a text without any."""
    on = block.special[:, None, :, None].to(block.weights.dtype)
    return (block.weights @ on)[..., 0], block.valid & block.special[:, block.first_key :].any(dim=-1)[:, None, None]


@metric("low")
def relative_entropy(block: RowBlock) -> RowValues:
    """Mean of a row's entropy over ln(visible keys), rows scaled to sum to one; rows with two visible keys or more."""
    visible, total = block.visible.sum(dim=-1), block.weights.sum(dim=-1)
    scaled = block.weights / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return _entropy(scaled) / visible.clamp(min=2).log(), block.valid & (visible >= 2) & (total > 0)


@metric(None, unit="tokens", cross=False)
def mean_distance(block: RowBlock) -> RowValues:
    """Mean over rows of sum w |i - j|, in tokens."""
    keys = torch.arange(block.weights.shape[-1], device=block.weights.device)
    distance = (block.positions[:, None] - keys).abs().to(block.weights.dtype)
    return (block.weights * distance).sum(dim=-1, dtype=torch.float64), block.valid


@metric("high")
def max_weight(block: RowBlock) -> RowValues:
    """Mean over rows of the largest weight ("confidence" in Voita et al. 2019, section 3.3)."""
    return block.weights.amax(dim=-1), block.valid


# ------------------------------------------------------------------ shared parts
def _entropy(weights: Tensor) -> Tensor:
    return -(weights * (weights + 1e-9).log()).sum(dim=-1, dtype=torch.float64)


def _on_target(block: RowBlock, target: Tensor) -> RowValues:
    """Weights on one key a row; rows whose key does not exist, or is removed, cannot show it."""
    keys = block.weights.shape[-1]
    exists = (target >= block.first_key) & (target < keys)
    index = target.clamp(0, keys - 1)[:, None].expand(*block.weights.shape[:3], 1)
    return block.weights.gather(-1, index)[..., 0], block.valid & exists


def could_differ(metric: Metric, block: RowBlock) -> Tensor:
    """bool, (batch or 1, 1, rows): at least two visible keys, and the target (if any) among them."""
    several = block.visible.sum(dim=-1) >= 2
    if metric.target is None:
        return several
    return several & _sees(block, metric.target(block))


def _sees(block: RowBlock, target: Tensor) -> Tensor:
    """bool, (batch or 1, 1, rows): whether each row may look at its target."""
    index = target.clamp(0, block.visible.shape[-1] - 1)[:, None].expand(*block.visible.shape[:3], 1)
    return block.visible.gather(-1, index)[..., 0]


def uniform(block: RowBlock) -> RowBlock:
    """The block of a head that spreads uniformly over its visible keys."""
    seen = block.visible.float()
    return replace(block, weights=seen / seen.sum(dim=-1, keepdim=True).clamp(min=1))


def without_first(block: RowBlock) -> RowBlock:
    """The block without its first column, rows scaled to sum to one; rows with less than 1e-3 left do not count."""
    weights = block.weights.clone()
    weights[..., 0] = 0
    left = weights.sum(dim=-1, keepdim=True)
    visible = block.visible.clone()
    visible[..., 0] = False
    valid = block.valid & (left[..., 0] >= 1e-3)
    return replace(block, weights=weights / left.clamp(min=1e-3), visible=visible, valid=valid, first_key=1)


# ------------------------------------------------------------------ names of variants
@dataclass(frozen=True)
class Variant:
    """A metric as it is asked for: on all columns or without the first, plain or adjusted for chance."""

    metric: Metric
    rest: bool = False
    adjusted: bool = False

    @property
    def name(self) -> str:
        """As in tables and JSON: `prev_token`, `prev_token_rest`, `prev_token_adjusted`, `prev_token_adjusted_rest`."""
        return self.metric.name + "_adjusted" * self.adjusted + "_rest" * self.rest


def variant(name: str) -> Variant:
    """The variant of a name.

    Raises:
        InputError: No such metric.
    """
    stem, rest = name.removesuffix("_rest"), name.endswith("_rest")
    base, adjusted = stem.removesuffix("_adjusted"), stem.endswith("_adjusted")
    known = METRICS.get(base)
    if known is None or (adjusted and known.target is None) or (rest and base == "sink"):
        raise InputError(f"unknown metric '{name}'", f"Known metrics: {', '.join(metric_names())}.")
    return Variant(known, rest, adjusted)


def metric_names() -> tuple[str, ...]:
    """Every metric name: plain ones, adjusted ones, then the variants without the first column."""
    plain = tuple(METRICS)
    adjusted = tuple(f"{m}_adjusted" for m in plain if METRICS[m].target is not None)
    rest = tuple(f"{m}_rest" for m in plain + adjusted if not m.startswith("sink"))
    return plain + adjusted + rest


def chosen(names: str) -> tuple[str, ...]:
    """`core`, `all`, or a comma-separated list, as metric names without repeats.

    Raises:
        InputError: A name is not known, or there is none.
    """
    if names == "core":
        return CORE
    if names == "all":
        return metric_names()
    wanted = tuple(dict.fromkeys(n.strip() for n in names.split(",") if n.strip()))
    if not wanted:
        raise InputError("--metrics names no metric", f"Known metrics: {', '.join(metric_names())}.")
    for name in wanted:
        variant(name)
    return wanted
