"""Signals at random moments, in every command that writes: `python -m tests.faults --rounds 20`.

Each round forks a process in which everything is imported, lets it run a command, sends it a signal after a random
time, and looks at what is left. A killed command is run once more and has to succeed.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np

from headscope.cli import signals
from headscope.cli.main import main
from tests import corpus_samples as samples

PRUNE = ["prune", "-m", "model", "--heads", "0:1;1:2", "--no-latency"]
CORPUS = ["analyze", "-m", "model", "--data", "many.jsonl", "-o", "out/a.json"]
EVERYTHING = ["--html", "out/a.html", "--weights", "out/a.npz", "--heatmaps", "out/pictures"]
TEXT = "the cat sat on the mat"
# A command, and what it writes.
COMMANDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "analyze": (["analyze", TEXT, "-m", "model", "-o", "out/a.json"], ("a.json",)),
    "analyze, everything": (
        ["analyze", TEXT, "-m", "model", "--layer", "0", "--head", "0,1", "-o", "out/a.json", *EVERYTHING],
        ("a.json", "a.html", "a.npz", "pictures"),
    ),
    "corpus": ([*CORPUS, "--per-text", "out/a.parquet"], ("a.json", "a.parquet")),
    "heatmap": (["heatmap", TEXT, "-m", "model", "-o", "out/a.png"], ("a.png",)),
    "importance": (["importance", "-m", "model", "--data", "few.jsonl", "-o", "out/a.json"], ("a.json",)),
    "report": (["report", TEXT, "-m", "model", "-o", "out/a.html"], ("a.html",)),
    "compare": (
        ["compare", "model", "other", TEXT, "-o", "out/a.json", "--picture", "out/a.png"],
        ("a.json", "a.png"),
    ),
    "size": (["size", "model", "-o", "out/a.json"], ("a.json",)),
    "docs": (["docs", "-o", "out/a.md"], ("a.md",)),
    "prune structural": ([*PRUNE, "-o", "out/a"], ("a",)),
    "prune remote-code": ([*PRUNE, "--save-as", "remote-code", "-o", "out/a"], ("a",)),
    "prune masked": ([*PRUNE, "--save-as", "masked", "-o", "out/a"], ("a",)),
    "prune --repair": ([*PRUNE, "--repair", "few.jsonl", "-o", "out/a"], ("a",)),
    "prune --curve": (
        ["prune", "-m", "model", "--curve", "out/a.png", "--curve-methods", "random", "--data", "few.jsonl"],
        ("a.png", "a.csv"),
    ),
    "convert": (["convert", "pruned", "--save-as", "masked", "-o", "out/a"], ("a",)),
    "workers": ([*CORPUS, "--workers", "2"], ("a.json",)),
}
SLOW = ("workers",)
KINDS = {"INT": [signal.SIGINT], "INT INT": [signal.SIGINT] * 2, "TERM": [signal.SIGTERM], "KILL": [signal.SIGKILL]}
CODES = {"INT": 130, "INT INT": 130, "TERM": 143, "KILL": -9}


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit code, negative for a signal, and what it said on standard error."""

    code: int
    said: str
    terminal: bool


def prepare(place: Path) -> None:
    """Models and texts."""
    samples.model(place / "model")
    samples.model(place / "other", num_attention_heads=2)
    samples.write(place / "few.jsonl", samples.texts(60))
    samples.write(place / "many.jsonl", samples.texts(1500, longest=6))
    ended = Running([*PRUNE, "-o", "pruned"], place).wait()
    assert ended.code == 0, ended.said


class Running:
    """A command in a process and session of its own, in which something may be done first."""

    def __init__(
        self, argv: list[str], place: Path, terminal: bool = False, first: Callable[[], None] = lambda: None
    ) -> None:
        self.terminal = terminal
        self.reader, writer = pty.openpty() if terminal else (-1, os.open(place / "said", os.O_CREAT | os.O_RDWR))
        os.truncate(place / "said", 0) if not terminal else None
        self.place = place
        ready, listens = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be_the_command(argv, place, writer, listens, first)
        os.close(writer)
        os.close(listens)
        os.read(ready, 1)
        os.close(ready)
        self.begun = time.monotonic()

    def kill(self, numbers: list[signal.Signals], after: float, pause: float) -> None:
        """Send signals, the first after some seconds from the start."""
        time.sleep(max(0.0, self.begun + after - time.monotonic()))
        for number in numbers:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return
            time.sleep(pause)

    def wait(self, seconds: float = 300.0) -> Ended:
        """Until it has ended; one that hangs is killed, and its exit code is 0 in no case."""
        said, deadline = b"", time.monotonic() + seconds
        status = None
        while status is None:
            if self.terminal:
                said += _heard(self.reader)
            pid, found = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                status = os.waitstatus_to_exitcode(found)
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGABRT)
                deadline += 60
            time.sleep(0.01)
        if self.terminal:
            said += _heard(self.reader)
            os.close(self.reader)
        else:
            said = (self.place / "said").read_bytes()
        return Ended(status, said.decode("utf-8", "replace").replace("\r\n", "\n"), self.terminal)


