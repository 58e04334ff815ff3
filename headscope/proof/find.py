"""Finding a site's plan: by trying what the site can be against what it computed.

Modules that call transformers' attention functions show their queries, keys and values, so each is found on its own.
Of the others only the weights are known; `find_shown` tries whole plans against those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from headscope.capture.feed import Axis
from headscope.capture.layerwise import Arguments
from headscope.models.weights import HeadWeights, read_weights
from headscope.proof.backends import NumPy
from headscope.proof.bias import given_bias
from headscope.proof.closeness import close, working_dtype
from headscope.proof.find_shown import fits, orders, plan_from_weights, scale_factors
from headscope.proof.masks import MaskPlan, plan_masks
from headscope.proof.norms import has_norm, norm_of
from headscope.proof.plan import End, NotRebuilt, Plan, Role, Step
from headscope.proof.rebuild import gate, position, project
from headscope.proof.record import SiteRecord
from headscope.proof.rotary import stated_turn, states_rotary
from headscope.proof.sources import possible_sources

_NUMPY = NumPy()


def make_plan(model: nn.Module, record: SiteRecord, query: Axis, key: Axis, table: nn.Module | None = None) -> Plan:
    """Find the plan of a site from what it computed.

    Args:
        query, key: What the rows and columns of its weights are.
        table: The table of bucket biases that the site uses, None where there is none.

    Raises:
        NotRebuilt: None of our schemes gives the site's numbers.
        ModelError: The weights cannot be read per head.
    """
    weights = read_weights(record.site, model=model)
    masks = plan_masks(record, query, key)
    if record.call.arguments is None:
        return plan_from_weights(record, weights, masks, query, key)
    plan = _plan_from_arguments(record, record.call.arguments, weights, masks[0], table)
    after = replace(plan, sinks_after=True)
    return after if plan.sinks is not None and fits(after, record, query, key) else plan


def _plan_from_arguments(
    record: SiteRecord, arguments: Arguments, weights: HeadWeights, mask: MaskPlan, table: nn.Module | None
) -> Plan:
    scale, module = arguments.options.get("scaling"), record.site.module
    plan = Plan(
        weights=weights,
        query=End(norm=norm_of(module, "query", *weights.query.shape[:2])),
        key=End(norm=norm_of(module, "key", *weights.key.shape[:2])),
        value=_value(record, arguments, weights),
        scale=float(scale) if isinstance(scale, int | float) else arguments.query.shape[-1] ** -0.5,
        mask=mask,
        bias=given_bias(record, table),
        softcap=_number(arguments.options.get("softcap")),
        sinks=_sinks(record, arguments, weights.query.shape[0]),
    )
    found = next(_schemes(plan, record, arguments), None)
    plan = _as_stated(found, record, arguments) if found is not None else _borrowing(plan, record, arguments)
    return _with_gate(plan, record, arguments)


# ------------------------------------------------------------------ values
def _value(record: SiteRecord, arguments: Arguments, weights: HeadWeights) -> End:
    """The source and norm with which our values are the model's."""
    target, dtype = _NUMPY.array(arguments.value), working_dtype(record, weights)
    norm = norm_of(record.site.module, "value", *weights.value.shape[:2])
    for source in possible_sources(record, weights.value.shape[-1]):
        for end in (End(source), End(source, norm)) if norm is not None else (End(source),):
            ours = project(weights, end, record, _NUMPY, "value")
            if ours.shape == target.shape and close(ours, target, dtype):
                return end
    raise NotRebuilt(f"{record.site.path}: its values are not its input times the value weights")


# ------------------------------------------------------------------ queries and keys
def _schemes(plan: Plan, record: SiteRecord, arguments: Arguments) -> Iterator[Plan]:
    """Every combination of source, norm and turn that gives the model's queries and keys."""
    length = max(arguments.query.shape[-2], arguments.key.shape[-2])
    factors = scale_factors(record, plan.weights)
    for order, turn in orders(plan, record, length):
        trial = replace(plan, order=order, turn=turn)
        query = _matched(trial, record, "query", arguments.query, factors)
        key = None if query is None else _matched(trial, record, "key", arguments.key, factors)
        if query is not None and key is not None:
            yield trial.with_ends(query=query, key=key)


