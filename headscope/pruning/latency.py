"""How long a forward pass takes, before and after, for several shapes of input.

Both models run in turns, so that whatever else the machine does slows both alike.
"""

from __future__ import annotations

import math
import re
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.errors import InputError
from headscope.models.limits import decoder_limit, text_limit
from headscope.models.quiet import quiet
from headscope.pruning.implementations import attention_as
from headscope.pruning.probes import probes
from headscope.pruning.result import Conditions, Latency

Shape = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((1, 32), (1, 128), (8, 128), (1, 512))
_SHAPE = re.compile(r"([1-9][0-9]{0,5})[x×]([1-9][0-9]{0,6})")
_SECONDS = 1.5
# With fewer rounds there is no interval of 95 %.
_ROUNDS = (6, 40)
_WARM = 2


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """`1x32,8x128` as pairs of batch and length.

    Raises:
        InputError: It does not parse.
    """
    parts = [part for part in "".join(text.split()).split(",") if part]
    found = [_SHAPE.fullmatch(part) for part in parts]
    if not parts or None in found:
        raise InputError(f"cannot read {reprlib.repr(text)} as shapes of input", "Write BATCHxLENGTH: 1x32,8x128.")
    return tuple(dict.fromkeys((int(m[1]), int(m[2])) for m in found if m is not None))


def measure_latency(
    before: PreTrainedModel, after: PreTrainedModel, shapes: Sequence[Shape] = SHAPES
) -> tuple[tuple[Latency, ...], Conditions, tuple[str, ...]]:
    """Time forward passes of two models with the same inputs, in turns, after a warm-up.

    Args:
        before, after: In evaluation mode, on the same device.
        shapes: Batch and length; what is longer than the model takes is left out. For images and sounds only the batch
            counts.

    Returns:
        Times, what they were measured on, and notes of one line each.
    """
    inputs, notes = _inputs(before, shapes)
    name = _implementation(before, after)
    with attention_as(before, name), attention_as(after, name), torch.no_grad(), quiet():
        cells = tuple(_measure(before, after, *shape, given) for shape, given in inputs)
    dtype = str(before.dtype).removeprefix("torch.")
    return cells, Conditions(str(before.device), dtype, name, torch.get_num_threads()), notes


def same_shapes(before: PreTrainedModel, after: PreTrainedModel) -> bool:
    """Whether all parameters of two models have the same shapes: then neither can be faster."""
    shapes = [[p.shape for p in model.parameters()] for model in (before, after)]
    return shapes[0] == shapes[1]


# ------------------------------------------------------------------ inputs
def _inputs(
    model: PreTrainedModel, shapes: Sequence[Shape]
) -> tuple[list[tuple[tuple[int, int | None], dict[str, Tensor]]], tuple[str, ...]]:
    example = probes(model)[0].inputs
    if "input_ids" not in example:
        batches = dict.fromkeys(batch for batch, _ in shapes)
        return [((batch, None), _filled(example, batch, None, None)) for batch in batches], ()
    limit = text_limit(model, None)
    fit = [shape for shape in shapes if limit is None or shape[1] <= limit]
    left_out = [f"{batch}×{length}" for batch, length in shapes if (batch, length) not in fit]
    notes = (f"latency: {', '.join(left_out)} left out: the model takes {limit} tokens",) if left_out else ()
    if not fit and limit is not None:
        fit = [(1, limit)]
    return [((b, n), _filled(example, b, n, decoder_limit(model))) for b, n in fit], notes


def _filled(example: Mapping[str, Tensor], batch: int, length: int | None, decoder: int | None) -> dict[str, Tensor]:
    """Tensors for `batch` examples that are like the first of `example`, token sequences `length` long, unpadded."""
    filled = {}
    for name, tensor in example.items():
        first = tensor[:1]
        if first.ndim == 2 and not first.is_floating_point():
            limit = decoder if name.startswith("decoder_") else None
            wanted = first.shape[1] if length is None else min(length, limit or length)
            first = first.repeat(1, -(-wanted // first.shape[1]))[:, :wanted]
        filled[name] = first.repeat(batch, *(1 for _ in first.shape[1:]))
    return filled


def _implementation(before: PreTrainedModel, after: PreTrainedModel) -> str:
    """sdpa, as transformers takes by default, where both models have it."""
    with attention_as(before, "sdpa") as can, attention_as(after, "sdpa") as can_too:
        return "sdpa" if can and can_too else "eager"


# ------------------------------------------------------------------ time
def _measure(
    before: PreTrainedModel, after: PreTrainedModel, batch: int, length: int | None, inputs: Mapping[str, Tensor]
) -> Latency:
    wait = _waiting(before.device)
    for _ in range(_WARM):
        pair = _milliseconds(before, inputs, wait) + _milliseconds(after, inputs, wait)
    low, high = _ROUNDS
    rounds = min(max(int(1000 * _SECONDS / pair), low), high)
    times: dict[int, list[float]] = {0: [], 1: []}
    for turn in range(rounds):
        # In turns, and each first as often as the other.
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(_milliseconds((before, after)[which], inputs, wait))
    quartiles = [np.percentile(times[which], (25, 50, 75)).tolist() for which in (0, 1)]
    (b1, b2, b3), (a1, a2, a3) = quartiles
    ratios = [a / b for b, a in zip(times[0], times[1], strict=True)]
    low_ratio, high_ratio = median_interval(ratios)
    return Latency(batch, length, b2, a2, (b1, b3), (a1, a3), rounds, in_noise=low_ratio <= 1 <= high_ratio)


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


def _milliseconds(model: PreTrainedModel, inputs: Mapping[str, Tensor], wait: Callable[[], None]) -> float:
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
