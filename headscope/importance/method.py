"""What every importance method is given and gives; a method is a decorated function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headscope.capture.outputs import Output
from headscope.importance.texts import Data


@dataclass(frozen=True)
class Task:
    """What is scored on what.

    Attributes:
        model: In evaluation mode.
        outputs: Where its heads meet.
        data: Texts; None for methods that need none.
        units: What is scored: `head`, `kv-group`, or both.
        replace: What a removed head is replaced by, `zero` or `mean`, where a method tries that.
        normalise: Divide each layer's scores by their L2 norm (Michel et al. 2019, section 4.1).
        seed: For everything random.
        report: Called with lines for the user: what it will cost.
    """

    model: PreTrainedModel
    outputs: tuple[Output, ...]
    data: Data | None
    units: tuple[str, ...] = ("head",)
    replace: str = "zero"
    normalise: bool = False
    seed: int = 0
    report: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class LayerScores:
    """One layer's scores for one kind of unit, in the order of `Output.units(unit)`.

    Attributes:
        scores: float64, (units,): the more, the more it costs to remove the unit; loss in nats where `nats` is.
        errors: float64, (units,): standard errors over texts; None where a method has none.
        order: Places of the units in the order in which they should go, the first first; None means by score.
        losses: float64, (units + 1,): the loss that is added when the first k of `order` are gone, k = 0, 1, …; None
            where a method knows single units only.
    """

    scores: NDArray[np.float64]
    errors: NDArray[np.float64] | None = None
    order: tuple[int, ...] | None = None
    losses: NDArray[np.float64] | None = None


Scored = Mapping[tuple[str, str], LayerScores]
"""Scores by kind of unit and `Output.name`."""


@dataclass(frozen=True)
class Method:
    """A named way to score heads.

    Attributes:
        score: From a task to the scores of every unit.
        needs_data: Whether it needs texts.
        for_repair: It says which heads can be made up for, so it is of use with a repair only.
    """

    name: str
    score: Callable[[Task], Scored]
    needs_data: bool = True
    for_repair: bool = False


METHODS: dict[str, Method] = {}


def importance_method(
    name: str, *, needs_data: bool = True, for_repair: bool = False
) -> Callable[[Callable[[Task], Scored]], Callable[[Task], Scored]]:
    """Register a function as an importance method."""

    def register(function: Callable[[Task], Scored]) -> Callable[[Task], Scored]:
        METHODS[name] = Method(name, function, needs_data, for_repair)
        return function

    return register
