"""How heads read the residual stream and write to it, found by one tiny forward pass: names play no part.

A norm is told by what it does to numbers. To see what is a term of the stream, every norm's result is cut off from what
it was made of; what the embedding, an attention module or the norm right behind one of them gives then reaches a place
of the stream as the identity, times a number, or it does not. It does not where a norm lies on the stream itself, as in
post-norm models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.capture.evaluation import eager_evaluation
from headscope.capture.outputs import frozen
from headscope.errors import ModelError
from headscope.heads.catalogue.norms import Norm
from headscope.heads.catalogue.trial import Beginning, Layer, Trial
from headscope.models.checkpoint import first_line
from headscope.models.decoder_inputs import has_decoder
from headscope.models.loading import LoadedModel
from headscope.models.projections import Projections
from headscope.models.signature import takes

_TEXTS = 8
# What rounding of half-precision models leaves, relative.
_ROUNDING = 2e-2


@dataclass(frozen=True, eq=False)
class Reading:
    """What a module reads of the stream.

    Attributes:
        norm: Between the stream and the module, None for none.
        terms: What the stream there is a sum of, as far as it is known: the results of layers' attention and, under
            None, token embeddings; each with the norm that it goes through before it is added, None for none.
        given: float32, (texts, in_features): what went into the module, texts of one token each.
    """

    norm: Norm | None
    terms: Mapping[Layer | None, Norm | None]
    given: Tensor

    def fold(self, weights: Tensor) -> Tensor:
        """Weights of the module, (..., features), as float32 weights on the stream, but for its scale."""
        return weights.float() if self.norm is None else self.norm.before(weights)


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual stream of one model.

    Attributes:
        readings: What each layer's value projection reads.
        contexts: float32, (texts, heads * value_dim): what went into each layer's output projection.
        output: What the output embedding reads; None where there is none, or where it did not run.
    """

    readings: Mapping[Layer, Reading]
    contexts: Mapping[Layer, Tensor]
    output: Reading | None


def find_stream(loaded: LoadedModel, sites: Mapping[Layer, Projections], *, seed: int = 0) -> Stream:
    """Run texts of one token each, in which every head's context is its own token's value, and see who reads what.

    Layers whose projections run several times a forward pass, or are no modules of their own, are missing.

    Args:
        loaded: The model; as it was afterwards.
        sites: The projections of the layers of interest.
        seed: Of the tokens.

    Raises:
        ModelError: The model has no token embeddings, or does not run on token ids alone.
    """
    model = loaded.model
    embeddings: Any = model.get_input_embeddings()
    if not isinstance(getattr(embeddings, "weight", None), Tensor):
        raise ModelError(f"{loaded.name} has no plain token embeddings", "Weights are compared token by token.")
    trial = Trial()
    outputs = {layer: found.output for layer, found in sites.items()}
    writers = {layer: out.weight.owner for layer, out in outputs.items() if out and _is_own(out.weight.owner)}
    readers = {layer: found.value.weight.owner for layer, found in sites.items()}
    unembed = output_embedding(model)
    # Stacks may have embeddings of their own that share the weight.
    tables = [m for m in model.modules() if type(m) is type(embeddings) and m.weight is embeddings.weight]
    with eager_evaluation(model), frozen(model), trial.hooked(model, tables, writers, readers, unembed):
        _run(loaded, embeddings.weight, seed)
    readings = {layer: _reading(trial, found[0]) for layer, found in trial.read.items() if len(found) == 1}
    contexts = {layer: _flat(found[0]) for layer, found in trial.contexts.items() if len(found) == 1}
    return Stream(readings, contexts, _reading(trial, trial.output[0]) if len(trial.output) == 1 else None)


def output_embedding(model: PreTrainedModel) -> nn.Module | None:
    """The linear module that makes logits, None where the model has none."""
    found = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return found if isinstance(found, nn.Module) else None


def _is_own(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _run(loaded: LoadedModel, table: Tensor, seed: int) -> None:
    model = loaded.model
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(table.shape[0], (_TEXTS, 1), generator=generator).to(model.device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if has_decoder(loaded):
        inputs["decoder_input_ids"] = ids
    if takes(model, "use_cache"):
        inputs["use_cache"] = False
    try:
        model(**inputs)
    except Exception as error:  # models raise what they like where an input is missing
        raise ModelError(
            f"{loaded.name} does not run on token ids alone: {first_line(error)}", "name other types with --types"
        ) from error


# ------------------------------------------------------------------ what the stream is made of
def _reading(trial: Trial, given: Tensor) -> Reading:
    cut = trial.cut_before(given)
    stream, norm = (given, None) if cut is None else (cut.stream, cut.norm)
    parts: list[tuple[Layer | None, Beginning]] = [(None, start) for start in trial.starts]
    parts += [(layer, found[0]) for layer, found in trial.written.items() if len(found) == 1]
    normed = [(name, after) for name, start in parts if (after := trial.cut_after(start)) is not None]
    reached = _reached(stream, [start.leaf for _, start in parts] + [after.start.leaf for _, after in normed])
    terms: dict[Layer | None, Norm | None] = {}
    for (name, after), there in zip(normed, reached[len(parts) :], strict=True):
        if there:
            terms[name] = after.norm
    # What is in the stream as it is may be what a norm reads, too.
    terms |= {name: None for (name, _), there in zip(parts, reached, strict=False) if there}
    return Reading(norm, terms, _flat(given))


def _flat(given: Tensor) -> Tensor:
    return given.detach().float().reshape(-1, given.shape[-1])


def _reached(stream: Tensor, leaves: Sequence[Tensor]) -> list[bool]:
    """Whether each of some tensors is a term of the stream, times a positive number."""
    if not stream.requires_grad:
        return [False] * len(leaves)
    direction = torch.randn(stream.shape, generator=torch.Generator().manual_seed(1)).to(stream)
    found = torch.autograd.grad(stream, list(leaves), direction, retain_graph=True, allow_unused=True)
    return [g is not None and _proportional(g, direction) for g in found]


def _proportional(a: Tensor, b: Tensor) -> bool:
    if a.numel() != b.numel():
        return False
    x, y = a.float().flatten(), b.to(a.device).float().flatten()
    scale = (x @ y) / (y @ y)
    return bool(scale > 0) and bool((x - scale * y).abs().max() <= _ROUNDING * scale * y.abs().max())
