"""What is wrong with a command line is said at once, on two lines, with exit code 2, and no model is loaded for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import headscope
from headscope.cli.main import main


def run(argv: Sequence[str]) -> int:
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as left:
        main(argv)
    return int(left.value.code or 0)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **keywords: Any) -> None:
        raise AssertionError("the model was asked for")

    # setitem, not setattr: to look at the real function first would import torch.
    monkeypatch.setitem(vars(headscope), "analyze", refuse)


BAD = {
    "unknown option": (["--bogus", "x"], "No such option: --bogus"),
    "not a number": (["x", "--max-length", "many"], "--max-length"),
    "max length of zero": (["x", "--max-length", "0"], "--max-length"),
    "batch size of zero": (["x", "--batch-size", "0"], "--batch-size"),
    "negative seed": (["x", "--seed", "-1"], "--seed"),
    "layer that does not parse": (["x", "-l", "five"], "cannot read --layer 'five'"),
    "head that does not parse": (["x", "--head", "3-"], "cannot read --head '3-'"),
    "unknown engine": (["x", "--engine", "steam"], "steam"),
    "unknown format": (["x", "-f", "xml"], "xml"),
    "suffix without a format": (["x", "-o", "result.docx"], ".docx"),
    "option without its value": (["x", "--model"], "--model"),
    "nothing to measure": ([], "nothing to measure"),
    "only a decoder text": (["--decoder-text", "y"], "only --decoder-text"),
    "empty text": ([""], "empty text"),
    "blank text": ([" \t\n "], "empty text"),
    "one of two texts is empty": (["x", ""], "empty text"),
    "not UTF-8": (["caf\udce9"], "not valid UTF-8"),
    "missing file": (["--file", "missing.txt"], "missing.txt"),
    "file is a directory": (["--file", "."], "cannot read the text file ."),
    "missing image": (["--image", "missing.png"], "missing.png"),
    "missing sound": (["--audio", "missing.wav"], "missing.wav"),
    "ids and text": (["x", "--ids", "1 2"], "exclude each other"),
    "ids and file": (["--file", "text.txt", "--ids", "1 2"], "exclude each other"),
    "empty ids": (["--ids", " , "], "--ids is empty"),
    "negative id": (["--ids", "1 -2"], "'-2' is not a token id"),
    "id that is no number": (["--ids", "1 two"], "'two' is not a token id"),
    "id in other digits": (["--ids", "٣"], "is not a token id"),
    "output exists": (["x", "-o", "old.json"], "old.json exists"),
    "output is a directory": (["x", "-o", ".", "-f", "json"], "is a directory"),
    "output below a missing directory": (["x", "-o", "no/where/a.json"], "no such directory"),
    "output below a file": (["x", "-o", "text.txt/a.json"], "no such directory"),
    "output where nothing can be made": (["x", "-o", "/proc/a.json"], "cannot write to /proc"),
    "heatmaps in a file": (["x", "--heatmaps", "text.txt"], "is not a directory"),
    "heatmaps below a missing directory": (["x", "--heatmaps", "no/where"], "no such directory"),
    "heatmaps over heatmaps": (["x", "--heatmaps", "pictures"], "already holds pictures"),
    "weights exist": (["x", "--weights", "old.npz"], "old.npz exists"),
    "weights of another kind": (["x", "--weights", "new.json"], "writes .npz"),
    "one file for two results": (["x", "-f", "csv", "-o", "a.npz", "--weights", "./a.npz"], "both name a.npz"),
    "output through a link to nowhere": (["x", "-o", "nowhere.json"], "nowhere.json is a link"),
    "output through a link to itself": (["x", "-o", "loop.json"], "loop.json is a link"),
}


@pytest.mark.parametrize(("argv", "said"), BAD.values(), ids=BAD.keys())
def test_bad_command_line(
    argv: list[str],
    said: str,
    no_model: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "old.json", "old.npz"):
        Path(name).write_text("some text")
    Path("nowhere.json").symlink_to("no/where.json")
    Path("loop.json").symlink_to("loop.json")
    Path("pictures").mkdir()
    Path("pictures", "map.png").touch()

    assert run(["analyze", *argv]) == 2

    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 2, err
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert lines[1].startswith("hint: ")


@pytest.mark.parametrize("argv", [["--bogus"], ["analyse", "x"]])
def test_bad_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["error", "hint"]


def test_a_close_miss_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    run(["analyse", "x"])
    assert "Did you mean 'analyze'" in capsys.readouterr().err


def test_hostile_text_in_an_error_is_shown_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyze", "--\x1b[31mred\u202e", "x"]) == 2
    assert "\x1b" not in (err := capsys.readouterr().err)
    assert "\u202e" not in err


def test_options_of_other_commands_do_not_exist(no_model: None, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--heads", "--drop", "--hidden-size", "--explain"):
        assert run(["analyze", "x", option]) == 2
        assert f"No such option: {option}" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"headscope {headscope.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 0
    assert "analyze" in capsys.readouterr().out


@pytest.mark.parametrize("width", ["40", "80", "200"])
def test_help_fits_the_terminal(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert run(["analyze", "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= int(width)
