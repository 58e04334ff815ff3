"""Copying heads, by their weights alone: does attending to a token make the same token more likely?

Elhage et al. (2021, "A Mathematical Framework for Transformer Circuits", sections "Copying / primitive in-context
learning" and "Summarizing OV/QK matrices") look at a head's OV circuit, U W_O W_V E with a row and a column a token:
what attending to one token adds to the logits of each. Where its eigenvalues are positive, sets of tokens raise their
own logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.errors import ModelError
from headscope.heads.catalogue.circuits import Circuit, left_out, read_circuits
from headscope.heads.catalogue.norms import Norm
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.result import Found, Place, TypeRecord
from headscope.heads.catalogue.stream import Reading, Stream, output_embedding
from headscope.heads.catalogue.trial import Layer
from headscope.heads.clusters import holm, student_survival
from headscope.heads.interval import student_t

COPIES_ABOVE = 0.5
GROUPS = 10
ROTATIONS = 12
MAX_P = 0.05

# Tokens whose embeddings are copied in float32 at once.
_CHUNK = 4096
# What rounding leaves of a circuit that is zero, relative to the sizes of its factors.
_NOTHING = 1e-6

Floats = NDArray[np.float64]


def copying(probing: Probing) -> Found:
    """The copying score of every wanted self-attention head: sum of Re λ / sum of |λ|, -1 to 1.

    λ are the eigenvalues of the OV circuit of tokens, U W_O W_V E. It is never made: those of W_V (E^T U) W_O, of one
    head's width, are the same but for zeros. Norms before the attention and before the output embedding are folded in:
    their gains and, for LayerNorm, that they take off the mean over features. Biases, positions and the norms' scales,
    which belong to a text, are left out. From U its mean over tokens is taken off: what is added to all logits alike
    changes no probability, but would add an eigenvalue of any size. (Elhage et al. do not say that they do.)

    Only the direct path from embeddings to logits is looked at. It is there where a layer and the output embedding read
    one sum, each through one norm at most, of which the embeddings and the layer's result are terms (through a norm of
    their own at most, which is folded in, too). Layers are left out with a note where a norm lies on the sum, as in
    post-norm models, where embeddings are projected, and where something else comes before the output embedding, as in
    most masked models.

    A record holds as `chance` 0, the mean over heads whose value space is turned at random against their output space
    (W_O^T R W_V, R uniform over rotations and reflections: R and -R are as likely), and as `details` the spread of
    `ROTATIONS` such heads. `p` compares the score with that spread (Student's t), corrected for all heads. The
    interval is of the tokens: a delete-a-group jackknife (Kott, 2001, Journal of Official Statistics 17) over `GROUPS`
    random groups of the vocabulary. `eligible` is the number of tokens. Criterion `elhage_2021`: a score above
    `COPIES_ABOVE`: of real eigenvalues, those above zero add up to three times those below. The paper names no number.

    Returns:
        One record a head; heads that write nothing that the output embedding reads have none. In the summary,
        `copying_share` is the share of measured heads that copy.

    Raises:
        ModelError: The model has no output embedding, or no layer has a direct path.
    """
    loaded = probing.loaded
    if not isinstance(getattr(output_embedding(loaded.model), "weight", None), Tensor):
        raise ModelError(
            f"{loaded.name} has no output embedding, so heads cannot copy tokens to it",
            "Load it with its language-model head.",
        )
    circuits = read_circuits(probing, [s for s in probing.wanted if not s.cross])
    reasons = dict(circuits.reasons)
    direct = [c for c in circuits.layers if not _blocked(c, circuits.stream, reasons)]
    if not direct or circuits.stream.output is None:
        why = next(iter(reasons.values()), "no such layer")
        raise ModelError(
            f"no head of {loaded.name} has a direct path from embeddings to logits: {why}",
            "name other types with --types",
        )
    output, first = circuits.stream.output, direct[0].reading.terms[None]
    grams = _grams(probing, output, first)
    found = {
        place: score for circuit in direct for place, score in _scores(probing, circuit, circuit.written(output), grams)
    }
    scores = {place: score for place, score in found.items() if score is not None}
    notes = left_out(reasons)
    if len(scores) < len(found):
        notes += (f"copying: {len(found) - len(scores)} heads write nothing that the output embedding reads",)
    return _found(scores, grams.tokens, notes)


def _blocked(circuit: Circuit, stream: Stream, reasons: dict[Layer, str]) -> bool:
    """Whether the direct path through a layer is not linear; the reason is added."""
    if stream.output is None:
        reasons[circuit.layer] = "the output embedding does not run once in a forward pass"
    elif None not in circuit.reading.terms:
        reasons[circuit.layer] = "token embeddings are no term of the sum that it reads"
    elif circuit.layer not in stream.output.terms:
        reasons[circuit.layer] = "its result is no term of the sum that the output embedding reads"
    return circuit.layer in reasons


# ------------------------------------------------------------------ sums over the vocabulary
@dataclass(frozen=True, eq=False)
class _Grams:
    """E^T U, U without its mean over tokens and with the last norm folded in.

    Attributes:
        grams: float32, (1 + GROUPS, features, features): of all tokens, then without each group.
        tokens: How many there are.
    """

    grams: Tensor
    tokens: int


def _grams(probing: Probing, output: Reading, first: Norm | None) -> _Grams:
    model = probing.loaded.model
    tables: tuple[Any, Any] = (model.get_input_embeddings(), output_embedding(model))
    embedding, unembedding = (table.weight.detach() for table in tables)
    count, width = min(len(embedding), len(unembedding)), embedding.shape[1]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(probing.seed))
    grams = torch.zeros(GROUPS, width, width, device=embedding.device)
    sums = torch.zeros(2, GROUPS, width, device=embedding.device)
    sizes = torch.zeros(GROUPS, 1, 1, device=embedding.device)
    for group, ids in enumerate(order.tensor_split(GROUPS)):
        sizes[group] = len(ids)
        for chunk in torch.split(ids, _CHUNK):
            read = embedding[chunk.to(embedding.device)]
            read = read.float() if first is None else first.of(read)
            written = output.fold(unembedding[chunk.to(unembedding.device)].to(embedding.device))
            grams[group] += read.T @ written
            sums[0, group] += read.sum(dim=0)
            sums[1, group] += written.sum(dim=0)
    total, together, number = grams.sum(dim=0), sums.sum(dim=1), sizes.sum()
    parts = [_centred(total, together, number)]
    for group in range(GROUPS):
        parts.append(_centred(total - grams[group], together - sums[:, group], number - sizes[group]))
    return _Grams(torch.stack(parts), count)


def _centred(gram: Tensor, sums: Tensor, count: Tensor) -> Tensor:
    return gram - torch.outer(sums[0], sums[1]) / count.clamp(min=1)


# ------------------------------------------------------------------ eigenvalues
@dataclass(frozen=True)
class _Score:
    """One head's score, its standard error over tokens, and the root mean square of turned heads' scores."""

    score: float
    error: float
    spread: float


def _scores(probing: Probing, circuit: Circuit, output: Tensor, grams: _Grams) -> Iterator[tuple[Place, _Score | None]]:
    width = circuit.value.shape[1]
    rotations = _rotations(width, probing.seed)
    device = grams.grams.device
    value, output = circuit.value.to(device), output.to(device)
    read = torch.einsum("kdf,gfe->kgde", value, grams.grams)
    size = grams.grams[0].norm()
    for index, place in probing.places(circuit.facts):
        kv = circuit.kv(index)
        small = read[kv] @ output[index].T
        if small[0].norm() <= _NOTHING * value[kv].norm() * size * output[index].norm():
            yield place, None
            continue
        matrices = small.double().cpu()
        found = _positive(torch.cat([matrices, rotations @ matrices[0]]))
        left, turned = found[1 : 1 + GROUPS], found[1 + GROUPS :]
        error = np.sqrt((GROUPS - 1) / GROUPS * ((left - found[0]) ** 2).sum())
        yield place, _Score(float(found[0]), float(error), float(np.sqrt((turned**2).mean())))


def _positive(matrices: Tensor) -> Floats:
    """Sum of Re λ / sum of |λ| of each of some square matrices."""
    values = torch.linalg.eigvals(matrices)
    scores: Floats = (values.real.sum(dim=-1) / values.abs().sum(dim=-1)).numpy()
    return scores


def _rotations(width: int, seed: int) -> Tensor:
    """float64, (ROTATIONS, width, width): orthogonal, uniform (Mezzadri, 2007, Notices of the AMS 54)."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(ROTATIONS, width, width, generator=generator, dtype=torch.float64))
    turned: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    return turned


# ------------------------------------------------------------------ records
def _found(scores: dict[Place, _Score], tokens: int, notes: tuple[str, ...]) -> Found:
    ratios = np.array([s.score / s.spread for s in scores.values()])
    p = holm(student_survival(ratios, np.full(len(ratios), ROTATIONS)))
    evidence = {
        place: (_record(score, tokens, float(value)),) for (place, score), value in zip(scores.items(), p, strict=True)
    }
    claimed = sum(records[0].claimed for records in evidence.values())
    share = claimed / len(evidence) if evidence else None
    return Found(evidence, notes=notes, summary={"copying_share": share})


def _record(score: _Score, tokens: int, p: float) -> TypeRecord:
    half = float(student_t(np.array(GROUPS - 1))) * score.error
    criteria = ("elhage_2021",) if score.score > COPIES_ABOVE else ()
    return TypeRecord(
        type="copying",
        score=score.score,
        chance=0.0,
        eligible=tokens,
        low=max(-1.0, score.score - half),
        high=min(1.0, score.score + half),
        claimed=bool(criteria) and p < MAX_P,
        criteria=criteria,
        p=p,
        details={"spread": score.spread},
    )
