"""The pruned model against the original with the same heads zeroed before the output projection.

Shapes prove nothing: several families run without an error and compute something else when they are sliced wrongly. So
both models run on the same inputs, in every attention implementation that the family has, and generate with a cache.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.capture.evaluation import evaluating
from headscope.errors import InputError, is_out_of_memory
from headscope.models.checkpoint import first_line
from headscope.models.quiet import quiet
from headscope.models.sites import find_sites
from headscope.pruning.implementations import IMPLEMENTATIONS, attention_as
from headscope.pruning.masking import masked_heads
from headscope.pruning.plan import current_plan
from headscope.pruning.probes import Probe
from headscope.pruning.report import Equivalence, EquivalenceCheck
from headscope.pruning.running import Outputs, can_generate, comparable, forward, generated

TOLERANCE = 1e-5
# Relative differences above this are never rounding.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class _Pair:
    """Both models in one dtype, and the heads that the original runs without."""

    original: PreTrainedModel
    pruned: PreTrainedModel
    heads: Mapping[str, Sequence[int]]
    dtype: str


def prove(
    original: PreTrainedModel,
    pruned: PreTrainedModel,
    heads: Mapping[str, Sequence[int]] | None = None,
    *,
    batches: Sequence[Probe],
    implementations: Sequence[str] = IMPLEMENTATIONS,
    generate: bool = True,
    tolerance: float = TOLERANCE,
) -> Equivalence:
    """Compare a pruned model with what it was pruned from.

    Args:
        original: The model before; it is as before afterwards. It may have been pruned less.
        pruned: The model after, of the same dtype. Half precision is compared in float32 copies of both. What differs
            in float32 by more than the tolerance, but little, is looked at once more in float64 copies.
        heads: What the pruned model has to be without, by `stack.layer`, in the numbers of the original model; by
            default what it says itself.
        batches: Inputs that fit the model; `headscope.pruning.probes.probes` makes some.
        implementations: Of attention; those that the original does not have are left out.
        generate: Generate with a cache as well, where the model can.
        tolerance: Of the largest difference, relative to the largest number in an output.

    Raises:
        InputError: There are no batches.
        NotPlain: The original's heads cannot be zeroed.
    """
    if not batches:
        raise InputError("there is nothing to run the models on", "Give at least one batch.")
    heads = current_plan(pruned).heads if heads is None else heads
    ways = _Ways(tuple(batches), tuple(implementations), generate)
    found = _compare(original, pruned, heads, ways, torch.float32)
    doubtful = {_key(c) for c in found.checks if tolerance < c.relative < _ROUNDING}
    if doubtful:
        # Deep models magnify the rounding of float32; what is only rounding is gone in float64.
        found.look_again(_compare(original, pruned, heads, replace(ways, only=frozenset(doubtful)), torch.float64))
    ran = found.ran
    if ran != set(heads):
        idle = ", ".join(sorted(set(heads) - ran))
        found.failures.append(f"{idle} did not run on these inputs, so nothing is known of it")
    return found.result(tolerance)


_Key = tuple[str, str, str]


def _key(check: EquivalenceCheck) -> _Key:
    return check.implementation, check.mode, check.batch


@dataclass(frozen=True)
class _Ways:
    """What is to be compared: everything, or `only` some of it."""

    batches: tuple[Probe, ...]
    implementations: tuple[str, ...]
    generate: bool
    only: frozenset[_Key] | None = None

    def wants(self, key: _Key) -> bool:
        return (self.only is None or key in self.only) and (key[1] == "forward" or self.generate)


def _compare(
    original: PreTrainedModel,
    pruned: PreTrainedModel,
    heads: Mapping[str, Sequence[int]],
    ways: _Ways,
    dtype: torch.dtype,
) -> _Findings:
    pair = _Pair(_in(original, dtype), _in(pruned, dtype), heads, str(dtype).removeprefix("torch."))
    ways = replace(ways, batches=tuple(Probe(b.name, _inputs_in(b, dtype)) for b in ways.batches))
    found = _Findings()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(quiet())
        for model in (pair.original, pair.pruned):
            stack.enter_context(evaluating(model))
        with masked_heads(pair.original, heads):
            pass  # what cannot be zeroed is an error of the caller's, not of a run
        found.ran = stack.enter_context(_watching(pair))
        for name in ways.implementations:
            _in_implementation(pair, name, ways, found)
    return found


# ------------------------------------------------------------------ running both
class _Findings:
    def __init__(self) -> None:
        self.checks: list[EquivalenceCheck] = []
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.ran: set[str] = set()

    def look_again(self, other: _Findings) -> None:
        """Take another look's checks in place of the same ones here."""
        again = {_key(c): c for c in other.checks}
        worst = max(c.relative for c in self.checks if _key(c) in again) if again else 0.0
        self.note(f"{len(again)} comparisons were made in float64: rounding in float32 came to {worst:.1e}")
        self.checks = [again.get(_key(c), c) for c in self.checks]
        self.failures += other.failures

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def result(self, tolerance: float) -> Equivalence:
        worst = [max((getattr(c, n) for c in self.checks), default=float("inf")) for n in ("max_abs", "relative")]
        passed = bool(self.checks) and not self.failures and all(c.relative <= tolerance for c in self.checks)
        return Equivalence(
            worst[0], worst[1], tolerance, passed, tuple(self.checks), tuple(self.notes), tuple(self.failures)
        )


