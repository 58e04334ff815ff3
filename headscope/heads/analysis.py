"""`analyze`: run a model on texts, measure every head, label it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from headscope.capture.evaluation import eager_evaluation
from headscope.capture.session import Engine
from headscope.errors import InputError
from headscope.heads.arguments import loaded_model, token_ids
from headscope.heads.catalogue.catalogue import check_files, gather
from headscope.heads.catalogue.choice import Choice, choose
from headscope.heads.catalogue.probing import Probing
from headscope.heads.describe import model_info
from headscope.heads.labels import head_records
from headscope.heads.layer_facts import LayerFacts
from headscope.heads.measuring import ENGINES, Measured, Measuring
from headscope.heads.media import media_of
from headscope.heads.metrics import chosen, plugin_versions, plugin_warnings
from headscope.heads.pictures import Maps, check_maps
from headscope.heads.rules import RuleSet, load_rules
from headscope.heads.sums import LayerSums
from headscope.models.chosen_sites import select_sites
from headscope.models.inputs import Prepared, prepare
from headscope.models.loading import LoadedModel
from headscope.models.selection import Selection, check_seed, parse_selection
from headscope.models.sites import find_sites
from headscope.models.text_form import text_form
from headscope.models.versions import versions
from headscope.results import Analysis, InputInfo, RuleInfo


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
    types: str | Sequence[str] | None = None,
    conllu: str | PathLike[str] | None = None,
    mentions: str | PathLike[str] | None = None,
    haystack: str | PathLike[str] | None = None,
    needles: str | PathLike[str] | None = None,
    ablate_check: bool = False,
    ids: Sequence[int] | Sequence[Sequence[int]] | Tensor | NDArray[np.integer[Any]] | None = None,
    decoder_texts: str | Sequence[str] | None = None,
    images: Sequence[Any] | None = None,
    audio: Sequence[Any] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    generate: int | None = None,
    chat: bool = False,
    pairs: str | Sequence[str] | None = None,
    pre_split: bool = False,
    max_length: int | None = None,
    strict_length: bool = False,
    batch_size: int | None = None,
    words: bool = False,
    exclude_special: bool = False,
    maps: Maps = False,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
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
        rules: `seed`, `calibrated`, the name of installed rules, or the path of a TOML file.
        metrics: `core`, `all`, or names separated by commas. Entropies are in nats, distances in tokens.
        engine: `streaming` computes attention tile by tile and makes no matrices wherever the model lets it,
            `layerwise` holds one layer's matrices at a time, `full` all of them. `auto` streams, but reads models in
            half precision layer by layer up to 1,024 tokens: numbers are then those of their own rounded weights.
        types: Types of the head catalogue to look for: `all`, or names of types or groups, with commas or as a list.
        conllu: Dependency trees, for the type `syntax`.
        mentions: Mentions in JSON Lines or CoNLL-2012 columns, for the type `coreference`.
        haystack, needles: A text, and sentences to hide in it in JSON Lines, for the type `retrieval`.
        ablate_check: Also measure what zeroing the strongest induction heads does, beside zeroing others.
        ids: Token ids as they are, one text's or several texts'.
        decoder_texts: For encoder-decoders, what the decoder reads; generated greedily where it is not given.
        images, audio: Paths, or images and sounds in memory.
        inputs: Ready keyword arguments of the model's forward, padded on either side.
        generate: The model continues each text greedily by so many tokens at most, to its end token; text and
            continuation are then measured in one forward pass. An encoder-decoder's decoder writes so many at most.
        chat: Each text is a user's message in the model's own chat template, up to where the answer begins.
        pairs: Second texts for models that read two, one for all or one each, put together by the tokenizer; where both
            are too long, the longer is cut first.
        pre_split: White space separates the words: each is tokenized by itself, and `words` merges to just these.
        max_length: Tokens kept per text, without what is generated; the model's limit where it is not given.
        strict_length: Refuse longer texts instead of cutting them.
        batch_size: Texts a forward pass; does not change results.
        words: Merge the pieces of a word: key pieces summed, query pieces averaged.
        exclude_special: Leave special tokens out, as rows and as columns, and scale the rest to one; words come first.
        maps: Keep the first text's attention matrices in `Analysis.maps`: `True` as they are, `"pooled"` for pictures:
            beyond 512 tokens as means and maxima of square tiles, so that memory does not grow with the length;
            `"mean"` the mean over each layer's selected heads, for attention rollout.
        seed: Of what the catalogue draws at random.
        say: Called with lines of progress.
        revision, device, dtype, device_map, trust_remote_code: As in transformers, for a model given by name.

    Returns:
        A frozen result; `.to_dict()` is the JSON contract's object.

    Raises:
        InputError: Bad arguments: unknown layer, head, metric or rules, empty text.
        ModelError: The model cannot be loaded or measured.
        ResourceError: Out of memory.
    """
    rule_set, names = load_rules(rules), chosen(metrics)
    files = {"conllu": conllu, "mentions": mentions, "haystack": haystack, "needles": needles}
    choice = choose(types, **files, ablate=ablate_check, seed=seed)
    if choice is not None:
        check_files(choice)
    layers, heads = parse_selection("layer", layer), parse_selection("head", head)
    if engine not in ENGINES:
        raise InputError(f"unknown engine '{engine}'", f"Engines: {', '.join(ENGINES)}.")
    check_maps(maps)
    check_seed(seed)
    ids = token_ids(ids)
    if inputs is not None and not isinstance(inputs, Mapping):
        raise InputError(
            f"inputs is a {type(inputs).__name__}, not a dict of tensors",
            "pass what a tokenizer or processor returns with return_tensors='pt'",
        )
    given: dict[str, Any] = {"texts": texts, "ids": ids, "decoder_texts": decoder_texts}
    given |= {"images": images, "audio": audio, "inputs": inputs}
    form = text_form(generate, chat, pairs, pre_split, given)
    loaded = loaded_model(
        model,
        tokenizer=tokenizer,
        processor=processor,
        trust_remote_code=trust_remote_code,
        generates=decoder_texts is None,
        options={"revision": revision, "device": device, "dtype": dtype, "device_map": device_map}
        | {"writes": generate is not None}
        | ({"own_class": True} if choice is not None and choice.needs_head else {}),
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
            form=form,
        )
    text_types = () if choice is None else choice.text_types
    measuring = Measuring(
        loaded, sites, chosen_sites, heads, rule_set, names, engine, words, exclude_special, text_types
    )
    measured = measuring.run(prepared, maps)
    result = _result(loaded, prepared, measured, rule_set, names, heads)
    if measured.maps:
        result = replace(result, media=media_of(loaded, prepared.batches, chosen_sites, measured.maps))
    left_out = plugin_warnings(rules, metrics, (*names, *rule_set.metrics))
    result = replace(result, warnings=(*result.warnings, *left_out))
    if choice is None:
        return result
    probing = Probing(loaded, sites, chosen_sites, heads, cast(Engine, measured.engine), seed, batch_size, say)
    return _with_types(result, probing, choice, measured, prepared)


