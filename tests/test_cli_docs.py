"""The reference in the documentation is what the commands say; examples are command lines that parse; completion."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from headscope.cli.docs import reference
from headscope.cli.examples import EXAMPLES
from headscope.cli.main import app

ROOT = Path(__file__).parents[1]
GROUP: Any = typer.main.get_command(app)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headscope", *arguments]
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=given, timeout=120)


def test_the_reference_is_up_to_date() -> None:
    """`headscope docs --output docs/reference.md --force` brings it up to date."""
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == reference(GROUP)


def test_the_command_prints_the_reference(tmp_path: Path) -> None:
    printed = run("docs")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout == reference(GROUP)
    written = run("docs", "--output", str(tmp_path / "reference.md"))
    assert written.stdout == "" and (tmp_path / "reference.md").read_text(encoding="utf-8") == printed.stdout
    again = run("docs", "--output", str(tmp_path / "reference.md"))
    assert again.returncode == 2 and "--force" in again.stderr


def test_every_option_of_every_command_is_in_it() -> None:
    sections = {part.split("\n")[0].strip(): part for part in reference(GROUP).split("\n## headscope ")[1:]}
    assert sections.keys() == GROUP.commands.keys()
    for name, command in GROUP.commands.items():
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert all(f"`{option}`" in sections[name] for option in parameter.opts), (name, parameter.opts)


@pytest.mark.parametrize(("command", "line"), [(c, line) for c, found in EXAMPLES.items() for line, _ in found])
def test_the_examples_parse(command: str, line: str) -> None:
    words = shlex.split(line.split(" > ")[0])
    assert words[:2] == ["headscope", command]
    parent = GROUP.make_context("headscope", [command], resilient_parsing=True)
    GROUP.commands[command].make_context(command, words[2:], parent=parent)


def test_every_command_has_examples_and_help_shows_them() -> None:
    assert EXAMPLES.keys() == GROUP.commands.keys()
    for command, found in EXAMPLES.items():
        shown = " ".join(run(command, "--help", COLUMNS="200").stdout.split())
        assert all(" ".join(line.split()) in shown for line, _ in found), command


@pytest.mark.parametrize("command", [(), *((name,) for name in EXAMPLES)])
def test_help_holds_at_sixty_columns(command: tuple[str, ...]) -> None:
    done = run(*command, "--help", COLUMNS="60", TERMINAL_WIDTH="60")
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 60


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete(shell: str) -> None:
    script = run("--show-completion", shell)
    assert script.returncode == 0 and "headscope" in script.stdout


def test_completion_knows_commands_and_options() -> None:
    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_HEADSCOPE_COMPLETE": "complete_bash"}
        return run(**words).stdout.split()

    assert completed("headscope an") == ["analyze"]
    assert "--heads" in completed("headscope prune --hea")
