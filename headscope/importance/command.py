"""`head_importance`: score every head of a model on texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as replace_fields
from os import PathLike
from typing import Any

from transformers import PreTrainedModel

from headscope.capture.evaluation import evaluating
from headscope.capture.outputs import Output, find_outputs
from headscope.errors import InputError, check_type
from headscope.importance.examples import Examples, Source, read_examples
from headscope.importance.method import Method, Task
from headscope.importance.methods import method_named
from headscope.importance.result import Importance, importance_result
from headscope.importance.texts import Data, Share, cut, deal, label_numbers, ready
from headscope.models.chosen_sites import select_sites
from headscope.models.describe import describe
from headscope.models.loading import LoadedModel
from headscope.models.selection import Selection, check_count, check_seed, parse_selection
from headscope.models.sites import find_sites
from headscope.models.versions import versions
from headscope.models.whole import whole_model

UNITS = ("head", "kv-group")
REPLACEMENTS = ("zero", "mean")
# What would mean nothing with each layer's scores divided by their norm.
_NOT_BY_LAYER = ("ablation", "random", "surgeon", "reconstruction")
# Tokens that scores are taken on where the user names no number.
TOKENS = 16_384


def head_importance(
    model: str | PathLike[str] | PreTrainedModel | None = None,
    data: Source | None = None,
    *,
    text_column: str = "text",
    method: str = "gradient",
    replace: str = "zero",
    units: Sequence[str] = UNITS,
    normalise: bool = False,
    layer: str | int | Sequence[int] = "all",
    head: str | int | Sequence[int] = "all",
    stack: str | Sequence[str] | None = None,
    max_length: int | None = None,
    batch_size: int | None = None,
    tokens: int | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    revision: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    report: Callable[[str], None] | None = None,
) -> Importance:
    """Score every head, and every group of heads that share a key-value head: the more, the more it matters.

    Args:
        model: A hub id, a directory (a pruned one, too), a `.gguf` file, a loaded transformers model (left as it was),
            or None for the default model. By name, the checkpoint's own class is loaded, with its head.
        data: A `.txt` file (a text a line), a `.jsonl` file (`text`, and `label` for classifiers), any other form that
            `analyze_corpus` reads, or texts. Long texts are cut into pieces.
        text_column: Where texts are found.
        method: `gradient`, `gradient-token`, `ablation`, `surgeon`, `reconstruction`, `confidence`, `magnitude` or
            `random`.
        replace: With `ablation`, what a head gives instead: `zero`, or its `mean` over all tokens.
        units: `head`, `kv-group`, or both.
        normalise: Divide each layer's scores by their L2 norm.
        layer, head, stack: Only these, written as in `analyze`.
        max_length: Tokens a piece of text, special ones included; 256, or the model's limit, where it is not given.
        batch_size: Texts a forward pass; does not change results.
        tokens: Tokens that are used at most, drawn from all over the texts; 16,384 where it is not given.
        tokenizer, processor, revision, device, dtype, device_map, trust_remote_code: As in `analyze`.
        seed: For which texts are drawn, for masks, and for `random`.
        report: Called with lines for the user: what it will cost.

    Raises:
        InputError: Bad arguments, or texts that are missing, too short, or without the labels that a classifier needs.
        ModelError: The model cannot be loaded, or its heads cannot be told apart.
        ResourceError: Out of memory.
    """
    chosen = method_named(method)
    _check(chosen, replace, units, normalise, tokens, data)
    check_count("max_length", max_length)
    check_count("batch_size", batch_size)
    check_seed(seed)
    layers, heads = parse_selection("layer", layer), parse_selection("head", head)
    examples = None if data is None else read_examples(data, text_column=text_column)
    options = {"revision": revision, "device": device, "dtype": dtype, "device_map": device_map}
    loaded = whole_model(model, tokenizer, processor, options | {"trust_remote_code": trust_remote_code})
    say = report or (lambda line: None)
    with evaluating(loaded.model):
        sites = find_sites(loaded.model)
        outputs = find_outputs(loaded.model, select_sites(sites, stack, layers, loaded.name))
        heads.check([o.state.kept for o in outputs], f"the selected layers of {loaded.name}")
        wanted = _units(outputs, units)
        notes: list[str] = []
        texts = None
        if examples is not None and chosen.needs_data:
            texts = _data(loaded, examples, max_length, batch_size, tokens or TOKENS, seed, notes)
        task = Task(loaded.model, outputs, texts, wanted, replace, normalise, seed, say)
        scored = chosen.score(task)
    result = importance_result(
        task,
        scored,
        model=describe(loaded),
        method=method,
        warnings=tuple(dict.fromkeys((*loaded.warnings, *notes))),
        versions=versions(),
    )
    return result if heads.items is None else _only(result, outputs, heads)


def _only(result: Importance, outputs: Sequence[Output], heads: Selection) -> Importance:
    """The chosen heads and the groups that have any of them; curves are of whole layers."""
    chosen = {(s.stack, s.layer, h) for o in outputs for s in o.sites for h in heads.within(o.state.kept)}
    return replace_fields(
        result,
        heads=tuple(h for h in result.heads if (h.stack, h.layer, h.head) in chosen),
        kv_groups=tuple(g for g in result.kv_groups if any((g.stack, g.layer, h) in chosen for h in g.heads)),
        curves=(),
    )


def _check(
    method: Method, replace: str, units: Sequence[str], normalise: bool, tokens: int | None, data: object
) -> None:
    if replace not in REPLACEMENTS:
        raise InputError(f"replace is {replace!r}", f"It is one of {', '.join(REPLACEMENTS)}.")
    if replace != "zero" and method.name != "ablation":
        raise InputError(f"{method.name} replaces nothing", "--with goes with --method ablation.")
    check_type("units", units, (list, tuple, set, frozenset), "a list of names")
    if not units or not all(isinstance(u, str) and u in UNITS for u in units):
        raise InputError(f"units is {units!r}", f"Give some of {', '.join(UNITS)}.")
    if normalise and method.name in _NOT_BY_LAYER:
        raise InputError(f"{method.name} compares layers by size", "Leave --normalize out.")
    check_count("tokens", tokens)
    if method.needs_data and data is None:
        raise InputError(f"{method.name} scores heads on texts, and there are none", "Give --data FILE.")


def _units(outputs: Sequence[Output], wanted: Sequence[str]) -> tuple[str, ...]:
    """Groups of one head are heads."""
    grouped = any(o.state.group > 1 for o in outputs)
    kept = tuple(u for u in UNITS if u in wanted and (grouped or u == "head"))
    if not kept:
        raise InputError("the model's heads share no keys and values, so there are no groups", "Score heads instead.")
    return kept


def _data(
    loaded: LoadedModel,
    examples: Examples,
    length: int | None,
    batch_size: int | None,
    tokens: int,
    seed: int,
    notes: list[str],
) -> Data:
    label_numbers(loaded.model, examples.labels)  # errors count texts as the user does
    pieces = cut(loaded, examples, length)
    drawn = deal(pieces, {"ranking": Share(1, tokens)}, seed)["ranking"]
    if len(drawn) < len(pieces):
        all_tokens = sum(p.tokens for p in pieces)
        notes.append(f"scored on {sum(p.tokens for p in drawn):,} of {all_tokens:,} tokens, drawn by chance (--tokens)")
    labels = label_numbers(loaded.model, [p.label for p in drawn])
    data = ready(loaded, drawn, labels, length=length, batch_size=batch_size, seed=seed)
    data.loss.remember(loaded.model, data.batches)
    return data
