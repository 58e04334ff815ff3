"""Which parameters of a model are the query, key, value and output projections of one attention site, head by head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from headscope.errors import ModelError
from headscope.models.exceptions import ARRANGEMENTS
from headscope.models.head_counts import is_gated, shape_of
from headscope.models.layouts import Arrangement, Layout, Role
from headscope.models.parts import NotPlain, Parameter, Part, Parts, find_parts, model_type, outside_output
from headscope.models.pruned import HeadState, pruned_state
from headscope.models.rows import HeadShape, Rows, fused_rows
from headscope.models.sites import Site


@dataclass(frozen=True)
class Projection:
    """Where one role's weights are.

    Attributes:
        role: What they make.
        weight: The parameter that holds them, other roles' maybe too.
        axis: The axis of the weight, flattened to two axes, that heads lie on; the other is the features that come in,
            for the output projection those that go out.
        rows: Where each head lies on that axis.
        bias: The parameter that holds the bias, None for none.
        bias_rows: Where each head lies in the bias; None for the output projection, whose bias belongs to no head.
    """

    role: Role
    weight: Parameter
    axis: int
    rows: Rows
    bias: Parameter | None = None
    bias_rows: Rows | None = None

    def matrix(self) -> Tensor:
        """The weight, (rows, features): heads' axis first, sharing memory."""
        matrix = self.weight.tensor.flatten(1)
        return matrix if self.axis == 0 else matrix.mT


@dataclass(frozen=True)
class Projections:
    """All projections of one site. Fused ones share a parameter and differ in their rows.

    Attributes:
        layout: The row of the layout table that fits.
        shape: Heads and widths.
        output: None where the module has none of its own and none is found beside it.
        gate: What a projection holds beside the queries to scale each head's result with, None mostly.
    """

    layout: Layout
    shape: HeadShape
    query: Projection
    key: Projection
    value: Projection
    output: Projection | None
    gate: Projection | None = None

    def __iter__(self) -> Iterator[Projection]:
        """All that there are, in the order query, key, value, gate, output."""
        return (p for p in (self.query, self.key, self.value, self.gate, self.output) if p is not None)


def projections(site: Site, shape: HeadShape | None = None, *, model: nn.Module | None = None) -> Projections:
    """The projections of a site, recognised by the layout table.

    Works on weights without values (the meta device), too.

    Args:
        site: One attention site of a model.
        shape: Heads and widths; found where not given.
        model: The model that the site is in, to find an output projection that lies outside of the attention module.

    Raises:
        NotPlain: They are not plain projections, or a fused one has an unknown arrangement.
        ModelError: The number of heads cannot be told, or the weights do not have these heads.
    """
    parts = find_parts(site)
    return _located(site, parts, shape or shape_of(site, parts), model)


def state_of(site: Site, found: Projections) -> HeadState:
    """The heads of a site's module, original and left."""
    shape = found.shape
    return pruned_state(site.module) or HeadState(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim)


def arrangement_runs(site: Site, found: Projections) -> int | None:
    """The number of equal runs that a fused weight is always cut into, None where heads alone decide it.

    Heads then leave such a weight only as many from each run.
    """
    if not found.layout.fused:
        return None
    runs = _arrangement(site, found.layout).runs
    return runs if isinstance(runs, int) and runs > 1 else None


def _located(site: Site, parts: Parts, shape: HeadShape, model: nn.Module | None) -> Projections:
    found: dict[Role, Projection] = {}
    for role, part in _separate(parts):
        gated = role == "query" and is_gated(parts, shape)
        # Each head has its query first, then its gate.
        arrangement = Arrangement(shape.num_heads, ("query", "gate")) if gated else Arrangement(1, (role,))
        found |= _place(site, part, fused_rows(arrangement, shape))
    if parts.fused is not None:
        found |= _place(site, parts.fused, fused_rows(_arrangement(site, parts.layout), shape))
    for role, name in (("query", parts.layout.query_bias), ("value", parts.layout.value_bias)):
        if name:
            found[role] = _with_bias(site, found[role], name)
    output = parts.output
    if output is None and model is not None:
        beside = outside_output(site, model)
        output = beside if beside and beside.num_inputs == shape.num_heads * shape.value_dim else None
    if output is not None:
        found["output"] = _output(site, output, shape)
    return Projections(
        parts.layout, shape, found["query"], found["key"], found["value"], found.get("output"), found.get("gate")
    )


def _separate(parts: Parts) -> list[tuple[Role, Part]]:
    named: tuple[tuple[Role, Part | None], ...] = (("query", parts.query), ("key", parts.key), ("value", parts.value))
    return [(role, part) for role, part in named if part is not None]


def _arrangement(site: Site, layout: Layout) -> Arrangement:
    known = ARRANGEMENTS.get(model_type(site.module)) or layout.arrangement
    if known is None:
        raise NotPlain(
            f"{site.path}.{layout.fused} holds queries, keys and values in an order that is not known",
            "A row of ARRANGEMENTS in headscope/models/exceptions.py says it.",
        )
    return known


def _place(site: Site, part: Part, rows: dict[Role, Rows]) -> dict[Role, Projection]:
    total = next(iter(rows.values())).total
    if total != part.num_outputs:
        raise ModelError(
            f"{part.weight.path} has {part.num_outputs} rows, its heads need {total}",
            "is the config.json the one of these weights?",
        )
    return {
        role: Projection(role, part.weight, part.out_axis, own, part.bias, own if part.bias else None)
        for role, own in rows.items()
    }


def _output(site: Site, part: Part, shape: HeadShape) -> Projection:
    rows = Rows.alone(shape.num_heads, shape.value_dim)
    if rows.total != part.num_inputs:
        raise ModelError(
            f"{part.weight.path} takes in {part.num_inputs} numbers, its heads give {rows.total}",
            "is the config.json the one of these weights?",
        )
    return Projection("output", part.weight, 1 - part.out_axis, rows, part.bias)


def _with_bias(site: Site, projection: Projection, name: str) -> Projection:
    """`projection` with the bias that is a parameter of the attention module itself, if it has one."""
    if site.module._parameters.get(name) is None:
        return projection
    if projection.bias is not None:
        raise NotPlain(f"{site.path} adds two biases to its {projection.role} projection")
    rows = Rows.alone(projection.rows.heads, projection.rows.dim)
    return replace(projection, bias=Parameter(site.path, site.module, name), bias_rows=rows)
