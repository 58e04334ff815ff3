"""Worker processes on this machine. One that dies is replaced, and its partition done again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from headscope.corpus.job import Job
from headscope.corpus.part import Part
from headscope.corpus.partition import Partition
from headscope.corpus.queue import MEMORY_HINT, Queue
from headscope.corpus.remote import Failure, RemoteWorker

_SCRIPT = 'what they wrote says why; a script that calls this does so under `if __name__ == "__main__":`'
# A worker's first message.
_READY = "ready"
# That a process may take to end by itself once its pipe is closed, so that its exit code is its own.
_SECONDS_TO_EXIT = 5.0


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
        queue = Queue(partitions)
        parts: list[Part] = []
        while True:
            self._hand_out(queue)
            # Whoever measured them is at the next ones already.
            yield from parts
            busy = {p.pipe: p for p in self._processes if p.partition is not None}
            if not busy:
                return
            heard = [self._hear(busy[pipe], queue) for pipe in wait([*busy]) if isinstance(pipe, Connection)]
            parts = [answer for answer in heard if isinstance(answer, Part)]
            failures = [answer for answer in heard if isinstance(answer, Failure)]
            if failures:
                yield from parts
                raise failures[0].error()

    def _hand_out(self, queue: Queue) -> None:
        """Give everyone who is idle a partition, and start who is missing, as long as there are partitions."""
        for process in [p for p in self._processes if p.partition is None and not p.process.is_alive()]:
            self._remove(process)
        while True:
            idle = next((p for p in self._processes if p.partition is None), None)
            if idle is None and len(self._processes) == self.workers:
                return
            partition = queue.take()
            if partition is None:
                return
            if idle is None:
                self._start(partition)
            else:
                idle.give(partition)

    def _start(self, partition: Partition) -> None:
        taken = {p.place for p in self._processes}
        place = next(i for i in range(self.workers) if i not in taken)
        device = self.devices[place % len(self.devices)] if self.devices else None
        self._processes.append(_Process.start(self.job.on(device), place, partition))

    def _hear(self, process: _Process, queue: Queue) -> Part | Failure | None:
        """A process' answer; one that is ready gets its partition, and the partition of one that has died goes back."""
        partition = process.partition
        assert partition is not None
        said: Part | Failure | str | None
        try:
            said = process.pipe.recv()
        except (EOFError, OSError):
            said = None
        if said is None:
            code = self._remove(process)
            how = f"exit code {code}" if code is None or code >= 0 else f"signal {-code}"
            queue.lost(partition, how, _SCRIPT if code == 1 else MEMORY_HINT)
            return None
        if isinstance(said, str):
            process.give(partition)
            return None
        process.partition = None
        return said

    def _remove(self, process: _Process) -> int | None:
        self._processes.remove(process)
        process.process.join(_SECONDS_TO_EXIT)
        process.process.kill()
        return process.end()

    def close(self) -> None:
        """End all processes at once."""
        for process in self._processes:
            process.process.kill()
        while self._processes:
            self._processes.pop().end()


# ------------------------------------------------------------------ one process
@dataclass(eq=False)
class _Process:
    """A process and the partition that is meant for it, from its start on."""

    place: int
    process: Any
    pipe: Connection[Any, Any]
    partition: Partition | None

    @classmethod
    def start(cls, job: Job, place: int, partition: Partition) -> _Process:
        # A forked process would share torch's threads and locks, which do not live on in it.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(job, theirs), daemon=True, name=f"headscope-{place}")
        with theirs, _uninterrupted():
            process.start()
        return cls(place, process, ours, partition)

    def give(self, partition: Partition) -> None:
        """Hand over a partition; if the process has died, its pipe says so when it is asked for the answer."""
        self.partition = partition
        with suppress(OSError):
            self.pipe.send(partition)

    def end(self) -> int | None:
        """Wait for a process that was killed; returns its exit code, negative for a signal."""
        self.process.join()
        code: int | None = self.process.exitcode
        self.pipe.close()
        self.process.close()
        return code


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes that start here are born deaf to interrupts, so that none of them dies of one with a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Started with the first process, it would lift the mask.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ------------------------------------------------------------------ the other side
def _work(job: Job, pipe: Connection[Any, Any]) -> None:
    """Load, then measure until nobody asks any more."""
    # An interrupt is for the process that was started by the user, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = RemoteWorker(job)
    with suppress(EOFError, OSError):
        # Only now: a large partition fills the pipe, and whoever sends it waits until it is read.
        pipe.send(_READY)
        while True:
            pipe.send(worker.measure(pipe.recv()))


def _end_with_parent() -> None:
    """A process whose parent was killed would else finish what it is at, and hold its memory until then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
