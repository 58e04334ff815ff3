"""`headscope analyze`: label attention heads on texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import headscope
from headscope.cli import catalogue, corpus, inputs, options, text_options
from headscope.cli.errors import reported, say
from headscope.cli.output import Sink, check_directory, check_target, print_table
from headscope.cli.progress import progress, show
from headscope.errors import InputError
from headscope.files import together
from headscope.heads import plugins
from headscope.models.selection import parse_selection

if TYPE_CHECKING:
    from headscope.results import Analysis

_MEASURE = "Measurement"

Rules = Annotated[
    str,
    typer.Option(
        "--rules",
        metavar="RULES",
        help="What earns a label: seed, calibrated or a .toml file." + plugins.help_text(plugins.RULES),
        rich_help_panel=_MEASURE,
    ),
]
Metrics = Annotated[
    str,
    typer.Option(
        "--metrics",
        metavar="METRICS",
        help="What is measured: core, all or names with commas." + plugins.help_text(plugins.METRICS),
        rich_help_panel=_MEASURE,
    ),
]
Engine = Annotated[
    Literal["auto", "streaming", "layerwise", "full"],
    typer.Option(
        "--engine",
        help="How attention is read: without matrices, one layer at a time, or all at once.",
        rich_help_panel=_MEASURE,
    ),
]
Words = Annotated[bool, typer.Option("--words", help="Merge sub-word pieces into words.", rich_help_panel=_MEASURE)]
ExcludeSpecial = Annotated[
    bool,
    typer.Option(
        "--exclude-special", help="Leave special tokens out, rows and columns; renormalise.", rich_help_panel=_MEASURE
    ),
]
Heatmaps = Annotated[
    Path | None,
    typer.Option(
        "--heatmaps", metavar="DIR", help="Also draw PNGs there, of the first text.", rich_help_panel="Output"
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="FILE.npz",
        help="Also write tokens and matrices of the first text, an array STACK.LAYER each.",
        rich_help_panel="Output",
    ),
]

Html = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE.html", help="Also write the page of `headscope report`.", rich_help_panel="Output"
    ),
]


def analyze(
    text: options.Texts = None,
    file: options.TextFile = None,
    ids: options.Ids = None,
    tokenizer: options.Tokenizer = None,
    decoder_text: options.DecoderTexts = None,
    image: options.Images = None,
    audio: options.Sounds = None,
    generate: text_options.Generate = None,
    chat: text_options.Chat = False,
    pair: text_options.Pair = None,
    pre_split: text_options.PreSplit = False,
    max_length: options.MaxLength = None,
    strict_length: options.StrictLength = False,
    batch_size: options.BatchSize = None,
    data: corpus.Data = None,
    text_column: corpus.TextColumn = None,
    split: corpus.Split = None,
    strict: corpus.Strict = False,
    sample: corpus.Sample = None,
    until: corpus.Until = None,
    runner: corpus.Runner = None,
    workers: corpus.Workers = None,
    ray_address: corpus.RayAddress = None,
    resume: corpus.Resume = False,
    checkpoint: corpus.Checkpoint = None,
    model: options.Model = None,
    revision: options.Revision = None,
    layer: options.Layer = "all",
    head: options.Head = "all",
    stack: options.Stacks = None,
    device: options.Device = "auto",
    dtype: options.DType = None,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    rules: Rules = "seed",
    metrics: Metrics = "core",
    engine: Engine = "auto",
    words: Words = False,
    exclude_special: ExcludeSpecial = False,
    types: catalogue.Types = None,
    conllu: catalogue.Conllu = None,
    mentions: catalogue.Mentions = None,
    haystack: catalogue.Haystack = None,
    needles: catalogue.Needles = None,
    ablate_check: catalogue.AblateCheck = False,
    format: options.Format = None,
    output: options.Output = None,
    heatmaps: Heatmaps = None,
    weights: Weights = None,
    html: Html = None,
    per_text: corpus.PerText = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Measure and label attention heads on texts, images or sounds."""
    with reported(debug):
        sink = Sink(output, force)
        sink.check()
        _check_pictures(heatmaps, weights, html, force)
        _check_apart(output, {"--weights": weights, "--html": html, "--per-text": per_text})
        chosen = _chosen_format(output, format)
        parse_selection("layer", layer)
        parse_selection("head", head)
        of_corpus: dict[str, Any] = {
            "text_column": text_column,
            "split": split,
            "strict": strict,
            "sample": sample,
            "until": until,
        }
        of_corpus |= {"runner": runner, "workers": workers, "ray_address": ray_address, "resume": resume}
        of_corpus |= {"checkpoint": checkpoint, "per_text": per_text}
        of_texts: dict[str, object] = {"a TEXT": text, "--file": file, "--ids": ids, "--image": image, "--audio": audio}
        of_texts |= {"--generate": generate, "--chat": chat, "--pair": pair, "--pre-split": pre_split}
        corpus.check_options(data, of_corpus, of_texts)
        of_types = catalogue.arguments(types, conllu, mentions, haystack, needles, ablate_check, quiet)
        shared: dict[str, Any] = {
            "model": model,
            "tokenizer": tokenizer,
            "layer": layer,
            "head": head,
            "stack": options.names(stack),
            "rules": rules,
            "metrics": metrics,
            "engine": engine,
            "max_length": max_length,
            "strict_length": strict_length,
            "batch_size": batch_size,
            "words": words,
            "exclude_special": exclude_special,
            "maps": _maps(weights, heatmaps, html),
            "revision": revision,
            "device": device,
            "dtype": dtype,
            "device_map": device_map,
            "trust_remote_code": trust_remote_code,
        }

        def write(analysis: Analysis) -> None:
            _tell(analysis, quiet)
            with together():
                _write_pictures(analysis, heatmaps, weights, html, force)
                _write(analysis, chosen, sink)

        if data is not None:
            given = {"decoder_text": corpus.decoder_text(decoder_text), "seed": seed, "force": force}
            corpus.run(data, shared | of_corpus | of_types | given, output, write, quiet, debug)
        else:
            found = inputs.given(text, file, ids, decoder_text, image, audio)
            found |= text_options.arguments(generate, chat, pair, pre_split, found)
            with progress("loading the model and measuring …", quiet, debug):
                seed_everything(seed)
                analysis = headscope.analyze(**found, **shared, **of_types, seed=seed)
            write(analysis)


