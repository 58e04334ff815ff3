"""What guides pruning where heads are not named: scores, texts, how much may go; and who gets which texts."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headscope.errors import InputError, check_type
from headscope.importance.command import UNITS
from headscope.importance.examples import Examples
from headscope.importance.method import Method
from headscope.importance.methods import METHODS, method_named
from headscope.importance.result import Importance
from headscope.importance.scores import read_scores
from headscope.importance.texts import Data, Piece, Share, cut, deal, label_numbers, ready
from headscope.models.loading import LoadedModel
from headscope.models.selection import check_count, check_seed

# Tokens that each role takes at most; what a repair takes beside is up to the user.
RANKING_TOKENS, JUDGING_TOKENS, REPAIR_TOKENS = 12_288, 8_192, 65_536
# With fewer, a refit learns its texts by heart.
ENOUGH_FOR_REPAIR = 25_000
# More than any model has heads.
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class Guide:
    """How heads are chosen and made up for.

    Attributes:
        scores, method: Scores that are there, or how to get them.
        drop: The share of units that goes.
        until_drop: As many units go as lose less than this, a share: of perplexity, or of 1 - cosine.
        unit: `head` or `kv-group`; None takes what the model can lose.
        steps: Scores are taken anew this many times, each time for a part of what goes.
        repair: Whether output projections are refitted; `repair_mlp`: down projections, too.
        data: Texts to rank, select and report on.
        repair_data: Texts to refit on; they may be the same as `data`, and are dealt out then.
    """

    scores: Importance | None = None
    method: Method | None = None
    drop: float | None = None
    until_drop: float | None = None
    unit: str | None = None
    min_per_layer: int = 1
    steps: int = 1
    repair: bool = False
    repair_mlp: bool = False
    data: Examples | None = None
    repair_data: Examples | None = None
    repair_tokens: int = REPAIR_TOKENS
    max_length: int | None = None
    batch_size: int | None = None
    seed: int = 0

    @property
    def chooses(self) -> bool:
        """Whether it says which heads go."""
        return self.scores is not None or self.method is not None


def make_guide(
    *,
    scores: str | Path | Importance | None,
    method: str | None,
    drop: float | None,
    until_drop: str | float | None,
    unit: str | None,
    min_per_layer: int,
    steps: int,
    repair: bool,
    repair_mlp: bool,
    data: Examples | None,
    repair_data: Examples | None,
    repair_tokens: int,
    max_length: int | None,
    batch_size: int | None,
    seed: int,
) -> Guide:
    """Check what was asked for, before any model is loaded.

    Raises:
        InputError: Something is missing, out of range, or excludes something else.
    """
    counts = {"min_per_layer": min_per_layer, "repair_tokens": repair_tokens}
    for name, count in (counts | {"max_length": max_length, "batch_size": batch_size}).items():
        check_count(name, count)
    check_count("steps", steps, most=_MOST_STEPS)
    check_seed(seed)
    if drop is not None and (isinstance(drop, bool) or not isinstance(drop, int | float)):
        raise InputError(f"drop is {reprlib.repr(drop)}, not a share between 0 and 1", "write --drop 0.3")
    check_type("scores", scores, (str, Path, Importance), "a file of scores, or what head_importance returns")
    known = None if method is None else method_named(method)
    bound = _share(until_drop) if until_drop is not None else None
    guide = Guide(
        scores=read_scores(scores) if isinstance(scores, str | Path) else scores,
        method=known,
        drop=drop,
        until_drop=bound,
        unit=unit,
        min_per_layer=min_per_layer,
        steps=steps,
        repair=repair,
        repair_mlp=repair_mlp,
        data=data,
        repair_data=repair_data if repair_data is not None else data if repair else None,
        repair_tokens=repair_tokens,
        max_length=max_length,
        batch_size=batch_size,
        seed=seed,
    )
    for wrong, problem, hint in _problems(guide):
        if wrong:
            raise InputError(problem, hint)
    return guide


def _problems(guide: Guide) -> list[tuple[bool, str, str]]:
    drop, chooses = guide.drop, guide.chooses
    needs_data = guide.method is not None and guide.method.needs_data
    return [
        (
            guide.scores is not None and guide.method is not None,
            "scores and a method exclude each other",
            "give --scores or --method",
        ),
        (
            not chooses and (drop is not None or guide.until_drop is not None),
            "there are no scores to choose heads by",
            "give --scores or --method with --drop and --until-drop",
        ),
        (
            chooses and (drop is None) == (guide.until_drop is None),
            "how much goes is said by one of drop and until_drop",
            "give --drop 0.3, or --until-drop 1%",
        ),
        (drop is not None and not 0 < drop < 1, f"drop is {drop}, not a share between 0 and 1", "write --drop 0.3"),
        (guide.unit is not None and guide.unit not in UNITS, f"unit is {guide.unit!r}", f"it is {' or '.join(UNITS)}"),
        (
            guide.steps > 1 and (guide.method is None or drop is None),
            "scores are taken in steps with a method and a drop only",
            "give --method and --drop with --steps, or leave --steps out",
        ),
        (needs_data and guide.data is None, "the method needs texts", "give --data"),
        (guide.until_drop is not None and guide.data is None, "until_drop needs texts to judge by", "give --data"),
        (
            _needs_repair(guide) and not guide.repair,
            "these scores say which heads can be made up for, which is worse than gradient where none is",
            "give --repair FILE, or scores by gradient",
        ),
        (guide.repair_mlp and not guide.repair, "repair_mlp goes with a repair", "give --repair"),
        (guide.repair and guide.repair_data is None, "a repair needs texts", "give --repair FILE, or --data"),
    ]


def _needs_repair(guide: Guide) -> bool:
    name = guide.scores.method if guide.scores is not None else ""
    method = METHODS.get(name) if guide.method is None else guide.method
    return method is not None and method.for_repair


def _share(given: str | float) -> float:
    """`1%` or 0.01 as a number."""
    try:
        value = float(given.removesuffix("%")) / 100 if isinstance(given, str) and "%" in given else float(given)
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value < 10:
        raise InputError(f"until_drop is {given!r}, not a share", "write 1% or 0.01")
    return value


# ------------------------------------------------------------------ who gets which texts
@dataclass(frozen=True)
class Roles:
    """Texts by what they are for, none of them in two; None where nobody needs them."""

    ranking: Data | None
    repair: Data | None
    selection: Data | None
    report: Data | None

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Texts and tokens of each role that has any."""
        named: Mapping[str, Data | None] = vars(self)
        return {name: (data.texts, data.tokens) for name, data in named.items() if data is not None}


