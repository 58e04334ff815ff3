"""How a site gets from its input to its weights: found once, by trying what the site can be against what it computed.

A plan holds our own copies of everything that belongs to the checkpoint (weights, norms, sinks, bias tables) and
choices (which input, which norm, which rotation, which mask). It can be made on one model and checked on another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headscope.capture.feed import Axis
from headscope.errors import ModelError
from headscope.models.weights import HeadWeights, read_weights
from headscope.proof.backends import NumPy
from headscope.proof.bias import BiasPlan, given_bias, shown_biases
from headscope.proof.masks import MaskPlan, plan_masks
from headscope.proof.norms import Norm, has_norm, norm_of
from headscope.proof.record import PROJECTION_INPUT, SiteRecord
from headscope.proof.rotary import Rotation, angles, rotations

# Relative to the largest value: what tells a scheme that is ours from one that is not, by the model's dtype.
MATCH = {torch.float32: 2e-4, torch.float64: 2e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


Sources = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]

# Where modules keep a factor on queries or scores.
_SCALES = ("scaling", "scale", "scale_factor", "inv_norm_factor", "softmax_scale", "norm_factor")


class NotRebuilt(ModelError):
    """A site's computation is none that we have; the message says which part."""


@dataclass(frozen=True)
class Plan:
    """One site's plan.

    Attributes:
        weights: Our copy of the checkpoint's weights, by head.
        sources: Which inputs make queries, keys and values; several names are added up.
        norms: On queries, keys and values, None for none.
        order: Steps between projection and scores: `norm` and `rotate` in their order.
        rotation: How positions turn queries and keys, None where they do not.
        factors: What queries and keys are multiplied with before the attention function sees them.
        scale: Factor on the dot products.
        bias: What is added to the scores, None for nothing.
        mask: Who may look at whom.
        softcap, sinks: As in `reference.attention`.
        sinks_after: The weights are those without sinks, which only scale the heads' results.
        between: Something of the model lies between the heads' results and the output projection.
        borrowed: Queries and keys are the model's own, since how they get their positions is not ours.
    """

    weights: HeadWeights
    sources: Sources
    norms: tuple[Norm | None, Norm | None, Norm | None]
    order: tuple[str, ...]
    rotation: Rotation | None
    factors: tuple[float, float]
    scale: float
    bias: BiasPlan | None
    mask: MaskPlan
    softcap: float | None = None
    sinks: Tensor | None = None
    sinks_after: bool = False
    between: bool = False
    borrowed: bool = False

    @property
    def positions(self) -> str:
        """`own`, or `model` where any of the model's own tensors is taken for positions."""
        rotated = self.rotation is None or self.rotation.own
        biased = self.bias is None or self.bias.own
        return "own" if rotated and biased and not self.borrowed else "model"


def make_plan(model: nn.Module, record: SiteRecord, query: Axis, key: Axis, table: nn.Module | None = None) -> Plan:
    """Find the plan of a site from what it computed.

    Args:
        table: The stack's table of bucket biases, None where there is none.

    Raises:
        NotRebuilt: None of our schemes gives the site's numbers.
        ModelError: The weights cannot be read per head.
    """
    weights = read_weights(record.site, model=model)
    masks = plan_masks(record, query, key)
    if record.call.arguments is None:
        return _plan_from_weights(record, weights, masks, query, key)
    plan = _plan_from_arguments(record, weights, masks[0], table)
    after = replace(plan, sinks_after=True)
    return after if plan.sinks is not None and _fits(after, record, query, key) else plan


