"""The plan in a model's config, as it is saved: original numbers, cumulative, with JSON's string keys.

    {"version": 1, "heads": {"self.5": [0, 3]}, "zeroed": {}, "original": {"self.5": [12, 12]}}

`heads` are all that give nothing any more; those in `zeroed` are still in the weights. `original` are the numbers of
query heads and key-value heads before anything was removed. Modules know their own state; the config only repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from headscope.errors import ModelError
from headscope.models.projections import projections, state_of
from headscope.models.pruned import pruned_state
from headscope.models.sites import find_sites
from headscope.pruning.groups import Groups
from headscope.pruning.plan import ModulePlan, Plan

KEY = "headscope"
VERSION = 1


def write_plan(model: PreTrainedModel, plan: Plan) -> None:
    """Say in a model's config which heads are gone."""
    setattr(model.config, KEY, plan_to_dict(plan))


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON has it."""
    return {
        "version": VERSION,
        "heads": {name: list(heads) for name, heads in plan.heads.items()},
        "zeroed": {name: list(heads) for name, heads in plan.zeroed.items()},
        "original": {name: list(numbers) for name, numbers in plan.original.items()},
    }


def read_plan(model: PreTrainedModel, saved: Mapping[str, Any]) -> Plan:
    """A saved plan for a model that still has all of its heads, with weights or without (the meta device).

    Args:
        model: Built from the config that the plan was saved in.
        saved: What `plan_to_dict` gave.

    Raises:
        ModelError: The plan is of a later version, does not fit the model, or the model is pruned already.
    """
    if saved.get("version") != VERSION:
        raise ModelError(
            f"its plan of removed heads has version {saved.get('version')!r}, this headscope reads {VERSION}",
            "Install a newer headscope.",
        )
    by_name = {f"{s.stack}.{s.layer}": s for s in find_sites(model)}
    unknown = sorted(set(saved["heads"]) - set(by_name))
    if unknown:
        raise _misfit(f"the model has no {', '.join(unknown)}")
    modules: dict[int, ModulePlan] = {}
    for name, heads in saved["heads"].items():
        site = by_name[name]
        zeroed = tuple(sorted(saved.get("zeroed", {}).get(name, ())))
        part = _module(model, name, heads, zeroed, by_name, saved["original"][name])
        known = modules.setdefault(id(site.module), part)
        if known.after != part.after:
            raise _misfit(f"{name} shares its module with layers that lose other heads")
    return Plan(
        tuple(modules.values()),
        {name: tuple(heads) for name, heads in saved["heads"].items()},
        {name: tuple(heads) for name, heads in saved.get("zeroed", {}).items()},
        {name: (int(numbers[0]), int(numbers[1])) for name, numbers in saved["original"].items()},
    )


def _module(
    model: PreTrainedModel, name: str, heads: Any, zeroed: tuple[int, ...], by_name: Mapping[str, Any], original: Any
) -> ModulePlan:
    site = by_name[name]
    if pruned_state(site.module) is not None:
        raise _misfit(f"heads of {name} are removed from this model already")
    found = projections(site, model=model)
    before = state_of(site, found)
    if [before.num_heads, before.num_kv_heads] != list(original):
        raise _misfit(f"{name} has {before.num_heads} heads, the plan was made for {original[0]}")
    gone = set(heads)
    if not gone <= set(range(before.num_heads)) or not set(zeroed) <= gone:
        raise _misfit(f"{name} has no heads {sorted(gone)}")
    removed = tuple(sorted(gone - set(zeroed)))
    if not Groups(before.num_heads, before.group).legal(removed) or len(removed) == before.num_heads:
        raise _misfit(f"what is left of {name} would not be a rectangle of heads")
    sites = tuple(s for s in by_name.values() if s.module is site.module)
    return ModulePlan(sites, found, before, replace(before, removed=removed, zeroed=zeroed))


def _misfit(why: str) -> ModelError:
    return ModelError(f"the saved plan of removed heads does not fit: {why}", "Was config.json changed by hand?")
