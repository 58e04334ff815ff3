"""Where the result of a projection joins the residual stream, found by trying: no architecture plays a part.

A module *reads the stream* of a projection if an input of it is S = A + c · result, with A independent of the result
and c a number. Behind an attention module that is the next norm mostly: a later sublayer's, or the one that follows the
sum in post-norm models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.models.batches import Batch
from headscope.repair.trial import Event, Trial, short

# What rounding may leave, relative; half-precision models round more.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Stream:
    """What a projection's result goes into.

    Attributes:
        projection: The projection's path.
        event: Where the stream is first read; the projection's own result where nothing reads a sum that it is in.
        scale: The number that the result is multiplied by before it is added.
        centred: What reads it subtracts the mean over features, as LayerNorm does.
        order: Sorts streams by when they are read, then by when their projections are called.
    """

    projection: str
    event: Event
    scale: float
    centred: bool
    order: tuple[int, int]

    @property
    def joined(self) -> bool:
        """Whether the result is added to something; else the stream is the result itself."""
        return self.event.key is not None


def find_streams(
    model: PreTrainedModel, projections: Mapping[str, nn.Module], batch: Batch
) -> tuple[dict[str, Stream], Counter[str]]:
    """The streams of projections, by path, and how often each projection is called in a forward pass.

    Each projection that is called once costs two forward passes of two short texts: in the first a number is added to
    its result, in the second to the stream; what follows must be the same.

    Args:
        projections: By path.
        batch: Two short pieces of it are tried.

    Returns:
        Streams of those projections that are called once; and calls of all.
    """
    trial = Trial(model, projections, short(model, batch))
    base = trial.run()
    calls = Counter(event.path for event in base if event.key is None)
    called = [event for event in base if event.key is None and calls[event.path] == 1]
    outputs = [event for event in base if event.key is None]
    order = {event: number for number, event in enumerate(base)}
    streams: dict[str, Stream] = {}
    for own in called:
        # A projection beside it may be called before the sum of both is read.
        later = outputs[outputs.index(own) + 2 :]
        event, scale = _find(trial, base, own, later[0] if later else None)
        centred = _is_centred(trial, base, event)
        streams[own.path] = Stream(own.path, event, scale, centred, (order[event], order[own]))
    return streams, calls


# ------------------------------------------------------------------ comparing them
def _find(trial: Trial, base: Mapping[Event, Tensor], own: Event, stop: Event | None) -> tuple[Event, float]:
    """Where the stream of a projection's result is first read, and the result's factor in it.

    The last sum that holds the result as it is counts: what is read before that may be the result alone, and behind
    that there is a sublayer's answer to it.
    """
    delta = _delta(base, own, stop)
    moved = trial.run(own, delta, stop)
    later = list(moved)[list(moved).index(own) + 1 :]
    sums = {e: c for e in later if e in base and (c := _factor(base[e], moved[e], base[own], delta)) is not None}
    if not sums:
        return own, 1.0
    last, scale = list(sums.items())[-1]
    first = next(e for e in sums if torch.equal(_rows(moved[e]), _rows(moved[last])))
    again = trial.run(first, delta * scale, stop)
    behind = later[later.index(first) + 1 :]
    same = all(_same(base[e], moved[e], again[e]) for e in behind if e in base and e in again)
    return (first, scale) if same else (own, 1.0)


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])


def _tolerance(value: Tensor) -> float:
    return max(_ROUNDING, 4 * torch.finfo(value.dtype).eps)


def _delta(base: Mapping[Event, Tensor], own: Event, stop: Event | None) -> Tensor:
    """Noise in the shape of a result, as large as a token's share in what is read behind it mostly is."""
    events = list(base)
    near = events[events.index(own) : events.index(stop) if stop is not None else None]
    result = base[own]
    sizes = [_rows(base[e]).float().pow(2).mean(-1).sqrt().median() for e in near if base[e].numel() == result.numel()]
    noise = torch.randn(result.shape, generator=torch.Generator().manual_seed(0))
    return noise.to(result) * torch.stack(sizes).max().to(result)


def _factor(before: Tensor, after: Tensor, result: Tensor, delta: Tensor) -> float | None:
    """c, if `before` is A + c · result with A neither zero nor moved by the result; None if not."""
    if before.numel() != result.numel() or before.shape[-1] != result.shape[-1] or before.shape != after.shape:
        return None
    change, added = (_rows(after) - _rows(before)).double(), _rows(delta).double()
    scale = float((change * added).sum() / added.pow(2).sum())
    rounding = _tolerance(before)
    if not change.any() or float((change - scale * added).norm() / change.norm()) > rounding:
        return None
    scale = 1.0 if abs(scale - 1) < rounding else scale
    whole = _rows(before).double()
    other = whole - scale * _rows(result).double()
    return scale if float(other.norm()) > rounding * float(whole.norm()) else None


def _same(base: Tensor, wanted: Tensor, given: Tensor) -> bool:
    if not base.shape == wanted.shape == given.shape:
        return False
    off, moved = float((given.double() - wanted.double()).norm()), float((wanted.double() - base.double()).norm())
    return off <= 0.05 * moved + _tolerance(base) * float(wanted.double().norm())


def _is_centred(trial: Trial, base: Mapping[Event, Tensor], event: Event) -> bool:
    """Whether any module that reads the same numbers is a LayerNorm."""
    same = {e.path for e in base if e.key is not None and torch.equal(base[e], base[event])}
    return any(_is_layer_norm(trial.model.get_submodule(path)) for path in same)


def _is_layer_norm(module: nn.Module) -> bool:
    named = "LayerNorm" in type(module).__name__ and module._parameters.get("bias") is not None
    return isinstance(module, nn.LayerNorm) or named
