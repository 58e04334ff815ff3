"""Heads that give nothing while their weights keep their shapes: their slices of the output projection are zero.

Zeroing the output projection is exact also where values have a bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from headscope.errors import InputError
from headscope.models.parts import NotPlain
from headscope.models.projections import projections, state_of
from headscope.models.sites import Site, find_sites
from headscope.pruning.edits import Slot, Zero


@contextmanager
def masked_heads(model: PreTrainedModel, heads: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Within the block the model runs without some of its heads; every bit of its weights is as before afterwards.

    Args:
        model: Pruned or not.
        heads: By `stack.layer`, in the numbers of the original model; those that are removed already do not matter.

    Raises:
        InputError: The model has no such layer or head.
        NotPlain: A layer's output projection is not known.
    """
    # All copies before the first zero: layers that share a module share a weight.
    kept = [(zero, zero.slot.value.detach().clone()) for zero in _zeros(model, heads)]
    try:
        for zero, _ in kept:
            zero.apply()
        yield
    finally:
        with torch.no_grad():
            for zero, before in kept:
                zero.slot.value.copy_(before)


def mask_heads(model: PreTrainedModel, heads: Mapping[str, Sequence[int]]) -> None:
    """Zero heads for good, in place. Arguments and errors are those of `masked_heads`."""
    for zero in _zeros(model, heads):
        zero.apply()


def _zeros(model: PreTrainedModel, heads: Mapping[str, Sequence[int]]) -> list[Zero]:
    sites = {f"{s.stack}.{s.layer}": s for s in find_sites(model)}
    unknown = sorted(set(heads) - set(sites))
    if unknown:
        raise InputError(f"the model has no layer {', '.join(unknown)}", f"Its layers are {', '.join(sites)}.")
    return [_zero(model, sites[name], numbers) for name, numbers in heads.items()]


def _zero(model: PreTrainedModel, site: Site, heads: Sequence[int]) -> Zero:
    found = projections(site, model=model)
    state = state_of(site, found)
    wrong = [h for h in heads if not 0 <= h < state.num_heads]
    if wrong:
        raise InputError(
            f"layer {site.layer} of {site.stack} has no head {wrong[0]}: 0-{state.num_heads - 1}",
            "heads are counted from 0 in each layer",
        )
    if found.output is None:
        raise NotPlain(f"{site.path} has no output projection that is known, so its heads cannot be zeroed")
    places = state.places(tuple(h for h in heads if h not in state.removed))
    index = found.output.rows.index()[places].flatten()
    return Zero(Slot(found.output.weight.owner, found.output.weight.name), found.output.axis, index)
