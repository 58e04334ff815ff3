"""One of the two models: loaded, measured text by text, and let go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from headscope.capture.evaluation import eager_evaluation
from headscope.capture.feed import Axis
from headscope.capture.session import Engine
from headscope.comparison.rows import Again, Drawing, Kept, RowKeeper, tokens_of
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.similarity import shares
from headscope.heads.describe import model_info
from headscope.heads.labels import head_records
from headscope.heads.layer_facts import LayerFacts
from headscope.heads.measuring import Measured, Measuring
from headscope.heads.rules import RuleSet
from headscope.heads.statistics import Layer, Values
from headscope.heads.sums import LayerSums
from headscope.heads.tokens import token_groups
from headscope.models.chosen_sites import select_sites
from headscope.models.decoder_inputs import has_decoder
from headscope.models.inputs import Prepared, prepare
from headscope.models.loading import LoadedModel
from headscope.models.pruned import pruned_state
from headscope.models.selection import Selection
from headscope.models.sites import find_sites
from headscope.results import HeadRecord, ModelInfo


@dataclass(frozen=True)
class Ways:
    """How both models are measured; as for `headscope.analyze`, and `max_rows` to draw from each stack."""

    layers: Selection
    heads: Selection
    stack: str | Sequence[str] | None
    rules: RuleSet
    names: tuple[str, ...]
    engine: str
    words: bool
    exclude_special: bool
    max_length: int | None
    strict_length: bool
    batch_size: int | None
    max_rows: int
    seed: int


@dataclass(frozen=True)
class Side:
    """What one model showed.

    Attributes:
        records: Its heads; those that pruning left in the weights without effect are left out.
        values: Text by text, (text, head), by layer and metric.
        heads: The heads along the second axis of `values`, by layer.
        removed: Heads that pruning took out, by layer.
        axes: The tokens of rows and of keys, by stack: names of axes, and each text's tokens by axis.
        kept: Rows of attention.
        decoder_texts: What its decoder read, None without one.
    """

    info: ModelInfo
    records: tuple[HeadRecord, ...]
    values: Mapping[Layer, Mapping[str, Values]]
    heads: Mapping[Layer, tuple[int, ...]]
    removed: Mapping[Layer, tuple[int, ...]]
    axes: Mapping[str, tuple[str, str]]
    tokens: Mapping[tuple[str, int], tuple[str, ...]]
    kept: Kept
    texts: int
    count: int
    decoder_texts: tuple[str, ...] | None
    warnings: tuple[str, ...]


def measure(loaded: LoadedModel, given: Mapping[str, Any], ways: Ways, other: Side | None = None) -> Side:
    """Measure one model.

    Args:
        given: Arguments of `headscope.models.inputs.prepare`.
        other: The first model, for the second: rows are kept where it has some, and its decoder's text is read.
    """
    sites = find_sites(loaded.model)
    wanted = select_sites(sites, ways.stack, ways.layers, loaded.name)
    with eager_evaluation(loaded.model):
        prepared = _prepared(loaded, given, ways, other)
    measured = Measuring(
        loaded, sites, wanted, ways.heads, ways.rules, ways.names, ways.engine, ways.words, ways.exclude_special
    ).run(prepared)
    probing = Probing(loaded, sites, wanted, ways.heads, cast(Engine, measured.engine), ways.seed, ways.batch_size)
    gone = {(s.stack, s.layer): state.gone for s in wanted if (state := pruned_state(s.module)) is not None}
    return Side(
        info=model_info(loaded, measured.facts),
        records=_records(measured, ways, gone),
        values=measured.values,
        heads={key: facts.heads for key, facts in measured.facts.items()},
        removed={key: heads for key, heads in gone.items() if heads},
        axes={s.stack: (s.query_axis, s.key_axis) for s in wanted},
        tokens=_tokens(prepared, ways),
        kept=_kept(probing, prepared, ways, other),
        texts=prepared.texts,
        count=prepared.tokens,
        decoder_texts=prepared.decoder_texts,
        warnings=(*loaded.warnings, *prepared.warnings, *measured.warnings),
    )


def stacks_of(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, str]:
    """The second model's stacks and the first's that they are compared with: those of the same name, or the only ones.

    Only one stack in each is the same part of the model whatever it is called: `self` here, `text` there.
    """
    if len(first) == len(second) == 1:
        return dict(zip(second, first, strict=True))
    return {name: name for name in second if name in first}


def _prepared(loaded: LoadedModel, given: Mapping[str, Any], ways: Ways, other: Side | None) -> Prepared:
    """The input; what a decoder writes by itself is written once, and both models read it as text."""

    def ready(texts: Sequence[str] | None) -> Prepared:
        return prepare(
            loaded,
            **{**given, "decoder_texts": texts},
            max_length=ways.max_length,
            strict_length=ways.strict_length,
            batch_size=ways.batch_size,
        )

    texts = given["decoder_texts"]
    if texts is not None or not has_decoder(loaded):
        return ready(texts)
    if other is not None and _readable(loaded, other.decoder_texts):
        return ready(other.decoder_texts)
    first = ready(None)
    if not _readable(loaded, first.decoder_texts):
        return first
    return replace(ready(first.decoder_texts), warnings=first.warnings)


def _readable(loaded: LoadedModel, written: Sequence[str] | None) -> bool:
    """Whether what a decoder wrote can be read as text: it may be nothing, or no tokenizer's."""
    return loaded.tokenizer is not None and bool(written) and all(text.strip() for text in written or ())