def _in_implementation(pair: _Pair, name: str, ways: _Ways, found: _Findings) -> None:
    with attention_as(pair.original, name) as can, attention_as(pair.pruned, name) as can_too:
        if not can:
            found.note(f"{type(pair.original).__name__} has no {name} attention")
            return
        if not can_too:
            found.failures.append(f"the pruned model has no {name} attention, the original has")
            return
        modes = ("forward", "generate") if can_generate(pair.original) else ("forward",)
        for batch in ways.batches:
            for mode in modes:
                if ways.wants((name, mode, batch.name)):
                    _check(pair, name, mode, batch, found)


def _check(pair: _Pair, implementation: str, mode: str, batch: Probe, found: _Findings) -> None:
    run = forward if mode == "forward" else generated
    try:
        plain = run(pair.original, batch.inputs) if mode == "forward" else None
        with masked_heads(pair.original, pair.heads):
            wanted = run(pair.original, batch.inputs)
    except Exception as error:  # whatever a model's code raises on an input that it cannot take
        if is_out_of_memory(error):
            raise
        found.note(f"{mode} on {batch.name}: the original does not run: {first_line(error)}")
        return
    try:
        given = run(pair.pruned, batch.inputs)
    except Exception as error:  # as above, but here it is the pruning that is wrong
        if is_out_of_memory(error):
            raise
        found.failures.append(f"{mode} on {batch.name} ({implementation}): the pruned model fails: {first_line(error)}")
        return
    if not any(bool(t.isfinite().any()) for t in wanted.values()):
        found.note(f"{mode} on {batch.name} ({implementation}): the original gives no finite numbers")
        return
    absolute, relative = difference(wanted, given, batch.inputs)
    effect = None if plain is None else difference(wanted, plain, batch.inputs)[1]
    check = EquivalenceCheck(batch.name, implementation, mode, pair.dtype, absolute, relative, effect)
    found.checks.append(check)


def difference(wanted: Outputs, given: Outputs, inputs: Mapping[str, Tensor]) -> tuple[float, float]:
    """(largest difference, largest difference relative to the largest number of the same output), on real tokens.

    Infinite where outputs are missing, have other shapes, or are not finite on one side only.
    """
    wanted, given = comparable(wanted, given)
    if set(wanted) != set(given):
        return float("inf"), float("inf")
    pairs = [_between(wanted[name], given[name], inputs) for name in wanted]
    return max((p[0] for p in pairs), default=float("inf")), max((p[1] for p in pairs), default=float("inf"))


def _between(wanted: Tensor, given: Tensor, inputs: Mapping[str, Tensor]) -> tuple[float, float]:
    if wanted.shape != given.shape:
        return float("inf"), float("inf")
    masks = (inputs.get(n) for n in ("attention_mask", "decoder_attention_mask"))
    for mask in masks:
        if mask is not None and wanted.ndim > 2 and wanted.shape[:2] == mask.shape:
            wanted, given = wanted[mask.bool()], given[mask.bool()]
            break
    wanted, given = wanted.double(), given.double()
    # What is hidden from a row of padding can be infinite, or no number, on both sides.
    same = (wanted == given) | (wanted.isnan() & given.isnan())
    cells = torch.where(same, torch.zeros_like(wanted), (wanted - given).abs()).nan_to_num(nan=float("inf"))
    largest = float(cells.max()) if cells.numel() else 0.0
    finite = wanted[wanted.isfinite()].abs()
    if wanted.numel() and not finite.numel():
        return float("inf"), float("inf")
    return largest, largest / max(float(finite.max()) if finite.numel() else 0.0, 1e-12)


# ------------------------------------------------------------------ the models as they have to be
def _in(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model, or a copy of it in a finer dtype where it is in a coarser one."""
    bits = min((torch.finfo(p.dtype).bits for p in model.parameters() if p.is_floating_point()), default=64)
    if bits >= torch.finfo(dtype).bits:
        return model
    return nn.Module.to(copy.deepcopy(model), dtype)


def _inputs_in(batch: Probe, dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = batch.inputs.items()
    return {n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in inputs}


@contextmanager
def _watching(pair: _Pair) -> Iterator[set[str]]:
    """The names of the pruned layers that ran, filled while the block runs."""
    ran: set[str] = set()
    handles = []
    for site in find_sites(pair.pruned):
        name = f"{site.stack}.{site.layer}"
        if name in pair.heads:

            def note(module: object, args: object, name: str = name) -> None:
                ran.add(name)

            handles.append(site.module.register_forward_pre_hook(note))
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()
