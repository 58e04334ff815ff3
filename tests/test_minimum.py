"""The oldest Python, torch and transformers: what is said below them, and that everything names the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import headscope
from headscope import minimum
from headscope.cli.main import main
from headscope.errors import ModelError

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
MATRIX = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
NAMES = [name for name in headscope.__all__ if name != "__version__"]
ALONE = {"HeadscopeError", "MultiHeadAttention"}


@pytest.fixture
def forgetful(monkeypatch):
    """headscope as if no public name had been used."""
    for name in NAMES:
        monkeypatch.delitem(vars(headscope), name, raising=False)


@pytest.fixture
def installed(monkeypatch, forgetful):
    """`installed(torch="2.5.1")`: as if that release were there; None for none."""
    version_of, find_spec = minimum.version_of, minimum.find_spec

    def pretend(**versions):
        monkeypatch.setattr(minimum, "version_of", lambda name: versions.get(name, version_of(name)))
        gone = [name for name, version in versions.items() if version is None]
        monkeypatch.setattr(minimum, "find_spec", lambda name: None if name in gone else find_spec(name))

    return pretend


def run(*argv):
    with pytest.raises(SystemExit) as left:
        main([*argv])
    return left.value.code


TOO_OLD = [("transformers", "4.57.6"), ("torch", "2.5.1+cpu"), ("transformers", "5.3.1.dev0"), ("torch", "1.13")]


# ------------------------------------------------------------------ below the minimum
@pytest.mark.parametrize(("name", "version"), TOO_OLD)
def test_an_older_release_is_named_with_the_oldest_and_what_to_do(installed, name, version) -> None:
    installed(**{name: version})
    with pytest.raises(ModelError) as caught:
        headscope.analyze(None, "a text")
    oldest = ".".join(map(str, minimum.PACKAGES[name]))
    assert caught.value.message == f"headscope needs {name} {oldest} or newer; this is {version}"
    assert caught.value.hint == f"pip install --upgrade '{name}>={oldest}'"


@pytest.mark.parametrize("name", sorted(minimum.PACKAGES))
def test_a_missing_package_is_said_to_be_missing(installed, name) -> None:
    installed(**{name: None})
    with pytest.raises(ModelError, match=f"headscope needs {name} .* or newer; it is not installed"):
        _ = headscope.load


def test_every_public_name_that_needs_them_says_so_and_the_others_work(installed) -> None:
    installed(transformers="4.57.6")
    for name in NAMES:
        if name in ALONE:
            assert getattr(headscope, name) is not None
        else:
            with pytest.raises(ModelError, match="needs transformers"):
                getattr(headscope, name)


COMMANDS = {
    "analyze": ["a text"],
    "heatmap": ["a text", "-o", "picture.png"],
    "report": ["a text", "-o", "page.html"],
    "verify": [],
    "importance": ["--data", str(ROOT / "CHANGELOG.md")],
    "prune": ["--heads", "0:1", "-o", "smaller"],
    "convert": [".", "--save-as", "masked", "-o", "other"],
    "compare": [".", ".", "a text"],
    "size": ["."],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_with_one_line_and_a_hint(installed, command, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    installed(transformers="4.57.6")
    assert run(command, *COMMANDS[command]) == 3
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == (
        "",
        [
            "error: headscope needs transformers 5.4 or newer; this is 4.57.6",
            "hint: pip install --upgrade 'transformers>=5.4'",
        ],
    )
    assert list(tmp_path.iterdir()) == []


def test_help_and_version_need_nothing(installed, capsys) -> None:
    installed(transformers="4.57.6", torch=None)
    assert run("analyze", "--help") == 0
    assert run("--version") == 0
    assert headscope.__version__ in capsys.readouterr().out


def test_an_older_python_is_named(monkeypatch, forgetful) -> None:
    monkeypatch.setattr(minimum.sys, "version_info", (3, 10, 13, "final", 0))
    with pytest.raises(ModelError) as caught:
        _ = headscope.analyze
    assert caught.value.message == "headscope needs Python 3.11 or newer; this is 3.10.13"


def test_python_itself_is_looked_at_before_the_commands_are_imported(tmp_path) -> None:
    """The syntax of the rest is not for older ones; what comes before has to be."""
    script = (
        "import runpy, sys\n"
        "sys.version_info = (3, 9, 18, 'final', 0)\n"
        "sys.modules['headscope.cli'] = None\n"
        "runpy.run_module('headscope', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [
        "error: headscope needs Python 3.11 or newer; this is 3.9.18",
        "hint: run it with a newer interpreter",
    ]


# ------------------------------------------------------------------ at the minimum and above
@pytest.mark.parametrize(
    ("version", "numbers"),
    [("5.0.0", (5, 0, 0)), ("5.24.0.dev0", (5, 24, 0)), ("2.13.0+cpu", (2, 13, 0)), ("2.6.0a0+git1", (2, 6, 0))],
)
def test_releases_are_numbers(version, numbers) -> None:
    assert minimum.release(version) == numbers


@pytest.mark.parametrize("version", ["5.4", "5.4.0", "5.4.0.dev0", "5.99", "6.0.0", "10.0", "main"])
def test_whatever_is_not_older_is_taken(installed, version) -> None:
    installed(transformers=version, torch="2.6.0+cu124")
    minimum.check_minimum()


def test_a_package_without_metadata_is_taken_as_it_is(tmp_path, monkeypatch) -> None:
    (tmp_path / "nameless_package.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(minimum, "PACKAGES", {"nameless_package": (9, 9)})
    minimum.check_minimum()


# ------------------------------------------------------------------ everybody says the same
def lowest(requirement):
    return next(Version(s.version) for s in requirement.specifier if s.operator == ">=")


def test_installers_know_the_same_minimum() -> None:
    wanted = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}
    for name, oldest in minimum.PACKAGES.items():
        assert lowest(wanted[name]) == Version(".".join(map(str, oldest))), name
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(">=" + ".".join(map(str, minimum.PYTHON)))


def test_the_readme_says_the_same_minimum() -> None:
    python, torch, transformers = (
        ".".join(map(str, numbers))
        for numbers in (minimum.PYTHON, minimum.PACKAGES["torch"], minimum.PACKAGES["transformers"])
    )
    assert f"Python {python} or newer" in README
    assert f"torch {torch} or newer and transformers {transformers} or newer" in README


def pinned(name):
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return re.search(rf"^{name}==(.+)$", text, re.MULTILINE).group(1)


def test_the_matrix_has_the_oldest_and_the_newest_of_each() -> None:
    releases = MATRIX["versions"]["strategy"]["matrix"]
    pythons = sorted(re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"])), key=Version)
    assert pythons[0] == ".".join(map(str, minimum.PYTHON))
    assert releases["python"] == [pythons[0], pythons[-1]]
    assert sorted(MATRIX["test"]["strategy"]["matrix"]["python"], key=Version) == pythons
    oldest, newest = releases["transformers"]
    assert Version(oldest).release[:2] == minimum.PACKAGES["transformers"]
    assert newest == pinned("transformers")
