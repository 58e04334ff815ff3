"""From the answers of heads and baselines to records, a table and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.heads.catalogue.coreference_answers import Answers
from headscope.heads.catalogue.coreference_runs import KINDS, Run
from headscope.heads.catalogue.coreference_statistics import corrected, halves, paired_gain
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.result import Example, Found, Looked, Place, TypeRecord
from headscope.heads.clusters import ClusterSums, Floats
from headscope.heads.statistics import Layer

TYPE = "coreference"
NEAREST, MATCH, CHANCE = "nearest mention", "head match", "chance"
_LEVEL = 0.05
# Words shown before a mention.
_NEAR = 16

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Asked:
    """All questions.

    Attributes:
        run, document, head: int64, (question,): its run, its document among those with questions, and the position of
            the mention's head word in the run.
        kind: str, (question,).
    """

    runs: tuple[Run, ...]
    run: Ints
    document: Ints
    head: Ints
    kind: NDArray[np.str_]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Asked:
        """The questions of these runs, in order."""
        each = [(i, run.document, q.head, q.kind) for i, run in enumerate(runs) for q in run.questions]
        run, document, head, kind = (np.array(part) for part in zip(*each, strict=True))
        return cls(tuple(runs), run, np.unique(document, return_inverse=True)[1], head, kind)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Right answers summed over questions, float64 (document, head) by name; `rows` counts the questions.

    Heads of one layer share the answers of baselines.
    """

    by: Mapping[str, Floats]

    def clusters(self, name: str, expected: str = CHANCE) -> ClusterSums:
        """Documents as clusters."""
        return ClusterSums.of(self.by[name], self.by[expected], self.by["rows"])

    def part(self, name: str, head: int, documents: Ints) -> tuple[Floats, Floats]:
        """One head's right answers and questions, (document,) each."""
        return self.by[name][documents, head], self.by["rows"][documents, head]


_Layers = Sequence[tuple[Answers, list[int]]]


def found_by(probing: Probing, asked: Asked, found: Mapping[Layer, Answers], notes: Sequence[str]) -> Found:
    """Records of the wanted heads, the table of the best one and the baselines, and its gain."""
    layers: list[tuple[Answers, list[int]]] = []
    places: list[Place] = []
    for a in found.values():
        here = probing.places(a.facts)
        if here:
            layers.append((a, [i for i, _ in here]))
            places += [place for _, place in here]
    if not places:
        return Found({}, notes=tuple(notes))
    whole = _sums(asked, layers)
    kinds = {kind: _sums(asked, layers, kind) for kind in KINDS}
    records = zip(places, _records(probing, asked, layers, whole, kinds), strict=True)
    evidence = {place: (record,) for place, record in records if record.eligible}
    table, summary, more = _best(places, whole, kinds, probing.seed)
    return Found(evidence, {TYPE: table}, (*notes, *more), {TYPE: summary})


def _sums(asked: Asked, layers: _Layers, kind: str | None = None) -> _Sums:
    """Sums over all heads of all layers; `kind` None counts all questions."""
    wanted = np.ones(len(asked.kind), np.bool_) if kind is None else asked.kind == kind
    columns: dict[str, list[Floats]] = {}
    for a, heads in layers:
        counted = (a.eligible & wanted)[:, None]
        parts = {NEAREST: a.nearest[:, None], MATCH: a.match[:, None], CHANCE: a.chance[:, None]}
        parts |= {"value": a.value[:, heads], "any_word": a.any_word[:, heads], "rows": counted}
        for name, values in parts.items():
            total = np.zeros((asked.document.max() + 1, len(heads)))
            np.add.at(total, asked.document, np.where(counted, values, 0))
            columns.setdefault(name, []).append(total)
    return _Sums({name: np.concatenate(parts, axis=1) for name, parts in columns.items()})


