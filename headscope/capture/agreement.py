"""Before a kind of model is streamed for the first time: does it give what the model's own eager attention gives?

A short slice of the input runs twice, and every layer's numbers are compared. Models that behave differently under a
name that is not `eager` are then streamed under that one; if neither agrees, nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.attention.streaming import StreamedWeights
from headscope.attention.visibility import Target
from headscope.capture import layerwise, streaming
from headscope.capture.feed import nan_weights
from headscope.capture.layerwise import Call
from headscope.capture.streaming import Mode, StreamedCall
from headscope.errors import ModelError
from headscope.models.sites import Site

# Tokens of the slice.
_TOKENS = 48

# Largest differences of weights, entropies and contexts (as a share of the largest): rounding, and what it becomes over
# layers. Eager attention rounds its weights to half precision where the model is in it, and ours does not.
_TOLERANCE = {torch.float64: 2e-3, torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}

CONTEXT = "the context"

_TARGETS = (Target(key=0), Target(offset=0), Target(offset=-1))

_agreed: dict[tuple[object, ...], Mode] = {}


def agreed_mode(
    model: PreTrainedModel,
    sites: Sequence[Site],
    inputs: Mapping[str, Tensor],
    lengths: Mapping[str, Tensor],
    size: int,
) -> Mode:
    """The mode in which streaming agrees with eager attention; found once a kind of model and process.

    Args:
        model: The model.
        sites: Its sites.
        inputs: A batch that is about to be run.
        lengths: int64, (batch,) each: real tokens of each axis, padding on the right.
        size: Examples in the batch.

    Raises:
        ModelError: It agrees in no mode; names the layer.
    """
    kinds = frozenset((type(s.module).__name__, s.uses_interface) for s in sites)
    device = model.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
    key = (type(model), dtype, kinds, frozenset(inputs))
    if key not in _agreed:
        short, kept = _short(inputs, lengths, size)
        try:
            expected = _eager(model, sites, short, kept)
        except ModelError:  # some models take a batch only as a whole; what else is wrong shows again
            short, kept = dict(inputs), dict(lengths)
            expected = _eager(model, sites, short, kept)
        tolerance = _TOLERANCE.get(dtype, 1e-1)
        faults = []
        for mode in ("named", "eager"):
            fault = _difference(model, sites, short, kept, expected, tolerance, mode)
            if fault is None:
                _agreed[key] = mode
                break
            faults.append(fault)
        else:
            raise ModelError(
                f"streaming does not give what {type(model).__name__} computes itself: {faults[-1]}",
                "Use --engine layerwise.",
            )
    return _agreed[key]


def _difference(
    model: PreTrainedModel,
    sites: Sequence[Site],
    inputs: Mapping[str, Tensor],
    lengths: Mapping[str, Tensor],
    expected: Calls,
    tolerance: float,
    mode: Mode,
) -> str | None:
    """Where streaming differs from eager attention; None where it does not."""
    found: Calls = {}
    try:
        with _same_chance():
            streaming.run(model, sites, deepcopy(inputs), lambda call: _keep(found, call, lengths), mode)
    except ModelError as error:
        return str(error)
    for where, numbers in expected.items():
        if where not in found:
            return f"{where[0]} computes no attention"
        for name, theirs in numbers.items():
            ours = found[where].get(name)
            off = _largest(ours, theirs) / (float(theirs.abs().max()) or 1.0 if name == CONTEXT else 1.0)
            if not off <= tolerance:
                return f"{where[0]} differs by {off:.1e} in {name}"
    return None


Calls = dict[tuple[str, int], dict[str, Tensor]]
"""By module and call number: what is compared, 0 in rows that do not count."""


def _eager(
    model: PreTrainedModel, sites: Sequence[Site], inputs: Mapping[str, Tensor], lengths: Mapping[str, Tensor]
) -> Calls:
    expected: Calls = {}

    def take(call: Call) -> None:
        _keep(expected, call, lengths)
        numbers = expected.get((call.site.path, call.number), {})
        if not all(bool(n.isfinite().all()) for n in numbers.values()):
            raise nan_weights(call.site)

    with _same_chance():
        layerwise.run(model, sites, deepcopy(inputs), take)
    return expected


@contextmanager
def _same_chance() -> Iterator[None]:
    """The same random numbers in every run, and the caller's own as they were: some models draw in evaluation, too.

    For the same reason runs get copies of their inputs: some models write into them.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _keep(calls: Calls, call: Call | StreamedCall, lengths: Mapping[str, Tensor]) -> None:
    if len(call.weights.shape) != 4:
        return
    weights = call.weights
    numbers = _of_streamed(weights) if isinstance(weights, StreamedWeights) else _of_matrix(weights.float())
    shown = call if isinstance(call, StreamedCall) else call.arguments
    context = None if shown is None else shown.context
    if context is not None and context.ndim == 4:
        numbers[CONTEXT] = context.float().transpose(1, 2)
    known = lengths.get(call.site.query_axis)
    if known is not None and len(known) == weights.shape[0]:
        padding = torch.arange(weights.shape[2], device=weights.device) >= known.to(weights.device)[:, None]
        for name, values in numbers.items():
            numbers[name] = values.masked_fill(padding.view(len(known), 1, -1, *[1] * (values.ndim - 3)), 0)
    calls[call.site.path, call.number] = numbers


def _of_streamed(weights: StreamedWeights) -> dict[str, Tensor]:
    numbers = {f"the weights on {target}": weights.at(target) for target in _TARGETS}
    return {**numbers, "entropy": weights.entropy(), "the sum of weights": weights.total()}


def _of_matrix(weights: Tensor) -> dict[str, Tensor]:
    rows = torch.arange(weights.shape[2], device=weights.device)
    numbers = {}
    for target in _TARGETS:
        keys = target.positions(rows)
        index = keys.clamp(0, weights.shape[3] - 1)[:, None].expand(*weights.shape[:3], 1)
        exists = (keys >= 0) & (keys < weights.shape[3])
        numbers[f"the weights on {target}"] = weights.gather(-1, index)[..., 0] * exists
    entropy = -torch.special.xlogy(weights, weights).sum(dim=-1)
    return {**numbers, "entropy": entropy, "the sum of weights": weights.sum(dim=-1)}


def _largest(ours: Tensor | None, theirs: Tensor) -> float:
    """The largest difference; infinite where ours are no numbers."""
    if ours is None or ours.shape != theirs.shape:
        return torch.inf
    return float((ours - theirs).abs().nan_to_num(nan=torch.inf).max()) if ours.numel() else 0.0


# ------------------------------------------------------------------ a short slice
def _short(
    inputs: Mapping[str, Tensor], lengths: Mapping[str, Tensor], size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The shortest and the longest example, and their first tokens where the input is tokens and nothing else."""
    tensors = {name: t for name, t in inputs.items() if isinstance(t, Tensor)}
    if not all(t.ndim and t.shape[0] == size for t in tensors.values()) or len(tensors) < len(inputs):
        return dict(inputs), dict(lengths)
    by_length = next(iter(lengths.values())).argsort().tolist() if lengths else list(range(size))
    examples = sorted({by_length[0], by_length[-1]})
    tensors = {name: t[examples] for name, t in tensors.items()}
    lengths = {name: n[examples] for name, n in lengths.items()}
    if all(t.ndim == 2 and not t.is_floating_point() for t in tensors.values()):
        tensors = {name: t[:, :_TOKENS] for name, t in tensors.items()}
        lengths = {name: n.clamp(max=_TOKENS) for name, n in lengths.items()}
    return tensors, lengths
