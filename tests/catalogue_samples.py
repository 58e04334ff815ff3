"""A head catalogue made by hand for the views' tests: numbers that are all different, tokens that break things."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from headscope.heads.catalogue.result import Catalogue, Example, Looked, TypeInfo, TypeRecord
from headscope.heads.catalogue.similarity_result import Similarity
from headscope.results import Analysis, HeadRecord
from tests.views_samples import analysis, model_heads

BAD_TOKENS = ("[bold]", "|", "<script>", "a\nb", "\x1b[31m", "猫", " ", "", "*_`$")


def type_record(name: str, score: float, **more: Any) -> TypeRecord:
    """A claimed type with an interval of a tenth to both sides."""
    given = {"chance": 0.077, "eligible": 31, "low": score - 0.1, "high": score + 0.05} | more
    return TypeRecord(name, score, **given)


def example(token: str, *keys: tuple[str, float], text: str = "the cat sat on the mat") -> Example:
    """A row that looks at `keys`."""
    return Example(text, 5, token, tuple(Looked(i, key, weight) for i, (key, weight) in enumerate(keys)))


INFOS = (
    TypeInfo("induction", "attends behind", "Olsson et al. 2022", 12, 3, 1.26, None),
    TypeInfo("previous_token", "attends one back", "Clark et al. 2019", 11, 1, None, None),
    TypeInfo("syntax", "attends to heads", "Clark et al. 2019", 12, 2, 4.04, None),
    TypeInfo("redundant", "like another", "own", 12, 2, None, None),
    TypeInfo("broad", "spreads", "own", 12, 0, None, None),
    TypeInfo("retrieval", "copies needles", "Wu et al. 2025", 0, 0, None, "it needs a causal model"),
)

PARTNERS = [
    {"stack": "self", "layer": 0, "head": head, "drop": drop, "k_composition": None}
    for head, drop in ((1, 0.611), (2, 0.099), (3, 0.012), (0, -0.02))
]
_SYNTAX = {"relation": "nsubj", "direction": "dependent_to_head", "difference": 0.313}
_TYPES: dict[tuple[int, int], tuple[TypeRecord, ...]] = {
    (0, 1): (type_record("previous_token", 0.871, example=example("mat", ("the", 0.912), (".", 0.041))),),
    (1, 0): (
        type_record("induction", 0.734, example=example("cat", ("sat", 0.555)), details={"partners": PARTNERS}),
        type_record("redundant", 0.042, chance=None, low=None, high=None, details={"partner": "L2H2"}),
    ),
    (1, 2): (
        type_record("syntax", 0.964, details=_SYNTAX | {"relation": "det", "difference": 0.102}),
        type_record(
            "syntax", 0.651, details=_SYNTAX, example=example("sat", ("cat", 0.777)), alternative=("offset -1", 0.338)
        ),
        type_record("redundant", 0.142, chance=None, details={"partner": "L1H0"}),
    ),
    (2, 1): (type_record("induction", 0.952, chance=0.061), type_record("syntax", 0.993, details={"difference": 0.2})),
    (2, 3): (type_record("induction", 0.418),),
}


def relation(
    name: str, head: tuple[int, int], numbers: tuple[float, ...], p: float, offset: int = -1
) -> dict[str, Any]:
    """A row of the table of relations, with `numbers` from the accuracy to the difference's upper end."""
    keys = ("accuracy", "low", "high", "offset_accuracy", "difference", "diff_low", "diff_high")
    row: dict[str, Any] = {"relation": name, "direction": "dependent_to_head", "stack": "self"}
    row |= {"layer": head[0], "head": head[1], "offset": offset, "p": p, "p_heads": p / 7, "eligible": 1234}
    return row | dict(zip(keys, numbers, strict=True)) | {"chance": 0.111}


def rare(name: str, direction: str = "head_to_dependent") -> dict[str, Any]:
    """A row of a relation that is too rare."""
    row = relation(name, (0, 0), (0.0,) * 7, 1.0)
    return dict.fromkeys(row) | {"relation": name, "direction": direction, "stack": "self", "eligible": 4}