# ------------------------------------------------------------------ the result
def _with_types(result: Analysis, probing: Probing, choice: Choice, measured: Measured, prepared: Prepared) -> Analysis:
    """With what the catalogue says of the heads."""
    heads = {layer: probing.places(facts) for layer, facts in measured.facts.items() if layer in measured.types}
    records, catalogue, notes = gather(probing, choice, measured.types, heads, prepared, result.heads)
    warnings = tuple(dict.fromkeys((*result.warnings, *notes)))
    return replace(result, heads=records, catalogue=catalogue, warnings=warnings)


def _result(
    loaded: LoadedModel,
    prepared: Prepared,
    measured: Measured,
    rules: RuleSet,
    names: tuple[str, ...],
    heads: Selection,
) -> Analysis:
    records = tuple(
        record
        for key, facts in measured.facts.items()
        if key in measured.values
        for record in head_records(
            LayerFacts.of(facts), LayerSums.of(measured.values[key], rules), rules, names, heads.within(facts.heads)
        )
    )
    return Analysis(
        model=model_info(loaded, measured.facts),
        engine=measured.engine,
        rules=RuleInfo(rules.name, rules.thresholds),
        inputs=InputInfo(prepared.texts, prepared.tokens, prepared.truncated, prepared.first_tokens),
        heads=records,
        versions=versions() | plugin_versions((*names, *rules.metrics)),
        warnings=tuple(dict.fromkeys((*loaded.warnings, *prepared.warnings, *measured.warnings))),
        maps=measured.maps,
    )
