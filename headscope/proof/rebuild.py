"""A plan carried out: from a site's input and our copy of its weights to attention weights and output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headscope.attention import reference
from headscope.capture.feed import Axis
from headscope.models.weights import HeadWeights
from headscope.proof.backends import Array, Backend
from headscope.proof.bias import bias_tensor
from headscope.proof.masks import blocked, graded
from headscope.proof.plan import End, Plan, Role
from headscope.proof.record import SiteRecord, to_float
from headscope.proof.sources import source_tensor


@dataclass(frozen=True)
class Rebuilt:
    """What we computed, float64.

    Attributes:
        weights: (batch, head, query, key).
        context: (batch, head, query, dim), gated where the plan is.
        output: (batch, query, features), from the context; None where the site has no output projection.
        projected: The same from the model's own input of the output projection.
        reach: The largest score in size, before bias, mask and soft cap.
    """

    weights: NDArray[np.float64]
    context: NDArray[np.float64]
    output: NDArray[np.float64] | None
    projected: NDArray[np.float64] | None
    reach: float


def rebuild(plan: Plan, record: SiteRecord, backend: Backend, query: Axis, key: Axis) -> Rebuilt | None:
    """Compute a site anew; None where a turn does not fit its shape."""
    q, k = _compared(plan, record, backend)
    if q is None or k is None:
        return None
    v = project(plan.weights, plan.value, record, backend, "value")
    options = attention_options(plan, record, backend, query, key)
    context, weights = backend.attend(q, k, v, **options)
    if plan.sinks_after:
        weights = backend.attend(q, k, v, **{**options, "sinks": None})[1]
    if plan.gated:
        context = context * backend.sigmoid(gate(plan, record, backend))
    output, projected = _outputs(plan, record, backend, context)
    return Rebuilt(backend.numpy(weights), backend.numpy(context), output, projected, _reach(plan, backend, q, k))


def _reach(plan: Plan, backend: Backend, query: Array, key: Array) -> float:
    dots = reference.scores(
        backend.numpy(query), reference.repeat_heads(backend.numpy(key), query.shape[1]), plan.scale
    )
    return float(np.abs(dots).max(initial=0.0))


# ------------------------------------------------------------------ queries, keys, values
def project(weights: HeadWeights, end: End, record: SiteRecord, backend: Backend, role: Role) -> Array:
    """One of the three for every head, (batch, heads, n, dim), as its projection gives it; values with their norm."""
    x = _projected(weights, end, record, backend, role)
    return backend.normalise(x, end.norm) if role == "value" and end.norm is not None else x


def gate(plan: Plan, record: SiteRecord, backend: Backend) -> Array:
    """What scales each head's result after a sigmoid, (batch, heads, n, dim)."""
    return _projected(plan.weights, plan.query, record, backend, "gate")


def position(plan: Plan, backend: Backend, role: Role, x: Array) -> Array | None:
    """Projected queries or keys with their norm and their turn, in the plan's order; None where the turn does not fit.

    The plan's factor is not in it.
    """
    norm, turn = plan.end(role).norm, plan.turn
    for step in plan.order:
        if step == "norm":
            x = x if norm is None else backend.normalise(x, norm)
        elif turn is not None:
            batch, _, length, dim = x.shape
            if not turn.fits(batch, length, dim):
                return None
            cos, sin = (backend.array(t[..., :length, :]) for t in (turn.cos, turn.sin))
            x = backend.rotate(x, cos, sin, turn.interleaved)
    return x


def _projected(weights: HeadWeights, end: End, record: SiteRecord, backend: Backend, part: str) -> Array:
    x = backend.array(source_tensor(record, end.source))
    weight, bias = getattr(weights, part), getattr(weights, f"{part}_bias")
    return backend.project(x, backend.array(weight), None if bias is None else backend.array(bias))


def _compared(plan: Plan, record: SiteRecord, backend: Backend) -> tuple[Array | None, Array | None]:
    """Queries and keys as they enter the dot products: ours, or the model's where the plan borrows them."""
    if plan.borrowed:
        given = record.call.arguments
        assert given is not None
        return backend.array(to_float(given.query)), backend.array(to_float(given.key))
    return _finished(plan, record, backend, "query"), _finished(plan, record, backend, "key")


def _finished(plan: Plan, record: SiteRecord, backend: Backend, role: Role) -> Array | None:
    end = plan.end(role)
    x = position(plan, backend, role, project(plan.weights, end, record, backend, role))
    return None if x is None else x * end.factor


# ------------------------------------------------------------------ scores, output
def attention_options(plan: Plan, record: SiteRecord, backend: Backend, query: Axis, key: Axis) -> dict[str, Any]:
    """The plan's arguments of `reference.attention`, for all heads."""
    options: dict[str, Any] = {
        "scale": plan.scale,
        "mask": backend.array(blocked(plan.mask, record, query, key)),
        "softcap": plan.softcap,
        "sinks": None if plan.sinks is None else backend.array(plan.sinks),
    }
    added = _added(plan, record)
    return options if added is None else {**options, "bias": backend.array(added)}


def _added(plan: Plan, record: SiteRecord) -> Tensor | None:
    """What is added to the scores: the bias, and a mask that is more than open or closed."""
    bias = None if plan.bias is None else bias_tensor(plan.bias, record)
    if plan.mask.own or not graded(record):
        return bias
    assert record.call.arguments is not None and record.call.arguments.mask is not None
    mask = to_float(record.call.arguments.mask)[..., : record.call.weights.shape[-1]]
    return mask if bias is None else mask + bias


def _outputs(
    plan: Plan, record: SiteRecord, backend: Backend, context: Array
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """Our output from our context, and from what the model has before its output projection."""
    weights = plan.weights
    if weights.output is None or record.merged is None:
        return None, None
    batch, heads, rows, dim = context.shape
    if record.merged.numel() != batch * heads * rows * dim:
        # Attention within chunks that are put together before they are projected.
        return None, None
    matrix = backend.array(weights.output)
    bias = None if weights.output_bias is None else backend.array(weights.output_bias)
    theirs = backend.array(to_float(record.merged)).reshape(batch, rows, heads, dim).swapaxes(1, 2)
    ours = backend.merge(context, matrix, bias)
    return backend.numpy(ours), backend.numpy(backend.merge(theirs, matrix, bias))