def _matched(plan: Plan, record: SiteRecord, role: Role, model: Tensor, factors: Sequence[float]) -> End | None:
    """The end with which our queries or keys are the model's."""
    return _first_end(plan, record, role, _NUMPY.array(model), factors, lambda x: x)


def _same_lengths(plan: Plan, record: SiteRecord, role: Role, model: Tensor, factors: Sequence[float]) -> End | None:
    """The end with which our queries or keys have the model's lengths, as they do before a turn."""
    return _first_end(plan, record, role, _NUMPY.array(model), factors, lambda x: np.linalg.norm(x, axis=-1))


def _first_end(
    plan: Plan, record: SiteRecord, role: Role, target: Any, factors: Sequence[float], of: Any
) -> End | None:
    dtype = working_dtype(record, plan.weights)
    for source in possible_sources(record, getattr(plan.weights, role).shape[-1]):
        end = replace(plan.end(role), source=source)
        ours = position(plan, _NUMPY, role, project(plan.weights, end, record, _NUMPY, role))
        if ours is None or ours.shape != target.shape:
            continue
        for factor in factors:
            if close(of(ours) * factor, of(target), dtype):
                return replace(end, factor=factor)
    return None


def _as_stated(plan: Plan, record: SiteRecord, arguments: Arguments) -> Plan:
    """The plan with our own turn where the config states one that the model's angles are not: it shows as a difference.

    Taking over the model's angles would hide that they are wrong.
    """
    dim = plan.weights.query.shape[1]
    length = max(arguments.query.shape[-2], arguments.key.shape[-2])
    ours = stated_turn(record, plan.turn, dim, length, working_dtype(record, plan.weights))
    if ours is None:
        return plan
    order: tuple[Step, ...] = plan.order if "turn" in plan.order else (*plan.order, "turn")
    return replace(plan, turn=ours, order=order)


def _borrowing(plan: Plan, record: SiteRecord, arguments: Arguments) -> Plan:
    """Take the model's queries and keys, if they are ours but for a turn: each head's lengths must agree."""
    factors = scale_factors(record, plan.weights)
    normed: tuple[Step, ...] = ("norm",)
    for order in (normed, ()) if plan.normed else ((),):
        trial = replace(plan, order=order, borrowed=True, turn=None)
        query = _same_lengths(trial, record, "query", arguments.query, factors)
        key = _same_lengths(trial, record, "key", arguments.key, factors)
        if query is not None and key is not None:
            stated = states_rotary(record, plan.weights.query.shape[1])
            doubt = "the config states rotary positions that we have, but its queries and keys are turned otherwise"
            return replace(trial.with_ends(query=query, key=key), doubt=doubt if stated else None)
    unknown = has_norm(record.site.module) and not plan.normed
    part = "norms are none that we have" if unknown else "are more than a projection, a norm and a turn"
    raise NotRebuilt(f"{record.site.path}: its queries and keys {part}")


# ------------------------------------------------------------------ what follows the weights
def _with_gate(plan: Plan, record: SiteRecord, arguments: Arguments) -> Plan:
    """Say what lies between the heads' results and the output projection: nothing, our gate, or something else."""
    if record.merged is None:
        return plan
    context, merged = _NUMPY.array(arguments.context), _NUMPY.array(record.merged)
    dtype = working_dtype(record, plan.weights)
    if context.size == merged.size and close(context.reshape(merged.shape), merged, dtype):
        return plan
    if plan.weights.gate is not None and context.size == merged.size:
        gates = _NUMPY.sigmoid(gate(plan, record, _NUMPY)).swapaxes(1, 2)
        if gates.shape == context.shape and close((context * gates).reshape(merged.shape), merged, dtype):
            return replace(plan, gated=True)
    return replace(plan, between=True)


def _sinks(record: SiteRecord, arguments: Arguments, heads: int) -> Tensor | None:
    given = (*(arguments.options.get(n) for n in ("s_aux", "sinks")), getattr(record.site.module, "sinks", None))
    found = next((s for s in given if isinstance(s, Tensor)), None)
    if found is None or found.numel() != heads:
        return None
    return found.detach().float().cpu().reshape(heads).clone()


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
