"""`verify`: rebuild every attention site of a model from its weights, and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.capture.feed import Axis, readable
from headscope.errors import InputError, ModelError
from headscope.heads.chosen_sites import select_sites
from headscope.heads.describe import versions
from headscope.heads.selection import parse_selection, ranges
from headscope.models.inputs import Batch
from headscope.models.loading import LoadedModel, load_model, wrap_model
from headscope.models.sites import Site, find_sites
from headscope.proof.backends import Backend, NumPy, Torch
from headscope.proof.check import TOLERANCES, compare
from headscope.proof.inputs import verification_batch
from headscope.proof.masks import blocked
from headscope.proof.plan import Plan, make_plan
from headscope.proof.rebuild import rebuild
from headscope.proof.record import SiteRecord, record
from headscope.results import SiteCheck, SkippedSite, Verification

BACKENDS: dict[str, tuple[type[NumPy] | type[Torch], ...]] = {
    "numpy": (NumPy,),
    "torch": (Torch,),
    "both": (NumPy, Torch),
}
_Layer = tuple[str, int]


@dataclass(frozen=True)
class Reference:
    """Our side of the comparison, read from a model: plans with copies of its weights, and why sites have none.

    Made by `read_reference` before a model is changed, it shows what the change did.
    """

    plans: Mapping[_Layer, Plan]
    reasons: Mapping[_Layer, str]
    batch: Batch


def verify(
    model: str | PreTrainedModel | None = None,
    text: str | Sequence[str] | None = None,
    *,
    checkpoint: str | PreTrainedModel | None = None,
    reference: Reference | None = None,
    backend: str = "both",
    layer: str | int | Sequence[int] = "all",
    stack: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    inputs: Mapping[str, Tensor] | None = None,
    revision: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> Verification:
    """Rebuild attention weights and output of every site with our own code and compare them with the model's.

    Args:
        model: A hub id, a directory, a `.gguf` file, a loaded transformers model (left as it was), or None for the
            default model.
        text: One text or several; by default two of different lengths, so that padding is in the check.
        checkpoint: Where our side's weights come from, if not from `model` itself: another model or its name.
        reference: Our side, read earlier with `read_reference`; the check then runs on the reference's own input.
        backend: `numpy` (float64), `torch` (float32), or `both`.
        layer, stack: As in `analyze`.
        tokenizer, processor, inputs, revision, device, dtype, device_map, trust_remote_code: As in `analyze`.
        seed: For inputs that have to be made up: models without a tokenizer.

    Returns:
        A frozen result. `passed` is False where any site differs, and where none could be rebuilt.

    Raises:
        InputError: Bad arguments.
        ModelError: The model cannot be loaded or has no attention.
    """
    if backend not in BACKENDS:
        raise InputError(f"unknown backend '{backend}'", f"Backends: {', '.join(BACKENDS)}.")
    options = {
        "revision": revision,
        "device": device,
        "dtype": dtype,
        "device_map": device_map,
        "trust_remote_code": trust_remote_code,
    }
    layers = parse_selection("layer", layer)
    loaded = loaded_model(model, tokenizer, processor, options)
    sites = find_sites(loaded.model)
    wanted = {(s.stack, s.layer) for s in select_sites(sites, stack, layers, loaded.name)}
    if reference is None:
        source = loaded if checkpoint is None else loaded_model(checkpoint, tokenizer, processor, options)
        batch = verification_batch(loaded, text, inputs, seed)
        reference = read_plans(source, batch, wanted, copy=False)
    records, silent = record(loaded.model, sites, reference.batch.inputs)
    backends = [kind() for kind in BACKENDS[backend]]
    checks: list[SiteCheck] = []
    leaking: list[SiteRecord] = []
    skipped: dict[_Layer, str] = {k: v for k, v in reference.reasons.items() if k in wanted}
    for found in records:
        key = (found.site.stack, found.site.layer)
        plan = reference.plans.get(key)
        if key in wanted and plan is not None:
            checks.extend(_checked(plan, found, reference.batch, b) for b in backends)
            leaking += [found] if _looks_ahead(plan, found, reference.batch) else []
    skipped |= {(s.stack, s.layer): silent[s.path] for s in sites if s.path in silent and (s.stack, s.layer) in wanted}
    return _result(loaded, sites, checks, skipped, leaking)


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
    """
    loaded = wrap_model(model, tokenizer=tokenizer)
    return read_plans(loaded, verification_batch(loaded, text, inputs, seed), None, copy=True)


