"""Heads zeroed for good instead of removed, written down in modules and config as removed ones are."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from headscope.models.pruned import set_pruned_state
from headscope.pruning.masking import mask_heads
from headscope.pruning.plan import Heads, Plan, current_plan, make_plan
from headscope.pruning.restore import restore
from headscope.pruning.saved import write_plan


def zeroed_copy(model: PreTrainedModel, heads: Heads) -> tuple[PreTrainedModel, Plan]:
    """A copy of a model whose weights keep their shapes and in which heads are zeroed; those removed before come back.

    Raises:
        InputError: A layer or head does not exist.
        NotPlain: A layer's heads cannot be told apart.
    """
    after = copy.deepcopy(model)
    plan = make_plan(after, heads, zero_all=True)
    _zero(after, plan)
    now = current_plan(after)
    write_plan(after, now)
    if now.zeroed != now.heads:  # some were removed before, and are to have their shapes again
        restore(after, now.heads)
    return after, plan


def as_heads(chosen: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Heads by `stack.layer` in the form that plans are made from; layers that lose none are left out."""
    return {name: list(heads) for name, heads in chosen.items() if heads}


def _zero(model: PreTrainedModel, plan: Plan) -> None:
    mask_heads(model, plan.heads)
    for part in plan.modules:
        set_pruned_state(part.sites[0].module, part.after)