RELATIONS = (
    relation("det", (2, 1), (0.801, 0.702, 0.853, 0.751, 0.050, -0.013, 0.087), 0.413),
    rare("vocative"),
    relation("obj", (1, 2), (0.644, 0.581, 0.699, 0.233, 0.411, 0.322, 0.456), 0.0002, offset=2),
    {
        **relation("nsubj", (0, 3), (0.556, 0.444, 0.667, 0.601, -0.045, -0.091, 0.032), 0.987),
        "direction": "head_to_dependent",
    },
    rare("expl"),
)
COREFERENCE = tuple(
    {"name": name, "kind": kind, "accuracy": accuracy, "low": accuracy - 0.07, "high": accuracy + 0.03, "mentions": n}
    for name, kind, accuracy, n in (
        *(("L1H2", "all", 0.677, 1077), ("L1H2", "pronoun", 0.488, 91)),
        *(("nearest mention", "all", 0.312, 1077), ("head match", "all", 0.599, 1077)),
    )
)
RETRIEVAL = tuple(
    {
        "length": length,
        "depth": depth,
        "trials": 8,
        "passed": passed,
        "recall": recall,
        "stack": "self",
        "head": None if score is None else f"L2H{head}",
        "score": score,
    }
    for length, depth, passed, recall, head, score in (
        (4096, 0.0, 3, 0.25, 1, 0.337),
        (4096, 0.5, 0, 0.0, 0, None),
        (512, 0.0, 8, 0.75, 3, 0.921),
        (512, 0.5, 7, 0.5, 2, 0.864),
    )
)
SUMMARY = {
    "coreference": {
        "head": "L1H2",
        "baseline": "head match",
        "documents_to_choose": 19,
        "documents_to_score": 21,
        "gain": 0.078,
        "low": 0.021,
        "high": 0.137,
        "p": 0.0123,
    },
    "retrieval": {"trials": 32, "passed": 18, "share_wu_2025": 0.0833, "share_zero": 0.75, "latest_match": 0.444},
    "copying_share": 0.2917,
    "redundant_pairs": 2,
    "more": {"texts": 1500, "share": float("nan"), "names": ["x"]},
}


def similarity(pairs: int = 2) -> Similarity:
    """Three heads, one of which does not compare, and as many pairs as asked for."""
    heads = (("self", 1, 0), ("self", 2, 2), ("self", 0, 1))
    distance = np.array([[0, 0.042, np.nan], [0.042, 0, np.nan], [np.nan, np.nan, 0]])
    redundant = tuple((heads[0], heads[1], 0.042 + 0.01 * i) for i in range(pairs))
    return Similarity(heads, distance, (0, 0, 1), redundant, 0.15, np.zeros((3, 2)), 2048, 0.35)


ABLATION: dict[str, Any] = {
    "heads": [
        {"stack": "self", "layer": 2, "head": 1, "score": 0.952},
        {"stack": "self", "layer": 1, "head": 0, "score": 0.734},
    ],
    "base": {"second_copy": 1.234, "first_copy": 11.567},
    "top": {
        "added": 9.412,
        "low": 9.105,
        "high": 9.708,
        "first_copy": {"added": 0.321, "low": -0.004, "high": 0.655},
    },
    "random": {
        "mean": 1.612,
        "sd": 0.403,
        "min": 0.911,
        "max": 2.567,
        "ratio": 5.839,
        "missing": 0,
        "first_copy": {"mean": 0.211, "sd": 0.052},
    },
    "same_layers": {
        "mean": 2.222,
        "sd": 0.505,
        "min": 1.313,
        "max": 3.717,
        "ratio": 4.236,
        "missing": 1,
        "first_copy": {"mean": 0.277, "sd": 0.063},
    },
    "sequences": 16,
    "length": 50,
    "predictions": 784,
    "draws": 20,
    "seed": 7,
    "notes": [],
}


def catalogue(heads: tuple[HeadRecord, ...], **more: Any) -> Catalogue:
    """Everything that a catalogue can have; scores are drawn, and some could not be measured."""
    draw = np.random.default_rng(3).random((len(INFOS) - 1, len(heads)))
    scores = {
        kind.name: tuple(None if (i + n) % 7 == 0 else float(v) for i, v in enumerate(values))
        for n, (kind, values) in enumerate(zip(INFOS, draw, strict=False))
    }
    scores["induction"] = (math.nan, *scores["induction"][1:])
    tables = {"relations": RELATIONS, "coreference": COREFERENCE, "retrieval": RETRIEVAL}
    given: dict[str, Any] = {"tables": tables, "summary": SUMMARY, "similarity": similarity(), "ablation": ABLATION}
    return Catalogue(INFOS, scores, **given | more)


def catalogued(**more: Any) -> Analysis:
    """Three layers of four heads with types and a catalogue."""
    heads = tuple(dataclasses.replace(h, types=_TYPES.get((h.layer, h.head), ())) for h in model_heads(3, 4))
    return dataclasses.replace(analysis(heads), catalogue=catalogue(heads, **more))
