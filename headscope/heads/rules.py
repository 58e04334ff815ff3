"""Label rules: a TOML table says which metric above or below which threshold gives which label.

`choose = "first"`: the first rule that holds gives the label. `choose = "largest"`: among the `above` rules that hold
the one with the largest value does, and the `below` rules are asked, in order, when there is none.
"""

from __future__ import annotations

import os
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.errors import InputError
from headscope.heads import plugins
from headscope.heads.metrics import variant
from headscope.reading.whole import read_whole

SINK_LABEL = "attention_sink"
# No metric comes near; infinity is not valid JSON.
LARGEST = 1e9
_MOST_DOTS = 500
_HINT = "A rules file has name, choose, otherwise and [[rule]] tables with label, metric and above or below."

Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class Rule:
    """`metric` above or below `threshold` gives `label`."""

    label: str
    metric: str
    threshold: float
    above: bool

    def holds(self, metrics: Metrics) -> bool:
        """Whether the rule fires; a metric that could not be measured never does."""
        value = metrics.get(self.metric)
        return value is not None and (value > self.threshold if self.above else value < self.threshold)


@dataclass(frozen=True)
class RuleSet:
    """A named set of rules, in order.

    Attributes:
        largest: The strongest rule wins instead of the first.
        runner_up_above: With `largest`, the value that a runner-up must exceed.
        unmeasurable: The label where no rule's metric could be measured; None uses `otherwise`.
    """

    name: str
    rules: tuple[Rule, ...]
    otherwise: str
    largest: bool = False
    runner_up_above: float = 0.0
    unmeasurable: str | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that the rules look at."""
        return tuple(dict.fromkeys(r.metric for r in self.rules))

    @property
    def thresholds(self) -> dict[str, float]:
        """Threshold by metric; by `metric:label` for the second and later rules on the same metric."""
        found: dict[str, float] = {}
        for rule in self.rules:
            found[rule.metric if rule.metric not in found else f"{rule.metric}:{rule.label}"] = rule.threshold
        return found

    @property
    def labels(self) -> tuple[str, ...]:
        """Every label that the rules can give, in their order, `otherwise` and `unmeasurable` last."""
        last = () if self.unmeasurable is None else (self.unmeasurable,)
        return tuple(dict.fromkeys((*(r.label for r in self.rules), self.otherwise, *last)))

    def label(self, metrics: Metrics) -> tuple[str, str | None]:
        """The label and the runner-up (None where there is none) of one head's metrics."""
        if self.unmeasurable is not None and all(metrics.get(m) is None for m in self.metrics):
            return self.unmeasurable, None
        order = self._by_value(metrics) if self.largest else self.rules
        holding = [r for r in order if r.holds(metrics)]
        labels = [r.label for r in holding] + [self.otherwise]
        if not self.largest:
            return labels[0], next((other for other in labels if other != labels[0]), None)
        # The strongest is what the second strongest is measured against: without one there is no runner-up.
        return labels[0], self._second(labels[0], metrics) if holding and holding[0].above else None

    def label_many(self, values: Mapping[str, NDArray[np.float64]]) -> NDArray[np.int64]:
        """The labels of many heads or texts at once, as numbers of `labels`.

        Args:
            values: Arrays of one shape by metric name; NaN, or a metric that is missing, could not be measured.

        Returns:
            Of that shape; in each cell the label that `label` gives.
        """
        measured = self.measured_many(values)
        number = {label: i for i, label in enumerate(self.labels)}
        labels = np.full(measured.shape, number[self.otherwise])
        known = [r for r in self.rules if r.metric in values]
        # Written from the last to the first, so that the first that holds stays.
        for rule in reversed([r for r in known if not (self.largest and r.above)]):
            value = values[rule.metric]
            labels[value > rule.threshold if rule.above else value < rule.threshold] = number[rule.label]
        strongest = np.full(measured.shape, -np.inf)
        for rule in [r for r in known if self.largest and r.above]:
            value = values[rule.metric]
            wins = (value > rule.threshold) & (value > strongest)
            labels[wins], strongest[wins] = number[rule.label], value[wins]
        if self.unmeasurable is not None:
            labels[~measured] = number[self.unmeasurable]
        return labels

    def measured_many(self, values: Mapping[str, NDArray[np.float64]]) -> NDArray[np.bool_]:
        """Where at least one of the rules' metrics could be measured, of the shape of `values`."""
        measured = np.zeros(np.broadcast_shapes(*(v.shape for v in values.values())), dtype=bool)
        for name in self.metrics:
            if name in values:
                measured |= ~np.isnan(values[name])
        return measured

    def _by_value(self, metrics: Metrics) -> list[Rule]:
        """The `above` rules whose metric was measured, largest value first (ties as in the file), then the rest."""
        strength = {r: metrics.get(r.metric) for r in self.rules if r.above}
        found = sorted((r for r in strength if strength[r] is not None), key=lambda r: -(strength[r] or 0.0))
        return found + [r for r in self.rules if not r.above]

    def _second(self, label: str, metrics: Metrics) -> str | None:
        others = [r for r in self._by_value(metrics) if r.above and r.label != label]
        return next((r.label for r in others if (metrics.get(r.metric) or 0.0) > self.runner_up_above), None)

    def without_sink(self) -> RuleSet:
        """The same rules asked of the weights without the first column, the sink's own rule left out."""
        kept = tuple(
            replace(r, metric=r.metric if r.metric.endswith("_rest") else f"{r.metric}_rest")
            for r in self.rules
            if r.label != SINK_LABEL and r.metric not in ("sink", "sink_adjusted")
        )
        return replace(self, rules=kept)


