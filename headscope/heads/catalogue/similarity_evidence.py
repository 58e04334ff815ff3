"""What is said of each head beside the head that is most like it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from headscope.heads.catalogue.result import Example, Looked, Place, TypeRecord
from headscope.heads.catalogue.similarity_result import Similarity
from headscope.heads.catalogue.similarity_rows import SampledRow, divergence
from headscope.heads.clusters import ClusterSums
from headscope.models.inputs import Prepared

NAME = "redundant"

_TRIVIAL = ("first_token", "uniform")
# Neighbouring rows are alike: an interval is over so many stretches of the sample, each of one part of one text.
_STRETCHES = 16
_AROUND = 8
_SHOWN = 3


@dataclass
class _Seen:
    """One head's rows beside its partner's: each row's stretch, divergence, and those from the trivial heads."""

    stretch: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    trivial: list[list[float]] = field(default_factory=list)
    closest: tuple[float, SampledRow | None] = (np.inf, None)


def redundant_records(
    found: Similarity, rows: Sequence[SampledRow], prepared: Prepared
) -> dict[Place, tuple[TypeRecord, ...]]:
    """A record for each head that can be compared with another: its score is the distance to the nearest."""
    partner = _partners(found)
    seen: dict[Place, _Seen] = {head: _Seen() for head in partner}
    for number, row in enumerate(rows):
        _add(seen, partner, row, number * _STRETCHES // len(rows))
    index = {head: i for i, head in enumerate(found.heads)}
    records: dict[Place, tuple[TypeRecord, ...]] = {}
    for head, other in partner.items():
        others = np.delete(found.distance[index[head]], index[head])
        distance = float(found.distance[index[head], index[other]])
        records[head] = (_record(found, head, other, distance, others, seen[head], prepared),)
    return records


def _partners(found: Similarity) -> dict[Place, Place]:
    """The nearest other head of each; the first of several that are as near."""
    away = np.where(np.isnan(found.distance), np.inf, found.distance)
    np.fill_diagonal(away, np.inf)
    nearest, distance = away.argmin(axis=1), away.min(axis=1)
    return {head: found.heads[nearest[i]] for i, head in enumerate(found.heads) if distance[i] < np.inf}


def _add(seen: dict[Place, _Seen], partner: dict[Place, Place], row: SampledRow, stretch: int) -> None:
    place = {head: i for i, head in enumerate(row.heads)}
    heads = [head for head in row.heads if head in partner and partner[head] in place]
    weights, trivial = row.scaled(), torch.cat([part.trivial for part in row.parts])
    own, others = ([place[h] for h in some] for some in (heads, [partner[h] for h in heads]))
    values = divergence(weights[own], weights[others]).clamp(0, 1).tolist()
    for head, value, away in zip(heads, values, trivial[own].tolist(), strict=True):
        if value == value:
            into = seen[head]
            into.stretch.append(stretch)
            into.value.append(value)
            into.trivial.append(away)
            if value < into.closest[0]:
                into.closest = (value, row)


def _record(
    found: Similarity,
    head: Place,
    other: Place,
    distance: float,
    others: NDArray[np.float64],
    seen: _Seen,
    prepared: Prepared,
) -> TypeRecord:
    low, high = _interval(seen, distance)
    trivial = np.sqrt(np.clip(np.mean(seen.trivial, axis=0), 0, 1))
    name, nearest = min(zip(_TRIVIAL, trivial.tolist(), strict=True), key=lambda pair: pair[1])
    claimed = distance < found.threshold
    row = seen.closest[1]
    return TypeRecord(
        NAME,
        score=distance,
        chance=None,
        eligible=len(seen.value),
        low=low,
        high=high,
        example=_example(row, head, prepared) if claimed and row is not None else None,
        claimed=claimed,
        alternative=(name, nearest),
        details={
            "partner": f"L{other[1]}H{other[2]}",
            "same_layer": other[:2] == head[:2],
            "median_distance": float(np.nanmedian(others)),
        },
    )


def _interval(seen: _Seen, distance: float) -> tuple[float | None, float | None]:
    """95 % interval of the distance, by stretches of the sample; none below two."""
    stretches = np.array(seen.stretch)
    rows = np.bincount(stretches, minlength=_STRETCHES).astype(np.float64)
    values = np.bincount(stretches, weights=seen.value, minlength=_STRETCHES).astype(np.float64)
    low, high = (float(np.sqrt(np.clip(v, 0, 1))) for v in ClusterSums.of(values, np.zeros(1), rows).interval())
    # Distances are rounded to float32, these are not.
    return (None, None) if np.isnan(low) else (min(low, distance), max(high, distance))


def _example(row: SampledRow, head: Place, prepared: Prepared) -> Example | None:
    """A row as the head sees it; none where tokens have no names."""
    axis = prepared.batches[row.batch].axes.get(row.axis)
    if axis is None or row.position >= len(axis.labels[row.text]):
        return None
    labels = axis.labels[row.text]
    weights = row.scaled()[row.heads.index(head)][: len(labels)]
    top = weights.topk(min(_SHOWN, len(weights)))
    keys = [Looked(k, labels[k], w) for w, k in zip(top.values.tolist(), top.indices.tolist(), strict=True) if w > 0]
    around = labels[max(0, row.position - _AROUND) : row.position + _AROUND + 1]
    return Example(" ".join(around), row.position, labels[row.position], tuple(keys))
