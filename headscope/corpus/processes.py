"""Worker processes on this machine. One that dies is replaced, and its partition done again."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from headscope.corpus.job import Job
from headscope.corpus.part import Part
from headscope.corpus.partition import Partition
from headscope.errors import ResourceError

# A partition that ended this many workers will end the next one.
MOST_ATTEMPTS = 3


class Processes:
    """Partitions go to whoever is idle.

    Args:
        job: What to measure; every process loads its own model.
        workers: How many processes.
        devices: A device for each process, in turn; none leaves the choice to the job.
    """

    def __init__(self, job: Job, workers: int, devices: tuple[str, ...] = ()) -> None:
        self.job, self.workers, self.devices = job, workers, devices
        self._processes: list[_Process] = []

    def run(self, partitions: Iterator[Partition]) -> Iterator[Part]:
        """Measure; see `Runner.run`."""
        attempts: dict[int, int] = {}
        again: list[Partition] = []
        more = True
        while True:
            while more or again:
                process = self._idle()
                if process is None:
                    break
                partition = again.pop() if again else next(partitions, None)
                if partition is None:
                    more = False
                else:
                    process.give(partition)
            busy = [p for p in self._processes if p.partition is not None]
            if not busy:
                return
            for process in _ready(busy):
                partition = process.partition
                assert partition is not None
                answer = process.answer()
                if isinstance(answer, Part):
                    yield answer
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    self._processes.remove(process)
                    attempts[partition.number] = attempts.get(partition.number, 0) + 1
                    _check_attempts(partition, attempts[partition.number], process.exit_code)
                    again.append(partition)

    def _idle(self) -> _Process | None:
        """A process that waits for work, started if there may be one more."""
        for process in self._processes:
            if process.partition is None:
                return process
        if len(self._processes) == self.workers:
            return None
        taken = {p.place for p in self._processes}
        place = next(i for i in range(self.workers) if i not in taken)
        device = self.devices[place % len(self.devices)] if self.devices else None
        self._processes.append(_Process.start(self.job, place, device))
        return self._processes[-1]

    def close(self) -> None:
        """End all processes at once."""
        for process in self._processes:
            process.end()
        self._processes = []


def _check_attempts(partition: Partition, attempts: int, code: int | None) -> None:
    if attempts < MOST_ATTEMPTS:
        return
    first, last = partition.records[0].where, partition.records[-1].where
    raise ResourceError(
        f"{attempts} workers died (exit code {code}) on the texts from {first} to {last}",
        "it may be memory: take fewer --workers, --batch-size 1 or a smaller --max-length; --resume keeps what is done",
    )


# ------------------------------------------------------------------ one process
@dataclass(eq=False)
class _Process:
    """A process and the partition that it has."""

    place: int
    process: Any
    pipe: Connection[Any, Any]
    partition: Partition | None = field(default=None)

    @classmethod
    def start(cls, job: Job, place: int, device: str | None) -> _Process:
        # A forked process would share torch's threads and locks, which do not live on in it.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(job, device, theirs), daemon=True, name=f"headscope-{place}")
        process.start()
        theirs.close()
        return cls(place, process, ours)

    def give(self, partition: Partition) -> None:
        """Hand over a partition; a process that has died says so when it is asked for its answer."""
        self.partition = partition
        try:
            self.pipe.send(partition)
        except OSError:
            self.pipe.close()

    def answer(self) -> Part | Exception | None:
        """The part, or what went wrong; None if the process has died."""
        self.partition = None
        try:
            found: Part | Exception = self.pipe.recv()
        except (EOFError, OSError):
            self.end()
            return None
        return found

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that ended it."""
        code: int | None = self.process.exitcode
        return code

    def end(self) -> None:
        """Whatever it is at."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _ready(busy: list[_Process]) -> list[_Process]:
    """Those that have answered or died."""
    closed = [p for p in busy if p.pipe.closed]
    if closed:
        return closed
    ready = wait([p.pipe for p in busy])
    return [p for p in busy if p.pipe in ready]


def _work(job: Job, device: str | None, pipe: Connection[Any, Any]) -> None:
    """The other side: load, then measure until nobody asks any more."""
    # An interrupt is for the process that was started by the user, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from headscope.corpus.worker import Worker  # loads torch, here and not where processes are started

    try:
        worker = Worker(job.on(device))
        while True:
            pipe.send(worker.measure(pipe.recv()))
    except EOFError:
        return
    except Exception as error:  # whatever it is, the user's process has to hear of it
        pipe.send(error)
