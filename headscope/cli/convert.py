"""`headscope convert`: a pruned model's directory in another form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import headscope
from headscope.cli import options
from headscope.cli.errors import reported, say
from headscope.cli.progress import progress
from headscope.cli.prune import Pad, SaveAs

if TYPE_CHECKING:
    from headscope.pruning.save_report import SaveReport

Directory = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="A pruned model: saved by headscope in any form, or by transformers 4 with pruned_heads.",
        show_default=False,
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="A directory to write.", rich_help_panel="Output")
]


def convert(
    directory: Directory,
    output: Output,
    save_as: SaveAs = "structural",
    pad: Pad = False,
    tokenizer: options.Tokenizer = None,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.DType = None,
    trust_remote_code: options.TrustRemoteCode = False,
    format: options.Format = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Save a pruned model in another form, load it again and compare."""
    with reported(debug):
        from headscope.views.records import format_for

        chosen = format_for(None, format)
        with progress("loading the model and saving it …", quiet, debug):
            report = headscope.convert(
                directory,
                output,
                form=save_as,
                pad=pad,
                force=force,
                tokenizer=tokenizer,
                revision=revision,
                device=device,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
        for note in report.notes:
            say("note", note)
        _write(report, chosen)


def _write(report: SaveReport, chosen: str) -> None:
    from headscope.cli.output import Sink, print_table
    from headscope.views.saving import render_saving, saving_table

    if chosen == "table":
        print_table(saving_table(report))
        return
    Sink(None).text(render_saving(report, chosen))