# ------------------------------------------------------------------ our side
def loaded_model(
    model: str | PreTrainedModel | None, tokenizer: Any, processor: Any, options: Mapping[str, Any]
) -> LoadedModel:
    """The caller's own model as it is, or one loaded by name with `options`."""
    if isinstance(model, PreTrainedModel):
        return wrap_model(model, tokenizer=tokenizer, processor=processor)
    return load_model(model, tokenizer=tokenizer, **options)


def read_plans(loaded: LoadedModel, batch: Batch, wanted: set[_Layer] | None = None, copy: bool = False) -> Reference:
    """The plans of the wanted layers (None for all); with `copy` they stay as they are when the model changes."""
    sites = find_sites(loaded.model)
    records, _ = record(loaded.model, sites, batch.inputs)
    tables = _bias_tables(records)
    plans: dict[_Layer, Plan] = {}
    reasons: dict[_Layer, str] = {}
    for found in records:
        key = (found.site.stack, found.site.layer)
        if wanted is not None and key not in wanted:
            continue
        try:
            readable(found.call, found.call.weights.shape[0])
            query, keys = axes_of(found, batch)
            plan = make_plan(loaded.model, found, query, keys, tables.get(found.site.stack))
            plans[key] = replace(plan, weights=plan.weights.clone()) if copy else plan
        except ModelError as reason:
            plans.pop(key, None)
            reasons[key] = reason.message
    return Reference(plans, reasons, batch)


def _bias_tables(records: Sequence[SiteRecord]) -> dict[str, nn.Module]:
    """Each stack's table of bucket biases; T5 keeps one, in the first layer, for all."""
    found: dict[str, nn.Module] = {}
    for item in records:
        table = getattr(item.site.module, "relative_attention_bias", None)
        if isinstance(table, nn.Module):
            found.setdefault(item.site.stack, table)
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


# ------------------------------------------------------------------ the comparison
def _checked(plan: Plan, found: SiteRecord, batch: Batch, backend: Backend) -> SiteCheck:
    query, key = axes_of(found, batch)
    rebuilt = rebuild(plan, found, backend, query, key)
    if rebuilt is None:
        raise ModelError(f"{found.site.path}: its positions do not fit the reference's", "Read the reference anew.")
    return compare(plan, found, rebuilt, query, backend.name)


def _looks_ahead(plan: Plan, found: SiteRecord, batch: Batch) -> bool:
    """Whether a causal site took the model's mask, and that lets tokens see later ones."""
    if plan.mask.own or not found.site.causal:
        return False
    query, key = axes_of(found, batch)
    open_later = (~blocked(plan.mask, found, query, key) & query.valid[:, None, :, None]).triu(1)
    return bool(open_later.any())


def _leak_warnings(leaking: Sequence[SiteRecord]) -> list[str]:
    stacks: dict[str, list[int]] = {}
    for found in leaking:
        stacks.setdefault(found.site.stack, []).append(found.site.layer)
    return [
        f"{stack}: the model's own mask lets tokens see later ones in a causal model (layers {ranges(sorted(layers))})"
        for stack, layers in stacks.items()
    ]


def _result(
    loaded: LoadedModel,
    sites: Sequence[Site],
    checks: list[SiteCheck],
    skipped: Mapping[_Layer, str],
    leaking: Sequence[SiteRecord],
) -> Verification:
    order = {(s.stack, s.layer): i for i, s in enumerate(sites)}
    checks.sort(key=lambda c: (order[c.stack, c.layer], c.backend))
    tolerance = TOLERANCES.get(loaded.model.dtype, TOLERANCES[torch.float32])
    return Verification(
        model=loaded.name,
        passed=bool(checks) and all(c.passed for c in checks),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        tolerance={"weights": tolerance.weights, "output": tolerance.output},
        sites=tuple(checks),
        skipped=tuple(
            SkippedSite(stack, layer, reason)
            for (stack, layer), reason in sorted(skipped.items(), key=lambda item: order[item[0]])
        ),
        warnings=(*loaded.warnings, *_leak_warnings(leaking)),
        versions=versions(),
    )
