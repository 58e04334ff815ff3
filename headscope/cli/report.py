"""`headscope report`: one HTML page of every head on texts, to open in a browser."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import headscope
from headscope.cli import catalogue, corpus, inputs, options, text_options
from headscope.cli.analyze import Engine, ExcludeSpecial, Metrics, Rules, Words, seed_everything
from headscope.cli.errors import reported, say
from headscope.cli.output import Sink, check_target
from headscope.cli.progress import progress
from headscope.errors import InputError
from headscope.models.selection import parse_selection

if TYPE_CHECKING:
    from headscope.results import Analysis
    from headscope.views.report.build import Report

_SHOWN = "Also shown"

Importance = Annotated[
    Path | None,
    typer.Option(
        "--importance",
        metavar="FILE.json",
        help="Scores of the same model's heads, as `headscope importance -o` writes them.",
        rich_help_panel=_SHOWN,
    ),
]
Curve = Annotated[
    Path | None,
    typer.Option(
        "--curve",
        metavar="FILE.csv",
        help="What removing heads costs, as `headscope prune --curve` writes it beside its picture.",
        rich_help_panel=_SHOWN,
    ),
]


def report_page(
    text: options.Texts = None,
    file: options.TextFile = None,
    ids: options.Ids = None,
    tokenizer: options.Tokenizer = None,
    decoder_text: options.DecoderTexts = None,
    image: options.Images = None,
    audio: options.Sounds = None,
    max_length: options.MaxLength = None,
    strict_length: options.StrictLength = False,
    batch_size: options.BatchSize = None,
    generate: text_options.Generate = None,
    chat: text_options.Chat = False,
    pair: text_options.Pair = None,
    pre_split: text_options.PreSplit = False,
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
    importance: Importance = None,
    curve: Curve = None,
    output: options.Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Make one self-contained HTML page: a map of the model, every head on the first text, and what was found."""
    with reported(debug):
        target = page_target(output, force)
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
        of_corpus |= {"checkpoint": checkpoint}
        of_texts: dict[str, object] = {"a TEXT": text, "--file": file, "--ids": ids, "--image": image, "--audio": audio}
        of_texts |= {"--generate": generate, "--chat": chat, "--pair": pair, "--pre-split": pre_split}
        corpus.check_options(data, of_corpus, of_texts)
        of_types = catalogue.arguments(types, conllu, mentions, haystack, needles, ablate_check, quiet)
        extras = _read(importance, curve)
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
            "maps": "pooled",
            "revision": revision,
            "device": device,
            "dtype": dtype,
            "device_map": device_map,
            "trust_remote_code": trust_remote_code,
        }

        def write(analysis: Analysis) -> None:
            page = headscope.report(analysis, command=command_line(), **extras)
            Sink(target, force).text(page.html)
            _tell(analysis, page, target, quiet)

        if data is not None:
            given = {"decoder_text": corpus.decoder_text(decoder_text), "seed": seed, "force": force}
            corpus.run(data, shared | of_corpus | of_types | given, target, write, quiet, debug)
        else:
            found = inputs.given(text, file, ids, decoder_text, image, audio)
            found |= text_options.arguments(generate, chat, pair, pre_split, found)
            with progress("loading the model and measuring …", quiet, debug):
                seed_everything(seed)
                analysis = headscope.analyze(**found, **shared, **of_types, seed=seed)
            write(analysis)


def page_target(output: Path | None, force: bool) -> Path:
    """Where the page goes; what can be refused before a model is loaded."""
    from headscope.views.report.plots import bokeh_script

    if output is None:
        raise InputError("a report is a file, and none is named", "add -o report.html")
    if output.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"a report is HTML, and {output.name!r} does not end so", "name a file that ends with .html")
    check_target(output, force)
    bokeh_script()
    return output


def _read(importance: Path | None, curve: Path | None) -> dict[str, Any]:
    """The files of other commands, read before a model is loaded."""
    found: dict[str, Any] = {}
    if importance is not None:
        from headscope.importance.scores import read_scores

        found["importance"] = read_scores(importance)
    if curve is not None:
        from headscope.views.report.curve_file import losses_of

        losses_of(curve)
        found["curve"] = curve
    return found


def command_line() -> str:
    """The command line as it was given."""
    return shlex.join(["headscope", *sys.argv[1:]])


def _tell(analysis: Analysis, page: Report, target: Path, quiet: bool) -> None:
    """Where the page is and how large, and the warnings, on standard error."""
    for warning in analysis.warnings:
        say("warning", warning)
    if not quiet:
        say("note", f"{target} is written, {page.bytes / 1e6:.1f} MB; open it in a browser")
