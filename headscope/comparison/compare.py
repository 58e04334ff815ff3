"""`compare`: two models on the same texts, head by head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from headscope.comparison.changes import changed_heads, in_pairs
from headscope.comparison.distances import between, matching, same_places
from headscope.comparison.result import Comparison
from headscope.comparison.side import Side, Ways, measure
from headscope.comparison.texts import Source, small_corpus
from headscope.errors import InputError
from headscope.heads.arguments import loaded_model, token_ids
from headscope.heads.interval import rough
from headscope.heads.measuring import ENGINES
from headscope.heads.metrics import chosen, plugin_versions, plugin_warnings
from headscope.heads.rules import load_rules
from headscope.models.selection import check_count, check_seed, parse_selection
from headscope.models.versions import versions
from headscope.results import RuleInfo

Model = str | PathLike[str] | PreTrainedModel


def compare(
    a: Model,
    b: Model,
    texts: str | Sequence[str] | None = None,
    *,
    data: Source | None = None,
    text_column: str = "text",
    sample: int | None = None,
    ids: Sequence[int] | Sequence[Sequence[int]] | Tensor | NDArray[np.integer[Any]] | None = None,
    decoder_texts: str | Sequence[str] | None = None,
    images: Sequence[Any] | None = None,
    audio: Sequence[Any] | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    layer: str | int | Sequence[int] = "all",
    head: str | int | Sequence[int] = "all",
    stack: str | Sequence[str] | None = None,
    rules: str = "seed",
    metrics: str = "core",
    engine: str = "auto",
    words: bool = False,
    exclude_special: bool = False,
    max_length: int | None = None,
    strict_length: bool = False,
    batch_size: int | None = None,
    max_rows: int = 256,
    seed: int = 0,
    revision: str | None = None,
    revision_b: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> Comparison:
    """Compare two models on the same texts: labels, metrics, where heads look, and which head is which.

    A difference of a metric is the mean over texts of the second model's value less the first's, with a 95 % interval
    over these differences: what makes one text unlike another is in both models and falls out. The distance of a head
    is how far its rows are from those of the head of the same number, and the matching pairs heads of all layers so
    that the sum of distances is least (`headscope.comparison.distances`).

    Rows compare only on the same tokens. Where tokenizers cut a text in another way, it does not count for distances;
    `words` may help, with `exclude_special` where special tokens differ, too. A cased and an uncased letter are alike.

    Args:
        a, b: Hub ids, directories, `.gguf` files or loaded models (left as they were). One of them is in memory at a
            time, if given by name. Of a pruned model, numbers are those of the original.
        texts: One text or several.
        data: A small corpus instead: what `headscope.reading.open_corpus` reads. Of more than 2,000 texts, 2,000 are
            drawn.
        text_column: Where its texts are found.
        sample: Only so many of its texts, drawn with `seed`.
        ids, decoder_texts, images, audio: As for `headscope.analyze`. A decoder's text that is not given is written by
            the first model, and read by both.
        tokenizer, processor: For both models.
        layer, head, stack, rules, metrics, engine, words, exclude_special, max_length, strict_length, batch_size: As
            for `headscope.analyze`, for both models; negative layers count from the end of each.
        max_rows: Rows of attention to draw from each stack.
        seed: Of the rows, and of the sample.
        revision, revision_b: Of the first model, and of the second.
        device, dtype, device_map, trust_remote_code: As in transformers, for models given by name.

    Returns:
        A frozen result; `.to_dict()` is the JSON contract's object.

    Raises:
        InputError: Bad arguments, or no head of one model has its like in the other.
        ModelError: A model cannot be loaded or measured.
        ResourceError: Out of memory.
    """
    if engine not in ENGINES:
        raise InputError(f"unknown engine '{engine}'", f"Engines: {', '.join(ENGINES)}.")
    for name, number in (("max_rows", max_rows), ("sample", sample), ("max_length", max_length)):
        check_count(name, number)
    check_count("batch_size", batch_size)
    check_seed(seed)
    ways = Ways(
        layers=parse_selection("layer", layer),
        heads=parse_selection("head", head),
        stack=stack,
        rules=load_rules(rules),
        names=chosen(metrics),
        engine=engine,
        words=words,
        exclude_special=exclude_special,
        max_length=max_length,
        strict_length=strict_length,
        batch_size=batch_size,
        max_rows=max_rows,
        seed=seed,
    )
    notes = list(plugin_warnings(rules, metrics, (*ways.names, *ways.rules.metrics)))
    given: dict[str, Any] = {
        "texts": [texts] if isinstance(texts, str) else texts,
        "ids": token_ids(ids),
        "decoder_texts": [decoder_texts] if isinstance(decoder_texts, str) else decoder_texts,
        "images": images,
        "audio": audio,
    }
    if data is not None:
        read, more = small_corpus(data, text_column, sample, seed, given)
        given, notes = {**given, "texts": read}, [*notes, *more]
    shared = {"device": device, "dtype": dtype, "device_map": device_map}
    common = {"tokenizer": tokenizer, "processor": processor, "trust_remote_code": trust_remote_code}
    first = _side(a, given, ways, common, {**shared, "revision": revision}, None)
    second = _side(b, given, ways, common, {**shared, "revision": revision_b}, first)
    return _result(first, second, ways, notes)


def _side(
    model: Model,
    given: Mapping[str, Any],
    ways: Ways,
    common: Mapping[str, Any],
    options: dict[str, Any],
    other: Side | None,
) -> Side:
    """Load a model, measure it, and let it go before the next one is loaded."""
    loaded = loaded_model(model, generates=given["decoder_texts"] is None, options=options, **common)
    return measure(loaded, given, ways, other)


def _result(a: Side, b: Side, ways: Ways, notes: Sequence[str]) -> Comparison:
    pairs, more = in_pairs(a, b, ways)
    same = {rows.stack: same_places(rows) for rows in pairs}
    found = [between(rows, same[rows.stack]) for rows in pairs]
    heads = changed_heads(a, b, ways, same)
    return Comparison(
        a=a.info,
        b=b.info,
        rules=RuleInfo(ways.rules.name, ways.rules.thresholds),
        texts=a.texts,
        tokens=(a.count, b.count),
        heads=heads,
        removed=(_removed(a), _removed(b)),
        matching=tuple(match for each in found for match in matching(each)),
        rows=sum(len(rows.rows) for rows in pairs),
        between=tuple(found),
        versions=versions() | plugin_versions((*ways.names, *ways.rules.metrics)),
        warnings=tuple(dict.fromkeys((*notes, *_warnings(a, b), *more, *rough(a.texts)))),
    )


def _removed(side: Side) -> dict[str, tuple[int, ...]]:
    return {f"{stack}.{layer}": heads for (stack, layer), heads in side.removed.items()}


def _warnings(a: Side, b: Side) -> list[str]:
    """What concerns both models once, all else with the name of the model."""
    both = set(a.warnings) & set(b.warnings)
    lines = list(dict.fromkeys(w for w in a.warnings if w in both))
    return [*lines, *(f"{side.info.name}: {w}" for side in (a, b) for w in side.warnings if w not in both)]
