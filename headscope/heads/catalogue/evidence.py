"""From sums over texts to records: scores, intervals, corrected p-values, claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headscope.heads.catalogue.layer_types import LayerTypes
from headscope.heads.catalogue.result import Evidence, Place, TypeRecord
from headscope.heads.catalogue.text_types import TextType
from headscope.heads.clusters import holm
from headscope.heads.statistics import Layer

# The risk of any false claim of a type, over all heads that were looked at.
RISK = 0.05

Heads = Mapping[Layer, Sequence[tuple[int, Place]]]
"""The heads that are asked for, by layer: each one's place among the layer's weights, and where it is."""


def evidence_of(types: Iterable[TextType], layers: Mapping[Layer, LayerTypes], heads: Heads) -> Evidence:
    """Every head's record of every type that could be measured on it, as if each type were alone."""
    found: dict[Place, list[TypeRecord]] = {}
    for kind in types:
        for place, record in _records(kind, layers, heads).items():
            found.setdefault(place, []).append(record)
    return {place: tuple(records) for place, records in found.items()}


def _records(kind: TextType, layers: Mapping[Layer, LayerTypes], heads: Heads) -> dict[Place, TypeRecord]:
    known = [
        (layer, index, place)
        for layer, chosen in heads.items()
        if layer in layers and kind.score in layers[layer].measures
        for index, place in chosen
        if layers[layer].measures[kind.score].rows[index] > 0
    ]
    sums = {layer: layers[layer].measures[kind.score] for layer, _, _ in known}
    values = {layer: (s.score, s.chance, *s.interval(), s.p_above()) for layer, s in sums.items()}
    p = holm(np.array([values[layer][4][index] for layer, index, _ in known]))
    records = {}
    for (layer, index, place), corrected in zip(known, p.tolist(), strict=True):
        score, chance, low, high, _ = (float(v[index]) for v in values[layer])
        scores = layers[layer].scores(index)
        alternative = layers[layer].alternative(kind.score) if kind.trivial else None
        criteria = tuple(c.name for c in kind.criteria if c.holds(scores))
        better = not kind.tested or corrected < RISK
        beaten = alternative is not None and score <= alternative[1]
        examples = layers[layer].examples.get(kind.score, ())
        claimed = bool(criteria) and better and not beaten
        records[place] = TypeRecord(
            type=kind.name,
            score=score,
            chance=chance,
            eligible=int(sums[layer].rows[index]),
            # Shares of 0 to 1, which the sums of rounded weights may pass a little.
            low=None if np.isnan(low) else max(low, min(score, 0.0)),
            high=None if np.isnan(high) else min(high, max(score, 1.0)),
            example=examples[index] if claimed and index < len(examples) else None,
            claimed=claimed,
            criteria=criteria,
            alternative=alternative,
            p=corrected if kind.tested else None,
            details=_details(kind, scores),
        )
    return records


def _details(kind: TextType, scores: Mapping[str, float]) -> dict[str, Any]:
    """What criteria look at beside the score: how often the largest weight is there, on how many texts it is high."""
    wanted = {"largest_there": kind.score.replace("at:", "most:"), "texts_above": f"share:{kind.score}"}
    return {name: scores[key] for name, key in wanted.items() if key != kind.score and key in scores}
