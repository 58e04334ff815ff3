"""What asks a command to end: in whatever it is, it ends with the right code, two lines, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import headscope
from headscope.cli import signals
from headscope.cli.main import main
from headscope.files import new_file
from tests import views_samples as samples
from tests.faults import Ended, Running

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """`ends(act)` runs `analyze` in a process of its own, with `act` in the place of the analysis."""
    (tmp_path / "out").mkdir()

    def run(act: Callable[[], Any], *more: str, terminal: bool = False) -> Ended:
        def analyze(*arguments: Any, **options: Any) -> Any:
            act()
            return samples.analysis(samples.model_heads(1, 2))

        monkeypatch.setitem(vars(headscope), "analyze", analyze)
        return Running(["analyze", "x", "-o", "out/a.json", *more], tmp_path, terminal).wait(120)

    return run


def left(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "out"))


def lines(ended: Ended) -> list[str]:
    return [line.partition(":")[0] for line in ended.said.splitlines()]


# ------------------------------------------------------------------ one signal
@pytest.mark.parametrize("number", CODES)
def test_two_lines_and_a_code(number: int, ends: Callable[..., Ended], tmp_path: Path) -> None:
    ended = ends(lambda: signal.raise_signal(number))
    assert (ended.code, lines(ended)) == (CODES[signal.Signals(number)], ["error", "hint"])
    assert left(tmp_path) == []


def test_in_the_middle_of_writing_and_the_old_file_stays(
    ends: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> str:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError

    (tmp_path / "out" / "a.json").write_text("old")
    monkeypatch.setattr("headscope.views.records.render", interrupted)
    ended = ends(lambda: None, "--force", "--quiet")
    assert (ended.code, lines(ended)) == (143, ["error", "hint"])
    assert left(tmp_path) == ["a.json"] and (tmp_path / "out" / "a.json").read_text() == "old"


class Vanishing:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def swallowed_as_it_vanishes() -> None:
    Vanishing()
    time.sleep(30)


def made_another_error() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise RuntimeError("initialization failed") from None


def swallowed() -> None:
    with suppress(BaseException):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("act", "written"), [(swallowed_as_it_vanishes, []), (made_another_error, []), (swallowed, ["a.json"])]
)
def test_whatever_a_library_makes_of_it(
    act: Callable[[], None], written: list[str], ends: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = ends(act, "--quiet")
    assert (ended.code, lines(ended)) == (130, ["error", "hint"])
    assert left(tmp_path) == written


def test_ignored_signals_stay_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `nohup`, or in the background of a script."""

    def analyze(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGHUP)
        return samples.analysis(samples.model_heads(1, 2))

    monkeypatch.setitem(vars(headscope), "analyze", analyze)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["analyze", "x", "-o", str(tmp_path / "a.json")])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.value.code == 0 and (tmp_path / "a.json").exists()


def test_who_calls_main_has_his_handlers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def analyze(*arguments: Any, **options: Any) -> Any:
        assert signal.getsignal(signal.SIGTERM) is signals._stop
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setitem(vars(headscope), "analyze", analyze)
    before, hook = [signal.getsignal(n) for n in CODES], sys.unraisablehook
    with pytest.raises(SystemExit) as ended:
        main(["analyze", "x"])
    assert ended.value.code == 143
    assert [signal.getsignal(n) for n in CODES] == before and sys.unraisablehook is hook


# ------------------------------------------------------------------ a second one
def second_while_the_first_is_at_it(tmp_path: Path) -> None:
    with new_file(tmp_path / "out" / "b", force=False) as file:
        file.write(b"half")
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            time.sleep(60)


def test_a_second_signal_ends_it_at_once_and_tidily(ends: Callable[..., Ended], tmp_path: Path) -> None:
    begun = time.monotonic()
    ended = ends(lambda: second_while_the_first_is_at_it(tmp_path), terminal=True)
    assert ended.code == 130 and time.monotonic() - begun < 50
    assert ended.said.count("error: interrupted\nhint: ") == 1
    assert ended.said.rfind("\x1b[?25h") > ended.said.rfind("\x1b[?25l") >= 0  # the cursor is there again
    assert left(tmp_path) == []


def test_a_second_signal_ends_worker_processes(ends: Callable[..., Ended], tmp_path: Path) -> None:
    def act() -> None:
        import multiprocessing

        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=[300])
        worker.start()
        (tmp_path / "worker").write_text(str(worker.pid))
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGTERM)

    assert ends(act).code == 130
    worker = int((tmp_path / "worker").read_text())
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


def test_a_process_that_the_command_forked_is_not_the_command(ends: Callable[..., Ended]) -> None:
    def act() -> None:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM

    assert ends(act).code == 0


def test_before_anything_is_imported() -> None:
    """The command's own process, interrupted in its first imports: two lines all the same."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import builtins; real = builtins.__import__\n"
        "def interrupted(name, *rest, **more):\n"
        "    if name == 'typer': signal.raise_signal(signal.SIGINT)\n"
        "    return real(name, *rest, **more)\n"
        "builtins.__import__ = interrupted\n"
        "from headscope.__main__ import start; start()"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert ended.returncode == 130
    assert [line.partition(":")[0] for line in ended.stderr.splitlines()] == ["error", "hint"]


# ------------------------------------------------------------------ readers that leave
def broken_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_who_hears_no_warnings_gets_the_result(ends: Callable[..., Ended], tmp_path: Path) -> None:
    """`headscope … -o a.json 2>&1 | head -1`: the reader has left, and the file is written nevertheless."""
    ended = ends(lambda: os.dup2(broken_pipe(), 2))
    assert left(tmp_path) == ["a.json"]
    assert ended.code == 0


@pytest.mark.parametrize("form", ["table", "json"])
def test_who_reads_only_a_part_gets_the_files(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Gone:
        """Standard output that nobody reads."""

        encoding, buffer = "utf-8", property(lambda self: self)

        def write(self, data: Any) -> int:
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self) -> None: ...
        def isatty(self) -> bool:
            return False

        def fileno(self) -> int:
            return self.number

        number = os.open(os.devnull, os.O_WRONLY)

    monkeypatch.setitem(vars(headscope), "analyze", lambda *a, **k: samples.analysis(samples.model_heads(1, 2)))
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(SystemExit) as ended:
        main(["analyze", "x", "-f", form, "--heatmaps", str(tmp_path / "pictures"), "--quiet"])
    assert (ended.value.code, capsys.readouterr().err) == (0, "")
    assert (tmp_path / "pictures" / "map.png").exists()
