"""Actors of a Ray cluster. One that is lost is replaced, and its partition done again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch

import headscope
from headscope.corpus.job import Job
from headscope.corpus.part import Part
from headscope.corpus.partition import Partition
from headscope.corpus.queue import MEMORY_HINT, MOST_ATTEMPTS, Queue
from headscope.corpus.ray_cluster import connected
from headscope.corpus.remote import Failure, RemoteWorker
from headscope.errors import InputError, ResourceError

_SECONDS_TO_START = 300.0


class RayActors:
    """Partitions go to whoever is idle; an actor for which the cluster has no room yet gets none.

    Args:
        job: What to measure; every actor loads its own model.
        workers: How many actors. Each has a GPU where the cluster has any, a CPU otherwise.
        address: Of a cluster that runs; without it one starts on this machine, unless this process uses Ray already.

    Raises:
        InputError: Ray is not installed.
    """

    def __init__(self, job: Job, workers: int, address: str | None) -> None:
        if find_spec("ray") is None:
            raise InputError("the runner ray needs Ray", 'pip install "headscope[ray]"')
        self.job, self.workers, self.address = job, workers, address
        self._open = ExitStack()
        self._ray: Any = None
        self._idle: list[Any] = []
        # What was asked, and of whom: a partition's part, or (None) whether the actor is there.
        self._asked: dict[Any, tuple[Any, Partition | None]] = {}
        self._failed_starts = 0

    def run(self, partitions: Iterator[Partition]) -> Iterator[Part]:
        """Measure; see `Runner.run`.

        Raises:
            InputError: The cluster cannot be reached, or has another headscope or none.
            ResourceError: The cluster has no room.
        """
        first = next(partitions, None)
        if first is None:
            return
        queue = Queue(chain([first], partitions))
        job = self._connect()
        for _ in range(self.workers):
            self._start(job)
        while True:
            self._hand_out(queue)
            if self._idle and not self._busy():
                return
            answer = self._next_answer(job, queue)
            if isinstance(answer, Failure):
                raise answer.error()
            if answer is not None:
                # Before anybody looks at it, so that its actor does not wait.
                self._hand_out(queue)
                yield answer

    def _connect(self) -> Job:
        """The job as it is done there."""
        self._ray, ours = self._open.enter_context(connected(self.workers, self.address))
        # An actor is given one CPU of a cluster that others use, too; a cluster of our own has all of this machine.
        return replace(self.job, threads=max(1, torch.get_num_threads() // self.workers) if ours else 1)

    def _start(self, job: Job) -> None:
        remote = self._ray.remote(RemoteWorker)
        actor = remote.options(num_cpus=1, num_gpus=_gpus(self._ray.nodes(), job)).remote(job)
        self._asked[actor.version.remote()] = actor, None

    def _hand_out(self, queue: Queue) -> None:
        while self._idle:
            partition = queue.take()
            if partition is None:
                return
            actor = self._idle.pop()
            self._asked[actor.measure.remote(partition)] = actor, partition

    def _busy(self) -> bool:
        return any(partition is not None for _, partition in self._asked.values())

    def _next_answer(self, job: Job, queue: Queue) -> Part | Failure | None:
        """What the first of them says; the partition of one that is lost goes back."""
        asked = self._first_answered()
        actor, partition = self._asked.pop(asked)
        try:
            said: Part | Failure | str = self._ray.get(asked)
        except self._ray.exceptions.RayError as error:
            if partition is None:
                self._check_starts(error)
            else:
                queue.lost(partition, type(error).__name__, MEMORY_HINT)
            self._start(job)
            return None
        self._idle.append(actor)
        if not isinstance(said, str):
            return said
        if said != headscope.__version__:
            raise InputError(
                f"the Ray cluster has headscope {said}, and this is {headscope.__version__}",
                "install the same version there",
            )
        return None

    def _first_answered(self) -> Any:
        # Until there is somebody to wait for, it may be that nobody can start.
        timeout = None if self._busy() else _SECONDS_TO_START
        begun = time.monotonic()
        answered, _ = self._ray.wait([*self._asked], num_returns=1, timeout=timeout)
        if not answered:
            raise ResourceError(
                f"the Ray cluster has started no actor in {time.monotonic() - begun:.0f} s",
                "its CPUs or GPUs are taken: `ray status` shows by whom",
            )
        return answered[0]

    def _check_starts(self, error: Exception) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MOST_ATTEMPTS:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise InputError(
                f"the Ray cluster's actors do not start: {lines[-1] if lines else type(error).__name__}",
                "every node needs headscope, the same version",
            ) from error

    def close(self) -> None:
        """End all actors at once, and the cluster if it is our own."""
        actors = [*self._idle, *(actor for actor, _ in self._asked.values())]
        self._idle, self._asked = [], {}
        for actor in actors:
            self._ray.kill(actor)
        self._open.close()


def _gpus(nodes: list[dict[str, Any]], job: Job) -> int:
    """GPUs of an actor: one if there are any, with a device map as many as the largest node has."""
    largest = max((int(n["Resources"].get("GPU", 0)) for n in nodes if n["Alive"]), default=0)
    if str(job.loading.get("device")) == "cpu":
        return 0
    return largest if job.loading.get("device_map") is not None else min(1, largest)
