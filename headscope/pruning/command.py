"""`prune`: heads out of a model that stays as it was, proved, measured and saved."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headscope.capture.evaluation import evaluating
from headscope.capture.outputs import find_outputs
from headscope.errors import InputError, check_type
from headscope.importance.examples import Examples, Source, read_examples
from headscope.importance.result import Importance
from headscope.models.describe import describe
from headscope.models.loading import LoadedModel
from headscope.models.versions import versions
from headscope.models.whole import whole_model
from headscope.pruning.choosing import Say, choose
from headscope.pruning.cost import cost_of, layer_heads
from headscope.pruning.directory import check_directory
from headscope.pruning.guide import REPAIR_TOKENS, Guide, deal_roles, make_guide
from headscope.pruning.latency import SHAPES, Shape, measure_latency, parse_shapes, same_shapes
from headscope.pruning.outcome import RepairOutcome
from headscope.pruning.plan import Heads, Plan, make_plan
from headscope.pruning.probes import probes
from headscope.pruning.proof import prove
from headscope.pruning.quality import check_examples, measure_quality
from headscope.pruning.repairing import check_repairable, outcome, repaired
from headscope.pruning.report import Equivalence
from headscope.pruning.result import Change, Conditions, Latency, PruneResult, Quality
from headscope.pruning.save import save_pruned
from headscope.pruning.save_report import FORMS, Form, SaveReport
from headscope.pruning.surgery import apply, prepare
from headscope.pruning.uniform import as_uniform
from headscope.pruning.zeroing import as_heads, zeroed_copy


def prune(
    model: str | PathLike[str] | PreTrainedModel | None,
    heads: Heads | None = None,
    *,
    scores: str | Path | Importance | None = None,
    method: str | None = None,
    data: Source | None = None,
    text_column: str = "text",
    drop: float | None = None,
    until_drop: str | float | None = None,
    unit: str | None = None,
    min_per_layer: int = 1,
    steps: int = 1,
    repair: Source | bool = False,
    repair_mlp: bool = False,
    repair_tokens: int = REPAIR_TOKENS,
    max_length: int | None = None,
    batch_size: int | None = None,
    output: str | Path | None = None,
    save_as: Form = "structural",
    pad: bool = False,
    ragged: str = "refuse",
    allow_empty: bool = False,
    dry_run: bool = False,
    force: bool = False,
    eval: Source | None = None,
    latency: bool | str = True,
    tokenizer: Any = None,
    processor: Any = None,
    revision: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    report: Say | None = None,
) -> PruneResult:
    """Remove heads from a copy of a model, prove that nothing else changed, measure what it brings, and save it.

    What is not proved is neither measured nor saved: see `PruneResult.passed`. To prune a model in place, take
    `prune_heads`.

    Args:
        model: A hub id, a directory (a pruned one, too), a `.gguf` file, a loaded transformers model (left as it was),
            or None for the default model. By name, the checkpoint's own class is loaded, with its head.
        heads: As on the command line, `"5:0,3;7:1-4"`, or `{5: [0, 3]}`; in the numbers of the original model. Or None:
            then scores say which.
        scores: A file that `headscope importance` wrote, or what `head_importance` returned.
        method: How to score heads, as in `head_importance`.
        data: Texts to score heads on, to select by and to report on; dealt out, so that none serves twice.
        text_column: Where texts are found in `data`, `repair` and `eval`.
        drop: The share of heads, or groups, that goes; rounded down.
        until_drop: As many go as lose less than this on texts that they are not scored on: `"1%"` of perplexity is
            ln(1.01) = 0.00995 nats; of models without a head, of 1 - cosine.
        unit: `head` or `kv-group`; by default groups where heads share keys and values and their shapes shrink.
        min_per_layer: Heads or groups that each layer keeps.
        steps: Score anew this many times, each time for a part of what goes.
        repair: Texts to refit the output projections on, so that what is left makes up for what went; True for `data`.
            Applied only if it helps on texts of its own.
        repair_mlp: Refit down projections, too; that helps on text like the repair texts only.
        repair_tokens: Tokens to refit on at most.
        max_length: Tokens of a piece of these texts; 256, or the model's limit, where it is not given.
        batch_size: Texts a forward pass; does not change results.
        output: A directory to write, which must not exist; nothing is written without.
        save_as: `structural`, `remote-code`, `uniform`, or `masked`, where weights keep their shapes and heads are
            zeroed.
        pad: With `uniform`, fill layers up with zeroed heads to the largest.
        ragged, allow_empty: As in `prune_heads`; with `masked` every plan is legal.
        dry_run: Do all but writing.
        force: Write over an existing directory.
        eval: What to measure quality on: a `.txt` or `.jsonl` file, or texts.
        latency: Whether to measure it, or shapes to measure it for: `"1x32,8x128"`.
        tokenizer, processor, revision, device, dtype, device_map, trust_remote_code: As in `analyze`.
        seed: For made-up inputs, for what a masked language model has to predict, and for who gets which texts.
        report: Called with lines for the user while this goes on.

    Raises:
        InputError: A layer or head does not exist, the plan is not legal, or a file is missing or there already.
        ModelError: The model cannot be loaded, or its heads cannot be removed exactly.
        ResourceError: Out of memory or disk; nothing half-written remains.
    """
    check_type("heads", heads, (str, list, tuple, Mapping), "text such as '5:0,3', or heads by layer")
    examples = None if data is None else read_examples(data, text_column=text_column)
    guide = make_guide(
        scores=scores,
        method=method,
        drop=drop,
        until_drop=until_drop,
        unit=unit,
        min_per_layer=min_per_layer,
        steps=steps,
        repair=repair is not False,
        repair_mlp=repair_mlp,
        data=examples,
        repair_data=None if isinstance(repair, bool) else read_examples(repair, text_column=text_column),
        repair_tokens=repair_tokens,
        max_length=max_length,
        batch_size=batch_size,
        seed=seed,
    )
    if (heads is None) != guide.chooses:
        raise InputError(
            "what goes is said by heads or by scores" + (", not by both" if guide.chooses else ""),
            'give --heads "5:0,3", or --scores FILE, or --method',
        )
    wanted = _Wanted(
        heads=heads,
        guide=guide,
        say=report or (lambda line: None),
        ragged=ragged,
        allow_empty=allow_empty,
        directory=None if output is None else check_directory(output, force=force),
        form=_form(save_as, pad),
        pad=pad,
        force=force,
        dry_run=dry_run,
        examples=None if eval is None else read_examples(eval, text_column=text_column),
        shapes=_shapes(latency),
        seed=seed,
    )
    options = {"revision": revision, "device": device, "dtype": dtype, "device_map": device_map}
    loaded = whole_model(model, tokenizer, processor, options | {"trust_remote_code": trust_remote_code})
    with evaluating(loaded.model):
        return _pruned(loaded, wanted)


@dataclass(frozen=True)
class _Wanted:
    heads: Heads | None
    guide: Guide
    say: Say
    ragged: str
    allow_empty: bool
    directory: Path | None
    form: Form
    pad: bool
    force: bool
    dry_run: bool
    examples: Examples | None
    shapes: tuple[Shape, ...]
    seed: int


def _form(save_as: Form, pad: bool) -> Form:
    if save_as not in FORMS:
        raise InputError(f"save_as is {save_as!r}", f"It is one of {', '.join(FORMS)}.")
    if pad and save_as != "uniform":
        raise InputError(f"nothing is padded with save_as {save_as!r}", "--pad goes with --save-as uniform.")
    return save_as


def _shapes(latency: bool | str) -> tuple[Shape, ...]:
    check_type("latency", latency, (bool, str), "True, False or shapes such as '1x32'")
    if isinstance(latency, str):
        return parse_shapes(latency)
    return SHAPES if latency else ()


# ------------------------------------------------------------------ the pruned copy
def _pruned(loaded: LoadedModel, wanted: _Wanted) -> PruneResult:
    original = loaded.model
    if wanted.examples is not None:
        check_examples(loaded, wanted.examples)
    roles = deal_roles(loaded, wanted.guide)
    check_repairable(original, roles.repair, wanted.guide.repair_mlp)
    choice = None
    if wanted.guide.chooses:
        choice = choose(loaded, wanted.guide, roles, _unit(original, wanted), wanted.say)
    heads = as_heads(choice.heads) if choice is not None else wanted.heads or {}
    after, plan = _without_heads(original, heads, wanted)
    shown, form_notes = _in_form(after, wanted)
    equivalence = prove(original, shown, plan.heads, batches=probes(original, wanted.seed))
    mended: RepairOutcome | None = None
    mending: tuple[str, ...] = ()
    if equivalence.passed:
        mended, mending = repaired(original, after, roles, wanted.guide.repair_mlp, wanted.say)
        if mended is not None and mended.applied:
            shown, _ = _in_form(after, wanted)
    chosen = None if choice is None else outcome(choice, original, shown if equivalence.passed else None, roles)
    cells, conditions, quality, notes = _measured(loaded, shown, equivalence, wanted)
    saved = _saved(after, loaded, wanted) if equivalence.passed else None
    costs = cost_of(original), cost_of(shown)
    return PruneResult(
        model=describe(loaded),
        form=wanted.form,
        layers=layer_heads(shown),
        params=Change(costs[0].params, costs[1].params),
        attention_params=Change(costs[0].attention_params, costs[1].attention_params),
        bytes=Change(costs[0].bytes, costs[1].bytes),
        kv_cache=Change(costs[0].kv_cache, costs[1].kv_cache),
        equivalence=equivalence,
        latency=cells,
        conditions=conditions,
        quality=quality,
        chosen=chosen,
        repair=mended,
        saved=saved,
        warnings=tuple(dict.fromkeys((*loaded.warnings, *plan.notes, *form_notes, *mending, *notes))),
        versions=versions(),
    )


def _unit(original: PreTrainedModel, wanted: _Wanted) -> str:
    """What can leave where the user names nothing: whole groups, if heads share keys and values and shapes shrink."""
    if wanted.guide.unit is not None:
        return wanted.guide.unit
    shrinks = wanted.form != "masked" and wanted.ragged == "refuse"
    return "kv-group" if shrinks and any(o.state.group > 1 for o in find_outputs(original)) else "head"


def _without_heads(original: PreTrainedModel, heads: Heads, wanted: _Wanted) -> tuple[PreTrainedModel, Plan]:
    """A copy without the heads, and the plan by which it lost them."""
    if wanted.form == "masked":
        return zeroed_copy(original, heads)
    ways: dict[str, Any] = {"allow_empty": wanted.allow_empty, "ragged": wanted.ragged}
    prepare(original, make_plan(original, heads, **ways))  # what is refused is refused before copying
    after = copy.deepcopy(original)
    plan = make_plan(after, heads, **ways)
    apply(after, plan)
    return after, plan


def _in_form(after: PreTrainedModel, wanted: _Wanted) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The model in the shapes in which it is saved, and what the user should know of them."""
    if wanted.form != "uniform":
        return after, ()
    uniform = as_uniform(after, pad=wanted.pad)
    return uniform.model, tuple(uniform.notes)