# ------------------------------------------------------------------ records
def _records(
    probing: Probing, asked: Asked, layers: _Layers, whole: _Sums, kinds: Mapping[str, _Sums]
) -> list[TypeRecord]:
    """One a head, in order."""
    p = {n: corrected(whole.by["value"], whole.by[n], whole.by["rows"], probing.seed) for n in (NEAREST, MATCH, CHANCE)}
    clusters = whole.clusters("value")
    low, high = np.clip(clusters.interval(), 0.0, 1.0)
    others = {name: whole.clusters(name).score for name in (NEAREST, MATCH, "any_word")}
    flat = [(a, i) for a, heads in layers for i in heads]
    result = []
    for n, (a, i) in enumerate(flat):
        better = max((MATCH, NEAREST), key=lambda name: others[name][n])
        worst = max(p[better][n], p[CHANCE][n])
        claimed = bool(worst < _LEVEL)
        by_kind = {kind: _accuracy(sums, n) for kind, sums in kinds.items()}
        result.append(
            TypeRecord(
                type=TYPE,
                score=float(clusters.score[n]),
                chance=float(clusters.chance[n]),
                eligible=int(clusters.rows[n]),
                low=_number(low[n]),
                high=_number(high[n]),
                example=_example(asked, a, i) if claimed else None,
                claimed=claimed,
                criteria=tuple(f"beats_{name.replace(' ', '_')}" for name in (NEAREST, MATCH) if p[name][n] < _LEVEL),
                alternative=(better, float(others[better][n])),
                p=_number(worst),
                details={
                    "any_word": float(others["any_word"][n]),
                    "nearest_mention": float(others[NEAREST][n]),
                    "head_match": float(others[MATCH][n]),
                    "kinds": {kind: part for kind, part in by_kind.items() if part is not None},
                },
            )
        )
    return result


def _accuracy(sums: _Sums, head: int) -> dict[str, Any] | None:
    mentions = sums.by["rows"][:, head].sum()
    value = sums.by["value"][:, head].sum()
    return {"accuracy": float(value / mentions), "mentions": int(mentions)} if mentions else None


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _example(asked: Asked, a: Answers, head: int) -> Example | None:
    """The right answer with the largest weight, of those that no baseline gives where there is one."""
    right = a.eligible & (a.value[:, head] == 1)
    telling = right & (a.nearest < 1) & (a.match < 1)
    right = telling if telling.any() else right
    if not right.any():
        return None
    n = int(np.argmax(np.where(right, a.weight[:, head], -1)))
    run, here, there = asked.runs[asked.run[n]], int(asked.head[n]), int(a.chosen[n, head])
    text = " ".join(run.words[max(0, min(here, there) - _NEAR) : here + 1])
    key = Looked(run.first + there, run.words[there], float(a.weight[n, head]))
    return Example(text, run.first + here, run.words[here], (key,))


# ------------------------------------------------------------------ the best head
def _best(
    places: Sequence[Place], whole: _Sums, kinds: Mapping[str, _Sums], seed: int
) -> tuple[tuple[dict[str, Any], ...], dict[str, Any], list[str]]:
    """The table, the summary and notes: a head chosen on half of the documents, scored on the others."""
    documents = np.flatnonzero(whole.by["rows"].any(axis=1))
    if len(documents) < 2:
        return (), {}, [f"{TYPE}: no best head: one is chosen on some documents and scored on others, there is but one"]
    chosen_on, scored_on = halves(documents, seed)
    value, rows = (whole.by[name][chosen_on].sum(axis=0) for name in ("value", "rows"))
    best = int(np.argmax(np.where(rows > 0, value / np.maximum(rows, 1), -1)))
    name = _name(places[best], places)
    table = []
    for label, what in ((name, "value"), (NEAREST, NEAREST), (MATCH, MATCH), (CHANCE, CHANCE)):
        for kind, sums in {"all": whole, **kinds}.items():
            table += _row(label, kind, *sums.part(what, best, scored_on))
    scores = {n: whole.by[n][scored_on, best].sum() for n in (MATCH, NEAREST)}
    baseline = max(scores, key=lambda n: scores[n])
    summary: dict[str, Any] = {"head": name, "baseline": baseline}
    summary |= {"documents_to_choose": len(chosen_on), "documents_to_score": len(scored_on)}
    right, asked = whole.part("value", best, scored_on)
    gain = paired_gain(right, whole.part(baseline, best, scored_on)[0], asked, seed)
    summary |= {n: None if gain is None else getattr(gain, n) for n in ("gain", "low", "high", "p")}
    return tuple(table), summary, []


def _row(name: str, kind: str, value: Floats, rows: Floats) -> list[dict[str, Any]]:
    """A row of the table, none where no mention is of this kind."""
    if not rows.any():
        return []
    clusters = ClusterSums.of(value, value, rows)
    low, high = (_number(float(end)) for end in np.clip(clusters.interval(), 0.0, 1.0))
    row = {"name": name, "kind": kind, "accuracy": float(clusters.score), "low": low, "high": high}
    return [{**row, "mentions": int(rows.sum())}]


def _name(place: Place, places: Sequence[Place]) -> str:
    stack, layer, head = place
    several = len({stack for stack, _, _ in places}) > 1
    return f"{stack} L{layer}H{head}" if several else f"L{layer}H{head}"
