"""`headscope verify`: our own attention against the model's, site by site."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import headscope
from headscope.cli import options
from headscope.cli.errors import reported, say
from headscope.cli.output import Sink, print_table
from headscope.cli.progress import progress
from headscope.errors import InputError
from headscope.models.selection import parse_selection

if TYPE_CHECKING:
    from headscope.results import HeadExplanation, Verification

Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        metavar="TEXT",
        help="What to run on; two sentences of different length unless given.",
        rich_help_panel="Input",
    ),
]
Backend = Annotated[
    Literal["numpy", "torch", "both"],
    typer.Option("--backend", help="Which of our two versions.", rich_help_panel="Measurement"),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="MODEL",
        help="Read our side's weights from there, not from the model.",
        rich_help_panel="Model",
    ),
]
Explain = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="L5H3",
        help="Instead, show one head's computation step by step; decoder.L5H3 names a stack.",
        rich_help_panel="Measurement",
    ),
]


def verify(
    text: Texts = None,
    tokenizer: options.Tokenizer = None,
    model: options.Model = None,
    revision: options.Revision = None,
    checkpoint: Checkpoint = None,
    layer: options.Layer = "all",
    stack: options.Stacks = None,
    device: options.Device = "auto",
    dtype: options.DType = None,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    backend: Backend = "both",
    explain: Explain = None,
    format: options.Format = None,
    output: options.Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Rebuild attention from a model's weights with our own code, and compare it with the model's."""
    with reported(debug):
        sink = Sink(output, force)
        sink.check()
        chosen = _chosen_format(sink, format, explain)
        parse_selection("layer", layer)
        if any(not t.strip() for t in text or []):
            raise InputError("--text is empty", "give some text, or leave --text out")
        shared: dict[str, Any] = {
            "tokenizer": tokenizer,
            "revision": revision,
            "device": device,
            "dtype": dtype,
            "device_map": device_map,
            "trust_remote_code": trust_remote_code,
            "seed": seed,
        }
        with progress("loading the model and rebuilding its attention …", quiet, debug):
            result: Verification | HeadExplanation
            if explain is not None:
                result = headscope.explain_head(model, explain, text[0] if text else None, **shared)
            else:
                result = headscope.verify(
                    model,
                    text,
                    checkpoint=checkpoint,
                    backend=backend,
                    layer=layer,
                    stack=options.names(stack),
                    **shared,
                )
        for warning in getattr(result, "warnings", ()):
            say("warning", warning)
        _write(result, chosen, sink)
        if explain is None and not getattr(result, "passed", True):
            raise typer.Exit(1 if getattr(result, "sites", ()) else 3)


def _chosen_format(sink: Sink, format: str | None, explain: str | None) -> str:
    from headscope.views.records import format_for

    chosen = format_for(sink.path, format)
    if explain is not None and chosen not in ("table", "json"):
        raise InputError(f"--explain cannot be written as {chosen}", "formats: table, json")
    return chosen


def _write(result: Verification | HeadExplanation, chosen: str, sink: Sink) -> None:
    from headscope.results import Verification
    from headscope.views.verification import explanation_table, render_verification, verification_table

    if chosen == "table" and sink.path is None:
        print_table(verification_table(result) if isinstance(result, Verification) else explanation_table(result))
        return
    sink.text(render_verification(result, chosen))
