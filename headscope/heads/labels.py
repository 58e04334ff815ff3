"""From sums over texts to records: means, spread, chance marks, labels and how stable they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headscope.heads.interval import interval
from headscope.heads.layer_facts import LayerFacts
from headscope.heads.metrics import variant
from headscope.heads.moments import Moments
from headscope.heads.rules import SINK_LABEL, RuleSet
from headscope.heads.statistics import Values
from headscope.heads.sums import LayerSums
from headscope.results import SPLITS, STABLE, HeadRecord, Spread

# A value this close to chance is no better than chance: rounding of a uniform head's weights, not behaviour.
CHANCE_SLACK = 5e-3
ROUNDING = 1e-6


def head_records(
    facts: LayerFacts, sums: LayerSums, rules: RuleSet, names: Sequence[str], heads: Iterable[int]
) -> list[HeadRecord]:
    """The records of one layer's heads.

    Args:
        sums: What the texts showed, heads in the order of `facts.heads`; a metric that is missing was not measurable.
        names: The metrics to show; the rules' own are shown as well.
        heads: Head numbers, those of the original model.
    """
    shown = tuple(dict.fromkeys((*names, *rules.metrics)))
    without_sink = rules.without_sink()
    values = sums.values
    of_values, of_chances = ({n: _known(m.mean) for n, m in each.items()} for each in (values, sums.chances))
    spreads = {name: spread(values[name]) for name in shown if name in values} if sums.texts > 1 else None
    records = []
    for head in heads:
        place = facts.heads.index(head)
        means, chances = ({n: m[place] for n, m in each.items()} for each in (of_values, of_chances))
        pattern, runner_up = rules.label(means)
        stability, second, second_share = _stability(sums, place, pattern)
        records.append(
            HeadRecord(
                stack=facts.stack,
                layer=facts.layer,
                head=head,
                kv_head=facts.kv_head(head),
                pattern=pattern,
                runner_up=runner_up,
                metrics={name: means.get(name) for name in shown},
                chance={name: chances.get(name) for name in shown},
                at_chance=tuple(n for n in shown if at_chance(n, means.get(n), chances.get(n))),
                rest_pattern=_rest_pattern(pattern, without_sink, means),
                spread=None if spreads is None else {name: each[place] for name, each in spreads.items()},
                stability=stability,
                second=second,
                second_share=second_share,
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
    return {name: _known(Moments.of(v.value[:, head]).mean)[0] for name, v in values.items()}


def spread(moments: Moments) -> list[Spread]:
    """Each head's standard deviation over texts and 95 % interval of the mean; None below two texts."""
    low, high = interval(moments)
    columns = (_known(moments.sd), _known(low), _known(high), moments.count.tolist())
    return [Spread(*numbers) for numbers in zip(*columns, strict=True)]


def _stability(sums: LayerSums, place: int, pattern: str) -> tuple[float | None, str | None, float | None]:
    """A head's `stability`, `second` and `second_share`."""
    texts = int(sums.labelled[place])
    if texts < 2:
        return None, None, None
    shares = {label: int(counts[place]) / texts for label, counts in sums.labels.items()}
    stability = shares.pop(pattern, 0.0)
    second = max(shares, key=lambda label: shares[label], default=None)
    if second is None or stability >= STABLE or shares[second] < SPLITS:
        return stability, None, None
    return stability, second, shares[second]


def _known(values: NDArray[np.float64]) -> list[float | None]:
    """Numbers, None for NaN."""
    return [None if np.isnan(v) else v for v in np.atleast_1d(values).tolist()]
