"""How much the sweep of bad input sweeps, and that it would see what is wrong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import headscope
from headscope.errors import HeadscopeError, InputError
from tests import (
    test_sweep_api,
    test_sweep_checkpoints,
    test_sweep_files,
    test_sweep_options,
    test_sweep_selections,
    test_sweep_texts,
)
from tests.sweep import TEXT, Room

LINES = {
    module.__name__.rpartition(".")[2]: module.CASES
    for module in (
        test_sweep_checkpoints, test_sweep_files, test_sweep_options, test_sweep_selections, test_sweep_texts
    )
}  # fmt: skip


def test_more_than_500_command_lines_and_calls_are_swept() -> None:
    print(LINES, test_sweep_api.CASES)
    assert sum(LINES.values()) >= 2500 and min(LINES.values()) >= 300
    assert test_sweep_api.CASES >= 500


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (KeyError("x"), "was not foreseen"),
        (InputError("wrong"), "not one error and one hint"),
        (InputError("x" * 200, "y\n" * 9), None),
    ],
)
def test_the_judge_sees_what_is_wrong(
    error: Exception, seen: str | None, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **keywords: object) -> None:
        raise error

    monkeypatch.setitem(vars(headscope), "analyze", broken)
    if seen is None:
        room.refused("analyze", "-m", room.bert, TEXT)
    else:
        with pytest.raises(AssertionError, match=seen):
            room.refused("analyze", "-m", room.bert, TEXT)


def test_the_judge_sees_what_is_left_behind(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(*args: object, **keywords: object) -> None:
        Path(room.out("half")).write_text("half")
        raise InputError("wrong", "right")

    monkeypatch.setitem(vars(headscope), "analyze", careless)
    with pytest.raises(AssertionError, match="left behind"):
        room.refused("analyze", "-m", room.bert, TEXT)
    assert not list((room.root / "out").iterdir())


def test_every_error_says_what_to_do() -> None:
    """Wherever one is made in the package, it has a hint."""
    kinds = {kind.__name__ for kind in HeadscopeError.__subclasses__()}
    bare = []
    for path in Path(headscope.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            made = isinstance(node, ast.Call) and getattr(node.func, "id", "") in kinds
            if made and len(node.args) + len(node.keywords) < 2:
                bare.append(f"{path.name}:{node.lineno}")
    assert not bare
