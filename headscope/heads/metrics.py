"""Head metrics: each a mean over query rows, written once as a function on rows of attention.

A metric is a decorated function that gives one value a row and says which rows can show it. Everything else follows
from it: its chance value is the same function on uniform attention, its `_rest` variant the same function on the
weights without the first column, its `_adjusted` variant (value - chance) / (1 - chance) over the rows that could have
gone either way. Values are float32 a row and summed in float64.

What `Rows` offers is known without a matrix of weights; a metric that needs the weights themselves takes them in blocks
from `rows.from_weights`. Other distributions add metrics as `headscope.heads.plugins` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from headscope.attention.visibility import Target
from headscope.capture.blocks import Rows
from headscope.errors import InputError, check_type
from headscope.heads import plugins
from headscope.heads.registry import DECORATED, METRICS, Metric, RowValues, metric, target_metric

__all__ = [
    "CORE",
    "METRICS",
    "Metric",
    "RowValues",
    "Rows",
    "Target",
    "Variant",
    "chosen",
    "could_differ",
    "metric",
    "metric_names",
    "plugin_versions",
    "plugin_warnings",
    "target_metric",
    "variant",
]

CORE = ("sink", "prev_token", "self_attend", "entropy")


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
        InputError: No such metric, or one of another distribution that cannot be loaded.
    """
    stem, rest = name.removesuffix("_rest"), name.endswith("_rest")
    base, adjusted = stem.removesuffix("_adjusted"), stem.endswith("_adjusted")
    known = _find(base)
    if known is None or (adjusted and known.target is None) or (rest and base == "sink"):
        raise InputError(f"unknown metric '{name}'", f"Known metrics: {_known()}.")
    return Variant(known, rest, adjusted)


def metric_names() -> tuple[str, ...]:
    """Every metric name: plain ones, adjusted ones, then the variants without the first column.

    Other distributions' metrics are loaded for that; those that cannot be are not among them.
    """
    _load_all()
    installed = plugins.installed(plugins.METRICS).plugins
    # In an order that does not depend on what was asked for before.
    return _with_variants((*(m for m in METRICS if m not in installed), *(m for m in installed if m in METRICS)))


def _with_variants(plain: tuple[str, ...]) -> tuple[str, ...]:
    adjusted = tuple(f"{m}_adjusted" for m in plain if METRICS[m].target is not None)
    rest = tuple(f"{m}_rest" for m in plain + adjusted if m not in ("sink", "sink_adjusted"))
    return plain + adjusted + rest


def _known() -> str:
    """All names for an error's hint, without importing anything."""
    plain = tuple(m for m in METRICS if m not in plugins.installed(plugins.METRICS).plugins)
    others = plugins.listing(plugins.METRICS)
    return ", ".join(_with_variants(plain)) + (f"; installed: {others}" if others else "")


def chosen(names: str) -> tuple[str, ...]:
    """`core`, `all`, or a comma-separated list, as metric names without repeats.

    Raises:
        InputError: A name is not known or its metric cannot be loaded, or there is no name.
    """
    check_type("metrics", names, str, "text such as 'core' or 'sink,entropy'")
    if names == "core":
        return CORE
    if names == "all":
        return metric_names()
    wanted = tuple(dict.fromkeys(n.strip() for n in names.split(",") if n.strip()))
    if not wanted:
        raise InputError("--metrics names no metric", f"Known metrics: {_known()}.")
    for name in wanted:
        variant(name)
    return wanted


# ------------------------------------------------------------------ metrics of other distributions
def _find(name: str) -> Metric | None:
    if name in METRICS:
        return METRICS[name]
    plugin = plugins.installed(plugins.METRICS).plugins.get(name)
    return None if plugin is None else _load(plugin)


def _load(plugin: plugins.Plugin) -> Metric:
    """Import a metric, and take of its module only what the entry point names."""
    before = set(METRICS)
    try:
        function = plugin.load()
        found = DECORATED.get(function) if callable(function) else None
    finally:
        for name in METRICS.keys() - before:
            del METRICS[name]
    if found is None:
        raise InputError(
            f"{plugin} is not a function under @metric or @target_metric", "They are in headscope.heads.metrics."
        )
    if found.name != plugin.name:
        raise InputError(f"{plugin} is called {found.name!r} in its module", "The entry point needs the same name.")
    METRICS[found.name] = found
    return found


def _load_all() -> tuple[str, ...]:
    """Load every metric that is installed; what stands against it, one line each."""
    errors = []
    for plugin in plugins.installed(plugins.METRICS).plugins.values():
        try:
            _find(plugin.name)
        except InputError as error:
            errors.append(error.message)
    return tuple(errors)


def plugin_warnings(rules: str, metrics: str, used: Iterable[str]) -> tuple[str, ...]:
    """What to tell of other distributions' rules and metrics that are left out, one line each.

    Args:
        rules, metrics: As they were asked for; for `all`, metrics that cannot be loaded count.
        used: Names of metrics that are measured.
    """
    of_rules = plugins.warnings(plugins.RULES, [str(rules)])
    if metrics == "all":
        return (*of_rules, *_load_all(), *plugins.warnings(plugins.METRICS))
    return (*of_rules, *plugins.warnings(plugins.METRICS, [variant(name).metric.name for name in used]))


def plugin_versions(used: Iterable[str]) -> dict[str, str]:
    """The versions of the distributions that some metrics come from, by distribution."""
    installed = plugins.installed(plugins.METRICS).plugins
    of = [installed[base] for base in dict.fromkeys(variant(n).metric.name for n in used) if base in installed]
    return {plugin.distribution: plugin.version for plugin in of}
