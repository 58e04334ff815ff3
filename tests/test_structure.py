"""What the design forbids: heavy imports at start, branches on model types, more than one door to the hub."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "headscope").rglob("*.py"))
HEAVY = {"torch", "transformers", "matplotlib", "pandas", "scipy", "sklearn", "sentence_transformers"}

AT_START = {
    "import headscope": "import headscope; headscope.__version__; dir(headscope)",
    "errors": "import headscope; headscope.HeadscopeError",
    "--version": "from headscope.cli.main import main; main(['--version'])",
    "--help": "from headscope.cli.main import main; main(['--help'])",
    "analyze --help": "from headscope.cli.main import main; main(['analyze', '--help'])",
    "usage error": "from headscope.cli.main import main; main(['analyze', '--bogus'])",
    "nothing to measure": "from headscope.cli.main import main; main(['analyze'])",
}
NOT_FOR_VIEWS = {
    "results": "import headscope.results",
    "every view": "import pkgutil, importlib, headscope.views as v;"
    "[importlib.import_module(m.name) for m in pkgutil.walk_packages(v.__path__, 'headscope.views.')]",
}


def imported_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    script = (
        f"import sys\ntry:\n    exec({code!r})\nexcept SystemExit:\n    pass\n"
        "print(*{m.partition('.')[0] for m in sys.modules}, sep='\\n', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("code", AT_START.values(), ids=AT_START.keys())
def test_the_start_is_light(code: str) -> None:
    assert imported_by(code) & HEAVY == set()


@pytest.mark.parametrize("code", NOT_FOR_VIEWS.values(), ids=NOT_FOR_VIEWS.keys())
def test_results_and_views_know_no_model_library(code: str) -> None:
    assert imported_by(code) & {"torch", "transformers"} == set()


def trees(*, without: str = "") -> Iterator[tuple[str, ast.Module]]:
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        if name != without:
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def mentions_model_type(node: ast.AST) -> bool:
    return any(
        getattr(part, "attr", getattr(part, "id", getattr(part, "value", None))) == "model_type"
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute | ast.Name | ast.Constant)
    )


def test_only_the_table_of_exceptions_knows_model_types() -> None:
    """No comparison with a model type, no lookup by it, and no model type spelled out, in any other file."""
    found = []
    for name, tree in trees(without="headscope/models/exceptions.py"):
        documentation = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            branches = isinstance(node, ast.Compare | ast.Subscript) and mentions_model_type(node)
            branches |= isinstance(node, ast.Match) and mentions_model_type(node.subject)
            spells = isinstance(node, ast.Constant) and node.value in CONFIG_MAPPING_NAMES
            if branches or (spells and id(node) not in documentation):
                found.append(f"{name}:{node.lineno} {ast.unparse(node)[:60]}")
    assert found == []


def test_one_place_loads_from_disk_or_hub() -> None:
    callers = {
        name
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
    }
    assert {name.rpartition("/")[0] for name in callers} <= {"headscope/models"}
    assert len(callers) <= 1, callers


def test_files_and_functions_stay_short() -> None:
    long = [f"{name}: {lines}" for name, tree in trees() if (lines := _last_line(tree)) > 400]
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _body_lines(node) > 60:
                long.append(f"{name}:{node.lineno} {node.name}")
    assert long == []


def _body_lines(function: ast.FunctionDef) -> int:
    """Lines after the signature and the docstring."""
    first = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
    return (function.end_lineno or 0) - first.lineno


def _last_line(tree: ast.Module) -> int:
    return max((getattr(node, "end_lineno", 0) or 0 for node in tree.body), default=0)


def test_the_readme_maps_the_tree() -> None:
    """Every path in the file map exists, and every top-level entry and every package is in it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## File map", 1)[1].split("\n## ", 1)[0]
    mapped = set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))
    assert [path for path in sorted(mapped) if not (ROOT / path).exists()] == []
    packages = {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in SOURCES if path.name == "__init__.py"}
    top = {"pyproject.toml", "constraints.txt", "tests/", "fixtures/", "benchmarks/", ".ci/run", "CHANGELOG.md"}
    assert packages | top <= mapped