def load_rules(name: str | os.PathLike[str]) -> RuleSet:
    """`seed`, `calibrated`, the name of rules that another distribution brings, or the path of a TOML file.

    Raises:
        InputError: The file is missing or not a rule set; the message says where.
    """
    if isinstance(name, str) and name in plugins.OWN_RULES:
        text = (resources.files("headscope.heads") / "rulesets" / f"{name}.toml").read_text(encoding="utf-8")
        return _parse(name, text, name)
    if isinstance(name, str) and (plugin := plugins.installed(plugins.RULES).plugins.get(name)) is not None:
        return _parse(f"{plugin.name} ({plugin.distribution})", _text_of(plugin), plugin.name)
    if not isinstance(name, str | os.PathLike) or Path(name).suffix != ".toml":
        names = ", ".join((*plugins.OWN_RULES, *filter(None, [plugins.listing(plugins.RULES)])))
        raise InputError(f"unknown rules {name!r}", f"Use {names} or the path of a .toml file.")
    path = os.fspath(name)
    try:
        text = read_whole(path, "rules file").decode("utf-8-sig")
    except ValueError as error:
        raise InputError(f"cannot read rules file {path!r}: {_reason(error)}", _HINT) from error
    return _parse(path, text, Path(path).stem)


def _text_of(plugin: plugins.Plugin) -> str:
    """The TOML of rules that another distribution brings: text, a file, or a function that returns one of them."""
    found = plugin.load()
    try:
        found = found() if callable(found) else found
        if isinstance(found, os.PathLike):
            found = Path(found)
        if isinstance(found, Traversable):
            found = found.read_text(encoding="utf-8")
    except (Exception, SystemExit) as error:  # whatever another's function does
        raise plugin.broken(error) from error
    if not isinstance(found, str):
        raise InputError(f"{plugin} is a {type(found).__name__}", "TOML text, a file or a function is wanted.")
    return found


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).splitlines()[0]


def _parse(name: str, text: str, default: str) -> RuleSet:
    """A rule set from TOML; `name` is what errors call it, `default` is its name where it has none itself."""
    # The time for a key grows with the square of its dots.
    if max((line.count(".") for line in text.splitlines()), default=0) > _MOST_DOTS:
        raise _wrong(name, f"a line has more than {_MOST_DOTS} dots")
    try:
        table = tomllib.loads(text)
    # Numbers with thousands of digits are a ValueError, as broken syntax is.
    except (ValueError, RecursionError) as error:
        raise InputError(f"rules file {name!r} is not valid TOML: {error}", _HINT) from error
    known = {"name", "choose", "otherwise", "rule", "runner_up_above", "unmeasurable"}
    if unknown := sorted(set(table) - known):
        raise _wrong(name, f"unknown key {unknown[0]!r}")
    choose = table.get("choose", "first")
    if choose not in ("first", "largest"):
        raise _wrong(name, f"choose must be 'first' or 'largest', not {choose!r}")
    if choose == "first" and "runner_up_above" in table:
        raise _wrong(name, "runner_up_above needs choose = 'largest'")
    rows = table.get("rule")
    if not isinstance(rows, list) or not rows:
        raise _wrong(name, "no [[rule]] table")
    return RuleSet(
        name=_text(name, table.get("name", default), "name"),
        rules=tuple(_rule(name, i, row) for i, row in enumerate(rows, 1)),
        otherwise=_text(name, table.get("otherwise", "broad"), "otherwise"),
        largest=choose == "largest",
        runner_up_above=_number(name, table.get("runner_up_above", 0.0), "runner_up_above"),
        unmeasurable=_text(name, table["unmeasurable"], "unmeasurable") if "unmeasurable" in table else None,
    )


def _rule(name: str, index: int, row: Any) -> Rule:
    where = f"rule {index}"
    if not isinstance(row, dict):
        raise _wrong(name, f"{where} is not a table")
    if unknown := sorted(set(row) - {"label", "metric", "above", "below"}):
        raise _wrong(name, f"{where} has an unknown key {unknown[0]!r}")
    if ("above" in row) == ("below" in row):
        raise _wrong(name, f"{where} needs either 'above' or 'below'")
    metric = _text(name, row.get("metric"), f"{where}, metric")
    try:
        variant(metric)
    except InputError as error:
        raise InputError(f"rules file {name!r}: {where}: {error.message}", error.hint) from error
    side = "above" if "above" in row else "below"
    threshold = _number(name, row[side], f"{where}, {side}")
    return Rule(_text(name, row.get("label"), f"{where}, label"), metric, threshold, side == "above")


def _text(name: str, value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(name, f"{where} must be a text, not {value!r}")
    return value


def _number(name: str, value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise _wrong(name, f"{where} must be a number, not {reprlib.repr(value)}")
    return float(value)


def _wrong(name: str, what: str) -> InputError:
    return InputError(f"rules file {name!r}: {what}", _HINT)
