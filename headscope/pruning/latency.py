"""How long a forward pass takes, before and after, for several shapes of input, and one more token with a cache."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.errors import InputError, is_out_of_memory
from headscope.models.checkpoint import first_line
from headscope.models.limits import decoder_limit, text_limit
from headscope.models.quiet import quiet
from headscope.pruning.decoding import keeps_cache, step_after
from headscope.pruning.implementations import attention_as
from headscope.pruning.probes import probes
from headscope.pruning.result import Conditions, Latency, Pass
from headscope.pruning.turns import Given, median_interval, quartiles, times_in_turns

Shape = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((1, 32), (1, 128), (8, 128), (1, 512))
_SHAPE = re.compile(r"([1-9][0-9]{0,5})[x×]([1-9][0-9]{0,6})")
# For one shape, whether that is one kind of pass or two.
_SECONDS = 1.5


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

    Models that generate with a cache are also timed while they decode: one more token for each example of these inputs.

    Args:
        before, after: In evaluation mode, on the same device.
        shapes: Batch and length; what is longer than the model takes is left out. For images and sounds only the batch
            counts.

    Returns:
        Times, what they were measured on, and notes of one line each.
    """
    inputs, notes = _inputs(before, shapes)
    name = _implementation(before, after)
    decodes = keeps_cache(before)
    turns = _Turns(before, after, _SECONDS / 2 if decodes else _SECONDS)
    with attention_as(before, name), attention_as(after, name), torch.no_grad(), quiet():
        cells = [turns.forward(*shape, given) for shape, given in inputs]
        if decodes:
            steps, more = _decoding(turns, [(batch, given) for (batch, _), given in inputs])
            cells, notes = cells + steps, notes + more
    dtype = str(before.dtype).removeprefix("torch.")
    return tuple(cells), Conditions(str(before.device), dtype, name, torch.get_num_threads()), notes


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
@dataclass(frozen=True)
class _Turns:
    """Two models that run in turns, for so many seconds a cell."""

    before: PreTrainedModel
    after: PreTrainedModel
    seconds: float

    def forward(self, batch: int, length: int | None, inputs: Mapping[str, Tensor]) -> Latency:
        """A pass over whole inputs."""
        return self._cell("forward", batch, length, (lambda: inputs, lambda: inputs))

    def decode(self, batch: int, inputs: Mapping[str, Tensor]) -> Latency | None:
        """A step after inputs; None where a model keeps no cache."""
        steps = step_after(self.before, inputs), step_after(self.after, inputs)
        if steps[0] is None or steps[1] is None:
            return None
        return self._cell("decode", batch, steps[0].length, (steps[0].fresh, steps[1].fresh))

    def _cell(self, kind: Pass, batch: int, length: int | None, given: tuple[Given, Given]) -> Latency:
        times = times_in_turns((self.before, self.after), given, self.seconds)
        (b1, b2, b3), (a1, a2, a3) = (quartiles(t) for t in times)
        low, high = median_interval([a / b for b, a in zip(*times, strict=True)])
        in_noise = low <= 1 <= high
        return Latency(batch, length, b2, a2, (b1, b3), (a1, a3), len(times[0]), in_noise, kind)


def _decoding(turns: _Turns, inputs: Sequence[tuple[int, dict[str, Tensor]]]) -> tuple[list[Latency], tuple[str, ...]]:
    """Steps after each of the inputs that leave room for one token, and why there are none."""
    cells: list[Latency] = []
    for batch, given in inputs:
        if not _has_room(turns.before, given):
            continue
        try:
            cell = turns.decode(batch, given)
        except Exception as error:  # whatever a model's code raises where it takes no single token
            if is_out_of_memory(error):
                raise
            return cells, (f"latency: steps with a cache are not timed: {first_line(error)}",)
        if cell is None:
            return cells, ("latency: steps with a cache are not timed: the model fills none",)
        cells.append(cell)
    return cells, ()


def _has_room(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> bool:
    """Whether there is a position for one more token."""
    decoder = inputs.get("decoder_input_ids")
    limit = text_limit(model, None) if decoder is None else decoder_limit(model)
    ids = inputs["input_ids"] if decoder is None else decoder
    return limit is None or ids.shape[1] < limit
