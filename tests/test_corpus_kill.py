"""Runs over a corpus that are killed for real, at any moment: in the end it is as if nothing had happened."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from headscope.cli.main import main
from headscope.corpus.command import analyze_corpus
from headscope.corpus.progress import Progress
from headscope.corpus.worker import Worker
from tests import corpus_samples as samples

SMALL = (8, 100_000)
# The command line's partitions have 512 texts.
NUMBER = 2_300


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model, another one, and two corpora."""
    place = tmp_path_factory.mktemp("corpus")
    samples.model(place / "model")
    samples.model(place / "other", num_attention_heads=2)
    samples.write(place / "few.jsonl", samples.texts(240))
    samples.write(place / "many.jsonl", samples.texts(NUMBER, longest=8))
    return place


def measured(place: Path, **options: Any) -> str:
    """The JSON of a run over the smaller corpus."""
    found = analyze_corpus(place / "model", place / "few.jsonl", partition=SMALL, **options)
    return json.dumps(found.to_dict())


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> str:
    return measured(place)


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()


# ------------------------------------------------------------------ a worker
def test_a_killed_worker_is_replaced(place: Path, undisturbed: str) -> None:
    seen: list[int] = []
    killed: list[int] = []

    def report(done: Progress) -> None:
        found = {p.name: p for p in multiprocessing.active_children()}
        seen.extend(p.pid or 0 for p in found.values() if p.pid not in seen)
        if len(seen) >= 2 and not killed:
            kill(found["headscope-0"])
            killed.append(found["headscope-0"].pid or 0)

    assert measured(place, workers=2, report=report) == undisturbed
    assert len(killed) == 1
    assert multiprocessing.active_children() == []


# ------------------------------------------------------------------ the main process, by the Python API
def test_killed_again_and_again(place: Path, undisturbed: str, tmp_path: Path) -> None:
    moments = random.Random(0)

    def killed() -> int:
        enough = len(samples.parts(tmp_path)) + moments.randint(0, 4)
        process = samples.fork(lambda: measured(place, checkpoint=tmp_path, resume=True))
        samples.until(lambda: len(samples.parts(tmp_path)) >= enough or not process.is_alive())
        time.sleep(0.02 * moments.random())
        kill(process)
        return len(samples.parts(tmp_path))

    counts = [killed() for _ in range(8)]
    assert counts == sorted(counts)
    assert 0 < counts[-1] < 30
    assert measured(place, checkpoint=tmp_path, resume=True) == undisturbed
    assert not tmp_path.exists()


def test_finished_parts_are_read_and_not_measured_again(
    place: Path, undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = samples.fork(lambda: measured(place, checkpoint=tmp_path))
    samples.until(lambda: len(samples.parts(tmp_path)) >= 3)
    kill(process)
    left = samples.parts(tmp_path)
    times = [path.stat().st_mtime_ns for path in left]
    calls, shown = count_measured(monkeypatch), []

    def report(done: Progress) -> None:
        shown.append(done)
        assert [path.stat().st_mtime_ns for path in left] == times

    assert measured(place, checkpoint=tmp_path, resume=True, report=report) == undisturbed
    assert shown[-1].resumed == 8 * len(left)
    assert shown[-1].texts == 240
    assert sorted(calls) == sorted(set(range(30)) - {int(path.stem) for path in left})


def count_measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the partitions that are measured from now on, here."""
    calls: list[int] = []
    measure = Worker.measure

    def counted(self: Worker, partition: Any) -> Any:
        calls.append(partition.number)
        return measure(self, partition)

    monkeypatch.setattr(Worker, "measure", counted)
    return calls


# ------------------------------------------------------------------ the main process, by the command line
def arguments(place: Path, output: Path, *more: str, model: str = "model", data: str = "many.jsonl") -> list[str]:
    return ["--data", str(place / data), "-m", str(place / model), "-o", str(output), "--quiet", *more]


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["analyze", *argv])
    return int(left.value.code or 0)


@pytest.fixture(scope="module")
def expected(place: Path) -> bytes:
    assert run(*arguments(place, place / "expected.json")) == 0
    return (place / "expected.json").read_bytes()


@pytest.fixture
def killed(place: Path, tmp_path: Path) -> Path:
    """The checkpoint folder of a command that was killed when it had finished two parts or more."""
    folder = tmp_path / ".out.json.parts"
    process = samples.command(*arguments(place, tmp_path / "out.json"))
    samples.until(lambda: len(samples.parts(folder)) >= 2)
    kill(process)
    assert not (tmp_path / "out.json").exists()
    return folder


@pytest.mark.parametrize("resume", [True, False])
def test_the_same_bytes(
    place: Path, expected: bytes, killed: Path, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished, calls = {int(path.stem) for path in samples.parts(killed)}, count_measured(monkeypatch)
    output = killed.parent / "out.json"
    assert run(*arguments(place, output, *["--resume"] * resume)) == 0
    assert output.read_bytes() == expected
    assert calls == [number for number in range(5) if number not in finished or not resume]
    assert [path.name for path in output.parent.iterdir()] == ["out.json"]


def test_what_differs_is_refused_and_named(
    place: Path, expected: bytes, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*more: str, **others: str) -> str:
        capsys.readouterr()
        assert run(*arguments(place, killed.parent / "out.json", "--resume", *more, **others)) == 2
        printed = capsys.readouterr().err
        assert "--resume" in printed
        return printed.partition("\n")[0]

    assert refused("--max-length", "9").endswith("differs from this one in: max_length")
    assert refused("--rules", "calibrated", "--words").endswith("differs from this one in: rules, words")
    assert refused(model="other").endswith("differs from this one in: model")
    samples.write(place / "others.jsonl", samples.texts(NUMBER, longest=8))
    assert refused(data="others.jsonl").endswith("differs from this one in: data")
    data = place / "many.jsonl"
    lines = data.read_text("utf-8").splitlines(keepends=True)
    try:
        data.write_text("".join([*lines[:600], '{"text": "another"}\n', *lines[601:]]), "utf-8")
        assert refused().endswith(f"the texts have changed since the run that is to be resumed, from {data}:513 on")
        data.write_text("".join(lines[:512]), "utf-8")
        assert "the texts have changed" in refused()
    finally:
        data.write_text("".join(lines), "utf-8")
    assert run(*arguments(place, killed.parent / "out.json", "--resume")) == 0
    assert (killed.parent / "out.json").read_bytes() == expected


def test_workers_end_with_the_main_process(place: Path, expected: bytes, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    process = samples.command(*arguments(place, output, "--workers", "2"))
    samples.until(lambda: samples.parts(tmp_path / ".out.json.parts"))
    workers = samples.children(process.pid)
    assert len(workers) >= 2
    kill(process)
    samples.until(lambda: not any(map(samples.runs, workers)), seconds=20, every=0.1)
    assert run(*arguments(place, output, "--resume")) == 0
    assert output.read_bytes() == expected
