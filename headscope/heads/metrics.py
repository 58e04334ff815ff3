"""Head metrics: each a mean over query rows, written once as a function on rows of attention.

A metric is a decorated function that gives one value a row and says which rows can show it. Everything else follows
from it: its chance value is the same function on uniform attention, its `_rest` variant the same function on the
weights without the first column, its `_adjusted` variant (value - chance) / (1 - chance) over the rows that could have
gone either way. Values are float32 a row and summed in float64.

What `Rows` offers is known without a matrix of weights; a metric that needs the weights themselves takes them in blocks
from `rows.from_weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headscope.attention.visibility import Target
from headscope.capture.blocks import Rows
from headscope.errors import InputError

RowValues = tuple[Tensor, Tensor]
"""Values (batch, head, rows) and the rows that can show the metric, bool, broadcastable to them."""


@dataclass(frozen=True)
class Metric:
    """A named metric.

    Attributes:
        rows: From rows of attention to row values.
        direction: `high` where more means more of the behaviour, `low` where less does, None where neither.
        cross: Whether it makes sense when keys are another sequence.
        target: For a share of attention on one key a row: that key, else None.
        unit: `share`, `nats` or `tokens`.
    """

    name: str
    rows: Callable[[Rows], RowValues]
    direction: str | None
    cross: bool
    unit: str
    target: Target | None = None


METRICS: dict[str, Metric] = {}
CORE = ("sink", "prev_token", "self_attend", "entropy")


def metric(
    direction: str | None, unit: str = "share", cross: bool = True
) -> Callable[[Callable[[Rows], RowValues]], Callable[[Rows], RowValues]]:
    """Register a function on rows as the metric of the function's name."""

    def register(function: Callable[[Rows], RowValues]) -> Callable[[Rows], RowValues]:
        METRICS[function.__name__] = Metric(function.__name__, function, direction, cross, unit)
        return function

    return register


def target_metric(cross: bool = False, seen: bool = False) -> Callable[[Callable[[], Target]], Callable[[], Target]]:
    """Register the share of attention on one key a row; the function says which key.

    Args:
        cross: Whether it makes sense when keys are another sequence.
        seen: Only rows that may look at that key can show it; without, a key out of sight counts as 0.
    """

    def register(function: Callable[[], Target]) -> Callable[[], Target]:
        target = function()

        def rows(rows: Rows) -> RowValues:
            eligible = rows.valid & rows.has(target)
            return rows.at(target), eligible & rows.sees(target) if seen else eligible

        METRICS[function.__name__] = Metric(function.__name__, rows, "high", cross, "share", target)
        return function

    return register


# ------------------------------------------------------------------ the metrics
@target_metric(cross=True)
def sink() -> Target:
    """Mean over rows of `w[i, 0]`."""
    return Target(key=0)


@target_metric()
def prev_token() -> Target:
    """Mean over rows i >= 1 of `w[i, i-1]`."""
    return Target(offset=-1)


@target_metric()
def self_attend() -> Target:
    """Mean of `w[i, i]`."""
    return Target(offset=0)


@metric("low", unit="nats")
def entropy(rows: Rows) -> RowValues:
    """Mean over rows of -sum w ln(w + 1e-9), in nats."""
    return rows.entropy(), rows.valid


@target_metric(seen=True)
def next_token() -> Target:
    """Mean over rows i < n-1 of `w[i, i+1]`; not measurable in a causal model."""
    return Target(offset=1)


@metric("high")
def special(rows: Rows) -> RowValues:
    """Mean over rows of the mass on special tokens; not measurable in a text without any."""
    return rows.on(rows.special), rows.valid & rows.special[:, rows.first_key :].any(dim=-1)[:, None, None]


@metric("low")
def relative_entropy(rows: Rows) -> RowValues:
    """Mean of a row's entropy over ln(visible keys), rows scaled to sum to one; rows with two visible keys or more."""
    relative = rows.entropy(scaled=True) / rows.counts.clamp(min=2).log()
    return relative, rows.valid & (rows.counts >= 2) & (rows.total() > 0)


@metric(None, unit="tokens", cross=False)
def mean_distance(rows: Rows) -> RowValues:
    """Mean over rows of sum w |i - j|, in tokens."""
    return rows.distance(), rows.valid


@metric("high")
def max_weight(rows: Rows) -> RowValues:
    """Mean over rows of the largest weight ("confidence" in Voita et al. 2019, section 3.3)."""
    return rows.largest(), rows.valid


def could_differ(metric: Metric, rows: Rows) -> Tensor:
    """bool, (batch or 1, 1, rows): at least two visible keys, and the target (if any) among them."""
    several = rows.counts >= 2
    return several if metric.target is None else several & rows.sees(metric.target)


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
