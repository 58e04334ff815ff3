"""From scores to the heads that go: how many in each layer, and which."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headscope.capture.outputs import Output
from headscope.errors import InputError
from headscope.importance.method import LayerScores


def units_in(outputs: Sequence[Output], unit: str) -> int:
    """How many units, `head` or `kv-group`, still give something."""
    return sum(len(o.units(unit)) for o in outputs)


def most_of(outputs: Sequence[Output], unit: str, min_per_layer: int = 1) -> int:
    """How many units can go where each layer keeps `min_per_layer`, or all that it has if those are fewer."""
    return sum(_most(o, unit, min_per_layer) for o in outputs)


def check_room(outputs: Sequence[Output], unit: str, count: int, min_per_layer: int) -> None:
    """Refuse a number of units that cannot go where each layer keeps `min_per_layer`.

    Raises:
        InputError: So many cannot go; the hint says how many can.
    """
    most = most_of(outputs, unit, min_per_layer)
    if not 0 <= count <= most:
        raise InputError(
            f"{count} {unit}s cannot go where each layer keeps {min_per_layer}",
            f"at most {most} of {units_in(outputs, unit)} can",
        )


def count_of(outputs: Sequence[Output], unit: str, share: float) -> int:
    """How many units a share of those that still give something is, rounded down.

    Raises:
        InputError: The share is not above 0 and below 1.
    """
    if not 0 < share < 1:
        raise InputError(f"the share to drop is {share}, not above 0 and below 1", "0.3 drops three in ten")
    # 0.29 * 100 is a hair less than 29.
    return math.floor(share * units_in(outputs, unit) + 1e-9)


def allocate(
    outputs: Sequence[Output],
    scored: Mapping[str, LayerScores],
    count: int,
    min_per_layer: int = 1,
    *,
    unit: str = "head",
) -> dict[str, tuple[int, ...]]:
    """Choose the units that cost least together.

    Where all layers know what sets of units cost (`LayerScores.losses`), the sum of those losses is the least that any
    numbers of units by layer give: a multiple-choice knapsack, solved exactly. Else the units of least score go; among
    equal ones first those of earlier layers and lower numbers.

    Args:
        scored: Scores of every layer by `Output.name`.
        count: How many units go.
        min_per_layer: How many units each layer keeps; one that has no more loses none.
        unit: What is scored: `head` or `kv-group`.

    Returns:
        The heads that go, ascending and in original numbers, by `Output.name`; layers that lose none are left out.

    Raises:
        InputError: So many units cannot go, or scores are not of these units.
    """
    _check(outputs, scored, unit)
    check_room(outputs, unit, count, min_per_layer)
    limits = [_most(o, unit, min_per_layer) for o in outputs]
    layers = [scored[o.name] for o in outputs]
    curves = [s.losses[: limit + 1] for s, limit in zip(layers, limits, strict=True) if s.losses is not None]
    if len(curves) == len(layers):
        numbers = cheapest(curves, count)
        chosen: list[Sequence[int]] = [_order(s)[:k] for s, k in zip(layers, numbers, strict=True)]
    else:
        chosen = list(_least(layers, limits, count))
    return {o.name: _heads(o, unit, places) for o, places in zip(outputs, chosen, strict=True) if len(places)}


def cheapest(curves: Sequence[NDArray[np.float64]], count: int) -> tuple[int, ...]:
    """How many units to take from each layer, so that they are `count` and their losses add up to the least.

    Dynamic programming over layers, in O(layers · count · units of a layer). Among equal sums, later layers lose less.

    Args:
        curves: By layer, the loss when 0, 1, … units are gone, as far as they may go; together at least `count` units.
    """
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    taken: list[NDArray[np.int64]] = []
    for curve in curves:
        # Row k: the loss of each number of units when k of them are this layer's.
        sums = np.full((len(curve), count + 1), np.inf)
        for k, loss in enumerate(curve[: count + 1]):
            sums[k, k:] = best[: count + 1 - k] + loss
        taken.append(sums.argmin(0))
        best = sums.min(0)
    numbers: list[int] = []
    for choice in reversed(taken):
        numbers.append(int(choice[count]))
        count -= numbers[-1]
    return tuple(reversed(numbers))


def _most(output: Output, unit: str, min_per_layer: int) -> int:
    return max(0, len(output.units(unit)) - max(0, min_per_layer))


def _check(outputs: Sequence[Output], scored: Mapping[str, LayerScores], unit: str) -> None:
    for output in outputs:
        found, units = scored.get(output.name), len(output.units(unit))
        if found is None or len(found.scores) != units:
            number = "no" if found is None else len(found.scores)
            raise InputError(
                f"{output.name} has {units} {unit}s and {number} scores", "score the heads of this model anew"
            )
        if not np.isfinite(found.scores if found.losses is None else found.losses).all():
            raise InputError(f"scores of {output.name} are not finite", "score with float32, or by another method")


def _order(scores: LayerScores) -> Sequence[int]:
    return scores.order if scores.order is not None else np.argsort(scores.scores, kind="stable").tolist()


def _least(layers: Sequence[LayerScores], limits: Sequence[int], count: int) -> list[list[int]]:
    """Places of the units of least score, by layer."""
    ranked = sorted(
        (float(s), layer, place) for layer, found in enumerate(layers) for place, s in enumerate(found.scores)
    )
    chosen: list[list[int]] = [[] for _ in layers]
    for _, layer, place in ranked:
        if count and len(chosen[layer]) < limits[layer]:
            chosen[layer].append(place)
            count -= 1
    return chosen


def _heads(output: Output, unit: str, places: Sequence[int]) -> tuple[int, ...]:
    units = output.units(unit)
    return tuple(sorted(h for place in places for h in units[place].heads))
