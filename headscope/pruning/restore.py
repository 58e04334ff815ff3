"""Removed heads put back as zeros, for forms of saving in which layers have to keep their shapes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.errors import ModelError
from headscope.models.projections import projections
from headscope.models.pruned import HeadState, pruned_state, set_pruned_state
from headscope.models.sites import Site, find_sites
from headscope.pruning.caches import fit_caches
from headscope.pruning.edits import Set, Slot
from headscope.pruning.extras import one_norm_a_head
from headscope.pruning.numbers import number_edits
from headscope.pruning.plan import current_plan
from headscope.pruning.runtime import keep_heads
from headscope.pruning.saved import KEY, plan_to_dict, read_plan, write_plan
from headscope.pruning.surgery import prepare


@dataclass(frozen=True)
class Span:
    """Which entries of an original parameter are left.

    Attributes:
        axis: Counted after all axes but the first are flattened into one.
        index: int64, (left,), ascending.
        size: Entries along the axis of the original.
    """

    axis: int
    index: Tensor
    size: int


def original_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it was before anything was removed, without values (the meta device)."""
    config = copy.deepcopy(model.config)
    if hasattr(config, KEY):
        delattr(config, KEY)
    with torch.device("meta"):
        return type(model)(config)


def spans_left(model: PreTrainedModel, zeroed: Mapping[str, Sequence[int]] | None = None) -> dict[str, Span]:
    """What pruning left of each parameter and buffer that it cut, by path.

    Args:
        model: It is only read.
        zeroed: Another account of which removed heads are zeroed in the weights, by `stack.layer`; by default the
            model's own.
    """
    said = plan_to_dict(current_plan(model))
    if zeroed is not None:
        said["zeroed"] = {name: sorted(heads) for name, heads in zeroed.items() if heads}
    twin = original_twin(model)
    plan = read_plan(twin, said)
    if not any(part.after.removed for part in plan.modules):
        return {}
    paths = {id(module): path for path, module in twin.named_modules()}
    found = {}
    for edits in prepare(twin, plan):
        for cut in edits.cuts:
            path = f"{paths[id(cut.slot.owner)]}.{cut.slot.name}".removeprefix(".")
            old = cut.slot.value
            index = cut.index.cpu()
            if cut.axis > 1 or (cut.axis == 1 and old.ndim > 2 and not cut.flat):
                each = old[0].numel() // old.shape[1]
                assert cut.axis == 1
                index = (index[:, None] * each + torch.arange(each)).flatten()
            size = old.shape[0] if cut.axis == 0 else old[0].numel()
            found[path] = Span(cut.axis, index, size)
    return found


def restore(model: PreTrainedModel, zeroed: Mapping[str, Sequence[int]]) -> None:
    """Put removed heads back in place: everything that they had is zero, so outputs do not change.

    Args:
        zeroed: By `stack.layer`, in original numbers, which of the heads that are gone shall be in the weights; those
            that are so already have to be among them.

    Raises:
        ModelError: A module keeps something for each head that cannot be put back.
    """
    have, want = spans_left(model), spans_left(model, zeroed)
    modules = dict(model.named_modules())
    new = []
    for path, span in have.items():
        owner, _, name = path.rpartition(".")
        slot = Slot(modules[owner], name)
        new.append((slot, _grown(slot.value.detach(), span, want.get(path))))
    sites = {id(s.module): s for s in find_sites(model) if pruned_state(s.module) is not None}
    changes = [_site_change(site, model, zeroed) for site in sites.values()]
    for slot, tensor in new:
        slot.replace(tensor)
    for site, state, sets in changes:
        for change in sets:
            change.apply()
        keep_heads(site.module, state.kept, state.num_heads)
        set_pruned_state(site.module, state)
    fit_caches(model)
    write_plan(model, current_plan(model))


def _site_change(
    site: Site, model: PreTrainedModel, zeroed: Mapping[str, Sequence[int]]
) -> tuple[Site, HeadState, list[Set]]:
    state = pruned_state(site.module)
    assert state is not None
    shape = projections(site, model=model).shape
    if one_norm_a_head(site, shape):
        raise ModelError(f"{site.path} has one norm a head, which cannot be put back", "Save it as structural.")
    back = tuple(sorted(zeroed.get(f"{site.stack}.{site.layer}", ())))
    after = replace(state, removed=tuple(h for h in state.gone if h not in back), zeroed=back)
    return site, after, list(number_edits(site.module, shape, after))


def _grown(tensor: Tensor, have: Span, want: Span | None) -> Tensor:
    flat = tensor.flatten(1) if have.axis else tensor
    index = torch.arange(have.size) if want is None else want.index
    shape = list(flat.shape)
    shape[have.axis] = len(index)
    places = torch.searchsorted(index, have.index)
    grown = flat.new_zeros(shape).index_copy(have.axis, places.to(flat.device), flat)
    return grown.reshape(tensor.shape[0], -1, *tensor.shape[2:]) if have.axis else grown
