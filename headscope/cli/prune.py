"""`headscope prune`: heads named or chosen, removed, proved, repaired, measured, saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import headscope
from headscope.cli import corpus, guided, options
from headscope.cli.curve import draw_curve
from headscope.cli.errors import reported, say
from headscope.cli.progress import notes, progress, show
from headscope.errors import InputError
from headscope.pruning.spec import parse_heads

if TYPE_CHECKING:
    from headscope.pruning.result import PruneResult

_PRUNING = "Pruning"

Heads = Annotated[
    list[str] | None,
    typer.Option(
        "--heads",
        metavar="SPEC",
        help="5:0,3;7:1-4, L5H3, 5:all, encoder.0:1: heads by layer, in the original model's numbers; may be repeated.",
        rich_help_panel=_PRUNING,
    ),
]
SaveAs = Annotated[
    Literal["structural", "remote-code", "uniform", "masked"],
    typer.Option(
        "--save-as",
        help="structural: headscope.load reads it; remote-code: with code of its own; uniform: plain transformers, "
        "where every layer keeps as many; masked: heads zeroed, shapes kept.",
        rich_help_panel=_PRUNING,
    ),
]
Pad = Annotated[
    bool,
    typer.Option("--pad", help="With uniform: zeroed heads fill layers up to the largest.", rich_help_panel=_PRUNING),
]
Ragged = Annotated[
    Literal["refuse", "mask"],
    typer.Option(
        "--ragged",
        help="Where key-value heads would keep unequally many query heads: refuse, or zero what cannot leave.",
        rich_help_panel=_PRUNING,
    ),
]
AllowEmpty = Annotated[
    bool,
    typer.Option(
        "--allow-empty", help="A layer may lose all heads; one stays, zeroed, for caches.", rich_help_panel=_PRUNING
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Do all but writing.", rich_help_panel=_PRUNING)]
Eval = Annotated[
    Path | None,
    typer.Option(
        "--eval",
        metavar="FILE",
        help='Measure quality before and after on a .txt (a text a line) or .jsonl ("text" and "label").',
        rich_help_panel="Measurement",
    ),
]
Latency = Annotated[
    bool,
    typer.Option("--latency/--no-latency", help="Time forward passes before and after.", rich_help_panel="Measurement"),
]
Shapes = Annotated[
    str | None,
    typer.Option(
        "--shapes",
        metavar="BATCHxLENGTH,…",
        help="Of the inputs to time; 1x32,1x128,8x128,1x512 as far as the model takes them.",
        rich_help_panel="Measurement",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="A directory to write; without it nothing is written.",
        rich_help_panel="Output",
    ),
]


def prune(
    heads: Heads = None,
    scores: guided.Scores = None,
    method: guided.PruneMethod = None,
    data: guided.PruneData = None,
    text_column: corpus.TextColumn = None,
    drop: guided.Drop = None,
    until_drop: guided.UntilDrop = None,
    unit: guided.Unit = None,
    min_per_layer: guided.MinPerLayer = 1,
    steps: guided.Steps = 1,
    repair: guided.Repair = None,
    repair_mlp: guided.RepairMlp = False,
    curve: guided.CurvePicture = None,
    curve_methods: guided.CurveMethods = None,
    save_as: SaveAs = "structural",
    pad: Pad = False,
    ragged: Ragged = "refuse",
    allow_empty: AllowEmpty = False,
    dry_run: DryRun = False,
    eval: Eval = None,
    latency: Latency = True,
    shapes: Shapes = None,
    tokenizer: options.Tokenizer = None,
    max_length: guided.MaxLength = None,
    batch_size: options.BatchSize = None,
    model: options.Model = None,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.DType = None,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    format: options.Format = None,
    output: Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Remove attention heads, prove that nothing else changed, measure what it brings, and save the model.

    Which heads go is said by --heads, or by --scores or --method with --drop or --until-drop.
    """
    given = dict(locals())
    with reported(debug):
        chosen = _chosen_format(format)
        guided.check_choice(given)
        if heads is not None:
            parse_heads(heads)
        if shapes is not None and not latency:
            raise InputError("--shapes and --no-latency exclude each other", "leave one of them out")
        shared: dict[str, Any] = {
            "data": None if data is None else str(data),
            "repair": guided.repair_source(repair, data),
            "repair_mlp": repair_mlp,
            "text_column": text_column or "text",
            "min_per_layer": min_per_layer,
            "max_length": max_length,
            "batch_size": batch_size,
            "tokenizer": tokenizer,
            "revision": revision,
            "device": device,
            "dtype": dtype,
            "device_map": device_map,
            "trust_remote_code": trust_remote_code,
            "seed": seed,
            "report": notes(quiet),
        }
        if curve is not None:
            draw_curve(model, curve, guided.curve_methods(curve_methods), unit, shared, chosen, force, quiet, debug)
            return
        with progress("loading the model and removing heads …", quiet, debug):
            result = headscope.prune(
                model,
                heads,
                scores=scores,
                method=method,
                drop=drop,
                until_drop=until_drop,
                unit=unit,
                steps=steps,
                output=output,
                save_as=save_as,
                pad=pad,
                ragged=ragged,
                allow_empty=allow_empty,
                dry_run=dry_run,
                force=force,
                eval=eval,
                latency=shapes if shapes is not None else latency,
                **shared,
            )
        _tell(result, quiet)
        _write(result, chosen)
        if not result.passed:
            raise typer.Exit(1)


def _chosen_format(format: str | None) -> str:
    from headscope.views.records import format_for

    return format_for(None, format)


def _tell(result: PruneResult, quiet: bool) -> None:
    """The header and the warnings, on standard error."""
    if not quiet:
        from headscope.views.pruning import header_lines

        show(header_lines(result))
    for warning in result.warnings:
        say("warning", warning)


def _write(result: PruneResult, chosen: str) -> None:
    from headscope.cli.output import Sink, print_table
    from headscope.views.pruning import pruning_table, render_pruning

    if chosen == "table":
        print_table(pruning_table(result))
        return
    Sink(None).text(render_pruning(result, chosen))