def _records(measured: Measured, ways: Ways, gone: Mapping[Layer, tuple[int, ...]]) -> tuple[HeadRecord, ...]:
    return tuple(
        record
        for key, facts in measured.facts.items()
        if key in measured.values
        for record in head_records(
            LayerFacts.of(facts),
            LayerSums.of(measured.values[key], ways.rules),
            ways.rules,
            ways.names,
            [h for h in ways.heads.within(facts.heads) if h not in gone.get(key, ())],
        )
    )


def _tokens(prepared: Prepared, ways: Ways) -> dict[tuple[str, int], tuple[str, ...]]:
    return {
        (name, text): tokens_of(axis, row, ways.words, ways.exclude_special)
        for batch in prepared.batches
        for name, axis in batch.axes.items()
        for row, text in enumerate(batch.order)
    }


def _kept(probing: Probing, prepared: Prepared, ways: Ways, other: Side | None) -> Kept:
    """Rows of a part of the batches: drawn, or those that the other model has."""
    kept: Kept = {}
    capture = probing.capture(renormalise=ways.exclude_special)
    rng = np.random.default_rng(ways.seed)
    drawing = Drawing(rng, len(probing.wanted))
    again = None if other is None else _again(other, {s.stack: () for s in probing.wanted})
    counts = dict(shares(prepared, ways.max_rows, rng)) if again is None else {}
    for number, batch in enumerate(prepared.batches):
        if again is None:
            drawing.count = counts.get(number, 0)
            wanted: Drawing | Again = drawing
            needed = drawing.count > 0
        else:
            wanted = replace(again, order=batch.order)
            needed = any(text in batch.order for _, text in again.positions)
        if not needed:
            continue
        capture.consumers = (RowKeeper(batch, probing.heads, wanted, kept),)
        capture.groups = (
            token_groups(batch, ways.words, ways.exclude_special) if ways.words or ways.exclude_special else None
        )
        axes = {name: Axis(a.lengths, a.special) for name, a in batch.axes.items()}
        capture.batch(batch.inputs, axes, len(batch.order))
    for row, layers in kept.items():
        for layer in [n for n in layers if (row.stack, n) in capture.unreadable]:
            del layers[layer]
    return kept


def _again(other: Side, stacks: Mapping[str, object]) -> Again:
    positions: dict[tuple[str, int], list[int]] = {}
    for row in other.kept:
        positions.setdefault((row.stack, row.text), []).append(row.position)
    return Again((), stacks_of(other.axes, stacks), positions)
