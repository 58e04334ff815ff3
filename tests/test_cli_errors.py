"""Exceptions become two lines and an exit code; a traceback comes only with --debug."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import headscope
from headscope.cli.errors import explain, say
from headscope.cli.main import main
from headscope.errors import CheckError, HeadscopeError, InputError, ModelError, ResourceError
from tests import views_samples as samples

ROOT = Path(__file__).parents[1]

RAISED = {
    "input": (InputError("layer 9 does not exist", "valid layers: 0-5"), 2, "layer 9 does not exist"),
    "model": (ModelError("no attention", "take another model"), 3, "no attention"),
    "resource": (ResourceError("out of disk", "make room"), 4, "out of disk"),
    "check": (CheckError("they differ", "look at layer 3"), 1, "they differ"),
    "memory": (MemoryError(), 4, "out of memory"),
    "torch memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), 4, "out of memory"),
    "cpu memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 4, "out of memory"),
    "disk": (OSError(errno.ENOSPC, "No space left on device"), 4, "No space left"),
    "unreadable": (PermissionError(errno.EACCES, "Permission denied", "a.txt"), 2, "a.txt: Permission denied"),
    "interrupt": (KeyboardInterrupt(), 130, "interrupted"),
    "unforeseen": (ZeroDivisionError("division\nby zero"), 3, "ZeroDivisionError: division by zero"),
}


def run(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(argv)
    return int(left.value.code or 0)


def analysis_raises(monkeypatch: pytest.MonkeyPatch, exc: BaseException) -> None:
    def fail(*args: Any, **keywords: Any) -> None:
        raise exc

    monkeypatch.setitem(vars(headscope), "analyze", fail)


@pytest.mark.parametrize(("exc", "code", "said"), RAISED.values(), ids=RAISED.keys())
def test_exceptions_become_lines_and_a_code(
    exc: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    analysis_raises(monkeypatch, exc)
    assert run(["analyze", "x"]) == code
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == ""
    assert first.startswith("error: ")
    assert said in first
    assert second.startswith("hint: ")


def test_every_error_of_the_project_keeps_its_code() -> None:
    kinds = HeadscopeError.__subclasses__()
    assert {kind: explain(kind("m", "h")).exit_code for kind in kinds} == {
        InputError: 2,
        ModelError: 3,
        ResourceError: 4,
        CheckError: 1,
    }


def test_traceback_only_with_debug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    analysis_raises(monkeypatch, InputError("wrong", "right"))
    assert run(["analyze", "x"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert run(["analyze", "x", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: wrong\nhint: right\n")


def test_hostile_messages_stay_on_their_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    analysis_raises(monkeypatch, ModelError("a\x1b[2Jb\r\nerror: c\u202ed", "[red]e[/red]"))
    assert run(["analyze", "x"]) == 3
    assert capsys.readouterr().err == "error: a\\x1b[2Jb error: c\\u202ed\nhint: [red]e[/red]\n"


def test_python_warnings_are_shown_only_with_debug(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def warn(*args: Any, **keywords: Any) -> Any:
        warnings.warn("old function", DeprecationWarning, stacklevel=1)
        print("warned", file=sys.stderr)
        return samples.analysis(samples.model_heads(1, 2))

    monkeypatch.setitem(vars(headscope), "analyze", warn)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(["analyze", "x", "-f", "json"])
        assert "warned" in capfd.readouterr().err
        assert seen == []
        run(["analyze", "x", "-f", "json", "--debug"])
        assert [str(w.message) for w in seen] == ["old function"]


STUB = """
import sys
import headscope
from headscope.cli.main import main
from tests import views_samples as samples
vars(headscope)["analyze"] = lambda *a, **k: samples.analysis(samples.model_heads(40, 40))
main(sys.argv[1:])
"""


def start(argv: list[str], **keywords: Any) -> subprocess.Popen[bytes]:
    """A process that runs the command line with an analysis made by hand."""
    return subprocess.Popen(
        [sys.executable, "-c", STUB, *argv], cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, **keywords
    )


@pytest.mark.parametrize("shape", ["json", "table"])
def test_a_reader_that_leaves_early_is_no_error(shape: str) -> None:
    process = start(["analyze", "x", "--quiet", "-f", shape], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    _, err = process.communicate(timeout=120)
    assert err == b""
    assert process.returncode == 0


def test_a_full_disk_is_code_4() -> None:
    with open("/dev/full", "wb") as full:
        process = start(["analyze", "x", "--quiet", "-f", "json"], stdout=full)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 4
    assert [line.split(b":")[0] for line in err.splitlines()] == [b"error", b"hint"]


@pytest.mark.parametrize("argv", [["--version"], ["analyze", "--help"]])
def test_help_that_cannot_be_written_is_no_traceback_either(argv: list[str]) -> None:
    command = [sys.executable, "-m", "headscope", *argv]
    with open("/dev/full", "wb") as full:
        process = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert process.returncode == 4
    assert [line.split(b":")[0] for line in process.stderr.splitlines()] == [b"error", b"hint"]
    left = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert left.stdout is not None
    left.stdout.close()
    _, err = left.communicate(timeout=120)
    assert (left.returncode, err) == (0, b"")


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_a_closed_standard_stream_is_empty_or_swallows(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has None in its place."""
    monkeypatch.setitem(vars(headscope), "analyze", lambda *a, **k: samples.analysis(samples.model_heads(1, 2)))
    for argv, code in ((["analyze", "x"], 0), (["analyze", "x", "-f", "csv"], 0), (["analyze", "--file", "-"], 2)):
        monkeypatch.setattr(sys, closed, None)
        if closed != "stdin":
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        assert run(argv) == code


class Deaf(io.StringIO):
    """A standard error whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def test_without_a_listener_errors_keep_their_code_and_notes_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Deaf())
    say("note", "what it will cost")
    assert run(["analyze", " "]) == 2
    assert run(["analyze", "x", "-m", "no-such-directory/"]) == 3
    assert run(["no-such-command"]) == 2


def test_another_file_never_takes_a_closed_streams_number(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    line = '"$0" -c "$1" analyze x -f json -o "$2" <&- >&- 2>&-'
    process = subprocess.run(["sh", "-c", line, sys.executable, STUB, result], cwd=ROOT, timeout=120)
    assert process.returncode == 0
    assert result.read_bytes().startswith(b"{") and result.read_bytes().endswith(b"}\n")


def test_an_interrupt_is_quiet_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time, headscope; from headscope.cli.main import main\n"
        "def slow(*a, **k): print('ready', file=sys.stderr, flush=True); time.sleep(60)\n"
        "vars(headscope)['analyze'] = slow; main(sys.argv[1:])"
    )
    argv = ["analyze", "x", "-o", str(tmp_path / "a.json")]
    # Where tests run in the background of a script they inherit that interrupts are ignored, and so would this.
    hears = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    process = subprocess.Popen([sys.executable, "-c", code, *argv], cwd=ROOT, stderr=subprocess.PIPE, **hears)
    assert process.stderr is not None
    assert process.stderr.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert [line.split(b":")[0] for line in err.splitlines()] == [b"error", b"hint"]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setitem(vars(headscope), "analyze", lambda *a, **k: samples.analysis(samples.model_heads(1, 2)))
    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(os, "link", full)
    for force in ([], ["--force"]):
        assert run(["analyze", "x", "-o", str(tmp_path / "a.json"), *force]) == 4
        assert list(tmp_path.iterdir()) == []
