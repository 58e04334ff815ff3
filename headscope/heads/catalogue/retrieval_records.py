"""From trials with needles to records, a table and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.result import Example, Found, Looked, Place, TypeRecord
from headscope.heads.catalogue.retrieval_scores import (
    ABOVE,
    STRONG,
    TRIVIAL,
    Floats,
    Numbers,
    copied,
    expected,
    p_of,
    trivial,
)
from headscope.heads.catalogue.retrieval_trials import Ran, Trial
from headscope.heads.clusters import ClusterSums, holm
from headscope.heads.statistics import Layer
from headscope.models.selection import ranges
from headscope.models.tokens import TokenReader, labels_of

TYPE = "retrieval"
ALPHA = 0.05


# ------------------------------------------------------------------ all trials
@dataclass(frozen=True, eq=False)
class _Scores:
    """One layer's numbers, by the trials that count there.

    Attributes:
        trials: Those trials' numbers among the passed ones.
        score: float64, (trial, head).
        chance, other: float64, (trial,): what chance gives, and each trivial head, (trial, trivial).
    """

    trials: Numbers
    score: Floats
    chance: Floats
    other: Floats

    def over(self, groups: Sequence[Any]) -> dict[Any, Floats]:
        """Mean score of each head, by the group of each passed trial."""
        mine = [groups[i] for i in self.trials]
        return {g: self.score[[m == g for m in mine]].mean(axis=0) for g in sorted(set(mine))}


def found_by(probing: Probing, ran: Ran, notes: Sequence[str]) -> Found:
    """Everything that the trials show; at least one has passed."""
    passed = [t for t in ran.trials if t.passed]
    simple = np.array([trivial(t) for t in passed])
    layers: dict[Layer, _Scores] = {}
    blind: list[Layer] = []
    for layer in ran.facts:
        seeing = [i for i, t in enumerate(passed) if layer in t.tops and expected(t.tops[layer], t) > 0]
        if not seeing:
            blind.append(layer)
            continue
        score = np.array([copied(passed[i].tops[layer].key, passed[i]).mean(axis=1) for i in seeing])
        chance = np.array([expected(passed[i].tops[layer], passed[i]) for i in seeing])
        layers[layer] = _Scores(np.array(seeing), score, chance, simple[seeing, : len(TRIVIAL)])
    records: dict[Place, TypeRecord] = {}
    for layer, scores in layers.items():
        for index, place in probing.places(ran.facts[layer]):
            records[place] = _record(scores, index, passed)
    records = _corrected(probing, records, ran, passed)
    notes = [*notes, *_notes(ran, passed, blind, len(records))]
    evidence = {place: (record,) for place, record in records.items()}
    table = _table(probing, ran, passed, layers)
    return Found(evidence, {TYPE: table}, tuple(notes), {TYPE: _summary(ran, passed, records, simple[:, -1])})


def _record(scores: _Scores, index: int, passed: Sequence[Trial]) -> TypeRecord:
    """A head's record, its p-value for itself alone and nothing claimed yet."""
    needles = [passed[i].prompt.needle for i in scores.trials]
    groups = [[m == n for m in needles] for n in sorted(set(needles))]
    value, chance, rows = (
        np.array([array[g].sum() for g in groups])
        for array in (scores.score[:, index], scores.chance, np.ones(len(needles)))
    )
    other = np.array([scores.other[g].sum(axis=0) for g in groups])
    sums = ClusterSums.of(value, chance, rows)
    low, high = (_bounded(float(x)) for x in sums.interval())
    best = int(other.sum(axis=0).argmax())
    score = float(sums.score)
    by_length = scores.over([t.prompt.length for t in passed])
    by_depth = scores.over([t.prompt.depth for t in passed])
    return TypeRecord(
        type=TYPE,
        score=score,
        chance=float(sums.chance),
        eligible=len(needles),
        low=low,
        high=high,
        claimed=False,
        criteria=tuple(n for n, least in (("wu_2025", ABOVE), ("wu_2025_strong", STRONG)) if score >= least),
        alternative=(TRIVIAL[best], float(other[:, best].sum() / rows.sum())),
        p=p_of(value / rows, np.maximum(chance / rows, (other / rows[:, None]).max(axis=1))),
        details={
            "by_length": {str(n): float(s[index]) for n, s in by_length.items()},
            "by_depth": {f"{d:g}": float(s[index]) for d, s in by_depth.items()},
        },
    )


def _bounded(number: float) -> float | None:
    return None if np.isnan(number) else min(max(number, 0.0), 1.0)


