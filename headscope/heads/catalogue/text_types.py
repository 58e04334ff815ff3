"""The types of heads that show on any text: what is measured, and when a head has the type.

A new type is an entry of `TEXT_TYPES`. Criteria are conditions on its measures, each with the name of the publication
that it is from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headscope.capture.key_tokens import REPEATS, SUCCESSORS
from headscope.heads.catalogue.kinds import OTHER_SPECIAL, PUNCTUATION
from headscope.heads.catalogue.measures import (
    OFFSETS,
    WINDOW,
    Measures,
    breadth,
    first_token,
    kinds,
    offsets,
    relations,
)

Scores = Mapping[str, float]
"""One head's measures by name; what could not be measured is missing."""


@dataclass(frozen=True)
class Criterion:
    """A condition on a head's measures, under the name of where it is from."""

    name: str
    holds: Callable[[Scores], bool]


@dataclass(frozen=True)
class TextType:
    """A type of head, measured on the given text.

    Attributes:
        name: As in tables and JSON.
        description: One line.
        source: Where the definition is from.
        score: The measure that is the score.
        measures: What gives it, and the other measures that the criteria look at; None where they come otherwise.
        criteria: A head that is better than chance has the type if any of them holds.
        trivial: Whether what heads do that look at the first, the previous or their own token can pass for the type;
            it is then no evidence.
        residual: Claimed only for heads that have no other type.
        tested: Whether a head must be significantly better than uniform attention.
        per_text: Measures that are held against a threshold text by text: the share of texts above it is kept.
    """

    name: str
    description: str
    source: str
    score: str
    measures: Measures | None
    criteria: tuple[Criterion, ...]
    trivial: bool = False
    residual: bool = False
    tested: bool = True
    per_text: Mapping[str, float] = field(default_factory=dict)


def _above(name: str, measure_name: str, threshold: float) -> Criterion:
    return Criterion(name, lambda scores: scores.get(measure_name, float("-inf")) > threshold)


def _positional(offset: int) -> TextType:
    name = {-1: "previous_token", 0: "self_attend", 1: "next_token"}.get(offset, f"offset{offset:+d}")
    where = {-1: "the previous token", 0: "its own token", 1: "the next token"}
    return TextType(
        name,
        "attends to " + where.get(offset, f"the token at offset {offset:+d}"),
        "Clark et al. 2019, section 3.2; Voita et al. 2019, section 5.2",
        f"at:{offset}",
        offsets,
        (
            _above("clark_2019", f"at:{offset}", 0.5),
            Criterion("voita_2019", lambda scores: scores.get(f"most:{offset}", 0.0) >= 0.9),
        ),
    )


COLUMN_SINK = "column_sink"
# Gu et al. 2025, section 3: a head is a sink on a text where the first token's mean weight is above this.
SINK = 0.3


# The name under which the sums of a column, chosen on other rows, are kept.
COLUMN = "column"


def _spread_over_window(scores: Scores) -> bool:
    """Nearly everything on the window, and not on one key of it."""
    mass = scores.get("window", 0.0)
    return mass > 0.8 and all(scores.get(f"at:{k}", 0.0) < 0.6 * mass for k in WINDOW)


TEXT_TYPES: dict[str, TextType] = {
    t.name: t
    for t in (
        *(_positional(offset) for offset in sorted((0, *OFFSETS), key=lambda k: (abs(k), k))),
        TextType(
            "local_window",
            "spreads over the tokens up to two away",
            "own: > 0.8 on them, < 0.6 of it on one",
            "window",
            offsets,
            (Criterion("window_0.8", _spread_over_window),),
        ),
        TextType(
            "first_token",
            "attends to the first token: an attention sink",
            "Gu et al. 2025, section 3; Xiao et al. 2024",
            "first",
            first_token,
            (_above("gu_2025", "share:first", 0.5),),
            per_text={"first": SINK},
        ),
        TextType(
            COLUMN_SINK,
            "attends to one other token from everywhere",
            "Gu et al. 2025, section 3, for any token; it is chosen on even rows and scored on odd ones",
            COLUMN,
            None,
            (_above("gu_2025", "share:" + COLUMN, 0.5),),
            tested=False,
        ),
        TextType(
            "special_token",
            "attends to special tokens that are not the first, such as [SEP]",
            "Clark et al. 2019, section 3.2",
            OTHER_SPECIAL,
            kinds,
            (_above("clark_2019", OTHER_SPECIAL, 0.6),),
        ),
        TextType(
            "delimiter",
            "attends to punctuation",
            "Clark et al. 2019, section 3.2",
            PUNCTUATION,
            kinds,
            (_above("clark_2019", PUNCTUATION, 0.6),),
            trivial=True,
        ),
        TextType(
            "duplicate_token",
            "attends to earlier places of the same token",
            "Wang et al. 2023, section 3",
            REPEATS,
            relations,
            (_above("mass_0.4", REPEATS, 0.4),),
            trivial=True,
        ),
        TextType(
            "induction",
            "attends to what came after earlier places of the same token",
            "Olsson et al. 2022",
            SUCCESSORS,
            relations,
            (_above("olsson_2022", SUCCESSORS, 0.4),),
            trivial=True,
        ),
        TextType(
            "focused",
            "sharp attention that no other type explains",
            "own: entropy < 0.25 ln(visible keys), row by row",
            "sharp",
            breadth,
            (_above("relative_entropy_0.25", "sharp", 0.75),),
            residual=True,
        ),
        TextType(
            "broad",
            "spreads evenly",
            "Clark et al. 2019, section 3.3, but row by row: entropy > 0.8 ln(visible keys)",
            "broad",
            breadth,
            (_above("relative_entropy_0.8", "broad", 0.8),),
            tested=False,
        ),
    )
}
