"""`analyze`: run a model on texts, measure every head, label it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from headscope.capture.evaluation import eager_evaluation
from headscope.capture.feed import Axis
from headscope.capture.session import Capture, Engine, SiteFacts
from headscope.errors import InputError
from headscope.heads.arguments import loaded_model, token_ids
from headscope.heads.describe import model_info
from headscope.heads.labels import head_records
from headscope.heads.metrics import chosen, variant
from headscope.heads.pictures import Keep, Maps, check_maps
from headscope.heads.rules import RuleSet, load_rules
from headscope.heads.statistics import HeadStatistics, Layer, Values
from headscope.heads.tokens import token_groups
from headscope.models.chosen_sites import select_sites
from headscope.models.inputs import Prepared, prepare
from headscope.models.loading import LoadedModel
from headscope.models.selection import Selection, parse_selection, ranges
from headscope.models.sites import Site, find_sites
from headscope.models.versions import versions
from headscope.results import MOST_CELLS, Analysis, AttentionMap, InputInfo, RuleInfo

# Up to this many tokens a model in half precision is read from its own, rounded, matrices.
_SHORT = 1024

ENGINES = ("auto", "streaming", "layerwise", "full")


def analyze(
    model: str | PathLike[str] | PreTrainedModel | None = None,
    texts: str | Sequence[str] | None = None,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    layer: str | int | Sequence[int] = "all",
    head: str | int | Sequence[int] = "all",
    stack: str | Sequence[str] | None = None,
    rules: str = "seed",
    metrics: str = "core",
    engine: str = "auto",
    ids: Sequence[int] | Sequence[Sequence[int]] | Tensor | NDArray[np.integer[Any]] | None = None,
    decoder_texts: str | Sequence[str] | None = None,
    images: Sequence[Any] | None = None,
    audio: Sequence[Any] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    max_length: int | None = None,
    strict_length: bool = False,
    batch_size: int | None = None,
    words: bool = False,
    exclude_special: bool = False,
    maps: Maps = False,
    revision: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> Analysis:
    """Measure and label a model's attention heads.

    Args:
        model: A hub id, a directory, a `.gguf` file, a loaded transformers model (left as it was), or None for the
            default model.
        texts: One text or several; metrics are then means over texts of each text's value.
        tokenizer: A tokenizer, or the name of one, to take instead of the model's own.
        processor: For a loaded model: its image processor, feature extractor or composite processor.
        layer, head: `5`, `-1`, `0,2,5`, `3-7`, `all`, or numbers; the model's own layer numbers, 0-based.
        stack: Stack names or module path prefixes.
        rules: `seed`, `calibrated`, or the path of a TOML file.
        metrics: `core`, `all`, or names separated by commas. Entropies are in nats, distances in tokens.
        engine: `streaming` computes attention tile by tile and makes no matrices wherever the model lets it,
            `layerwise` holds one layer's matrices at a time, `full` all of them. `auto` streams, but reads models in
            half precision layer by layer up to 1,024 tokens: numbers are then those of their own rounded weights.
        ids: Token ids as they are, one text's or several texts'.
        decoder_texts: For encoder-decoders, what the decoder reads; generated greedily where it is not given.
        images, audio: Paths, or images and sounds in memory.
        inputs: Ready keyword arguments of the model's forward, padded on either side.
        max_length: Tokens kept per text; the model's limit where it is not given.
        strict_length: Refuse longer texts instead of cutting them.
        batch_size: Texts a forward pass; does not change results.
        words: Merge the pieces of a word: key pieces summed, query pieces averaged.
        exclude_special: Leave special tokens out, as rows and as columns, and scale the rest to one; words come first.
        maps: Keep the first text's attention matrices in `Analysis.maps`: `True` as they are, `"pooled"` for pictures:
            beyond 512 tokens as means and maxima of square tiles, so that memory does not grow with the length.
        revision, device, dtype, device_map, trust_remote_code: As in transformers, for a model given by name.

    Returns:
        A frozen result; `.to_dict()` is the JSON contract's object.

    Raises:
        InputError: Bad arguments: unknown layer, head, metric or rules, empty text.
        ModelError: The model cannot be loaded or measured.
        ResourceError: Out of memory.
    """
    rule_set, names = load_rules(rules), chosen(metrics)
    layers, heads = parse_selection("layer", layer), parse_selection("head", head)
    if engine not in ENGINES:
        raise InputError(f"unknown engine '{engine}'", f"Engines: {', '.join(ENGINES)}.")
    check_maps(maps)
    ids = token_ids(ids)
    if inputs is not None and not isinstance(inputs, Mapping):
        raise InputError(f"inputs is a {type(inputs).__name__}, not a dict of tensors")
    loaded = loaded_model(
        model,
        tokenizer=tokenizer,
        processor=processor,
        trust_remote_code=trust_remote_code,
        generates=decoder_texts is None,
        options={"revision": revision, "device": device, "dtype": dtype, "device_map": device_map},
    )
    sites = find_sites(loaded.model)
    chosen_sites = select_sites(sites, stack, layers, loaded.name)
    # A decoder's text is generated by the model as it is measured: without dropout.
    with eager_evaluation(loaded.model):
        prepared = prepare(
            loaded,
            texts=[texts] if isinstance(texts, str) else texts,
            ids=ids,
            decoder_texts=[decoder_texts] if isinstance(decoder_texts, str) else decoder_texts,
            images=images,
            audio=audio,
            tensors=inputs,
            max_length=max_length,
            strict_length=strict_length,
            batch_size=batch_size,
        )
    measured = _measure(
        loaded, sites, chosen_sites, heads, prepared, rule_set, names, engine, words, exclude_special, maps
    )
    return _result(loaded, prepared, measured, rule_set, names, heads)


# ------------------------------------------------------------------ measuring
@dataclass(frozen=True)
class _Measured:
    """Per-text values by layer and metric, what the sites turned out to be, and the first text's maps."""

    values: dict[Layer, dict[str, Values]]
    facts: dict[Layer, SiteFacts]
    maps: tuple[AttentionMap, ...]
    warnings: tuple[str, ...]
    engine: str


