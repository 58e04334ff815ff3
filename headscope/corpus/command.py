"""`analyze_corpus`: heads measured over any number of texts, with how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headscope.corpus.checkpoint import Checkpoint
from headscope.corpus.fingerprint import identity
from headscope.corpus.job import Job
from headscope.corpus.partition import MOST_CHARACTERS, MOST_TEXTS, partitions
from headscope.corpus.per_text import PerText
from headscope.corpus.progress import Progress, Watch
from headscope.corpus.result import analysis_of, narrow
from headscope.corpus.run import Total, run
from headscope.corpus.runners import runner_for
from headscope.corpus.summary import Summary
from headscope.corpus.texts import Texts
from headscope.corpus.types import with_types
from headscope.corpus.worker import load
from headscope.errors import HeadscopeError, InputError
from headscope.files import together
from headscope.heads.analysis import analyze
from headscope.heads.catalogue.catalogue import check_files
from headscope.heads.catalogue.choice import choose
from headscope.heads.measuring import ENGINES
from headscope.heads.metrics import chosen, plugin_warnings
from headscope.heads.pictures import Maps, check_maps
from headscope.heads.rules import load_rules
from headscope.models.selection import parse_selection
from headscope.reading import Data, Skipped, open_corpus
from headscope.results import Analysis, CorpusInfo


def analyze_corpus(
    model: str | PathLike[str] | PreTrainedModel | None = None,
    data: Data | None = None,
    *,
    text_column: str = "text",
    split: str | None = None,
    strict: bool = False,
    sample: int | None = None,
    until: float | None = None,
    seed: int = 0,
    tokenizer: Any = None,
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
    decoder_text: str | None = None,
    max_length: int | None = None,
    strict_length: bool = False,
    batch_size: int | None = None,
    words: bool = False,
    exclude_special: bool = False,
    maps: Maps = False,
    per_text: str | PathLike[str] | None = None,
    force: bool = False,
    runner: str = "local",
    workers: int = 1,
    ray_address: str | None = None,
    checkpoint: str | PathLike[str] | None = None,
    resume: bool = False,
    partition: tuple[int, int] = (MOST_TEXTS, MOST_CHARACTERS),
    report: Callable[[Progress], None] = lambda progress: None,
    say: Callable[[str], None] = lambda line: None,
    write: Callable[[Analysis], None] = lambda result: None,
    revision: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> Analysis:
    """Measure and label a model's attention heads over a corpus, in memory that does not grow with it.

    Each metric is the mean over texts of each text's value, with its standard deviation, a 95 % interval of the mean,
    and on how many texts a head has its label. Numbers do not depend on batches, workers or order, up to rounding; the
    same call gives the same bits.

    Args:
        model: A hub id, a directory, a `.gguf` file, a loaded transformers model (for one worker), or None for the
            default model.
        data: A `.txt`, `.jsonl`, `.csv`, `.parquet` or `.conllu` file, a directory or pattern of those, `-` for
            standard input, a dataset; or texts, or mappings with a text each.
        text_column: Where texts are found.
        split: Of a dataset.
        strict: Raise at the first text that cannot be read; otherwise such are skipped, counted and named.
        sample: Measure so many texts only, drawn at random.
        until: Take texts in random order, and stop when every interval is at most so wide (high - low, in the metric's
            own unit), over 20 texts or more.
        seed: Of what is drawn at random.
        tokenizer: A tokenizer, or the name of one, to take instead of the model's own; a name where there are workers.
        layer, head, stack, rules, metrics, engine, max_length, strict_length, words, exclude_special: As for `analyze`.
        types, conllu, mentions, haystack, needles, ablate_check, say: As for `analyze`. Types that bring their own
            inputs are measured once, at the end.
        decoder_text: For encoder-decoders, what the decoder reads beside every text; generated greedily if not given.
        batch_size: Texts a forward pass at most; chosen by length if not given.
        maps: Keep the first measured text's attention matrices, as for `analyze`.
        per_text: A `.parquet` file to write each text's values to, a row a text and head. `force` overwrites it.
        runner: `local`, or `ray` for the actors of a cluster.
        workers: Processes, or actors.
        ray_address: Of a cluster that runs; without it one starts on this machine.
        checkpoint: A directory for what is finished, so that a run that is killed can go on; it is emptied at the end.
        resume: Go on with what `checkpoint` has of the same run.
        partition: Texts and characters that a worker takes at once, at most.
        report: Called after each partition.
        write: Called with the result before what `checkpoint` has is thrown away; if it raises, nothing is lost.
        revision, device, dtype, device_map, trust_remote_code: As in transformers, for a model given by name.

    Raises:
        InputError: Bad arguments or data, a checkpoint of something else.
        ModelError: The model cannot be loaded or measured.
        ResourceError: Out of memory or disk, or workers die again and again.
    """
    if data is None:
        raise InputError("there is no corpus", "give data: a file, a directory, or texts")
    check_maps(maps)
    _check(sample, until, partition, resume, checkpoint, engine)
    files = {"conllu": conllu, "mentions": mentions, "haystack": haystack, "needles": needles}
    choice = choose(types, **files, ablate=ablate_check, seed=seed)
    if choice is not None:
        check_files(choice)
    shared: dict[str, Any] = {"words": words, "exclude_special": exclude_special, "max_length": max_length}
    loading: dict[str, Any] = {"revision": revision, "device": device, "dtype": dtype, "device_map": device_map}
    job = Job(
        model=None if model is None or isinstance(model, PreTrainedModel) else str(model),
        layer=parse_selection("layer", layer),
        head=parse_selection("head", head),
        stack=(stack,) if isinstance(stack, str) else None if stack is None else tuple(stack),
        rules=load_rules(rules),
        names=chosen(metrics),
        tokenizer=tokenizer if isinstance(tokenizer, str) else None,
        loading=loading | {"trust_remote_code": trust_remote_code},
        engine=engine,
        types=() if choice is None else tuple(t.name for t in choice.text_types),
        decoder_text=decoder_text,
        strict_length=strict_length,
        batch_size=batch_size,
        per_text=per_text is not None,
        strict=strict,
        seed=seed,
        **shared,
    )
    # What cannot be loaded by name, in every worker: a caller's own model or tokenizer.
    named = not isinstance(model, PreTrainedModel) and isinstance(tokenizer, str | None)
    loaded = None if named else load(job, model, tokenizer)
    at_work = runner_for(job, loaded, runner, workers, ray_address)
    corpus = open_corpus(data, text_column=text_column, strict=strict, split=split)
    texts = Texts(corpus, sample, until, seed)
    with ExitStack() as opened:
        kept = None
        if checkpoint is not None:
            order = {"sample": sample, "until": until, "partition": list(partition)}
            read = {"name": _place(corpus.name), "text_column": text_column, "split": split} | order
            kept = opened.enter_context(closing(Checkpoint(Path(checkpoint), identity(job, loaded, read), resume)))
        table = None if per_text is None else opened.enter_context(PerText(Path(per_text), force))
        total = Total(lambda found: until is not None and narrow(found, job, until), Watch(report, texts.share, table))
        run(partitions(texts.records(), *partition), at_work, kept, total)
        info = CorpusInfo(corpus.name, texts.skipped.count + total.summary.skipped, sample, until, total.stopped, seed)
        result = _analysis(kept, total.summary, job, info, texts.skipped)
        result = replace(result, warnings=(*result.warnings, *plugin_warnings(rules, metrics, job.shown)))
        if choice is not None:
            result = with_types(result, choice, total.summary, job, model, tokenizer, say)
        if maps:
            first = texts.numbered(total.summary.first_text)
            told: dict[str, Any] = {"tokenizer": tokenizer, "layer": layer, "head": head, "stack": stack}
            told |= {"rules": rules, "engine": engine, "decoder_texts": decoder_text, "maps": maps}
            result = replace(result, maps=analyze(model, first, **told, **shared, **job.loading).maps)
        with together():
            if table is not None:
                table.finish()
            write(result)
        if kept is not None:
            kept.remove()
    return result


def _check(
    sample: int | None,
    until: float | None,
    partition: tuple[int, int],
    resume: bool,
    checkpoint: str | PathLike[str] | None,
    engine: str,
) -> None:
    if engine not in ENGINES:
        raise InputError(f"unknown engine '{engine}'", f"Engines: {', '.join(ENGINES)}.")
    if sample is not None and sample < 1:
        raise InputError(f"sample is {sample}", "it is 1 text or more")
    if until is not None and not until > 0:
        raise InputError(f"until is {until}", "it is the width of an interval, such as 0.01")
    if min(partition) < 1:
        raise InputError(f"partition is {partition}", "it is a number of texts and a number of characters, 1 or more")
    if resume and checkpoint is None:
        raise InputError("there is nothing to resume from", "give checkpoint, the directory of the run that was killed")


def _analysis(kept: Checkpoint | None, summary: Summary, job: Job, info: CorpusInfo, skipped: Skipped) -> Analysis:
    """The result. Where there is none, what is finished goes: all is measured, and the same would come of it again."""
    try:
        return analysis_of(summary, job, info, skipped)
    except HeadscopeError:
        if kept is not None:
            kept.remove()
        raise


def _place(name: str) -> str:
    """A path as seen from everywhere; other names as they are."""
    path = Path(name)
    return str(path.resolve()) if path.exists() else name