# ------------------------------------------------------------------ modules that show their queries and keys
def _plan_from_arguments(record: SiteRecord, weights: HeadWeights, mask: MaskPlan, table: nn.Module | None) -> Plan:
    arguments = record.call.arguments
    assert arguments is not None
    options = arguments.options
    value = _match_value(record, weights, arguments.value)
    if value is None:
        raise NotRebuilt(f"{record.site.path}: its values are not its input times the value weights")
    bias = given_bias(record, table)
    plan = Plan(
        weights=weights,
        sources=(value[0], value[0], value[0]),
        norms=(*_norms(record, weights), value[1]),
        order=(),
        rotation=None,
        factors=(1.0, 1.0),
        scale=float(s) if isinstance(s := options.get("scaling"), int | float) else arguments.query.shape[-1] ** -0.5,
        bias=bias,
        mask=mask,
        softcap=_number(options.get("softcap")),
        sinks=_sinks(record, weights.query.shape[0]),
    )
    plan = replace(plan, between=_between(record))
    found = next(_schemes(plan, record), None)
    return found if found is not None else _borrowing(plan, record)


def _between(record: SiteRecord) -> bool:
    """Whether something lies between the heads' results and the output projection: a gate, a norm."""
    if record.merged is None or record.call.arguments is None:
        return False
    context = record.call.arguments.context
    merged = record.merged
    if context.numel() != merged.numel():
        return True
    return not torch.allclose(context.reshape(merged.shape).float(), merged.float(), rtol=1e-3, atol=1e-5)


def _schemes(plan: Plan, record: SiteRecord) -> Iterator[Plan]:
    """Every combination of source, norm and rotation that gives the model's queries and keys."""
    arguments = record.call.arguments
    assert arguments is not None
    sources = _sources(record, plan.weights.query.shape[-1])
    allowed = _factors(record)
    for order, rotation in _orders(plan, record):
        trial = replace(plan, order=order, rotation=rotation)
        query = _match_end(trial, record, 0, sources, arguments.query, allowed)
        if query is None:
            continue
        key = _match_end(trial, record, 1, sources, arguments.key, allowed)
        if key is not None:
            sources_found = (query[0], key[0], plan.sources[2])
            yield replace(trial, sources=sources_found, factors=(query[1], key[1]))


def _orders(plan: Plan, record: SiteRecord) -> Iterator[tuple[tuple[str, ...], Rotation | None]]:
    dim = plan.weights.query.shape[1]
    normed = any(n is not None for n in plan.norms[:2])
    yield (("norm",) if normed else ()), None
    for rotation in rotations(record, dim):
        yield (("norm", "rotate") if normed else ("rotate",)), rotation
        if normed:
            yield ("rotate", "norm"), rotation
    if normed:
        yield (), None


def _match_end(
    plan: Plan, record: SiteRecord, end: int, sources: list[tuple[str, ...]], model: Tensor, allowed: list[float]
) -> tuple[tuple[str, ...], float] | None:
    """The source and factor with which our queries (0) or keys (1) are the model's."""
    backend = NumPy()
    target = backend.array(model)
    for source in sources:
        ours = ends(plan, record, backend, (source, source, source), only=end)
        if ours is None or ours.shape != target.shape:
            continue
        for factor in allowed:
            if _close(ours * factor, target, model.dtype):
                return source, factor
    return None


def ends(plan: Plan, record: SiteRecord, backend: Any, sources: tuple[tuple[str, ...], ...], only: int) -> Any:
    """Our queries (0), keys (1) or values (2): projected, normed, turned; None where a rotation does not fit."""
    weight, bias = (
        (plan.weights.query, plan.weights.query_bias),
        (plan.weights.key, plan.weights.key_bias),
        (plan.weights.value, plan.weights.value_bias),
    )[only]
    x = backend.array(source_tensor(record, sources[only]))
    x = backend.project(x, backend.array(weight), None if bias is None else backend.array(bias))
    if only == 2:
        return x if plan.norms[2] is None else backend.normalise(x, plan.norms[2])
    for step in plan.order:
        if step == "norm":
            norm = plan.norms[only]
            x = x if norm is None else backend.normalise(x, norm)
        elif plan.rotation is not None:
            turn = angles(plan.rotation, record, x.shape[-1], x.shape[-2])
            if turn is None:
                return None
            x = backend.rotate(x, backend.array(turn[0]), backend.array(turn[1]), plan.rotation.interleaved)
    return x