# ------------------------------------------------------------------ measuring
_Measured = tuple[tuple[Latency, ...], Conditions | None, Quality | None, tuple[str, ...]]


def _measured(loaded: LoadedModel, after: PreTrainedModel, equivalence: Equivalence, wanted: _Wanted) -> _Measured:
    """Latency and quality, of models that are proved, and notes."""
    if not equivalence.passed:
        return (), None, None, ()
    notes: list[str] = []
    cells: tuple[Latency, ...] = ()
    conditions = quality = None
    if same_shapes(loaded.model, after):
        notes.append("no speed-up expected: shapes unchanged")
    if wanted.examples is not None:
        quality, more = measure_quality(loaded, after, wanted.examples, wanted.seed)
        notes += more
    if wanted.shapes:
        cells, conditions, more = measure_latency(loaded.model, after, wanted.shapes)
        notes += more
    return cells, conditions, quality, tuple(notes)


# ------------------------------------------------------------------ saving
def _saved(after: PreTrainedModel, loaded: LoadedModel, wanted: _Wanted) -> SaveReport | None:
    if wanted.directory is None or wanted.dry_run:
        return None
    return save_pruned(
        after,
        wanted.directory,
        form=wanted.form,
        pad=wanted.pad,
        force=wanted.force,
        tokenizer=loaded.tokenizer,
        processor=loaded.processor,
    )
