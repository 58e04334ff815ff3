"""What the map can be coloured by and heads ranked by: one column of numbers each, in the order of the heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headscope.errors import InputError
from headscope.results import Analysis, HeadRecord
from headscope.views.records import plain
from headscope.views.sections import has_stability, metric_names
from headscope.views.text import visible

if TYPE_CHECKING:
    from headscope.importance.result import Importance

Column = dict[str, Any]


def columns_of(analysis: Analysis, importance: Importance | None) -> list[Column]:
    """Metrics, stability, scores of types and importance, each with `kind`, `name` and `values` and what else there is.

    `low` and `high` are ends of intervals, `chance` is what even attention scores; lists with null where a head has
    none, and null where no head has any.

    Raises:
        InputError: The importance is of other heads.
    """
    found = [_metric(analysis.heads, name) for name in metric_names(analysis)]
    if has_stability(analysis):
        found.append(_column("stability", "stability", [record.stability for record in analysis.heads]))
    found += _types(analysis)
    if importance is not None:
        found.append(_importance(analysis, importance))
    return found


def _column(kind: str, name: str, values: Sequence[float | None], **more: Any) -> Column:
    empty = {"low": None, "high": None, "chance": None, "at_chance": None}
    column: Column = plain({"kind": kind, "name": visible(name), "values": list(values), **empty, **more})
    return column


def _metric(heads: Sequence[HeadRecord], name: str) -> Column:
    spreads = [(record.spread or {}).get(name) for record in heads]
    return _column(
        "metric",
        name,
        [record.metrics.get(name) for record in heads],
        low=_unless_empty([None if s is None else s.low for s in spreads]),
        high=_unless_empty([None if s is None else s.high for s in spreads]),
        sd=_unless_empty([None if s is None else s.sd for s in spreads]),
        texts=_unless_empty([None if s is None else s.texts for s in spreads]),
        chance=_unless_empty([record.chance.get(name) for record in heads]),
        at_chance=_unless_empty([name in record.at_chance or None for record in heads]),
    )


def _unless_empty(values: list[Any]) -> list[Any] | None:
    return None if all(value is None for value in values) else values


def _types(analysis: Analysis) -> Iterator[Column]:
    if analysis.catalogue is None:
        return
    for name, scores in analysis.catalogue.scores.items():
        if any(score is not None for score in scores):
            has = [any(found.type == name for found in record.types) for record in analysis.heads]
            yield _column("type", name, scores, has=has)


def _importance(analysis: Analysis, importance: Importance) -> Column:
    scores = {(s.stack, s.layer, s.head): s for s in importance.heads}
    own = [scores.get((record.stack, record.layer, record.head)) for record in analysis.heads]
    if not any(own):
        raise InputError(
            "the importance is of none of these heads", "score the heads of this model with `headscope importance`"
        )
    errors = [None if s is None or s.error is None else 2 * s.error for s in own]
    pairs = [(s.score, e) for s, e in zip(own, errors, strict=True) if s is not None and e is not None]
    wide = len(pairs) > 0
    return _column(
        "importance",
        "importance",
        [None if s is None else s.score for s in own],
        low=_ends(own, errors, -1) if wide else None,
        high=_ends(own, errors, 1) if wide else None,
    )


def _ends(own: Sequence[Any], errors: Sequence[float | None], sign: int) -> list[float | None]:
    return [None if s is None or e is None else s.score + sign * e for s, e in zip(own, errors, strict=True)]


def label_styles_data(styles: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Letter, fill and ink by the label's name as the page shows it."""
    return {visible(name): {"letter": s.letter, "fill": s.fill, "ink": s.ink} for name, s in styles.items()}