def _measure(
    loaded: LoadedModel,
    sites: tuple[Site, ...],
    wanted: tuple[Site, ...],
    heads: Selection,
    prepared: Prepared,
    rules: RuleSet,
    names: tuple[str, ...],
    engine: str,
    words: bool,
    exclude_special: bool,
    maps: Maps,
) -> _Measured:
    needed = dict.fromkeys((*names, *rules.metrics, *rules.without_sink().metrics))
    statistics = HeadStatistics(tuple(variant(n) for n in needed))
    keys = {(s.stack, s.layer) for s in wanted}
    capture = Capture(
        loaded.model,
        sites,
        selected=lambda site: (site.stack, site.layer) in keys,
        consumers=(statistics,),
        engine=_engine(engine, loaded.model, prepared),
        renormalise=exclude_special,
    )
    parts: list[tuple[tuple[int, ...], dict[Layer, dict[str, Values]]]] = []
    pictures: tuple[AttentionMap, ...] = ()
    most = MOST_CELLS if maps == "pooled" else None
    for number, batch in enumerate(prepared.batches):
        first = batch.order.index(0) if maps and 0 in batch.order else None
        keep = None if first is None else Keep(batch, first, heads, words, exclude_special, most)
        capture.consumers = (statistics,) if keep is None else (statistics, keep)
        capture.groups = token_groups(batch, words, exclude_special) if words or exclude_special else None
        capture.batch(batch.inputs, {n: Axis(a.lengths, a.special) for n, a in batch.axes.items()}, len(batch.order))
        parts.append((batch.order, statistics.finish()))
        _check_readable(keys, capture)
        if number == 0:
            _check_heads(loaded, capture.facts, keys, heads)
        if keep is not None:
            pictures = keep.maps()
    facts = {
        (s.stack, s.layer): capture.facts[s.stack, s.layer]
        for s in sites
        if (s.stack, s.layer) in capture.facts and (s.stack, s.layer) not in capture.unreadable
    }
    pictures = tuple(m for m in pictures if (m.stack, m.layer) in facts)
    notes = _left_out(wanted, capture)
    used = "full" if engine == "full" else "streaming" if capture.streamed else "layerwise"
    return _Measured(_joined(parts, prepared.texts), facts, pictures, (*capture.findings.warnings(), *notes), used)


