"""`headscope docs`: the reference of all commands, made from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from headscope.cli import options
from headscope.cli.errors import reported
from headscope.cli.examples import EXAMPLES
from headscope.cli.output import Sink

_PLAIN = "Options"

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="PATH", help="Write here instead of standard output."),
]


def docs(output: Output = None, force: options.Force = False) -> None:
    """Print the reference of every command and option, as Markdown."""
    from headscope.cli.main import app  # which imports the others

    with reported(debug=False):
        sink = Sink(output, force)
        sink.check()
        sink.text(reference(typer.main.get_command(app)))


def reference(group: Any) -> str:
    """Every command with its arguments, options and examples, as Markdown."""
    lines = ["# Commands", "", "Made by `headscope docs`; `headscope COMMAND --help` says the same.", ""]
    for name, command in group.commands.items():
        lines += [*_command(name, command), ""]
    return "\n".join(lines).rstrip() + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join(["headscope", name, *(_argument(p) for p in arguments), "[OPTIONS]"])
    yield from (f"## headscope {name}", "", _one_line(command.help), "", "```text", usage, "```", "")
    if EXAMPLES.get(name):
        yield from ("```bash", *(f"{line}  # {what}" for line, what in EXAMPLES[name]), "```", "")
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or _PLAIN, []).append(parameter)
    for panel, parameters in panels.items():
        yield from (f"### {name}: {panel}" if panel != _PLAIN else f"### {name}: other options", "")
        yield from ("| option | meaning | default |", "|---|---|---|")
        yield from (_option(p) for p in parameters)
        yield ""


def _argument(parameter: Any) -> str:
    shown = parameter.metavar or parameter.name.upper()
    return shown if parameter.required or shown.startswith("[") else f"[{shown}]"


def _option(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    shown = ", ".join(f"`{name}`" for name in sorted(names, key=lambda n: n.startswith("--"), reverse=True))
    value = "" if parameter.is_flag else f" `{_value(parameter)}`"
    default = parameter.default
    said = "" if default in (None, False, (), []) or callable(default) else f"`{_plain(default)}`"
    return f"| {shown}{value.replace('|', chr(92) + '|')} | {_cell(parameter.help)} | {said} |"


def _value(parameter: Any) -> str:
    """The name of what an option takes, or its choices."""
    if parameter.metavar:
        return str(parameter.metavar)
    annotation = parameter.type_descriptor.annotation
    choices = get_args(annotation)
    return "|".join(map(str, choices)) if choices else getattr(annotation, "__name__", str(annotation)).upper()


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))


def _cell(text: str | None) -> str:
    return _one_line(text).replace("|", "\\|")


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
