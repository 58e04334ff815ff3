"""`headscope importance`: which heads matter, scored on the user's own texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import headscope
from headscope.cli import corpus, guided, options
from headscope.cli.errors import reported, say
from headscope.cli.output import Sink, print_table
from headscope.cli.progress import notes, progress, show
from headscope.errors import InputError

if TYPE_CHECKING:
    from headscope.importance.result import Importance

_SCORES = "Scores"
_UNITS = {"head": ("head",), "kv-group": ("kv-group",), "both": ("head", "kv-group")}

Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help='Texts to score on: .txt (a text a line), .jsonl ("text", and "label" for a classifier), .csv, .parquet, '
        "a directory or pattern of those. Long texts are cut into pieces.",
        rich_help_panel="Input",
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        min=1,
        metavar="N",
        help="Tokens to use at most, drawn from all over the texts; 16384 unless given.",
        rich_help_panel="Input",
    ),
]
Method = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="METHOD",
        help=f"{', '.join(guided.METHODS[:-1])} or {guided.METHODS[-1]}; {' and '.join(guided.FOR_REPAIR)} are "
        f"{guided.ONLY_WITH_REPAIR}.",
        rich_help_panel=_SCORES,
    ),
]
Replace = Annotated[
    Literal["zero", "mean"],
    typer.Option("--with", help="With ablation: what a head gives instead.", rich_help_panel=_SCORES),
]
Unit = Annotated[
    Literal["head", "kv-group", "both"],
    typer.Option(
        "--unit", help="Heads, groups of heads that share a key-value head, or both.", rich_help_panel=_SCORES
    ),
]
Normalize = Annotated[
    bool,
    typer.Option("--normalize", help="Divide each layer's scores by their L2 norm.", rich_help_panel=_SCORES),
]


def importance(
    data: Data = None,
    text_column: corpus.TextColumn = None,
    tokens: Tokens = None,
    max_length: guided.MaxLength = None,
    batch_size: options.BatchSize = None,
    tokenizer: options.Tokenizer = None,
    method: Method = "gradient",
    replace: Replace = "zero",
    unit: Unit = "both",
    normalize: Normalize = False,
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
    format: options.Format = None,
    output: options.Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Score attention heads on texts: how much is lost without each."""
    with reported(debug):
        sink = Sink(output, force)
        sink.check()
        chosen = _chosen_format(output, format)
        _check(method, replace, data)
        with progress("loading the model and scoring heads …", quiet, debug):
            result = headscope.head_importance(
                model,
                None if data is None else str(data),
                text_column=text_column or "text",
                method=method,
                replace=replace,
                units=_UNITS[unit],
                normalise=normalize,
                layer=layer,
                head=head,
                stack=options.names(stack),
                max_length=max_length,
                batch_size=batch_size,
                tokens=tokens,
                tokenizer=tokenizer,
                revision=revision,
                device=device,
                dtype=dtype,
                device_map=device_map,
                trust_remote_code=trust_remote_code,
                seed=seed,
                report=notes(quiet),
            )
        _tell(result, quiet)
        _write(result, chosen, sink)


def _chosen_format(output: Path | None, format: str | None) -> str:
    from headscope.views.records import format_for

    return format_for(output, format)


def _check(method: str, replace: str, data: Path | None) -> None:
    guided.check_method(method)
    if replace != "zero" and method != "ablation":
        raise InputError(f"--with is for ablation, and --method is {method}", "leave --with out")
    if data is None and method not in guided.WITHOUT_DATA:
        raise InputError(f"{method} scores heads on texts, and there are none", "add --data FILE")


def _tell(result: Importance, quiet: bool) -> None:
    """The header, what the method is for, and the warnings, on standard error."""
    if not quiet:
        from headscope.views.importance import header_lines

        show(header_lines(result))
    if result.method in guided.FOR_REPAIR:
        say("note", f"{result.method} scores are {guided.ONLY_WITH_REPAIR}")
    for warning in result.warnings:
        say("warning", warning)


def _write(result: Importance, chosen: str, sink: Sink) -> None:
    if chosen == "table" and sink.path is None:
        from headscope.views.importance import importance_table

        print_table(importance_table(result))
        return
    from headscope.views.importance import render_importance

    sink.text(render_importance(result, chosen))