def _engine(wanted: str, model: PreTrainedModel, prepared: Prepared) -> Engine:
    """The engine that `auto` stands for."""
    if wanted in ("streaming", "layerwise", "full"):
        return cast(Engine, wanted)
    longest = max((a.special.shape[1] for b in prepared.batches for a in b.axes.values()), default=0)
    half = model.dtype in (torch.float16, torch.bfloat16)
    return "layerwise" if half and longest <= _SHORT else "streaming"


def _left_out(wanted: tuple[Site, ...], capture: Capture) -> list[str]:
    """One line for each stack of which something is missing from the result, and why."""
    known = capture.facts.keys() | capture.unreadable.keys()
    idle = dict.fromkeys(s.stack for s in wanted if (s.stack, s.layer) not in known)
    notes = [f"{name}: no attention was computed on this input" for name in idle]
    reasons: dict[str, list[int]] = {}
    for stack, layer in capture.unreadable:
        reasons.setdefault(stack, []).append(layer)
    for stack, numbers in reasons.items():
        which = f"layer {numbers[0]} is" if len(numbers) == 1 else f"layers {ranges(sorted(numbers))} are"
        notes.append(f"{stack}: {which} left out: {capture.unreadable[stack, numbers[0]]}")
    return notes


def _check_heads(loaded: LoadedModel, facts: Mapping[Layer, SiteFacts], wanted: set[Layer], heads: Selection) -> None:
    ran = [facts[key] for key in facts if key in wanted]
    if not ran:
        stacks = sorted({stack for stack, _ in wanted})
        raise InputError(
            f"{', '.join(stacks)}: no attention was computed on this input",
            "Give the input that this part of the model reads.",
        )
    heads.check([f.heads for f in ran], f"the selected layers of {loaded.name}")


def _check_readable(wanted: set[Layer], capture: Capture) -> None:
    """Refuse where nothing that was asked for can be read."""
    if capture.unreadable and not any(key in capture.facts and key not in capture.unreadable for key in wanted):
        raise next(iter(capture.unreadable.values()))


def _joined(
    parts: Sequence[tuple[tuple[int, ...], dict[Layer, dict[str, Values]]]], texts: int
) -> dict[Layer, dict[str, Values]]:
    """Batches put together, texts in the user's order."""
    result: dict[Layer, dict[str, Values]] = {}
    for order, layers in parts:
        for layer, metrics in layers.items():
            for name, values in metrics.items():
                shape = (texts, values.value.shape[1])
                into = result.setdefault(layer, {}).setdefault(
                    name, Values(np.full(shape, np.nan), np.full(shape, np.nan))
                )
                into.value[list(order)], into.chance[list(order)] = values.value, values.chance
    return result


# ------------------------------------------------------------------ the result
def _result(
    loaded: LoadedModel,
    prepared: Prepared,
    measured: _Measured,
    rules: RuleSet,
    names: tuple[str, ...],
    heads: Selection,
) -> Analysis:
    records = tuple(
        record
        for key, facts in measured.facts.items()
        if key in measured.values
        for record in head_records(facts, measured.values[key], rules, names, heads.within(facts.heads))
    )
    return Analysis(
        model=model_info(loaded, measured.facts),
        engine=measured.engine,
        rules=RuleInfo(rules.name, rules.thresholds),
        inputs=InputInfo(prepared.texts, prepared.tokens, prepared.truncated, prepared.first_tokens),
        heads=records,
        versions=versions(),
        warnings=tuple(dict.fromkeys((*loaded.warnings, *prepared.warnings, *measured.warnings))),
        maps=measured.maps,
    )