def deal_roles(loaded: LoadedModel, guide: Guide) -> Roles:
    """Deal the guide's texts out.

    Raises:
        InputError: There are too few, or a classifier's have no labels.
    """
    judging = Share(1, JUDGING_TOKENS)
    first: dict[str, Share] = {}
    if guide.method is not None and guide.method.needs_data:
        first["ranking"] = Share(1.5, RANKING_TOKENS)
    if guide.until_drop is not None or guide.repair:
        first["selection"] = judging
    if guide.data is not None or guide.repair:
        first["report"] = judging
    dealt: dict[str, tuple[Piece, ...]] = {}
    of_repair = {"repair": Share(4, guide.repair_tokens)} if guide.repair else {}
    if guide.data is not None and guide.repair_data != guide.data:
        dealt |= _dealt(loaded, guide, guide.data, first)
        taken = frozenset(p.text for pieces in dealt.values() for p in pieces)
        dealt |= _dealt(loaded, guide, guide.repair_data, of_repair, taken)
    else:
        dealt |= _dealt(loaded, guide, guide.data or guide.repair_data, first | of_repair)
    found = {role: _ready(loaded, guide, role, pieces) for role, pieces in dealt.items()}
    return Roles(**{role: found.get(role) for role in ("ranking", "repair", "selection", "report")})


def _dealt(
    loaded: LoadedModel,
    guide: Guide,
    examples: Examples | None,
    shares: Mapping[str, Share],
    taken: frozenset[str] = frozenset(),
) -> dict[str, tuple[Piece, ...]]:
    """Pieces by role, without those that say the same as one that is taken."""
    if examples is None or not shares:
        return {}
    if set(shares) != {"repair"}:
        label_numbers(loaded.model, examples.labels)  # errors count texts as the user does
    pieces = [p for p in cut(loaded, examples, guide.max_length) if p.text not in taken]
    return deal(pieces, shares, guide.seed)


def _ready(loaded: LoadedModel, guide: Guide, role: str, pieces: tuple[Piece, ...]) -> Data:
    """Batches and the loss on them; a repair looks at no loss, so it needs neither labels nor the model's output."""
    judged = role != "repair"
    data = ready(
        loaded,
        pieces,
        label_numbers(loaded.model, [p.label for p in pieces]) if judged else [0] * len(pieces),
        length=guide.max_length,
        batch_size=guide.batch_size,
        seed=guide.seed,
    )
    if judged:
        data.loss.remember(loaded.model, data.batches)
    return data
