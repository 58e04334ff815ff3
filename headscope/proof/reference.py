"""Our side of the comparison, read from a model: a plan for every site that can be rebuilt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.capture.feed import Axis, readable
from headscope.errors import ModelError
from headscope.models.inputs import Batch
from headscope.models.loading import LoadedModel, load_model, wrap_model
from headscope.models.sites import Site, find_sites
from headscope.proof.find import make_plan
from headscope.proof.inputs import verification_batch
from headscope.proof.plan import NotRebuilt, Plan
from headscope.proof.record import SiteRecord, record

Layer = tuple[str, int]
"""A stack's name and a layer's number."""


@dataclass(frozen=True)
class Reference:
    """Plans with copies of a model's weights, and why sites have none.

    Made by `read_reference` before a model is changed, it shows what the change did.

    Attributes:
        plans: By stack and layer.
        reasons: Why sites without a plan have none.
        unlike: Sites that could not be rebuilt although modules of the same class in the same stack could.
        batch: The input that everything was read on.
    """

    plans: Mapping[Layer, Plan]
    reasons: Mapping[Layer, str]
    unlike: tuple[Layer, ...]
    batch: Batch


def read_reference(
    model: PreTrainedModel,
    text: str | Sequence[str] | None = None,
    *,
    tokenizer: Any = None,
    inputs: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> Reference:
    """Read our side of the comparison from a model: copies of its weights, and how each site computes.

    Args:
        model: A loaded transformers model; not changed.
        text, tokenizer, inputs, seed: As in `verify`; later checks run on the same input.

    Raises:
        InputError: Bad arguments.
        ModelError: The model has no attention, or fails on the input.
    """
    loaded = loaded_model(model, tokenizer, None, {})
    return read_plans(loaded, verification_batch(loaded, text, inputs, seed), copy=True)


def loaded_model(
    model: str | PathLike[str] | PreTrainedModel | None, tokenizer: Any, processor: Any, options: Mapping[str, Any]
) -> LoadedModel:
    """The caller's own model as it is, or one loaded by name with `options`.

    Raises:
        ModelError: It cannot be loaded, or some of its weights are not in memory.
    """
    if isinstance(model, PreTrainedModel):
        loaded = wrap_model(model, tokenizer=tokenizer, processor=processor)
    else:
        loaded = load_model(model, tokenizer=tokenizer, **options)
    absent = [name for name, parameter in loaded.model.named_parameters() if parameter.device.type == "meta"]
    if absent:
        raise ModelError(
            f"{len(absent)} weights of {loaded.name} are not in memory (one is {absent[0]}): offloaded or never loaded",
            "Load the model as a whole: without --device-map, or on a device that has room for it.",
        )
    return loaded


def read_plans(loaded: LoadedModel, batch: Batch, wanted: set[Layer] | None = None, copy: bool = False) -> Reference:
    """The plans of the wanted layers (None for all); with `copy` they stay as they are when the model changes."""
    sites = find_sites(loaded.model)
    records, _ = record(loaded.model, sites, batch.inputs)
    return plans_of(loaded.model, [r for r in records if wanted is None or layer_of(r.site) in wanted], batch, copy)


def plans_of(model: nn.Module, records: Sequence[SiteRecord], batch: Batch, copy: bool) -> Reference:
    """The plans of recorded sites.

    Raises:
        ModelError: The model computes NaN, to which nothing can be compared.
    """
    tables = _bias_tables(model)
    plans: dict[Layer, Plan] = {}
    failed: dict[Layer, ModelError] = {}
    for found in records:
        _check_numbers(found, batch)
        try:
            readable(found.call, found.call.weights.shape[0])
            table = tables.get(found.site.path, tables.get(found.site.stack))
            plan = make_plan(model, found, *axes_of(found, batch), table)
            plans[layer_of(found.site)] = plan.copy() if copy else plan
        except ModelError as reason:
            plans.pop(layer_of(found.site), None)
            failed[layer_of(found.site)] = reason
    unlike = _unlike([r.site for r in records], plans, failed)
    return Reference(plans, {key: reason.message for key, reason in failed.items()}, unlike, batch)


def _check_numbers(found: SiteRecord, batch: Batch) -> None:
    real = axes_of(found, batch)[0].valid.cpu()
    by_row = [found.call.weights.transpose(1, 2), found.merged]
    for tensor in (t for t in by_row if t is not None and t.shape[:2] == real.shape):
        if not bool(torch.isfinite(tensor.cpu()[real]).all()):
            where = f"{found.site.path} (layer {found.site.layer})"
            raise ModelError(f"{where} computes NaN", "The checkpoint may hold NaN or infinite weights.")


def layer_of(site: Site) -> Layer:
    """What plans and results are filed under."""
    return site.stack, site.layer


def _unlike(
    sites: Sequence[Site], plans: Mapping[Layer, Plan], failed: Mapping[Layer, ModelError]
) -> tuple[Layer, ...]:
    rebuilt = {(s.stack, type(s.module)) for s in sites if layer_of(s) in plans}
    odd = [s for s in sites if isinstance(failed.get(layer_of(s)), NotRebuilt) and (s.stack, type(s.module)) in rebuilt]
    return tuple(dict.fromkeys(layer_of(s) for s in odd))


def _bias_tables(model: Any) -> dict[str, nn.Module]:
    """The tables of bucket biases by path, and each stack's first by the stack: T5 keeps one in the first layer."""
    found: dict[str, nn.Module] = {}
    for site in find_sites(model):
        table = getattr(site.module, "relative_attention_bias", None)
        if isinstance(table, nn.Module):
            found.setdefault(site.stack, table)
            found[site.path] = table
    return found


def axes_of(found: SiteRecord, batch: Batch) -> tuple[Axis, Axis]:
    """What a record's rows and columns are."""
    weights = found.call.weights
    axes = []
    for name, dim in ((found.site.query_axis, -2), (found.site.key_axis, -1)):
        known = batch.axes.get(name)
        if known is not None and tuple(known.special.shape) == (weights.shape[0], weights.shape[dim]):
            axes.append(Axis(known.lengths, known.special))
        else:
            axes.append(Axis.plain(weights.shape[0], weights.shape[dim], torch.device("cpu")))
    return axes[0], axes[1]
