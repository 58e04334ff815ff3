"""A plan carried out: from a site's input and our copy of its weights to attention weights and output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headscope.capture.feed import Axis
from headscope.proof.backends import Backend
from headscope.proof.bias import bias_tensor
from headscope.proof.masks import blocked, graded
from headscope.proof.plan import Plan, ends
from headscope.proof.record import SiteRecord, to_float


@dataclass(frozen=True)
class Rebuilt:
    """What we computed, float64.

    Attributes:
        weights: (batch, head, query, key).
        context: (batch, head, query, dim).
        output: (batch, query, features), from the context; None where the site has no output projection.
        projected: The same from the model's own input of the output projection, where something lies between.
    """

    weights: NDArray[np.float64]
    context: NDArray[np.float64]
    output: NDArray[np.float64] | None
    projected: NDArray[np.float64] | None


def rebuild(plan: Plan, record: SiteRecord, backend: Backend, query: Axis, key: Axis) -> Rebuilt | None:
    """Compute a site anew; None where a rotation does not fit its shape."""
    q, k, v = _ends(plan, record, backend)
    if q is None or k is None:
        return None
    options: dict[str, Any] = {"scale": plan.scale, "mask": backend.array(blocked(plan.mask, record, query, key))}
    added = _added(plan, record)
    if added is not None:
        options["bias"] = backend.array(added)
    if plan.softcap is not None:
        options["softcap"] = plan.softcap
    if plan.sinks is not None:
        options["sinks"] = backend.array(plan.sinks)
    context, weights = backend.attend(q, k, v, **options)
    if plan.sinks_after:
        weights = backend.attend(q, k, v, **{**options, "sinks": None})[1]
    output, projected = _output(plan, record, backend, context)
    return Rebuilt(backend.numpy(weights), backend.numpy(context), output, projected)


def _added(plan: Plan, record: SiteRecord) -> Tensor | None:
    """What is added to the scores: the bias, and a mask that is more than open or closed."""
    bias = None if plan.bias is None else bias_tensor(plan.bias, record)
    if plan.mask.own or not graded(record):
        return bias
    assert record.call.arguments is not None and record.call.arguments.mask is not None
    mask = to_float(record.call.arguments.mask)[..., : record.call.weights.shape[-1]]
    return mask if bias is None else mask + bias


def _ends(plan: Plan, record: SiteRecord, backend: Backend) -> tuple[Any, Any, Any]:
    value = ends(plan, record, backend, plan.sources, only=2)
    if plan.borrowed:
        assert record.call.arguments is not None
        borrowed = record.call.arguments
        return backend.array(to_float(borrowed.query)), backend.array(to_float(borrowed.key)), value
    query, key = (ends(plan, record, backend, plan.sources, only=i) for i in (0, 1))
    if query is None or key is None:
        return None, None, value
    return query * plan.factors[0], key * plan.factors[1], value


def _output(plan: Plan, record: SiteRecord, backend: Backend, context: Any) -> tuple[Any, Any]:
    """Our output, from our context and, where that is not all that enters the projection, from what the model has."""
    weights = plan.weights
    if weights.output is None or record.merged is None:
        return None, None
    matrix = backend.array(weights.output)
    bias = None if weights.output_bias is None else backend.array(weights.output_bias)
    ours = backend.numpy(backend.merge(context, matrix, bias))
    merged = backend.array(to_float(record.merged))
    heads, dim = weights.output.shape[:2]
    if to_float(record.merged).numel() != backend.numpy(context).size:
        # Attention within chunks that are put together before they are projected.
        return None, None
    merged = merged.reshape(ours.shape[0], ours.shape[1], heads, dim).swapaxes(1, 2)
    return ours, backend.numpy(backend.merge(merged, matrix, bias))
