"""The commands and examples of the README and the pages work, and output that they show is what the program prints."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import headscope
from headscope.cli.main import app
from tests.warm import warm

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The reference has a test of its own.
PAGES = {
    p.name: p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs").glob("*.md")) if p.name != "reference.md"
}
TEXTS = {"README.md": README, **PAGES}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def fenced(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a text in order: language and content."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """All blocks of one language, each once."""
    return list(dict.fromkeys(block for text in TEXTS.values() for lang, block in fenced(text) if lang == language))


def shown() -> list[tuple[str, str]]:
    """Commands and their output: the `text` blocks, each with the shell block before it."""
    pairs: dict[str, str] = {}
    for text in TEXTS.values():
        command = ""
        for language, block in fenced(text):
            if language == "bash":
                command = block
            elif language == "text":
                pairs[MAIN_JOB if command in INSTALL else command] = block
    return list(pairs.items())


INSTALL = [block for block in blocks("bash") if block.startswith("python3 -m venv .venv")]
MAIN_JOB = INSTALL[0].splitlines()[-1].removeprefix(".venv/bin/")
SHOWN = shown()
# What takes minutes on the texts that it names.
LONG = [block for block in blocks("bash") if "--repair" in block or "--curve" in block]
TOUR = [block for block in blocks("bash") if block not in (*INSTALL, *LONG, *(command for command, _ in SHOWN))]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An environment whose `headscope` is this one, in processes that do not wait for imports."""
    folder = tmp_path_factory.mktemp("bin")
    keep = {name: value for name, value in os.environ.items() if name not in ("HEADSCOPE_MODEL", "FORCE_COLOR")}
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    with warm(folder):
        yield {**keep, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


def run(script: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    # Examples are run from a clone; what they write stays out of it.
    if not (folder / "fixtures").exists():
        (folder / "fixtures").symlink_to(ROOT / "fixtures")
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


@pytest.mark.parametrize("script", TOUR, ids=[block.splitlines()[0][:60] for block in TOUR])
def test_the_commands_of_the_tour_work(script: str, tmp_path: Path, environment: dict[str, str]) -> None:
    done = run(script, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert "error:" not in done.stderr


@pytest.mark.parametrize("script", LONG, ids=[block.splitlines()[1][:60] for block in LONG])
def test_the_long_commands_work_on_little_text(script: str, tmp_path: Path, environment: dict[str, str]) -> None:
    first, rest = script.split("\n", 1)
    assert first.startswith("python3 -c") and first.endswith("> texts.txt")
    words = ["the", "cat", "sat", "on", "the", "mat", "because", "it", "was", "tired", "and", "a", "dog", "saw", "it"]
    lines = (" ".join(words[i % 5 :] + words[: i % 7]) + f" {i}" for i in range(160))
    (tmp_path / "texts.txt").write_text("\n".join(lines), encoding="utf-8")
    done = run(rest.replace("random,", ""), tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert "error:" not in done.stderr
    assert [path for path in tmp_path.iterdir() if path.name not in ("texts.txt", "fixtures")]


@pytest.mark.parametrize("code", blocks("python"))
def test_the_python_examples_work(code: str, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    done = run("headscope example.py", tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_public_name_is_told_of() -> None:
    listed = re.search(r"^\| names \| what .*?\n\n", PAGES["measuring.md"] + "\n", re.MULTILINE | re.DOTALL)
    assert listed is not None
    rows = [line.split("|")[1] for line in listed.group().splitlines()[2:] if line]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(names) == sorted(set(headscope.__all__) - {"__version__"})


@pytest.mark.parametrize("rules", blocks("toml"))
def test_the_rules_example_is_one(rules: str, tmp_path: Path) -> None:
    from headscope.heads.rules import load_rules

    (tmp_path / "mine.toml").write_text(rules, encoding="utf-8")
    loaded = load_rules(str(tmp_path / "mine.toml"))
    assert [rule.label for rule in loaded.rules] == ["looks_back", "sharp"]


def test_nothing_is_shown_without_its_command() -> None:
    assert len(SHOWN) == len(blocks("text")) and len(SHOWN) >= 6
    assert all("headscope" in command for command, _ in SHOWN)


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command[:60] for command, _ in SHOWN])
def test_the_output_shown_is_the_output(command: str, shown: str, tmp_path: Path, environment: dict[str, str]) -> None:
    """Word for word; numbers and heads that differ most may differ by what another processor's rounding explains."""
    done = run(command, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    ours, theirs = shown.split(), done.stdout.split()
    assert [word for word in ours if not _is_number(word)] == [word for word in theirs if not _is_number(word)]
    numbers = [[float(word.strip("~")) for word in words if _is_number(word, "")] for words in (ours, theirs)]
    assert numbers[0] == pytest.approx(numbers[1], abs=2e-3)


def _is_number(word: str, also: str = r"|H\d+") -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?(e-\d+)?~?" + also, word) is not None


def test_the_install_commands_fit_the_project() -> None:
    assert len(INSTALL) == 2
    for script in INSTALL:
        assert "-c constraints.txt" in script
        (extras,) = re.findall(r'-e "\.\[([\w,-]+)\]"', script)
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert MAIN_JOB == 'headscope analyze "The cat sat on the mat because it was tired." --layer 5'
    assert INSTALL[1].splitlines()[-1] == ".venv/bin/python -m pytest -n 2"


def test_every_extra_is_mentioned() -> None:
    assert [name for name in PROJECT["optional-dependencies"] if name not in README] == []


def test_every_page_is_listed() -> None:
    assert [name for name in (*PAGES, "reference.md") if f"](docs/{name})" not in README] == []


def test_links_lead_somewhere() -> None:
    """To files, and to headings in them."""
    lost = []
    for name, text in TEXTS.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for link in re.findall(r"\]\((?!https?://)([^)]+)\)", text):
            path, _, heading = link.partition("#")
            target = folder / path if path else folder / name
            if not target.exists() or (heading and heading not in anchors(target.read_text(encoding="utf-8"))):
                lost.append((name, link))
    assert lost == []


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a text."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_option_named_exists() -> None:
    """Of headscope, and of the scripts that reproduce figures."""
    whole = typer.main.get_command(app)
    commands = (whole, *whole.commands.values())
    known = {name for command in commands for p in command.params for name in p.opts + p.secondary_opts}
    assert "--heatmaps" in known
    text = "\n".join(TEXTS.values())
    scripts = re.findall(r"python (benchmarks/\w+\.py|-m tests\.\w+)([^`\n]*)", text)
    for script, options in scripts:
        source = (
            ROOT / (script.removeprefix("-m ").replace("tests.", "tests/").removesuffix(".py") + ".py")
        ).read_text()
        assert options_in(options) <= options_in(source), script
    assert options_in(re.sub(r"python (benchmarks/|-m tests\.)[^`\n]*", "", text)) <= known


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - {"--help", "--no-deps"}
