"""Worker processes: the same numbers as one text at a time, whatever happens to them, and none of them left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headscope.corpus import processes
from headscope.corpus.command import analyze_corpus
from headscope.corpus.part import Part
from headscope.corpus.partition import Partition
from headscope.corpus.processes import Processes
from headscope.corpus.queue import MOST_ATTEMPTS
from headscope.corpus.remote import Failure
from headscope.corpus.worker import Worker
from headscope.errors import InputError, ModelError, ResourceError
from tests import corpus_samples as samples

ROOT = Path(__file__).parents[1]
SMALL = (8, 100_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return samples.model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return samples.write(tmp_path_factory.mktemp("data") / "texts.jsonl", samples.texts(60))


def same(found: Part, expected: Part) -> bool:
    a, b = found.summary, expected.summary
    return (found.number, found.digest, a.texts, a.tokens) == (
        expected.number,
        expected.digest,
        b.texts,
        b.tokens,
    ) and all(
        np.array_equal(array, b.sums[layer].to_arrays()[name], equal_nan=array.dtype.kind == "f")
        for layer, sums in a.sums.items()
        for name, array in sums.to_arrays().items()
    )


# ------------------------------------------------------------------ the same numbers
def test_processes_give_what_one_text_at_a_time_gives(model: Path, data: Path) -> None:
    here = analyze_corpus(model, data, partition=SMALL)
    there = analyze_corpus(model, data, partition=SMALL, workers=2)
    assert json.dumps(there.to_dict()) == json.dumps(here.to_dict())
    samples.check_against_single_texts(there, model, samples.texts(60))
    assert multiprocessing.active_children() == []


# ------------------------------------------------------------------ deaths
def test_killed_as_it_loads_as_it_measures_and_as_it_waits(model: Path, data: Path) -> None:
    partitions = list(samples.cut(data, 8))
    at_work = Processes(samples.job(model), workers=1)
    killed = []

    def signal_it(number: signal.Signals) -> None:
        (process,) = multiprocessing.active_children()
        os.kill(process.pid or 0, number)
        killed.append(process.pid)

    def given() -> Iterator[Partition]:
        threading.Timer(0.5, signal_it, [signal.SIGKILL]).start()
        yield partitions[0]
        # Stopped, it is given a partition and cannot answer.
        signal_it(signal.SIGSTOP)
        threading.Timer(0.3, signal_it, [signal.SIGKILL]).start()
        yield partitions[1]
        signal_it(signal.SIGKILL)
        yield from partitions[2:]

    with closing(at_work):
        found = list(at_work.run(given()))
    assert len(set(killed)) == 3
    assert [part.number for part in found] == [partition.number for partition in partitions]
    worker = Worker(samples.job(model))
    assert all(same(part, worker.measure(partition)) for part, partition in zip(found, partitions, strict=True))


def at_every_start(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> list[int]:
    """`act` is called with the number of every process as soon as it starts; returns those numbers."""
    start, pids = processes._Process.start, []

    def and_act(*arguments: Any) -> Any:
        process = start(*arguments)
        act(process.process.pid)
        pids.append(process.process.pid)
        return process

    monkeypatch.setattr(processes._Process, "start", and_act)
    return pids


@pytest.fixture
def doomed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every process is killed as soon as it starts."""
    return at_every_start(monkeypatch, lambda pid: os.kill(pid, signal.SIGKILL))


def test_a_partition_that_ends_every_worker(data: Path, doomed: list[int]) -> None:
    with pytest.raises(ResourceError) as raised, closing(Processes(samples.job("any"), workers=1)) as at_work:
        list(at_work.run(samples.cut(data, 8)))
    assert raised.value.message == f"3 workers died (signal 9) on the texts from {data}:1 to {data}:8"
    assert "--resume" in (raised.value.hint or "")
    assert len(doomed) == MOST_ATTEMPTS == 3
    assert multiprocessing.active_children() == []


def test_closed_in_the_middle(data: Path) -> None:
    """Nothing is left: no process, no file."""

    def given() -> Iterator[Partition]:
        yield next(samples.cut(data, 8))
        raise KeyboardInterrupt

    before = open_files()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), closing(Processes(samples.job("any"), workers=2)) as at_work:
            for _ in at_work.run(given()):
                raise AssertionError
        assert multiprocessing.active_children() == []
    # The first process of all starts one that looks after the others.
    assert open_files() <= before + 1


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_nothing_starts_for_nothing(doomed: list[int]) -> None:
    assert list(Processes(samples.job("any"), workers=2).run(iter([]))) == []
    assert doomed == []


# ------------------------------------------------------------------ what they raise
def test_an_error_comes_out_as_itself(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as expected:
        Worker(samples.job(tmp_path))
    with pytest.raises(ModelError) as raised, closing(Processes(samples.job(tmp_path), workers=1)) as at_work:
        list(at_work.run(samples.cut(data, 8)))
    assert (raised.value.message, raised.value.hint) == (expected.value.message, expected.value.hint)
    assert raised.value.__notes__[0].startswith("In a worker:\nTraceback")


class Demanding(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize("error", [Demanding("this", "that"), ValueError("this and that", lambda: None)])
def test_an_error_that_cannot_travel_becomes_its_text(error: Exception) -> None:
    found = pickle.loads(pickle.dumps(Failure.of(error))).error()
    assert type(found) is RuntimeError
    assert str(found).startswith(type(error).__name__)
    assert "this and that" in str(found)


def test_errors_that_travel() -> None:
    error = InputError("no", "yes")
    error.message = "c.jsonl:7: no"
    for given in (error, OSError(2, "no such file", "c.jsonl"), MemoryError("out of memory")):
        found = Failure.of(given).error()
        assert type(found) is type(given)
        assert vars(found).items() >= vars(given).items()
        assert (found.args, str(found)) == (given.args, str(given))


# ------------------------------------------------------------------ an interrupt
def test_workers_leave_interrupts_to_who_started_them(model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C on a terminal reaches all processes; a worker that dies of it would write a traceback."""

    def interrupt(pid: int) -> None:
        for moment in (0.02, 0.1, 0.3, 0.8):
            threading.Timer(moment, os.kill, [pid, signal.SIGINT]).start()

    started = at_every_start(monkeypatch, interrupt)
    with closing(Processes(samples.job(model), workers=1)) as at_work:
        assert len(list(at_work.run(samples.cut(data, 8)))) == 8
        assert len(started) == 1


def test_an_interrupt_ends_everything(model: Path, tmp_path: Path) -> None:
    data = samples.write(tmp_path / "texts.jsonl", samples.texts(1100, longest=2))
    argv = ["analyze", "--data", str(data), "-m", str(model), "--workers", "2", "--quiet", "-f", "json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "headscope", *argv],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Where tests run in the background of a script they inherit that interrupts are ignored, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    # Both workers, and the process that looks after them.
    started = samples.until(lambda: len(found := samples.children(process.pid)) >= 3 and found, every=0.1)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[0] == "error: interrupted"
    assert "Traceback" not in err
    samples.until(lambda: not any(map(samples.runs, started)), every=0.1)