def _borrowing(plan: Plan, record: SiteRecord) -> Plan:
    """Take the model's queries and keys, if they are ours but for a turn: each head's lengths must agree."""
    arguments = record.call.arguments
    assert arguments is not None
    backend = NumPy()
    normed = any(n is not None for n in plan.norms[:2])
    sources = _sources(record, plan.weights.query.shape[-1])
    for order in (("norm",), ()) if normed else ((),):
        trial = replace(plan, order=order)
        found = [
            _same_lengths(trial, record, backend, end, sources, model)
            for end, model in enumerate((arguments.query, arguments.key))
        ]
        if found[0] is not None and found[1] is not None:
            chosen = (found[0][0], found[1][0], plan.sources[2])
            return replace(trial, borrowed=True, sources=chosen, factors=(found[0][1], found[1][1]))
    unknown = has_norm(record.site.module) and not normed
    part = "norms are none that we have" if unknown else "are more than a projection, a norm and a turn"
    raise NotRebuilt(f"{record.site.path}: its queries and keys {part}")


def _same_lengths(
    plan: Plan,
    record: SiteRecord,
    backend: NumPy,
    end: int,
    sources: list[tuple[str, ...]],
    model: Tensor,
) -> tuple[tuple[str, ...], float] | None:
    target = backend.array(model)
    lengths = np.linalg.norm(target, axis=-1)
    for source in sources:
        ours = ends(plan, record, backend, (source, source, source), only=end)
        if ours is None or ours.shape != target.shape:
            continue
        for factor in _factors(record):
            if _close(np.linalg.norm(ours, axis=-1) * factor, lengths, model.dtype):
                return source, factor
    return None


# ------------------------------------------------------------------ modules that show only their weights
def _plan_from_weights(record: SiteRecord, weights: HeadWeights, masks: list[MaskPlan], query: Axis, key: Axis) -> Plan:
    dim = weights.query.shape[1]
    sources = _shown_sources(record, weights)
    base = Plan(weights, sources, (*_norms(record, weights), None), (), None, (1.0, 1.0), dim**-0.5, None, masks[0])
    for bias in shown_biases(record, weights.query.shape[0], dim):
        terms = 0 if bias is None else bias.terms
        scales = list(dict.fromkeys(((dim * (1 + terms)) ** -0.5, dim**-0.5, *_factors(record))))
        for (order, rotation), scale, mask in product(_orders(base, record), scales, masks):
            plan = replace(base, order=order, rotation=rotation, scale=scale, bias=bias, mask=mask)
            if _fits(plan, record, query, key):
                return plan
    raise NotRebuilt(f"{record.site.path}: its weights follow from none of the schemes that we have")


def _fits(plan: Plan, record: SiteRecord, query: Axis, key: Axis) -> bool:
    """Whether a plan gives the model's weights, and its heads' results where these are all that is projected."""
    from headscope.proof.rebuild import rebuild

    rebuilt = rebuild(plan, record, NumPy(), query, key)
    if rebuilt is None:
        return False
    valid = query.valid.cpu().numpy()
    off = np.abs(rebuilt.weights - record.call.weights.double().cpu().numpy()) * valid[:, None, :, None]
    if off.max() >= MATCH[record.call.weights.dtype]:
        return False
    if record.call.arguments is not None or record.merged is None or rebuilt.context.size != record.merged.numel():
        return True
    batch, heads, rows, dim = rebuilt.context.shape
    merged = record.merged.double().cpu().numpy().reshape(batch, rows, heads, dim).swapaxes(1, 2)
    real = valid[:, None, :, None]
    return _close(rebuilt.context * real, merged * real, record.call.weights.dtype)


