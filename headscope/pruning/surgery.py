"""Carrying out a plan: every change is worked out first, so that a plan that fails has changed nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headscope.errors import ModelError, ResourceError, is_out_of_memory
from headscope.models.exceptions import NOT_PRUNABLE, SHARES_KEYS
from headscope.models.parts import NotPlain, Parameter
from headscope.models.projections import Projection
from headscope.models.pruned import set_pruned_state
from headscope.models.sites import Site
from headscope.pruning.caches import fit_caches
from headscope.pruning.edits import Cut, Edits, Set, Slot, Zero
from headscope.pruning.extras import extra_cuts, kept_entries, one_norm_a_head
from headscope.pruning.numbers import number_edits
from headscope.pruning.plan import ModulePlan, Plan
from headscope.pruning.runtime import keep_heads, shares_bias
from headscope.pruning.saved import write_plan

_Owners = dict[int, set[int]]


def apply(model: PreTrainedModel, plan: Plan) -> None:
    """Remove the heads of a plan from its model, in place.

    Parameters are replaced by smaller ones of the same dtype, on the same device, with the same `requires_grad`; an
    optimizer that holds the old ones has to be made anew. Weights need no values (the meta device).

    Raises:
        NotPlain: A module has something whose part for each head is not known; nothing is changed then.
        ResourceError: Out of memory; nothing is changed then.
    """
    all_edits = prepare(model, plan)
    try:
        cuts = [(cut.slot, cut.result()) for edits in all_edits for cut in edits.cuts]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ResourceError("out of memory while heads are removed", "Nothing was changed.") from error
    for slot, tensor in cuts:
        slot.replace(tensor)
    for part, edits in zip(plan.modules, all_edits, strict=True):
        for zero in edits.zeros:
            zero.apply()
        for change in edits.sets:
            change.apply()
        keep_heads(part.sites[0].module, part.after.kept, part.after.num_heads)
        set_pruned_state(part.sites[0].module, part.after)
    fit_caches(model)
    write_plan(model, plan)


def prepare(model: PreTrainedModel, plan: Plan) -> list[Edits]:
    """All changes of a plan, module by module; the model is only read.

    Raises:
        NotPlain: As `apply`.
    """
    owners = _owners(model)
    return [_edits(part, owners) for part in plan.modules]


def _edits(part: ModulePlan, owners: _Owners) -> Edits:
    site, found = part.sites[0], part.found
    _check_kind(site)
    if found.output is None:
        raise NotPlain(
            f"{site.path} has no output projection that is known, so its heads cannot be removed",
            "Leave this layer out.",
        )
    edits = Edits(cuts=_projection_cuts(part), zeros=[_zero(part, found.output)])
    used = {id(Slot(p.owner, p.name).value) for p in _parameters(found)}
    if part.after.kept != part.before.kept:
        edits.cuts += [
            c for c in extra_cuts(site, found.shape, part.before, part.after, used) if not _stays(site.module, c)
        ]
        edits.sets = [*_norm_lists(part), *number_edits(site.module, found.shape, part.after)]
    for cut in edits.cuts:
        _check_own(site.path, cut.slot, owners)
    return edits


def _parameters(found: Iterable[Projection]) -> list[Parameter]:
    return [p for projection in found for p in (projection.weight, projection.bias) if p is not None]


def _stays(module: nn.Module, cut: Cut) -> bool:
    """The table that a stack's layers share stays whole: each takes from it what it needs."""
    table = getattr(module, "relative_attention_bias", None)
    return cut.slot.owner is table and shares_bias(module)


# ------------------------------------------------------------------ projections
def _projection_cuts(part: ModulePlan) -> list[Cut]:
    """A cut for every weight and bias; roles that share one are cut together."""
    if part.after.kept == part.before.kept:
        return []
    indices: dict[tuple[int, str], list[torch.Tensor]] = {}
    places: dict[tuple[int, str], tuple[Parameter, int]] = {}
    for projection in part.found:
        spots = [(projection.weight, projection.axis, projection.rows)]
        if projection.bias is not None and projection.bias_rows is not None:
            spots.append((projection.bias, 0, projection.bias_rows))
        for parameter, axis, rows in spots:
            key = (id(parameter.owner), parameter.name)
            places[key] = parameter, axis
            indices.setdefault(key, []).append(rows.index_of(_kept_places(part, projection.role)))
    return [
        Cut(Slot(parameter.owner, parameter.name), axis, torch.cat(indices[key]).sort().values, flat=True)
        for key, (parameter, axis) in places.items()
    ]


def _kept_places(part: ModulePlan, role: str) -> list[int]:
    if role in ("key", "value"):
        return part.before.kv_places(part.after.kept_kv)
    return part.before.places(part.after.kept)


def _zero(part: ModulePlan, output: Projection) -> Zero:
    width = part.found.shape.value_dim
    places = part.after.places(part.after.zeroed)
    index = torch.tensor([p * width + i for p in places for i in range(width)], dtype=torch.long, device="cpu")
    return Zero(Slot(output.weight.owner, output.weight.name), output.axis, index)


def _norm_lists(part: ModulePlan) -> list[Set]:
    """Lists that hold a norm for each head, with those of the heads that are left."""
    site = part.sites[0]
    sets = []
    for norms, unit in one_norm_a_head(site, part.found.shape):
        kept = nn.ModuleList([norms[i] for i in kept_entries(unit, part.before, part.after)])
        owner, name = next((m, n) for m in site.module.modules() for n, c in m.named_children() if c is norms)
        sets.append(Set(owner, name, kept))
    return sets


# ------------------------------------------------------------------ what cannot be cut
def _check_kind(site: Site) -> None:
    cls = type(site.module)
    file = cls.__module__.rpartition(".")[2]
    reason = NOT_PRUNABLE.get(cls.__name__) or NOT_PRUNABLE.get(f"{file}.{cls.__name__}")
    if reason is None and any(getattr(site.module, name, False) is True for name in SHARES_KEYS):
        reason = "its keys and values serve several layers"
    if reason is not None:
        raise NotPlain(
            f"no heads can be removed from {site.path} ({cls.__name__}): {reason}",
            "Its heads can only be zeroed (--save-as masked).",
        )


def _owners(model: nn.Module) -> _Owners:
    """The modules that hold each parameter."""
    owners: _Owners = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(id(module))
    return owners


def _check_own(path: str, slot: Slot, owners: _Owners) -> None:
    value: Any = slot.value
    if len(owners.get(id(value), ())) > 1:
        raise NotPlain(
            f"{path} shares its {slot.name} with other modules, which would lose the same heads",
            "Untie the weights first.",
        )
    hook = getattr(slot.owner, "_hf_hook", None)
    if hook is not None and getattr(hook, "offload", False):
        raise ModelError(f"the weights of {path} are offloaded", "Load the model on one device, without offloading.")
