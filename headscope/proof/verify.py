"""`verify`: rebuild every attention site of a model from its weights, and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.errors import InputError, ModelError
from headscope.models.chosen_sites import select_sites
from headscope.models.loading import LoadedModel
from headscope.models.selection import check_seed, parse_selection
from headscope.models.sites import Site, find_sites
from headscope.models.versions import versions
from headscope.models.weights import read_weights
from headscope.proof.backends import Backend, NumPy, Torch
from headscope.proof.check import compare
from headscope.proof.closeness import TOLERANCES, coarsest, working_dtype
from headscope.proof.inputs import verification_batch
from headscope.proof.plan import Plan
from headscope.proof.rebuild import rebuild
from headscope.proof.record import SiteRecord, record
from headscope.proof.reference import Layer, Reference, axes_of, layer_of, loaded_model, plans_of, read_plans
from headscope.proof.warnings import doubts
from headscope.results import SiteCheck, SkippedSite, Verification

BACKENDS: dict[str, tuple[type[NumPy] | type[Torch], ...]] = {
    "numpy": (NumPy,),
    "torch": (Torch,),
    "both": (NumPy, Torch),
}


def verify(
    model: str | PathLike[str] | PreTrainedModel | None = None,
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
    check_seed(seed)
    options = {
        "revision": revision,
        "device": device,
        "dtype": dtype,
        "device_map": device_map,
        "trust_remote_code": trust_remote_code,
    }
    layers = parse_selection("layer", layer)
    loaded = loaded_model(model, tokenizer, processor, options)
    sites = select_sites(find_sites(loaded.model), stack, layers, loaded.name)
    wanted = {layer_of(s) for s in sites}
    batch = verification_batch(loaded, text, inputs, seed) if reference is None else reference.batch
    if reference is None and checkpoint is not None:
        reference = read_plans(loaded_model(checkpoint, tokenizer, processor, options), batch, wanted)
    records, silent = record(loaded.model, find_sites(loaded.model), batch.inputs)
    records = [r for r in records if layer_of(r.site) in wanted]
    if reference is None:
        reference = plans_of(loaded.model, records, batch, copy=False)
    skipped = {k: v for k, v in reference.reasons.items() if k in wanted}
    skipped |= {layer_of(s): silent[s.path] for s in sites if s.path in silent}
    return _result(loaded, sites, _pairs(records, reference, skipped), reference, skipped, backend)


_Pair = tuple[Plan, SiteRecord]


def _pairs(records: Sequence[SiteRecord], reference: Reference, skipped: dict[Layer, str]) -> list[_Pair]:
    """Plans with what the model computed; sites of which the reference knows nothing are skipped."""
    pairs: list[_Pair] = []
    for found in records:
        plan = reference.plans.get(layer_of(found.site))
        if plan is not None:
            pairs.append((plan, found))
        else:
            skipped.setdefault(layer_of(found.site), "the checkpoint has no such layer")
    return pairs


def _check(model: nn.Module, plan: Plan, found: SiteRecord, reference: Reference, backend: Backend) -> SiteCheck:
    query, key = axes_of(found, reference.batch)
    rebuilt = rebuild(plan, found, backend, query, key)
    if rebuilt is None:
        raise ModelError(f"{found.site.path}: its positions do not fit the reference's", "Read the reference anew.")
    return compare(plan, found, rebuilt, query, backend.name, lambda: read_weights(found.site, model=model))


def _result(
    loaded: LoadedModel,
    sites: Sequence[Site],
    pairs: Sequence[_Pair],
    reference: Reference,
    skipped: Mapping[Layer, str],
    backend: str,
) -> Verification:
    order = {layer_of(s): i for i, s in enumerate(sites)}
    checks = [_check(loaded.model, *pair, reference, kind()) for pair in pairs for kind in BACKENDS[backend]]
    checks.sort(key=lambda c: (order[c.stack, c.layer], c.backend))
    dtype = coarsest({working_dtype(found, plan.weights) for plan, found in pairs} or {loaded.model.dtype})
    return Verification(
        model=loaded.name,
        passed=bool(checks) and all(c.passed for c in checks),
        dtype=str(dtype).removeprefix("torch."),
        tolerance={"weights": TOLERANCES[dtype].weights, "output": TOLERANCES[dtype].output},
        sites=tuple(checks),
        skipped=tuple(SkippedSite(*key, skipped[key]) for key in sorted(skipped, key=order.__getitem__)),
        warnings=(*loaded.warnings, *doubts(pairs, checks, reference)),
        versions=versions(),
    )
