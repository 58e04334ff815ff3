"""Which previous-token head an induction head works with: by the weights of both, and by taking the first away.

Induction takes two heads. One writes to each position what token stood before it, the other, in a later layer, looks
for positions to which its own token was written (Elhage et al., 2021, "A Mathematical Framework for Transformer
Circuits"; Olsson et al., 2022, "In-context Learning and Induction Heads").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from torch import Tensor

from headscope.attention.visibility import Target
from headscope.capture.blocks import Rows
from headscope.capture.evaluation import eager_evaluation
from headscope.capture.feed import Axis
from headscope.capture.outputs import Output, find_outputs, watching
from headscope.capture.session import Capture
from headscope.errors import InputError, ModelError
from headscope.heads.catalogue.circuits import Circuit, left_out, read_circuits
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.result import Place
from headscope.heads.catalogue.trial import Layer
from headscope.models.batches import Prepared
from headscope.models.inputs import prepare
from headscope.models.sites import Site


def composition(
    probing: Probing, readers: Sequence[Place], writers: Sequence[Place]
) -> dict[Place, list[tuple[Place, float]]]:
    """K-composition of readers (induction heads) with writers (previous-token heads) of earlier layers of their stack.

    ||W_QK W_OV|| / (||W_QK|| ||W_OV||), Frobenius norms, as Elhage et al. (2021, "Composing attention heads"), less
    what matrices with the same singular values give that are turned at random against each other: exactly
    1 / sqrt(hidden_size) as a root mean square. (The paper takes off what random matrices of these shapes give.)
    W_QK = W_Q^T W_K of the reader, W_OV = W_O W_V of the writer; norms before both layers are folded in. Biases are
    left out, and so is all that works on queries and keys after their projections: rotary positions and norms. What
    moves all scores counts as much as what tells keys apart, so this is a hint; `partners_by_zeroing` is evidence.

    Args:
        probing: The model.
        readers, writers: Heads, in original numbers.

    Returns:
        For each reader the writers of earlier layers, largest first. Pairs between which something other than an
        addition lies, as in post-norm models, are missing.

    Raises:
        InputError: There is no such head.
        ModelError: No layer of the readers or writers can be read.
    """
    layers = {place[:2] for place in (*readers, *writers)}
    _check_layers(probing, layers)
    found = read_circuits(probing, [s for s in probing.sites if (s.stack, s.layer) in layers and not s.cross])
    if not found.layers:
        raise ModelError(
            f"no head of {probing.loaded.name} can be read: {'; '.join(left_out(found.reasons))}",
            "name other types with --types",
        )
    circuits = {c.layer: c for c in found.layers}
    places = {place: _index(circuits[place[:2]], place) for place in (*readers, *writers) if place[:2] in circuits}
    result: dict[Place, list[tuple[Place, float]]] = {}
    for reader in (r for r in readers if r in places):
        circuit = circuits[reader[:2]]
        able = [w for w in writers if w in places and _earlier(w, reader) and w[:2] in circuit.reading.terms]
        scores = {w: _k_composition(circuit, places[reader], circuits[w[:2]], places[w]) for w in able}
        known = [(writer, score) for writer, score in scores.items() if score is not None]
        result[reader] = sorted(known, key=lambda pair: -pair[1])
    return result


def partners_by_zeroing(
    probing: Probing, readers: Sequence[Place], writers: Sequence[Place], ids: Sequence[Sequence[int]]
) -> dict[tuple[Place, Place], float]:
    """How much of each reader's prefix matching goes away with each writer's result.

    Prefix matching (Olsson et al., 2022) is the mean weight that a token of the second copy of a random sequence puts
    on the token after its first occurrence. The writer's slice of what goes into its output projection is set to zero.
    One forward pass over `ids` a writer, and one without; nothing of the model changes. A drop counts all ways from
    writer to reader, those through other heads, too.

    Args:
        probing: The model; its engine reads the readers' layers.
        readers, writers: Heads, in original numbers.
        ids: Token ids: one token, such as BOS, and a sequence twice; all of one length, 2 or more a copy.

    Returns:
        Prefix matching before less after, by (reader, writer), for writers of earlier layers of the reader's stack; at
        most 1, below 0 where the writer stood in the way.

    Raises:
        InputError: `ids` are no such sequences or too long for the model, or there is no such head.
        ModelError: A reader's attention cannot be read, or a writer's result is not found at an output projection.
    """
    period = _period(ids)
    _check_layers(probing, {place[:2] for place in (*readers, *writers)})
    prepared = prepare(probing.loaded, ids=ids, batch_size=probing.batch_size)
    if prepared.truncated:
        raise InputError(
            f"sequences of {2 * period + 1} tokens are too long for {probing.loaded.name}", "give a smaller period"
        )
    # All of them, so that layers that share a projection are seen to.
    outputs = find_outputs(probing.loaded.model, [s for s in probing.sites if not s.cross])
    slices = {writer: _slice(outputs, writer) for writer in writers}
    result: dict[tuple[Place, Place], float] = {}
    with eager_evaluation(probing.loaded.model):
        before = _prefix_matching(probing, readers, prepared, period, None)
        for writer in writers:
            after = _prefix_matching(probing, readers, prepared, period, slices[writer])
            result |= {(r, writer): before[r] - after[r] for r in readers if _earlier(writer, r)}
    return result


def _earlier(writer: Place, reader: Place) -> bool:
    return writer[0] == reader[0] and writer[1] < reader[1]


def _check_layers(probing: Probing, layers: set[Layer]) -> None:
    known = {(s.stack, s.layer) for s in probing.sites if not s.cross}
    for stack, layer in sorted(layers - known):
        raise InputError(
            f"{probing.loaded.name} has no self-attention in layer {layer} of the stack {stack!r}",
            "name a layer of self-attention",
        )


# ------------------------------------------------------------------ weights
def _index(circuit: Circuit, place: Place) -> int:
    numbers = circuit.facts.heads
    if place[2] not in numbers:
        raise InputError(
            f"{place[0]}: there is no head L{place[1]}H{place[2]}", "heads are counted from 0 in each layer"
        )
    return numbers.index(place[2])


def _k_composition(reader: Circuit, head: int, writer: Circuit, other: int) -> float | None:
    """By products as wide as a head: ||A^T B||^2 is the trace of (A A^T) (B B^T). None where a head is all zeros."""
    query, key = reader.query[head].double(), reader.key[reader.kv(head)].double()
    value, output = writer.value[writer.kv(other)].double(), writer.written(reader.reading)[other].double()
    query, key, output, value = (t.to(query.device) for t in (query, key, output, value))
    between = key @ output.T
    queries, values = query @ query.T, value @ value.T
    composed = ((queries @ between) * (between @ values)).sum()
    sizes = (queries * (key @ key.T)).sum() * ((output @ output.T) * values).sum()
    if not bool(sizes > 0):
        return None
    return float((composed.clamp(min=0) / sizes).sqrt()) - 1 / math.sqrt(query.shape[1])


# ------------------------------------------------------------------ zeroing
def _period(ids: Sequence[Sequence[int]]) -> int:
    """Tokens in one copy."""
    lengths = {len(row) for row in ids}
    if len(lengths) != 1:
        raise InputError(f"sequences have {sorted(lengths) or 'no'} tokens", "give sequences of one length")
    period = (lengths.pop() - 1) // 2
    for number, row in enumerate(ids):
        if period < 2 or list(row[1:]) != 2 * list(row[1 : 1 + period]):
            raise InputError(
                f"sequence {number} is not one token and then two copies of 2 or more",
                "give a first token, then the same 2 tokens or more twice",
            )
    return period


def _slice(outputs: Sequence[Output], writer: Place) -> tuple[Output, Tensor]:
    """The output projection that a head goes into, and its columns there."""
    for output in outputs:
        if writer[:2] not in [(s.stack, s.layer) for s in output.sites]:
            continue
        if len(output.sites) > 1:
            raise ModelError(
                f"{writer[0]}: layer {writer[1]} shares its weights with others, so it has no heads alone",
                "name other types with --types",
            )
        for unit in output.units():
            if unit.number == writer[2]:
                return output, unit.columns
        raise InputError(
            f"{writer[0]}: there is no head L{writer[1]}H{writer[2]}", "heads are counted from 0 in each layer"
        )
    raise ModelError(
        f"{writer[0]}: the result of layer {writer[1]}'s heads is not found at an output projection",
        "name other types with --types",
    )


class _Matching:
    """Sums the weights that rows of the second copy put on the token after their first occurrence."""

    def __init__(self, period: int) -> None:
        self.period = period
        self.sums: dict[Layer, Tensor] = {}
        self.rows_seen: dict[Layer, int] = {}

    def rows(self, site: Site, rows: Rows) -> None:
        """Take the next rows."""
        second = rows.positions > self.period
        weights = rows.at(Target(offset=1 - self.period)).double() * second
        layer = (site.stack, site.layer)
        self.sums[layer] = self.sums.get(layer, 0) + weights.sum(dim=(0, 2))
        self.rows_seen[layer] = self.rows_seen.get(layer, 0) + int(second.sum()) * weights.shape[0]


def _prefix_matching(
    probing: Probing,
    readers: Sequence[Place],
    prepared: Prepared,
    period: int,
    zeroed: tuple[Output, Tensor] | None,
) -> dict[Place, float]:
    layers = {place[:2] for place in readers}
    matching = _Matching(period)
    capture = Capture(
        probing.loaded.model,
        probing.sites,
        selected=lambda site: (site.stack, site.layer) in layers,
        consumers=(matching,),
        engine=probing.engine,
    )
    with nullcontext() if zeroed is None else watching(zeroed[:1], lambda _, x: _without(x, zeroed[1])):
        for batch in prepared.batches:
            axes = {n: Axis(a.lengths, a.special) for n, a in batch.axes.items()}
            capture.batch(batch.inputs, axes, len(batch.order))
    return dict(_means(capture, matching, readers))


def _means(capture: Capture, matching: _Matching, readers: Sequence[Place]) -> Iterator[tuple[Place, float]]:
    for reader in readers:
        layer = reader[:2]
        if layer in capture.unreadable:
            raise capture.unreadable[layer]
        numbers = capture.facts[layer].heads
        if reader[2] not in numbers:
            raise InputError(
                f"{reader[0]}: there is no head L{reader[1]}H{reader[2]}", "heads are counted from 0 in each layer"
            )
        yield reader, float(matching.sums[layer][numbers.index(reader[2])]) / matching.rows_seen[layer]


def _without(given: Tensor, columns: Tensor) -> Tensor:
    changed = given.clone()
    changed[..., columns.to(given.device)] = 0
    return changed