def _chosen_format(output: Path | None, format: str | None) -> str:
    from headscope.views.records import format_for

    return format_for(output, format)


def _maps(weights: Path | None, heatmaps: Path | None, html: Path | None) -> bool | Literal["pooled"]:
    """Matrices are written as they are; without that, pictures of long texts need no more than tiles."""
    if weights is not None:
        return True
    return "pooled" if heatmaps is not None or html is not None else False


def _check_pictures(heatmaps: Path | None, weights: Path | None, html: Path | None, force: bool) -> None:
    if html is not None:
        from headscope.cli.report import page_target

        page_target(html, force)
    if weights is not None:
        if weights.suffix != ".npz":
            raise InputError(f"--weights writes .npz, not {weights.name!r}", "name a file that ends with .npz")
        check_target(weights, force)
    if heatmaps is None:
        return
    if heatmaps.exists() and not heatmaps.is_dir():
        raise InputError(f"{heatmaps} is not a directory", "--heatmaps takes a directory")
    if not force and heatmaps.is_dir() and any(heatmaps.glob("*.png")):
        raise InputError(f"{heatmaps} already holds pictures", "use --force to overwrite them, or another directory")
    check_directory(heatmaps if heatmaps.is_dir() else heatmaps.parent)


def _check_apart(output: Path | None, others: Mapping[str, Path | None]) -> None:
    """Refuse one file for two results: the second would take the first one's place."""
    for name, other in others.items():
        if output is not None and other is not None and output.absolute() == other.absolute():
            raise InputError(f"--output and {name} both name {output}", "name two files")


def seed_everything(seed: int) -> None:
    """A few architectures draw random numbers in the forward pass (hashing, random blocks, masks)."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _tell(analysis: Analysis, quiet: bool) -> None:
    """The header and the warnings, on standard error."""
    if not quiet:
        from headscope.views.tables import header_lines

        show(header_lines(analysis))
    for warning in analysis.warnings:
        say("warning", warning)


def _write_pictures(
    analysis: Analysis, heatmaps: Path | None, weights: Path | None, html: Path | None, force: bool
) -> None:
    if html is not None:
        from headscope.cli.report import command_line

        Sink(html, force).text(headscope.report(analysis, command=command_line()).html)
    if heatmaps is not None:
        from headscope.views.heatmaps import write_heatmaps

        write_heatmaps(analysis, heatmaps, force=force)
    if weights is not None:
        from headscope.cli.weights import write_weights

        write_weights(analysis, weights, force)


def _write(analysis: Analysis, chosen: str, sink: Sink) -> None:
    if chosen == "table" and sink.path is None:
        from headscope.views.tables import analysis_table

        print_table(analysis_table(analysis, header=False))
        return
    from headscope.views.records import render

    sink.text(render(analysis, chosen))
