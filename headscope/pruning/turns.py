"""Two models timed in turns, so that whatever else the machine does slows both alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

# With fewer rounds there is no interval of 95 %.
_ROUNDS = (6, 40)
_WARM = 2

Given = Callable[[], Mapping[str, Any]]
"""Makes the keywords for one forward pass; the time for it does not count."""


def times_in_turns(
    models: tuple[PreTrainedModel, PreTrainedModel], given: tuple[Given, Given], seconds: float
) -> tuple[list[float], list[float]]:
    """Milliseconds of the forward passes of two models, round by round, after a warm-up.

    Args:
        models: On the same device; gradients have to be off.
        given: What each is run on.
        seconds: About how long to go on.
    """
    wait = _waiting(models[0].device)
    for _ in range(_WARM):
        pair = sum(_milliseconds(model, make, wait) for model, make in zip(models, given, strict=True))
    low, high = _ROUNDS
    rounds = min(max(int(1000 * seconds / pair), low), high)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        # Each first as often as the other.
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(_milliseconds(models[which], given[which], wait))
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    low, middle, high = np.percentile(values, (25, 50, 75)).tolist()
    return low, middle, high


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval of at least 95 % for the median, from order statistics and without assumptions on the distribution.

    The number of values below the median is binomial with 1/2 (David and Nagaraja 2003, "Order Statistics", 7.1).
    Infinite where there are fewer than six values.
    """
    ordered, count = sorted(values), len(values)
    tail, rank = 0.0, 0
    while tail + math.comb(count, rank) / 2**count <= 0.025:
        tail += math.comb(count, rank) / 2**count
        rank += 1
    return (ordered[rank - 1], ordered[count - rank]) if rank else (-math.inf, math.inf)


def _milliseconds(model: PreTrainedModel, given: Given, wait: Callable[[], None]) -> float:
    inputs = given()
    wait()
    start = time.perf_counter()
    model(**inputs)
    wait()
    return 1000 * (time.perf_counter() - start)


def _waiting(device: torch.device) -> Callable[[], None]:
    """Waits until a device has done what it was told to; the CPU always has."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None
