"""The `headscope` command: its subcommands, its version, and what happens to a command line that does not parse."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

from headscope import __version__
from headscope.cli import signals
from headscope.cli.analyze import analyze
from headscope.cli.compare import compare
from headscope.cli.convert import convert
from headscope.cli.docs import docs
from headscope.cli.errors import report, reported
from headscope.cli.examples import epilog
from headscope.cli.heatmap import heatmap
from headscope.cli.importance import importance
from headscope.cli.prune import prune
from headscope.cli.report import report_page
from headscope.cli.size import size
from headscope.cli.verify import verify
from headscope.files import undisturbed

app = typer.Typer(
    help="What every attention head of a transformer does: measured, labelled, shown.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "analyze": analyze,
    "heatmap": heatmap,
    "report": report_page,
    "verify": verify,
    "importance": importance,
    "prune": prune,
    "convert": convert,
    "compare": compare,
    "size": size,
    "docs": docs,
}
for _name, _function in _COMMANDS.items():
    app.command(_name, epilog=epilog(_name))(_function)


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
    _open_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal cannot show is spelled out
    code = 0
    try:
        with signals.at_work(), reported(debug=False):
            code = _run(argv)
    except typer.Exit as exc:
        code = exc.exit_code
    except KeyboardInterrupt:  # so late that nothing else hears of it
        code = 130
    asked = signals.stopped()
    if asked is not None:
        # Where a library swallows an interrupt, or makes something else of it, it is one nevertheless.
        code = asked[1]
        with undisturbed():
            if not signals.told():
                report(asked[0], signals.HINT)
    _flush_errors()
    sys.exit(code)


def _flush_errors() -> None:
    """Where nobody reads standard error Python would try once more at the end, and change the exit code."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _open_streams() -> None:
    """Make a standard stream that was closed (`>&-`) the null device; the next file opened would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # as long as the process


def _run(argv: Sequence[str] | None) -> int:
    """The exit code of a command line."""
    try:
        return app(args=argv, prog_name="headscope", standalone_mode=False) or 0
    except typer.TyperException as exc:
        report(exc.format_message(), f"{_command_of(exc)} --help shows what it takes")
        return exc.exit_code
    except SystemExit as exc:
        if isinstance(exc.__context__, BrokenPipeError):  # the reader of a help text has seen enough
            return 0
        raise


def _command_of(exc: typer.TyperException) -> str:
    context = getattr(exc, "ctx", None)
    return context.command_path if context is not None else "headscope"
