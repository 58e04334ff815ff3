"""What attention heads do to the residual stream, as matrices: weights with the norms before them folded in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.capture.session import SiteFacts
from headscope.errors import ModelError
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.stream import Reading, Stream, find_stream
from headscope.heads.catalogue.trial import Layer
from headscope.models.projections import Projections, projections
from headscope.models.pruned import pruned_state
from headscope.models.selection import ranges
from headscope.models.sites import Site
from headscope.models.weights import HeadWeights, NotPlain, read_weights

# What rounding of half-precision models leaves of a cosine of 1.
_ALIKE = 1e-3


@dataclass(frozen=True, eq=False)
class Circuit:
    """One attention layer whose heads read the stream x and add to it, biases and the scale of x left out.

    A head's scores are x_q @ query[h].T @ key[g] @ x_k, what it adds is x_k @ value[g].T @ output[h], g = kv(h).

    Attributes:
        facts: The layer, and how many heads it has.
        reading: What it reads.
        query, key, value: float32, (heads or kv-heads, width, features), the norm before the layer folded in.
        output: float32, (num_heads, value_dim, features).
    """

    facts: SiteFacts
    reading: Reading
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    @property
    def layer(self) -> Layer:
        """The stack's name and the layer number."""
        return self.facts.site.stack, self.facts.site.layer

    def kv(self, index: int) -> int:
        """The place among the key and value weights of what a head uses, both places among the weights."""
        return _kv_places(self.facts)[index]

    def written(self, reading: Reading) -> Tensor:
        """`output` as it is added to a stream, of which it must be a term."""
        norm = reading.terms[self.layer]
        return self.output if norm is None else norm.after(self.output)


@dataclass(frozen=True)
class Circuits:
    """The layers whose weights say what their heads do.

    Attributes:
        layers: In the model's order.
        stream: What lies between them.
        reasons: Why a layer is missing.
    """

    layers: tuple[Circuit, ...]
    stream: Stream
    reasons: Mapping[Layer, str]


def read_circuits(probing: Probing, sites: Sequence[Site]) -> Circuits:
    """The circuits of self-attention sites; what cannot be read is left out with a reason.

    A layer is left out, too, where a head's context is not its value times a number: where something beside the value
    projection, such as a gate or a norm, works on it.

    Raises:
        ModelError: The model has no token embeddings, or does not run on token ids alone.
    """
    found: dict[Layer, tuple[Site, Projections]] = {}
    reasons: dict[Layer, str] = {}
    model = probing.loaded.model
    for site in sites:
        layer = (site.stack, site.layer)
        try:
            plain = projections(site, model=model)
            if plain.output is None:
                raise NotPlain(f"{site.path} has no output projection that is known")
            found[layer] = (site, plain)
        except ModelError as reason:
            reasons[layer] = str(reason)
    stream = find_stream(probing.loaded, {layer: plain for layer, (_, plain) in found.items()}, seed=probing.seed)
    circuits = []
    for layer, (site, plain) in found.items():
        try:
            circuits.append(_circuit(probing, site, plain, stream))
        except ModelError as reason:
            reasons[layer] = str(reason)
    return Circuits(tuple(circuits), stream, reasons)


def left_out(reasons: Mapping[Layer, str]) -> tuple[str, ...]:
    """One line for each stack and reason."""
    lines: dict[tuple[str, str], list[int]] = {}
    for (stack, layer), reason in reasons.items():
        lines.setdefault((stack, reason), []).append(layer)
    result = []
    for (stack, reason), layers in lines.items():
        which = f"layer {layers[0]} is" if len(layers) == 1 else f"layers {ranges(sorted(layers))} are"
        result.append(f"{stack}: {which} left out: {reason}")
    return tuple(result)


# ------------------------------------------------------------------ details
def _circuit(probing: Probing, site: Site, plain: Projections, stream: Stream) -> Circuit:
    layer = (site.stack, site.layer)
    if layer not in stream.readings or layer not in stream.contexts:
        raise NotPlain("its projections do not run once each in a forward pass")
    weights = read_weights(site, plain.shape, model=probing.loaded.model)
    reading = stream.readings[layer]
    facts = SiteFacts(site, plain.shape.num_heads, plain.shape.num_kv_heads, plain.shape.head_dim)
    if not _gives(weights, _kv_places(facts), reading.given, stream.contexts[layer]):
        raise NotPlain("what its output projection takes in is not what its value projection gives")
    assert weights.output is not None
    query, key, value = (reading.fold(w) for w in (weights.query, weights.key, weights.value))
    return Circuit(facts, reading, query, key, value, weights.output.float())


def _kv_places(facts: SiteFacts) -> list[int]:
    state = pruned_state(facts.site.module)
    kept = list(range(facts.num_kv_heads)) if state is None else list(state.kept_kv)
    return [kept.index(facts.kv_head(h)) for h in facts.heads]


def _gives(weights: HeadWeights, kv: list[int], given: Tensor, contexts: Tensor) -> bool:
    """Whether every head's context of a text of one token is that token's value, times a positive number."""
    heads, width = len(kv), weights.value.shape[1]
    if given.shape[-1] != weights.value.shape[2] or contexts.shape != (len(given), heads * width):
        return False
    values = torch.einsum("kdf,tf->tkd", weights.value.float(), given)
    if weights.value_bias is not None:
        values = values + weights.value_bias.float()
    a, b = values[:, kv], contexts.reshape(len(given), heads, width)
    sizes = a.norm(dim=-1) * b.norm(dim=-1)
    return bool(((a * b).sum(dim=-1) >= (1 - _ALIKE) * sizes).all())
