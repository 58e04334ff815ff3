"""The `headscope` command: its subcommands, its version, and what happens to a command line that does not parse."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

from headscope import __version__
from headscope.cli import signals
from headscope.cli.errors import report, reported
from headscope.cli.examples import epilog
from headscope.files import undisturbed

_SETTINGS = {"help_option_names": ["-h", "--help"]}
# Each command's module and function; only those that are asked for are imported.
_COMMANDS = {
    "analyze": ("analyze", "analyze"),
    "heatmap": ("heatmap", "heatmap"),
    "report": ("report", "report_page"),
    "verify": ("verify", "verify"),
    "importance": ("importance", "importance"),
    "prune": ("prune", "prune"),
    "convert": ("convert", "convert"),
    "compare": ("compare", "compare"),
    "size": ("size", "size"),
    "docs": ("docs", "docs"),
}


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headscope {__version__}")
        raise typer.Exit


def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def __getattr__(name: str) -> typer.Typer:
    """`app`: all commands, for completion, help and documentation."""
    if name != "app":
        raise AttributeError(name)
    app = _app(completion=True)
    app.callback(invoke_without_command=True)(_top)
    for command in _COMMANDS:
        _add(app, command)
    return app


def _only(name: str) -> typer.Typer:
    """One command by itself: options of a group would be read first, with libraries that take a while to load."""
    app = _app(completion=False)
    _add(app, name)
    return app


def _app(*, completion: bool) -> typer.Typer:
    return typer.Typer(
        help="What every attention head of a transformer does: measured, labelled, shown.",
        add_completion=completion,
        pretty_exceptions_enable=False,
        context_settings=_SETTINGS,
    )


def _add(app: typer.Typer, name: str) -> None:
    module, function = _COMMANDS[name]
    command = getattr(import_module(f"headscope.cli.{module}"), function)
    app.command(name, epilog=epilog(name), context_settings=_SETTINGS)(command)


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
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if arguments and arguments[0] in _COMMANDS:
            app, program, arguments = _only(arguments[0]), f"headscope {arguments[0]}", arguments[1:]
        else:
            app, program = __getattr__("app"), "headscope"
        return app(args=arguments, prog_name=program, standalone_mode=False) or 0
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
