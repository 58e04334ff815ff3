"""The catalogue of one model: what texts showed, and every probe that is asked for, put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headscope.errors import InputError, ModelError
from headscope.heads.catalogue.ablation_check import ablation_check
from headscope.heads.catalogue.choice import PROBE_TYPES, Choice
from headscope.heads.catalogue.copying import copying
from headscope.heads.catalogue.coreference import coreference
from headscope.heads.catalogue.evidence import evidence_of
from headscope.heads.catalogue.layer_types import LayerTypes
from headscope.heads.catalogue.mentions import read_mentions
from headscope.heads.catalogue.needles import read_haystack, read_needles
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.repeated import repeated_ids
from headscope.heads.catalogue.repetition import REPEATING, repetition, with_natural
from headscope.heads.catalogue.result import Catalogue, Evidence, Found, Place, TypeInfo, TypeRecord
from headscope.heads.catalogue.retrieval import LENGTHS, retrieval
from headscope.heads.catalogue.similarity import similarity
from headscope.heads.catalogue.similarity_result import Similarity
from headscope.heads.catalogue.syntax import syntax
from headscope.heads.catalogue.text_types import TEXT_TYPES
from headscope.heads.catalogue.treebank import read_treebank
from headscope.heads.statistics import Layer
from headscope.models.inputs import Prepared
from headscope.results import HeadRecord

# Sequences of the ablation check, a forward pass of these a draw, and heads that are zeroed at most.
_SEQUENCES, _LENGTH, _ZEROED = 8, 50, 10
# Types that do not say where a head attends.
_NOT_WHERE = ("copying", "redundant")
# Why a type was not measured, on texts and by a probe that ran.
_NOWHERE = ("no row of the text can show it", "no head can show it")


def check_files(choice: Choice) -> None:
    """Read the files once before anything runs.

    Raises:
        InputError: One of them is not what it should be.
    """
    if "conllu" in choice.files:
        read_treebank(choice.files["conllu"])
    if "mentions" in choice.files:
        read_mentions(choice.files["mentions"])
    if "needles" in choice.files:
        read_needles(choice.files["needles"])
    if "haystack" in choice.files:
        read_haystack(choice.files["haystack"], 2 * max(LENGTHS))


@dataclass
class _Gathered:
    """What is known so far."""

    evidence: dict[Place, tuple[TypeRecord, ...]]
    seconds: dict[str, float]
    skipped: dict[str, str]
    tables: dict[str, tuple[Mapping[str, Any], ...]]
    summary: dict[str, Any]
    notes: list[str]

    def add(self, found: Found) -> None:
        for place, records in found.evidence.items():
            self.evidence[place] = (*self.evidence.get(place, ()), *records)
        self.tables.update(found.tables)
        self.summary.update(found.summary)
        self.notes += found.notes


def gather(
    probing: Probing,
    choice: Choice,
    layers: Mapping[Layer, LayerTypes],
    heads: Mapping[Layer, Sequence[tuple[int, Place]]],
    prepared: Prepared | None,
    records: Sequence[HeadRecord],
) -> tuple[tuple[HeadRecord, ...], Catalogue, tuple[str, ...]]:
    """Run the probes and put everything together.

    Args:
        layers: What the given texts showed.
        heads: The wanted heads of each layer.
        prepared: The given texts, for heads that are compared on them; None where they are not at hand.
        records: The heads' records, in order.

    Returns:
        The records with the types that each head has, what concerns the whole model, and notes.

    Raises:
        InputError, ModelError: A type that was asked for by name cannot be measured.
    """
    got = _Gathered(dict(evidence_of(choice.text_types, layers, heads)), {}, {}, {}, _sinks(choice, layers, heads), [])
    repeating = [TEXT_TYPES[n] for n in REPEATING if n in choice.names]
    if repeating:
        names = tuple(t.name for t in repeating)
        found = _run(got, choice, names, lambda: repetition(probing, repeating)) or Found({})
        got.evidence = dict(with_natural(found.evidence, got.evidence, names))
        got.add(replace(found, evidence={}))
    similar: list[Similarity] = []

    def compared() -> Found:
        if prepared is None:
            raise InputError("heads are compared on single texts, not on a corpus", "Leave redundant out of --types.")
        result, found = similarity(probing, prepared)
        similar.append(result)
        return found

    files = choice.files
    probes: dict[str, Callable[[], Found]] = {
        "copying": lambda: copying(probing),
        "syntax": lambda: syntax(probing, files["conllu"]),
        "coreference": lambda: coreference(probing, files["mentions"]),
        "retrieval": lambda: retrieval(probing, files["haystack"], files["needles"]),
        "redundant": compared,
    }
    for name in (n for n in choice.names if n in PROBE_TYPES):
        missing = [f"--{option} FILE" for option in PROBE_TYPES[name].files if option not in files]
        if missing:
            got.skipped[name] = f"give {' and '.join(missing)}"
            continue
        got.add(_run(got, choice, (name,), probes[name]) or Found({}))
    ablation = _ablated(probing, choice, got) if choice.ablate else None
    got.notes += ablation["notes"] if ablation is not None else ()
    evidence = _without_residual(got.evidence)
    infos = tuple(_info(n, got, evidence) for n in choice.names)
    _check_named(choice, infos)
    places = [(r.stack, r.layer, r.head) for r in records]
    typed = tuple(
        replace(r, types=tuple(t for t in evidence.get(place, ()) if t.claimed and t.type in choice.names))
        for r, place in zip(records, places, strict=True)
    )
    catalogue = Catalogue(
        types=infos,
        scores={n: tuple(_score(evidence.get(place, ()), n) for place in places) for n in choice.names},
        tables=got.tables,
        summary=got.summary,
        similarity=similar[0] if similar else None,
        ablation=ablation,
    )
    return typed, catalogue, tuple(dict.fromkeys(got.notes))


def _run(got: _Gathered, choice: Choice, names: Sequence[str], probe: Callable[[], Found]) -> Found | None:
    """What a probe of these types found, with its cost; None where it does not apply and none was asked for by name."""
    start = time.perf_counter()
    try:
        found = probe()
    except (InputError, ModelError) as error:
        if choice.named.intersection(names):
            raise
        got.skipped.update(dict.fromkeys(names, error.message))
        return None
    got.seconds.update(dict.fromkeys(names, round(time.perf_counter() - start, 3)))
    return found


def _check_named(choice: Choice, infos: Sequence[TypeInfo]) -> None:
    for info in infos:
        if info.name in choice.named and not info.measured:
            hint = "Give texts that can, or leave it out: of a group, or of all types, it is passed over."
            raise InputError(f"the type {info.name} was measured on no head: {info.skipped}", hint)


def _ablated(probing: Probing, choice: Choice, got: _Gathered) -> Mapping[str, Any]:
    """What zeroing the ten heads that score most does; of a model with few heads, only those that have the type."""
    found = [(p, r) for p, records in got.evidence.items() for r in records if r.type == "induction"]
    if not found:
        raise ModelError(
            "no head's induction could be measured: there is nothing to check", "Leave --ablate-check out."
        )
    claimed = [(p, r) for p, r in found if r.claimed]
    many = len(found) >= 4 * _ZEROED
    top = _ZEROED if many else min(_ZEROED, len(claimed) or max(1, len(found) // 2))
    ranked = sorted(((p, r.score) for p, r in (found if many else claimed or found)), key=lambda item: -item[1])
    repeated = repeated_ids(probing.loaded, sequences=_SEQUENCES, length=_LENGTH, seed=choice.seed + 1000)
    return ablation_check(probing, ranked, top=top, repeated=repeated)


def _sinks(
    choice: Choice, layers: Mapping[Layer, LayerTypes], heads: Mapping[Layer, Sequence[tuple[int, Place]]]
) -> dict[str, Any]:
    """The share of heads and texts on which the first token draws more than 0.3 (Gu et al. 2025, section 3)."""
    if "first_token" not in choice.names:
        return {}
    above = texts = 0.0
    for layer, found in layers.items():
        counts = found.above.get("first")
        for index, _ in heads.get(layer, ()) if counts is not None else ():
            assert counts is not None
            above, texts = above + float(counts[0][index]), texts + float(counts[1][index])
    return {"sink_rate": above / texts if texts else None}


def _without_residual(evidence: Evidence) -> Evidence:
    """What explains where a head attends keeps it from being merely focused, wherever that was measured."""
    residual = {t.name for t in TEXT_TYPES.values() if t.residual}
    explain = (TEXT_TYPES.keys() | PROBE_TYPES.keys()) - residual - set(_NOT_WHERE)
    result = {}
    for place, records in evidence.items():
        explained = any(r.claimed and r.type in explain for r in records)
        result[place] = tuple(
            replace(r, claimed=False, example=None) if explained and r.type in residual else r for r in records
        )
    return result


def _info(name: str, got: _Gathered, evidence: Evidence) -> TypeInfo:
    kind = TEXT_TYPES.get(name) or PROBE_TYPES[name]
    records = [[r for r in of if r.type == name] for of in evidence.values()]
    return TypeInfo(
        name=name,
        description=kind.description,
        source=kind.source,
        measured=sum(bool(r) for r in records),
        claimed=sum(any(x.claimed for x in r) for r in records),
        seconds=got.seconds.get(name),
        skipped=got.skipped.get(name) or (None if any(records) else _NOWHERE[name in PROBE_TYPES]),
    )


def _score(records: Iterable[TypeRecord], name: str) -> float | None:
    """The score of a head, of several records the one that is claimed, or the first."""
    own = [r for r in records if r.type == name]
    return next((r.score for r in (*(r for r in own if r.claimed), *own)), None)
