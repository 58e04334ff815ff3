"""Heads that look for repetition, on random tokens that are repeated: duplicate-token and induction heads.

On random tokens nothing but repetition can be seen (Olsson et al. 2022). Sequences have copies of several lengths, so
that a head that looks at a fixed distance is right in a few of them at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from headscope.capture.evaluation import eager_evaluation
from headscope.capture.feed import Axis
from headscope.errors import HeadscopeError
from headscope.heads.catalogue.composition import composition, partners_by_zeroing
from headscope.heads.catalogue.evidence import evidence_of
from headscope.heads.catalogue.examples import Examples
from headscope.heads.catalogue.kinds import key_tokens
from headscope.heads.catalogue.layer_types import LayerTypes
from headscope.heads.catalogue.observing import TypeStatistics
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.repeated import SHORTEST, RepeatedTokens, repeated_ids
from headscope.heads.catalogue.result import Evidence, Found, Place, TypeRecord
from headscope.heads.catalogue.text_types import TEXT_TYPES, TextType
from headscope.heads.statistics import Layer
from headscope.models.decoder_inputs import has_decoder
from headscope.models.inputs import Prepared, prepare

REPEATING = ("duplicate_token", "induction")
# Tokens of a copy, and sequences of each length: 20 in all.
LENGTHS, SEQUENCES = (40, 45, 50, 55), 5
# Previous-token heads that are tried as partners of an induction head, and sequences that they are tried on.
_WRITERS, _TRIED_ON = 8, 4


def repetition(probing: Probing, wanted: Sequence[TextType]) -> Found:
    """Measure types on repeated random tokens, of all wanted heads; once a model.

    Args:
        wanted: Types of `REPEATING`.

    Returns:
        Records; those of induction heads name the previous-token heads that they depend on in `partners`: how much of
        their prefix matching goes away with each of those, and its K-composition with them (Elhage et al. 2021).

    Raises:
        ModelError: The model reads no text, or too little of it.
    """
    types = (TEXT_TYPES["previous_token"], *wanted)
    drawn = _drawn(probing)
    tokens = sum(len(row) for one in drawn for row in one.ids)
    probing.say(f"repetition: {len(drawn)} forward passes, {tokens:,} tokens")
    statistics = TypeStatistics(types, SEQUENCES * len(LENGTHS))
    capture = probing.capture(statistics)
    layers: dict[Layer, LayerTypes] = {}
    with eager_evaluation(probing.loaded.model):
        for batch in (b for one in drawn for b in prepared_ids(probing, one).batches):
            statistics.examples = Examples(batch)
            axes = {n: Axis(a.lengths, a.special, key_tokens(a)) for n, a in batch.axes.items()}
            capture.batch(batch.inputs, axes, len(batch.order))
            for layer, sums in statistics.finish().items():
                layers[layer] = layers[layer] + sums if layer in layers else sums
    crossing = {(s.stack, s.layer) for s in probing.sites if s.cross}
    read = {k: v for k, v in layers.items() if k not in capture.unreadable and k not in crossing}
    heads = {key: probing.places(capture.facts[key]) for key in read}
    evidence = evidence_of(types, read, heads)
    notes: tuple[str, ...] = ()
    if any(t.name == "induction" for t in wanted):
        evidence, notes = _with_partners(probing, evidence, drawn[0])
    names = {t.name for t in wanted}
    kept = {place: tuple(r for r in records if r.type in names) for place, records in evidence.items()}
    return Found(kept, notes=notes, summary={"repeated_sequences": SEQUENCES * len(LENGTHS), "repeated_tokens": tokens})


def _drawn(probing: Probing) -> list[RepeatedTokens]:
    """Of several lengths, shorter ones where the model's limit asks for it."""
    seeds = [len(LENGTHS) * probing.seed + number for number in range(len(LENGTHS))]
    longest = repeated_ids(probing.loaded, sequences=1, length=LENGTHS[-1], seed=seeds[-1]).length
    lengths = [max(SHORTEST, longest - LENGTHS[-1] + length) for length in LENGTHS]
    return [
        repeated_ids(probing.loaded, sequences=SEQUENCES, length=length, seed=seed)
        for length, seed in zip(lengths, seeds, strict=True)
    ]