def _shown_sources(record: SiteRecord, weights: HeadWeights) -> Sources:
    """What queries, keys and values are made of in a module that shows none of them.

    Raises:
        NotRebuilt: Its input has not the shape that its weights ask for.
    """
    batch, _, rows, keys = record.call.weights.shape
    found: list[tuple[str, ...]] = []
    for end, (role, length) in enumerate((("query", rows), ("key", keys), ("value", keys))):
        width = (weights.query, weights.key, weights.value)[end].shape[-1]
        fit = [s for s in _sources(record, width) if source_tensor(record, s).shape[:2] == (batch, length)]
        own = [s for s in fit if s == (PROJECTION_INPUT[role],)]
        if not fit:
            raise NotRebuilt(f"{record.site.path}: its {role} has no input of one row a token")
        found.append((own or fit)[0])
    return found[0], found[1], found[2]


# ------------------------------------------------------------------ inputs
def source_tensor(record: SiteRecord, names: tuple[str, ...]) -> Tensor:
    """The sum of the module's inputs of these names, float32 (batch, n, features)."""
    tensors = [record.tensors[n].detach().float().cpu() for n in names]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _sources(record: SiteRecord, width: int) -> list[tuple[str, ...]]:
    """The inputs that fit a projection: the module's one by one, sums of two, then what entered the projections."""
    fit = [n for n, t in record.tensors.items() if t.shape[-1] == width]
    names = [n for n in fit if n not in PROJECTION_INPUT.values()]
    pairs = [
        (a, b)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if record.tensors[a].shape == record.tensors[b].shape
    ]
    entering = [(n,) for n in fit if n not in names]
    return [*((n,) for n in names), *pairs, *entering]


def _match_value(record: SiteRecord, weights: HeadWeights, model: Tensor) -> tuple[tuple[str, ...], Norm | None] | None:
    """The source and norm with which our values are the model's."""
    backend = NumPy()
    target = backend.array(model)
    bias = None if weights.value_bias is None else backend.array(weights.value_bias)
    found = norm_of(record.site.module, "value", *weights.value.shape[:2])
    for source in _sources(record, weights.value.shape[-1]):
        ours = backend.project(backend.array(source_tensor(record, source)), backend.array(weights.value), bias)
        if ours.shape != target.shape:
            continue
        if _close(ours, target, model.dtype):
            return source, None
        if found is not None and _close(backend.normalise(ours, found), target, model.dtype):
            return source, found
    return None


def _close(ours: Any, theirs: Any, dtype: torch.dtype) -> bool:
    return bool(np.abs(ours - theirs).max() <= MATCH[dtype] * max(float(np.abs(theirs).max()), 1e-6))


def _factors(record: SiteRecord) -> list[float]:
    """Factors that the module names, for models that scale queries before the attention function does."""
    module = record.site.module
    named = [getattr(module, n, None) for n in _SCALES]
    found = [float(v) for v in named if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
    if record.call.arguments is not None:
        dim = record.call.arguments.query.shape[-1]
        found += [dim**-0.5, dim**-0.25]
    return list(dict.fromkeys([1.0, *found]))


def _norms(record: SiteRecord, weights: HeadWeights) -> tuple[Norm | None, Norm | None]:
    module = record.site.module
    return (
        norm_of(module, "query", weights.query.shape[0], weights.query.shape[1]),
        norm_of(module, "key", weights.key.shape[0], weights.key.shape[1]),
    )


def _sinks(record: SiteRecord, heads: int) -> Tensor | None:
    arguments = record.call.arguments
    assert arguments is not None
    found = next((arguments.options.get(n) for n in ("s_aux", "sinks") if arguments.options.get(n) is not None), None)
    found = getattr(record.site.module, "sinks", None) if found is None else found
    if not isinstance(found, Tensor) or found.numel() != heads:
        return None
    return found.detach().float().cpu().reshape(heads).clone()


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
