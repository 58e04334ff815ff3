"""One head's computation on one text, step by step: from the layer's input to what the head adds to its output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headscope.attention.explain import Step, explain, make_step
from headscope.errors import InputError, ModelError
from headscope.models.inputs import Batch
from headscope.models.loading import LoadedModel
from headscope.models.sites import find_sites
from headscope.proof.backends import NumPy
from headscope.proof.inputs import TEXTS, verification_batch
from headscope.proof.plan import Plan, Role
from headscope.proof.rebuild import attention_options, gate, position, project, rebuild
from headscope.proof.record import SiteRecord, record
from headscope.proof.reference import axes_of, layer_of, loaded_model, plans_of
from headscope.proof.sources import source_tensor
from headscope.results import HeadExplanation

_NAME = re.compile(r"(?:(?P<stack>[\w.]+)\.)?L(?P<layer>\d{1,6})H(?P<head>\d{1,6})")
_NUMPY = NumPy()


def explain_head(
    model: str | PathLike[str] | PreTrainedModel | None,
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
    stack, layer = layer_of(found.site)
    reference = plans_of(loaded.model, [found], batch, copy=False)
    if not reference.plans:
        raise ModelError(
            f"{name} cannot be explained: {reference.reasons[stack, layer]}",
            "name a head of another layer; headscope verify lists those that can be",
        )
    plan, head = reference.plans[stack, layer], int(match["head"])
    num_heads = plan.weights.query.shape[0]
    if head >= num_heads:
        raise InputError(f"head {head} does not exist in layer {layer}", f"Valid heads: 0-{num_heads - 1}.")
    steps = tuple(_Head(plan, found, batch, head, size).steps())
    return HeadExplanation(f"L{layer}H{head}", stack, _labels(found, batch), steps)


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


@dataclass(frozen=True)
class _Head:
    """One head of one site on the first text of a batch, with matrices cut to their first `size` rows and columns."""

    plan: Plan
    found: SiteRecord
    batch: Batch
    head: int
    size: int

    @property
    def group(self) -> int:
        """The key-value head that this head uses."""
        return self.head * self.plan.weights.key.shape[0] // self.plan.weights.query.shape[0]

    @property
    def lengths(self) -> tuple[int, int]:
        """Real query and key tokens."""
        query, key = axes_of(self.found, self.batch)
        return int(query.lengths[0]), int(key.lengths[0])

    def steps(self) -> Iterator[Step]:
        """All steps in order."""
        yield from self._inputs()
        yield from self._ends("query", "Q")
        yield from self._ends("key", "K")
        yield from self._scores()
        yield from self._after()

    def _step(self, name: str, formula: str, array: Any, *axes: str) -> Step:
        return make_step(name, formula, array, (axes[0], axes[1]), rows=self.size, columns=self.size)

    def _inputs(self) -> Iterator[Step]:
        rows, keys = self.lengths
        plan, record = self.plan, self.found
        x = source_tensor(record, plan.query.source)[0, :rows].double().numpy()
        yield self._step("input", "X: the layer's input, one row a token", x, "n_q", "d_model")
        if self.found.site.cross:
            z = source_tensor(record, plan.key.source)[0, :keys].double().numpy()
            yield self._step("other input", "Z: the sequence that is looked at, one row a token", z, "n_k", "d_other")
        w_q = plan.weights.query[self.head].detach().double().cpu().numpy().T
        yield self._step("query weights", f"W_q of head {self.head}", w_q, "d_model", "d_k")

    # -------------------------------------------------------------- queries, keys, values
    def _formula(self, letter: str, bias: Any) -> str:
        """The projection of queries, keys or values in words."""
        given = "Z" if self.found.site.cross and letter != "Q" else "X"
        shared = self.group != self.head or self.plan.weights.key.shape[0] != self.plan.weights.query.shape[0]
        how = f", from key-value head {self.group}" if shared and letter != "Q" else ""
        low = letter.lower()
        return f"{letter} = {given} · W_{low}" + ("" if bias is None else f" + b_{low}") + how

    def _cut(self, x: Any, role: Role) -> NDArray[np.float64]:
        rows, keys = self.lengths
        found: NDArray[np.float64] = x[0, self.head, :rows] if role == "query" else x[0, self.group, :keys]
        return found

    def _ends(self, role: Role, letter: str) -> Iterator[Step]:
        """How queries or keys are made, up to what enters the scores, which is left to the steps of the scores."""
        plan, axis = self.plan, "n_q" if role == "query" else "n_k"
        projected = project(plan.weights, plan.end(role), self.found, _NUMPY, role)
        formula = self._formula(letter, getattr(plan.weights, f"{role}_bias"))
        yield self._step(f"projected {letter}", formula, self._cut(projected, role), axis, "d_k")
        for stop, step in enumerate(plan.order, 1):
            x = position(replace(plan, order=plan.order[:stop]), _NUMPY, role, projected)
            if step == "turn":
                name, how = "rotated", f"{letter}, each pair of columns turned by the token's position"
            else:
                name, how = "normed", f"{letter} divided by its size, times the norm's weight"
            yield self._step(f"{name} {letter}", how, self._cut(x, role), axis, "d_k")

    def _finished(self, role: Role) -> NDArray[np.float64]:
        """Queries or keys as they enter the scores."""
        plan, given = self.plan, self.found.call.arguments
        if plan.borrowed and given is not None:
            return self._cut(_NUMPY.array(getattr(given, role)), role)
        projected = project(plan.weights, plan.end(role), self.found, _NUMPY, role)
        x: NDArray[np.float64] = self._cut(position(plan, _NUMPY, role, projected), role)
        return x * plan.end(role).factor

    # -------------------------------------------------------------- scores, weights, output
    def _scores(self) -> Iterator[Step]:
        """From queries, keys and values to the context, without queries and keys that were shown already."""
        plan, (rows, keys) = self.plan, self.lengths
        options = attention_options(plan, self.found, _NUMPY, *axes_of(self.found, self.batch))
        sinks = None if plan.sinks_after else options["sinks"]
        query, mask = self._finished("query"), self._of_head(options["mask"], rows, keys)
        value = self._cut(project(plan.weights, plan.value, self.found, _NUMPY, "value"), "value")
        steps = explain(
            query,
            self._finished("key"),
            value,
            scale=None if plan.scale == query.shape[1] ** -0.5 else plan.scale,
            mask=mask if mask.any() else None,
            bias=None if "bias" not in options else self._of_head(options["bias"], rows, keys),
            softcap=plan.softcap,
            sink=None if sinks is None else float(sinks[self.head]),
            rows=self.size,
            columns=self.size,
        )
        for step in steps:
            formula = self._entering_formula(step)
            if formula is not None:
                yield replace(step, formula=formula)

    def _entering_formula(self, step: Step) -> str | None:
        """What a step of the scores says; None for queries and keys that were shown already."""
        plan = self.plan
        if step.name == "value":
            normed = "" if plan.value.norm is None else ", divided by its size"
            return self._formula("V", plan.weights.value_bias) + normed
        if step.name not in ("query", "key"):
            return step.formula
        if plan.borrowed:
            return f"{step.formula}, with its position as the model has it"
        factor = (plan.query if step.name == "query" else plan.key).factor
        return None if factor == 1 else f"{step.name[0].upper()} · {factor:.4g}"

    def _of_head(self, x: Any, rows: int, keys: int) -> Any:
        return np.broadcast_to(x, self.found.call.weights.shape)[0, self.head, :rows, :keys]

    def _after(self) -> Iterator[Step]:
        """From the context to what the head adds to the layer's output."""
        plan, found, rows = self.plan, self.found, self.lengths[0]
        rebuilt = rebuild(plan, found, _NUMPY, *axes_of(found, self.batch))
        assert rebuilt is not None
        context = rebuilt.context[0, self.head, :rows]
        if plan.gated:
            gates = _NUMPY.sigmoid(gate(plan, found, _NUMPY))[0, self.head, :rows]
            yield self._step("gate", "G = sigmoid(X · W_g), between 0 and 1", gates, "n_q", "d_v")
            yield self._step("gated context", "C × G, number by number", context, "n_q", "d_v")
        elif plan.sinks_after:
            yield self._step("scaled context", "C, made smaller by the sink's share", context, "n_q", "d_v")
        if plan.weights.output is None:
            return
        if plan.between:
            merged = found.merged
            if merged is None or merged.numel() != rebuilt.context.size:
                return
            context = self._merged(rebuilt.context.shape)[:rows]
            formula = "C after a part of the model that we do not rebuild (a gate or a norm): its own numbers"
            yield self._step("changed context", formula, context, "n_q", "d_v")
        w_o = plan.weights.output[self.head].detach().double().cpu().numpy()
        formula = "C · W_o: what this head adds to the layer's output"
        yield self._step("output", formula, context @ w_o, "n_q", "d_model")

    def _merged(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        batch, heads, rows, dim = shape
        assert self.found.merged is not None
        found: NDArray[np.float64] = _NUMPY.array(self.found.merged).reshape(batch, rows, heads, dim)[0, :, self.head]
        return found