def prepared_ids(probing: Probing, repeated: RepeatedTokens) -> Prepared:
    """Batches of the sequences; an encoder-decoder reads them with both."""
    if not has_decoder(probing.loaded):
        return prepare(probing.loaded, ids=repeated.ids, batch_size=probing.batch_size)
    ids = torch.tensor(repeated.ids)
    return prepare(probing.loaded, tensors={"input_ids": ids, "decoder_input_ids": ids.clone()})


def with_natural(found: Evidence, natural: Evidence, names: Sequence[str]) -> Evidence:
    """Records of repeated tokens in place of those of the given text, which each then holds as `natural`.

    Args:
        names: Types that are told by repeated tokens alone: a head that was not measured on those has none of them.
    """
    result = {place: tuple(r for r in records if r.type not in names) for place, records in natural.items()}
    for place, records in found.items():
        others = {r.type: r for r in natural.get(place, ())}
        merged = [replace(r, details={**r.details, "natural": _plain(others.get(r.type))}) for r in records]
        result[place] = (*result.get(place, ()), *merged)
    return result


def _plain(record: TypeRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {name: getattr(record, name) for name in ("score", "chance", "eligible", "low", "high")}


def _with_partners(probing: Probing, evidence: Evidence, repeated: RepeatedTokens) -> tuple[Evidence, tuple[str, ...]]:
    """Induction heads with the previous-token heads of earlier layers that they depend on."""
    readers = [p for p, records in evidence.items() if any(r.type == "induction" and r.claimed for r in records)]
    before = sorted(_scores(evidence, "previous_token").items(), key=lambda item: -item[1])
    writers = [place for place, score in before if score > 0.3][:_WRITERS]
    if not readers or not writers:
        return evidence, ()
    probing.say(f"partners of induction heads: {len(writers) + 1} forward passes")
    try:
        drops = partners_by_zeroing(probing, readers, writers, _sequences(repeated))
    except HeadscopeError as error:
        return evidence, (f"partners of induction heads are not known: {error.message}",)
    try:
        composed: Mapping[Place, list[tuple[Place, float]]] = composition(probing, readers, writers)
    except HeadscopeError:
        # A second opinion, from weights that not every layout gives.
        composed = {}
    result = {}
    for place, records in evidence.items():
        partners: list[dict[str, Any]] = [
            {
                "stack": writer[0],
                "layer": writer[1],
                "head": writer[2],
                "drop": drops[place, writer],
                "k_composition": dict(composed.get(place, ())).get(writer),
            }
            for writer in writers
            if (place, writer) in drops
        ]
        partners.sort(key=lambda p: -float(p["drop"]))
        result[place] = tuple(
            replace(r, details={**r.details, "partners": partners}) if r.type == "induction" and r.claimed else r
            for r in records
        )
    return result, ()


def _scores(evidence: Evidence, name: str) -> dict[Place, float]:
    return {place: r.score for place, records in evidence.items() for r in records if r.type == name}


def _sequences(repeated: RepeatedTokens) -> list[list[int]]:
    """One token and two copies each, as `partners_by_zeroing` takes them."""
    rows = repeated.ids[:_TRIED_ON]
    start, stop = repeated.span(0).start, repeated.span(1).stop
    if repeated.prefix:
        return [row[start - 1 : stop] for row in rows]
    # Any token that is not in the sequence: there is none that begins a text.
    fronts = [next(t for other in repeated.ids for t in other if t not in row) for row in rows]
    return [[front, *row[start:stop]] for front, row in zip(fronts, rows, strict=True)]
