"""An attention site's weights in one form, head by head, whatever its checkpoint's layout; and back into the model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from headscope.errors import InputError, ModelError
from headscope.models.head_counts import head_shape
from headscope.models.parts import NotPlain
from headscope.models.projections import Projection, Projections, projections
from headscope.models.rows import HeadShape
from headscope.models.sites import Site

__all__ = ["HeadShape", "HeadWeights", "NotPlain", "head_shape", "projections", "read_weights", "write_weights"]


@dataclass(frozen=True)
class HeadWeights:
    """One attention module's weights: query[h] @ x is the query of head h for an input vector x.

    They share memory with the model wherever its layout allows: `clone()` them to keep them from changing with it.

    Attributes:
        query: (num_heads, head_dim, in_features).
        key: (num_kv_heads, head_dim, in_features).
        value: (num_kv_heads, value_dim, in_features).
        output: (num_heads, value_dim, out_features): head h adds context @ output[h] to the output. None where the
            module has no output projection of its own and none is found beside it.
        query_bias, key_bias, value_bias: (heads, width), None for none.
        output_bias: (out_features,), added once, None for none.
        gate, gate_bias: As `query`, where the query projection holds a gate a head too: the context of a head is
            multiplied with sigmoid(gate[h] @ x). None mostly.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor | None = None
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate: Tensor | None = None
    gate_bias: Tensor | None = None

    @property
    def shape(self) -> HeadShape:
        """Heads and widths."""
        return HeadShape(self.query.shape[0], self.key.shape[0], self.query.shape[1], self.value.shape[1])

    def clone(self) -> HeadWeights:
        """The same numbers in memory of their own."""
        copies: dict[str, Any] = {f.name: _clone(getattr(self, f.name)) for f in fields(self)}
        return HeadWeights(**copies)


def read_weights(site: Site, shape: HeadShape | None = None, *, model: nn.Module | None = None) -> HeadWeights:
    """Per-head weights of a site in the checkpoint's dtype, without gradient.

    Args:
        site: One attention site of the model.
        shape: Heads and widths; found where not given.
        model: The model that the site is in, to find an output projection outside of the attention module, as BERT's
            `attention.output.dense`. Without it such a module's `output` is None.

    Raises:
        NotPlain: The module's projections are not plain, or arranged in an unknown way.
        ModelError: Its heads cannot be told, or its weights are not in memory.
    """
    found = projections(site, shape, model=model)
    tensors: dict[str, Any] = {}
    for part in found:
        tensors[part.role] = part.rows.take(_in_memory(part))
        tensors[f"{part.role}_bias"] = _read_bias(part)
    return HeadWeights(**tensors)


def write_weights(site: Site, weights: HeadWeights, *, model: nn.Module | None = None) -> None:
    """Write per-head weights into the model's parameters, in place: what `read_weights` gave leaves every bit alone.

    Layers that share a module share its weights, too.

    Args:
        site: One attention site of the model.
        weights: What to write.
        model: As in `read_weights`; needed wherever reading needed it.

    Raises:
        NotPlain, ModelError: As in `read_weights`.
        InputError: A tensor is missing, is one that the module has no place for, or has another shape. Nothing is
            written then.
    """
    found = projections(site, model=model)
    _check_fit(site, found, weights)
    # Copies first: a tensor may be a view of what another one is about to be written to.
    new = weights.clone()
    with torch.no_grad():
        for part in found:
            part.rows.put(part.matrix(), getattr(new, part.role))
            bias = getattr(new, f"{part.role}_bias")
            if part.bias is not None and part.bias_rows is not None:
                part.bias_rows.put(part.bias.tensor.view(-1, 1), bias.unsqueeze(-1))
            elif part.bias is not None:
                part.bias.tensor.copy_(bias)


# ------------------------------------------------------------------ details
def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _in_memory(part: Projection) -> Tensor:
    matrix = part.matrix()
    if matrix.device.type == "meta":
        raise ModelError(
            f"the weights of {part.weight.path} are not in memory", "Load the model on one device, without offloading."
        )
    return matrix


def _read_bias(part: Projection) -> Tensor | None:
    if part.bias is None:
        return None
    values = part.bias.tensor
    return values if part.bias_rows is None else part.bias_rows.take(values.view(-1, 1))[..., 0]


def _check_fit(site: Site, found: Projections, weights: HeadWeights) -> None:
    wanted: dict[str, tuple[int, ...]] = {}
    for part in found:
        wanted[part.role] = (part.rows.heads, part.rows.dim, _in_memory(part).shape[1])
        if part.bias is not None:
            per_head = (part.rows.heads, part.rows.dim)
            wanted[f"{part.role}_bias"] = tuple(part.bias.tensor.shape) if part.bias_rows is None else per_head
    for name in (f.name for f in fields(weights)):
        given = getattr(weights, name)
        shape = None if given is None else tuple(given.shape)
        if shape != wanted.get(name):
            raise InputError(
                f"{site.path} needs {name} of shape {wanted.get(name)}, got {shape}",
                "give arrays of the shape that read_reference gives",
            )
