"""The plan of a module that shows only its weights, and what all modules can be made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from headscope.capture.feed import Axis
from headscope.models.weights import HeadWeights
from headscope.proof.backends import NumPy
from headscope.proof.bias import shown_biases
from headscope.proof.closeness import MATCH, close, working_dtype
from headscope.proof.masks import MaskPlan
from headscope.proof.norms import norm_of
from headscope.proof.plan import End, NotRebuilt, Plan, Role, Step
from headscope.proof.rebuild import rebuild
from headscope.proof.record import PROJECTION_INPUT, SiteRecord
from headscope.proof.rotary import Turn, turns
from headscope.proof.sources import possible_sources, source_tensor

# Where modules keep a factor on queries or scores.
_SCALES = ("scaling", "scale", "scale_factor", "inv_norm_factor", "softmax_scale", "norm_factor")


def plan_from_weights(record: SiteRecord, weights: HeadWeights, masks: list[MaskPlan], query: Axis, key: Axis) -> Plan:
    """The first plan that gives the site's weights, and its heads' results where these are all that is projected.

    Raises:
        NotRebuilt: There is none.
    """
    dim, module = weights.query.shape[1], record.site.module
    length = max(record.call.weights.shape[-2:])
    base = Plan(
        weights=weights,
        query=End(_shown_source(record, weights, "query"), norm_of(module, "query", *weights.query.shape[:2])),
        key=End(_shown_source(record, weights, "key"), norm_of(module, "key", *weights.key.shape[:2])),
        value=End(_shown_source(record, weights, "value")),
        scale=dim**-0.5,
        mask=masks[0],
    )
    for bias in shown_biases(record, dim):
        terms = 0 if bias is None else bias.terms
        scales = dict.fromkeys(((dim * (1 + terms)) ** -0.5, dim**-0.5, *scale_factors(record, weights)))
        for (order, turn), scale, mask in product(orders(base, record, length), scales, masks):
            plan = replace(base, order=order, turn=turn, scale=scale, bias=bias, mask=mask)
            if fits(plan, record, query, key):
                return plan
    raise NotRebuilt(f"{record.site.path}: its weights follow from none of the schemes that we have")


def fits(plan: Plan, record: SiteRecord, query: Axis, key: Axis) -> bool:
    """Whether a plan gives the model's weights, and its heads' results where these are all that is projected."""
    rebuilt = rebuild(plan, record, NumPy(), query, key)
    if rebuilt is None:
        return False
    dtype, real = working_dtype(record, plan.weights), query.valid.cpu().numpy()[:, None, :, None]
    off = np.abs(rebuilt.weights - NumPy().array(record.call.weights)) * real
    if off.max(initial=0.0) >= MATCH[dtype]:
        return False
    if record.call.arguments is not None or record.merged is None or rebuilt.context.size != record.merged.numel():
        return True
    batch, heads, rows, dim = rebuilt.context.shape
    merged = NumPy().array(record.merged).reshape(batch, rows, heads, dim).swapaxes(1, 2)
    return close(rebuilt.context * real, merged * real, dtype)


def orders(plan: Plan, record: SiteRecord, length: int) -> Iterator[tuple[tuple[Step, ...], Turn | None]]:
    """What may lie between the projection of queries and keys and their scores, likeliest first.

    Args:
        length: Positions that turns are for.
    """
    normed: tuple[Step, ...] = ("norm",) if plan.normed else ()
    yield normed, None
    for turn in turns(record, plan.weights.query.shape[1], length):
        yield (*normed, "turn"), turn
        if normed:
            yield ("turn", *normed), turn
    if normed:
        yield (), None


def scale_factors(record: SiteRecord, weights: HeadWeights) -> list[float]:
    """Factors that the module names, for models that scale queries before the attention function does."""
    named = [getattr(record.site.module, n, None) for n in _SCALES]
    found = [float(v) for v in named if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
    if record.call.arguments is not None:
        dim = weights.query.shape[1]
        found += [dim**-0.5, dim**-0.25]
    return list(dict.fromkeys([1.0, *found]))


def _shown_source(record: SiteRecord, weights: HeadWeights, role: Role) -> tuple[str, ...]:
    """What entered one of the projections.

    Raises:
        NotRebuilt: Nothing has the shape that its weights ask for.
    """
    batch, _, rows, keys = record.call.weights.shape
    shape = (batch, rows if role == "query" else keys)
    possible = possible_sources(record, getattr(weights, role).shape[-1])
    fit = [s for s in possible if source_tensor(record, s).shape[:2] == shape]
    if not fit:
        raise NotRebuilt(f"{record.site.path}: its {role} has no input of one row a token")
    watched = (PROJECTION_INPUT[role],)
    return watched if watched in fit else fit[0]
