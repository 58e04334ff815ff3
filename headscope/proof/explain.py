"""One head's computation on one text, step by step: from the layer's input to what the head adds to its output."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from headscope.attention.explain import Step, explain, make_step
from headscope.errors import InputError, ModelError
from headscope.models.inputs import Batch
from headscope.models.loading import LoadedModel
from headscope.models.sites import find_sites
from headscope.proof.backends import NumPy
from headscope.proof.bias import bias_tensor
from headscope.proof.inputs import TEXTS, verification_batch
from headscope.proof.masks import blocked
from headscope.proof.plan import Plan, ends, source_tensor
from headscope.proof.record import SiteRecord, record
from headscope.proof.verify import axes_of, loaded_model, read_plans
from headscope.results import HeadExplanation

_DONE = {
    "norm": ("normed", " / its size · weight"),
    "rotate": ("rotated", ", each pair turned by its position"),
}
_NAME = re.compile(r"(?:(?P<stack>[\w.]+)\.)?L(?P<layer>\d{1,6})H(?P<head>\d{1,6})")


def explain_head(
    model: str | PreTrainedModel | None,
    name: str,
    text: str | None = None,
    *,
    tokenizer: Any = None,
    size: int = 4,
    seed: int = 0,
    **options: Any,
) -> HeadExplanation:
    """List the steps of one head's computation, each with its formula, its shape and its first numbers.

    Args:
        model: As in `verify`.
        name: `L5H3`, with the stack before it where several have the layer: `decoder.L5H3`.
        text: One text; the verification's first sentence by default.
        tokenizer, seed: As in `verify`.
        size: Rows and columns of each matrix to keep.
        options: `revision`, `device`, `dtype`, `device_map` and `trust_remote_code`, as in `verify`.

    Raises:
        InputError: The name does not parse, or there is no such head.
        ModelError: The head's layer cannot be rebuilt.
    """
    match = _NAME.fullmatch(name.strip())
    if match is None:
        raise InputError(f"cannot read the head's name '{name}'", "Write L5H3, or decoder.L5H3 with a stack.")
    loaded = loaded_model(model, tokenizer, None, options)
    batch = verification_batch(loaded, text or (TEXTS[0] if loaded.tokenizer is not None else None), None, seed)
    found = _find(loaded, batch, match["stack"], int(match["layer"]))
    key = (found.site.stack, found.site.layer)
    reference = read_plans(loaded, batch, {key})
    if key not in reference.plans:
        raise ModelError(f"{name} cannot be explained: {reference.reasons.get(key, 'it did not run')}")
    plan, head = reference.plans[key], int(match["head"])
    num_heads = plan.weights.query.shape[0]
    if head >= num_heads:
        raise InputError(f"head {head} does not exist in layer {key[1]}", f"Valid heads: 0-{num_heads - 1}.")
    steps = tuple(_steps(plan, found, batch, head, size))
    return HeadExplanation(f"L{key[1]}H{head}", key[0], _labels(found, batch), steps)


def _find(loaded: LoadedModel, batch: Batch, stack: str | None, layer: int) -> SiteRecord:
    records, _ = record(loaded.model, find_sites(loaded.model), batch.inputs)
    fit = [r for r in records if r.site.layer == layer and stack in (None, r.site.stack)]
    if len({r.site.stack for r in fit}) > 1:
        stacks = ", ".join(dict.fromkeys(r.site.stack for r in fit))
        raise InputError(f"several stacks have a layer {layer}: {stacks}", f"Write {fit[0].site.stack}.L{layer}H0.")
    if not fit:
        layers = ", ".join(dict.fromkeys(f"{r.site.stack}.L{r.site.layer}" for r in records))
        raise InputError(f"layer {layer} does not exist or did not run", f"Layers: {layers}.")
    return fit[0]


def _labels(found: SiteRecord, batch: Batch) -> tuple[tuple[str, ...], tuple[str, ...]]:
    sides = []
    for axis, dim in ((found.site.query_axis, -2), (found.site.key_axis, -1)):
        known = batch.axes.get(axis)
        size = found.call.weights.shape[dim]
        sides.append(tuple(str(i) for i in range(size)) if known is None else known.labels[0])
    return sides[0], sides[1]


def _steps(plan: Plan, found: SiteRecord, batch: Batch, head: int, size: int) -> Iterator[Step]:
    query_axis, key_axis = axes_of(found, batch)
    backend = NumPy()
    rows, keys = int(query_axis.lengths[0]), int(key_axis.lengths[0])
    group = head * plan.weights.key.shape[0] // plan.weights.query.shape[0]
    cut = {"rows": size, "columns": size}

    x = source_tensor(found, plan.sources[0])[0, :rows].double().numpy()
    yield make_step("input", "X: the layer's input, one row a token", x, ("n_q", "d_model"), **cut)
    w_q = plan.weights.query[head].detach().double().cpu().numpy().T
    yield make_step("query weights", f"W_q of head {head}", w_q, ("d_model", "d_k"), **cut)
    ends_now = []
    for end, index, length in ((0, head, rows), (1, group, keys)):
        letter, axis = ("Q", "n_q") if end == 0 else ("K", "n_k")
        projected = _end(plan, found, backend, end, ())[0, index, :length]
        how = "" if group == head or end == 0 else f" of key-value head {group}"
        yield make_step(f"projected {letter}", f"X · W_{letter.lower()}{how}", projected, (axis, "d_k"), **cut)
        for stop, step in enumerate(plan.order, 1):
            projected = _end(plan, found, backend, end, plan.order[:stop])[0, index, :length]
            formula = {"norm": f"{letter} / its size · weight", "rotate": f"{letter}, each pair turned by its position"}
            yield make_step(
                f"{step}d {letter}".replace("normd", "normed"), formula[step], projected, (axis, "d_k"), **cut
            )
        ends_now.append(projected * plan.factors[end])
    if plan.borrowed and found.call.arguments is not None:
        ends_now = [
            backend.array(found.call.arguments.query)[0, head, :rows],
            backend.array(found.call.arguments.key)[0, group, :keys],
        ]
    value = _end(plan, found, backend, 2, ())[0, group, :keys]
    output = plan.weights.output
    yield from explain(
        ends_now[0],
        ends_now[1],
        value,
        scale=plan.scale,
        mask=blocked(plan.mask, found, query_axis, key_axis)[0, 0, :rows, :keys].numpy(),
        bias=_bias(plan, found, head, rows, keys),
        softcap=plan.softcap,
        sink=None if plan.sinks is None else float(plan.sinks[head]),
        output_weight=None if output is None else output[head].detach().double().cpu().numpy(),
        **cut,
    )


def _end(plan: Plan, found: SiteRecord, backend: NumPy, end: int, order: Sequence[str]) -> Any:
    return ends(replace(plan, order=tuple(order)), found, backend, plan.sources, only=end)


def _bias(plan: Plan, found: SiteRecord, head: int, rows: int, keys: int) -> Any:
    if plan.bias is None:
        return None
    full = np.broadcast_to(bias_tensor(plan.bias, found).double().numpy(), found.call.weights.shape)
    return full[0, head, :rows, :keys]
