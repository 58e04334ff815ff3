"""The `headscope` command: its subcommands, its version, and what happens to a command line that does not parse."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

from headscope import __version__
from headscope.cli.analyze import analyze
from headscope.cli.errors import report
from headscope.cli.verify import verify

app = typer.Typer(
    help="What every attention head of a transformer does: measured, labelled, shown.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(analyze)
app.command()(verify)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headscope {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line `argv` (the process's own unless given) and exit with a code of the contract."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal cannot show is spelled out
    try:
        code = app(args=argv, prog_name="headscope", standalone_mode=False)
    except typer.TyperException as exc:
        report(exc.format_message(), f"{_command_of(exc)} --help shows what it takes")
        code = exc.exit_code
    sys.exit(code)


def _command_of(exc: typer.TyperException) -> str:
    context = getattr(exc, "ctx", None)
    return context.command_path if context is not None else "headscope"
