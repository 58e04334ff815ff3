"""What the catalogue found. NumPy only: views show it without torch.

All numbers are 0-based. A head has a type where a criterion of the literature holds and chance, corrected for how many
heads were looked at, does not explain it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.heads.catalogue.similarity_result import Similarity

Place = tuple[str, int, int]
"""A stack's name, a layer number, and a head's number in the original model."""


@dataclass(frozen=True)
class Looked:
    """One key that a query token looked at."""

    position: int
    token: str
    weight: float


@dataclass(frozen=True)
class Example:
    """One row that shows a type: the text around it, the query token, the keys with the largest weights first.

    Attributes:
        text: What was read, as the tokenizer writes it, cut to what is near.
        position, token: Of the query; positions count tokens of the whole text, or words where words are compared.
    """

    text: str
    position: int
    token: str
    keys: tuple[Looked, ...]

    def to_dict(self) -> dict[str, Any]:
        """The `example` object of the JSON."""
        keys = [{"position": k.position, "token": k.token, "weight": k.weight} for k in self.keys]
        return {"text": self.text, "query": {"position": self.position, "token": self.token}, "keys": keys}

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> Example:
        """What `to_dict` gave."""
        keys = tuple(Looked(k["position"], k["token"], k["weight"]) for k in found["keys"])
        return Example(found["text"], found["query"]["position"], found["query"]["token"], keys)


@dataclass(frozen=True)
class TypeRecord:
    """One head's evidence for one type.

    Attributes:
        type: The type's name.
        score: What the type measures, mostly a share of 0 to 1.
        chance: What a head that spreads uniformly over its visible keys scores on the same rows; None where that is
            not defined.
        eligible: Rows (tokens, words, mentions or trials) that could have shown the behaviour.
        low, high: 95 % interval of the score; None where too little was seen.
        example: The row that shows it best, None where there is none.
        claimed: Whether the head has the type.
        criteria: Names of the published criteria that hold, such as `voita_2019`.
        alternative: Name and score of the best trivial explanation (a fixed offset, the first token), None for none.
        p: Of no more than chance or the alternative, corrected for all heads looked at; None where not tested.
        details: More numbers by name, as plain JSON values.
    """

    type: str
    score: float
    chance: float | None
    eligible: int
    low: float | None
    high: float | None
    example: Example | None = None
    claimed: bool = True
    criteria: tuple[str, ...] = ()
    alternative: tuple[str, float] | None = None
    p: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """One record of a head's `types` list of the JSON contract."""
        other = self.alternative
        return {
            "type": self.type,
            "score": self.score,
            "chance": self.chance,
            "eligible": self.eligible,
            "low": self.low,
            "high": self.high,
            "example": None if self.example is None else self.example.to_dict(),
            "criteria": list(self.criteria),
            "alternative": None if other is None else {"name": other[0], "score": other[1]},
            "p": self.p,
            **self.details,
        }


Evidence = Mapping[Place, tuple[TypeRecord, ...]]
"""Records of heads, claimed or not: all of those that were measured."""


@dataclass(frozen=True)
class Found:
    """What one probe found.

    Attributes:
        evidence: Records by head.
        tables: Rows that concern no single head, by the table's name (`relations`, `coreference`, `retrieval`):
            flat dictionaries of plain values, all with the same keys.
        notes: What was left out and why, one line each; shown as warnings.
        summary: Numbers that concern the whole model, by name.
    """

    evidence: Evidence
    tables: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TypeInfo:
    """One type of the catalogue, as it was measured.

    Attributes:
        measured: Heads on which it could be measured.
        claimed: Heads that have it.
        seconds: What a type with inputs of its own cost; None for those measured on the given text.
        skipped: Why it was not measured, None where it was.
    """

    name: str
    description: str
    source: str
    measured: int
    claimed: int
    seconds: float | None
    skipped: str | None

    def to_dict(self) -> dict[str, Any]:
        """One record of the `types` list of the JSON's `catalogue`."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Catalogue:
    """What concerns the whole model, beside the heads' own records.

    Attributes:
        types: Every type that was asked for.
        scores: Scores of all heads, claimed or not, by type: in the order of `Analysis.heads`, None where they could
            not be measured.
        tables, summary: As in `Found`.
        similarity: Distances between heads, None where not asked for.
        ablation: What zeroing the heads of a type does, None where not asked for.
    """

    types: tuple[TypeInfo, ...]
    scores: Mapping[str, tuple[float | None, ...]]
    tables: Mapping[str, tuple[Mapping[str, Any], ...]]
    summary: Mapping[str, Any]
    similarity: Similarity | None = None
    ablation: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The `catalogue` object of the JSON."""
        return {
            "types": [t.to_dict() for t in self.types],
            "scores": {name: list(values) for name, values in self.scores.items()},
            **{name: [dict(row) for row in rows] for name, rows in self.tables.items()},
            "summary": dict(self.summary),
            "similarity": None if self.similarity is None else self.similarity.to_dict(),
            "ablation": None if self.ablation is None else dict(self.ablation),
        }
