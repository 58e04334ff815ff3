"""From per-text values to records: means over texts, spread, chance marks, labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headscope.capture.session import SiteFacts
from headscope.heads.metrics import variant
from headscope.heads.rules import SINK_LABEL, RuleSet
from headscope.heads.statistics import Values
from headscope.results import HeadRecord, Spread

# A value this close to chance is no better than chance: rounding of a uniform head's weights, not behaviour.
CHANCE_SLACK = 5e-3
ROUNDING = 1e-6

# Two-sided 95 % points of Student's t for 1 to 4 degrees of freedom; above, `student_t` uses a series.
_T975 = (12.706205, 4.302653, 3.182446, 2.776445)


def head_records(
    facts: SiteFacts, values: Mapping[str, Values], rules: RuleSet, names: Sequence[str], heads: Sequence[int]
) -> list[HeadRecord]:
    """The records of one layer's heads.

    Args:
        values: Per-text values, float64 (text, head), by metric name; what is missing was not measurable.
        names: The metrics to show; the rules' own are shown as well.
        heads: Head numbers, those of the original model.
    """
    shown = tuple(dict.fromkeys((*names, *rules.metrics)))
    without_sink = rules.without_sink()
    records = []
    of_values, of_chances = ({n: _means(getattr(v, field)) for n, v in values.items()} for field in ("value", "chance"))
    for head in heads:
        place = facts.heads.index(head)
        means, chances = ({n: m[place] for n, m in each.items()} for each in (of_values, of_chances))
        pattern, runner_up = rules.label(means)
        records.append(
            HeadRecord(
                stack=facts.site.stack,
                layer=facts.site.layer,
                head=head,
                kv_head=facts.kv_head(head),
                pattern=pattern,
                runner_up=runner_up,
                metrics={name: means.get(name) for name in shown},
                chance={name: chances.get(name) for name in shown},
                at_chance=tuple(n for n in shown if at_chance(n, means.get(n), chances.get(n))),
                rest_pattern=_rest_pattern(pattern, without_sink, means),
                spread=_spreads({n: values[n].value[:, place] for n in shown if n in values}),
            )
        )
    return records


def _rest_pattern(pattern: str, rules: RuleSet, means: Mapping[str, float | None]) -> str | None:
    if pattern != SINK_LABEL or all(means.get(m) is None for m in rules.metrics):
        return None
    return rules.label(means)[0]


def at_chance(name: str, value: float | None, chance: float | None) -> bool:
    """Whether a metric is no better than what uniform attention scores; False where that says nothing."""
    direction = variant(name).metric.direction
    if value is None or chance is None or direction is None:
        return False
    if direction == "low":
        return value >= chance * (1 - CHANCE_SLACK) - ROUNDING
    return value <= chance * (1 + CHANCE_SLACK) + ROUNDING


def means_of(values: Mapping[str, Values], head: int) -> dict[str, float | None]:
    """One head's metrics as means over texts; None where no text could show one."""
    return {name: _means(v.value)[head] for name, v in values.items()}


def _means(values: NDArray[np.float64]) -> list[float | None]:
    """Means over the first axis; None where there is nothing but NaN."""
    measured = ~np.isnan(values)
    counts = measured.sum(axis=0)
    means = np.where(measured, values, 0.0).sum(axis=0) / np.maximum(counts, 1)
    return [m if n else None for m, n in zip(means.tolist(), counts.tolist(), strict=True)]


def _spreads(values: Mapping[str, NDArray[np.float64]]) -> dict[str, Spread] | None:
    if all(len(v) < 2 for v in values.values()):
        return None
    return {name: spread(v) for name, v in values.items()}


def spread(values: NDArray[np.float64]) -> Spread:
    """Standard deviation over texts and the 95 % interval of the mean (Student's t), NaN left out."""
    measured = values[~np.isnan(values)]
    if measured.size < 2:
        return Spread(None, None, None, int(measured.size))
    mean, sd = float(measured.mean()), float(measured.std(ddof=1))
    half = student_t(measured.size - 1) * sd / math.sqrt(measured.size)
    return Spread(sd, mean - half, mean + half, int(measured.size))


def student_t(freedom: int) -> float:
    """The two-sided 95 % point of Student's t, good to 2e-3 (Abramowitz and Stegun, 26.7.5)."""
    if freedom <= len(_T975):
        return _T975[freedom - 1]
    z = 1.959963984540054
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + float(sum(t / freedom**k for k, t in enumerate(terms, 1)))