def _heard(reader: int) -> bytes:
    """All that is there; a terminal gives some 4,000 bytes at a time."""
    os.set_blocking(reader, False)
    said = b""
    with suppress(BlockingIOError, OSError):  # nothing more, or the other side is closed
        while part := os.read(reader, 1 << 16):
            said += part
    return said


def _be_the_command(argv: list[str], place: Path, writer: int, listens: int, first: Callable[[], None]) -> None:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number, to in ((0, nowhere), (1, nowhere), (2, writer)):
            os.dup2(to, number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        os.chdir(place)
        signals.listen()
        os.close(listens)
        first()
        main(argv)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    finally:
        sys.stderr.flush()
        os._exit(code)


# ------------------------------------------------------------------ what is there
Snapshot = dict[str, bytes]


def snapshot(folder: Path) -> Snapshot:
    """All files in a directory and below, by name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def of(found: Snapshot, output: str) -> Snapshot:
    """The part of a snapshot that is one output, without what is hidden in it."""
    inside = {name: data for name, data in found.items() if name == output or name.startswith(f"{output}/")}
    return {name: data for name, data in inside.items() if "/." not in name}


def same(a: Snapshot, b: Snapshot) -> bool:
    """The same files, and the same in them; archives have the time of writing in them."""
    return a.keys() == b.keys() and all(_content(n, a[n]) == _content(n, b[n]) for n in a)


def _content(name: str, data: bytes) -> object:
    if not (name.endswith(".npz") and data.startswith(b"PK")):
        return data
    with np.load(BytesIO(data)) as arrays:
        return {key: arrays[key].tobytes() for key in arrays}


def hidden(found: Snapshot | list[str]) -> list[str]:
    """What is no result."""
    return [name for name in found if name.startswith(".")]


# ------------------------------------------------------------------ one command
@dataclass
class Trial:
    """A command in its place, with what it writes when nobody disturbs it."""

    name: str
    place: Path
    new: Snapshot
    old: Snapshot
    seconds: float

    @classmethod
    def of(cls, name: str, place: Path) -> Trial:
        """Run the command in peace."""
        argv, outputs = COMMANDS[name]
        _import_for(argv, place)
        _empty(place / "out")
        begun = time.monotonic()
        ended = Running(argv, place).wait()
        assert ended.code == 0, ended.said
        seconds, new = time.monotonic() - begun, snapshot(place / "out")
        assert all(of(new, output) for output in outputs), new.keys()
        old = dict.fromkeys(new, b"{}")
        return cls(name, place, new, old, seconds)

    def disturbed(self, kind: str, moment: random.Random) -> tuple[str, list[str]]:
        """How it ended, and what is wrong with what is left."""
        argv, out, force = COMMANDS[self.name][0], self.place / "out", moment.random() < 0.5
        _empty(out)
        for key, data in self.old.items() if force else ():
            (out / key).parent.mkdir(exist_ok=True, parents=True)
            (out / key).write_bytes(data)
        argv = argv + ["--force"] * force
        running = Running(argv, self.place, terminal=moment.random() < 0.3)
        running.kill(KINDS[kind], moment.uniform(0, 1.1 * self.seconds), moment.uniform(0, 0.05))
        ended, found = running.wait(), snapshot(out)
        wrong = list(self._wrong_end(kind, ended)) + list(self._wrong_files(kind, ended, found, force))
        if not _gone(running.pid):
            wrong.append("processes are left")
        if kind == "KILL" and not wrong:
            wrong += self._wrong_again(found)
        if wrong:
            wrong.append(f"code {ended.code}, said: {ended.said[-1500:]!r}, found {sorted(found)}, force {force}")
        return {0: "done", CODES[kind]: "stopped"}.get(ended.code, f"code {ended.code}"), wrong

    def _wrong_end(self, kind: str, ended: Ended) -> Iterator[str]:
        if ended.code not in (0, CODES[kind]):
            yield "another exit code"
        if "Traceback" in ended.said or "Exception ignored" in ended.said:
            yield "a traceback"
        lines = [line.partition(":")[0] for line in ended.said.replace("\x1b[?25h", "").split("\n")]
        told = sum(line.endswith("error") for line in lines), sum(line.endswith("hint") for line in lines)
        if kind != "KILL" and told != ((0, 0) if ended.code == 0 else (1, 1)):
            yield f"told {told} times"
        if kind != "KILL" and ended.said.rfind("\x1b[?25l") > ended.said.rfind("\x1b[?25h"):
            yield "the cursor stays hidden"

    def _wrong_files(self, kind: str, ended: Ended, found: Snapshot, force: bool) -> Iterator[str]:
        states = set()
        for output in COMMANDS[self.name][1]:
            now, new, old = of(found, output), of(self.new, output), of(self.old, output) if force else {}
            states.add("new" if same(now, new) else "old" if now == old else "neither")
        if "neither" in states:
            yield "half-written"
        if states != {"new"} and ended.code == 0:
            yield "it ended well without its results"
        if len(states) > 1 and kind != "KILL":
            yield "one result is new and another is not"
        below = [p.name for p in (self.place / "out").rglob("*") if not p.parent.name.endswith(".parts")]
        rest = [name for name in hidden(below) if not name.endswith(".parts")]
        if kind != "KILL" and rest:
            yield f"left behind: {rest}"

    def _wrong_again(self, found: Snapshot) -> Iterator[str]:
        argv = COMMANDS[self.name][0]
        resume = ["--resume"] if "--data" in argv and argv[0] == "analyze" else []
        ended = Running([*argv, *resume, "--force"], self.place).wait()
        now = snapshot(self.place / "out")
        if ended.code != 0 or not same({k: v for k, v in now.items() if k in self.new}, self.new):
            yield f"not the same the next time: code {ended.code}, {ended.said[-500:]!r}"
        if left := hidden([path.name for path in (self.place / "out").rglob("*")]):
            yield f"left behind the next time: {left}"


def _import_for(argv: list[str], place: Path) -> None:
    """Run a command here, so that what it imports is there when others are forked from this process."""
    _empty(place / "out")
    os.chdir(place)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), suppress(SystemExit):
        main(argv)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _gone(session: int, seconds: float = 30.0) -> bool:
    """Whether no process of a session is left, or soon will not be."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_session(int(p.name)) == session for p in Path("/proc").iterdir() if p.name.isdigit()):
            return True
        time.sleep(0.05)
    return False


def _session(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[3])


# ------------------------------------------------------------------ all of them
@contextmanager
def modules_kept(report: Callable[[str], None]) -> Iterator[None]:
    """Say what is left in the cache of modules of checkpoints with code of their own."""
    from transformers.utils.hub import HF_MODULES_CACHE

    folder = Path(HF_MODULES_CACHE) / "transformers_modules"
    before = set(os.listdir(folder)) if folder.is_dir() else set()
    yield
    left = (set(os.listdir(folder)) if folder.is_dir() else set()) - before
    report(f"modules left in transformers' cache: {sorted(left)}")


def run(names: list[str], rounds: int, kinds: list[str], seed: int) -> int:
    """Disturb commands; returns how many faults were found."""
    moment, counts, faults = random.Random(seed), Counter[tuple[str, str, str]](), 0
    with tempfile.TemporaryDirectory() as folder, modules_kept(print):
        place = Path(folder)
        os.environ |= {"XDG_CACHE_HOME": folder, "HF_HUB_OFFLINE": "1"}
        prepare(place)
        for name in names:
            trial = Trial.of(name, place)
            for number in range(rounds):
                for kind in kinds:
                    how, wrong = trial.disturbed(kind, moment)
                    counts[name, kind, how] += 1
                    if wrong:
                        faults += 1
                        print(f"FAULT {name}, {kind}, round {number}: " + json.dumps(wrong, ensure_ascii=False))
            shown = {f"{k} {h}": n for (c, k, h), n in counts.items() if c == name}
            print(f"{name} ({trial.seconds:.2f} s): {shown}", flush=True)
    print(f"{sum(counts.values())} signals, {faults} faults")
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commands", nargs="*", default=[name for name in COMMANDS if name not in SLOW])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(1 if run(given.commands, given.rounds, given.kinds, given.seed) else 0)