def _corrected(
    probing: Probing, records: dict[Place, TypeRecord], ran: Ran, passed: Sequence[Trial]
) -> dict[Place, TypeRecord]:
    """Records with p-values corrected for all heads, and claims with their examples."""
    result = {}
    corrected = holm(np.array([r.p for r in records.values()], dtype=np.float64))
    for (place, record), p in zip(records.items(), corrected.tolist(), strict=True):
        claimed = bool(record.criteria) and p <= ALPHA
        index = ran.facts[place[:2]].heads.index(place[2])
        example = _example(probing, passed, place[:2], index) if claimed else None
        result[place] = TypeRecord(**{**record.__dict__, "p": p, "claimed": claimed, "example": example})
    return result


# ------------------------------------------------------------------ what is shown
def _example(probing: Probing, passed: Sequence[Trial], layer: tuple[str, int], index: int) -> Example | None:
    """The copied token with the largest weight: the needle and what was said of it until then."""
    best: tuple[float, Trial, int, int] | None = None
    for trial in passed:
        tops = trial.tops.get(layer)
        for row, token in enumerate(trial.said if tops is not None else ()):
            assert tops is not None
            key, weight = int(tops.key[index, row]), float(tops.weight[index, row])
            hit = key in trial.prompt.positions and trial.prompt.ids[key] == token
            if hit and (best is None or weight > best[0]):
                best = (weight, trial, row, key)
    if best is None:
        return None
    weight, trial, row, key = best
    ids, at, where = (*trial.prompt.ids, *trial.said), len(trial.prompt.ids) - 1 + row, trial.prompt.positions
    tokenizer = probing.loaded.tokenizer
    assert tokenizer is not None
    labels = labels_of(TokenReader(tokenizer).pieces(ids))
    parts = (ids[max(where.start - 4, 0) : where.stop], ids[max(at - 7, where.stop) : at + 1])
    text = " … ".join(str(tokenizer.decode(list(part))).strip() for part in parts)
    return Example(text, at, labels[at], (Looked(key, labels[key], weight),))


def _table(
    probing: Probing, ran: Ran, passed: Sequence[Trial], layers: Mapping[Layer, _Scores]
) -> tuple[Mapping[str, Any], ...]:
    """A row a length and depth, the best head's names and score None where no trial passed."""
    cells = sorted({(t.prompt.length, t.prompt.depth) for t in ran.trials})
    groups = [(t.prompt.length, t.prompt.depth) for t in passed]
    over = {layer: scores.over(groups) for layer, scores in layers.items()}
    rows = []
    for cell in cells:
        mine = [t for t in ran.trials if (t.prompt.length, t.prompt.depth) == cell]
        heads = {
            place: float(over[layer][cell][index])
            for layer in layers
            for index, place in probing.places(ran.facts[layer])
            if cell in over[layer]
        }
        best = max(heads, key=lambda place: heads[place], default=None)
        rows.append(
            {
                "length": cell[0],
                "depth": cell[1],
                "trials": len(mine),
                "passed": sum(t.passed for t in mine),
                "recall": float(np.mean([t.recall for t in mine])),
                "stack": None if best is None else best[0],
                "head": None if best is None else f"L{best[1]}H{best[2]}",
                "score": None if best is None else heads[best],
            }
        )
    return tuple(rows)


def _summary(
    ran: Ran, passed: Sequence[Trial], records: Mapping[Place, TypeRecord], induction: Floats
) -> dict[str, Any]:
    """Shares are of the heads that were measured."""
    scores = np.array([r.score for r in records.values()])
    return {
        "trials": len(ran.trials),
        "passed": len(passed),
        "needles": len({t.prompt.needle for t in passed}),
        "recall": float(np.mean([t.recall for t in ran.trials])),
        "share_wu_2025": float((scores >= ABOVE).mean()) if len(scores) else None,
        "share_zero": float((scores == 0).mean()) if len(scores) else None,
        "latest_match": float(induction.mean()),
    }


def _notes(ran: Ran, passed: Sequence[Trial], blind: Sequence[Layer], heads: int) -> list[str]:
    notes = []
    if len(passed) < len(ran.trials):
        lost = len(ran.trials) - len(passed)
        notes.append(
            f"retrieval: {lost} of {len(ran.trials)} trials do not count: the model says too little of the needle"
        )
    for stack in dict.fromkeys(stack for stack, _ in blind):
        numbers = ranges(sorted(layer for s, layer in blind if s == stack))
        notes.append(f"retrieval: {stack}: layers {numbers} left out: their rows do not see the needles")
    means = [float(np.mean([1 / t.prompt.length for t in passed if t.prompt.needle == n])) for n in _needles(passed)]
    if heads * p_of(np.ones(len(means)), np.array(means)) > ALPHA:
        notes.append(f"retrieval: {len(means)} needles are too few to tell any of {heads} heads from chance")
    return notes


def _needles(trials: Sequence[Trial]) -> list[int]:
    return sorted({t.prompt.needle for t in trials})
