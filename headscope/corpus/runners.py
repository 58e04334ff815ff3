"""Where partitions are measured: here, in processes of this machine, or in a cluster's actors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from headscope.corpus.job import Job
from headscope.corpus.part import Part
from headscope.corpus.partition import Partition
from headscope.corpus.processes import Processes
from headscope.corpus.worker import Worker
from headscope.errors import InputError
from headscope.models.loading import LoadedModel
from headscope.models.selection import check_count

RUNNERS = ("local", "ray")
_MOST_WORKERS = 1024


class Runner(Protocol):
    """Measures partitions; a lost worker's partition is done again."""

    def run(self, partitions: Iterator[Partition]) -> Iterator[Part]:
        """A part for each partition, in any order; partitions are taken as there is somebody to measure them.

        Raises:
            HeadscopeError: What a worker raised.
            ResourceError: A partition ended its worker again and again.
        """
        ...

    def close(self) -> None:
        """End all workers, whatever they are at."""
        ...


class Here:
    """One partition after the other, in this process; the model is loaded when the first one comes."""

    def __init__(self, job: Job, loaded: LoadedModel | None) -> None:
        self.job, self.loaded = job, loaded

    def run(self, partitions: Iterator[Partition]) -> Iterator[Part]:
        """Measure in order."""
        worker: Worker | None = None
        for partition in partitions:
            worker = worker or Worker(self.job, self.loaded)
            with _generators_kept():
                part = worker.measure(partition)
            yield part

    def close(self) -> None:
        """Nothing to end."""


@contextmanager
def _generators_kept() -> Iterator[None]:
    """A worker seeds the random generators of its process; here, they are the user's."""
    python, numpy = random.getstate(), np.random.get_state()
    gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng([*range(gpus)]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def runner_for(job: Job, loaded: LoadedModel | None, runner: str, workers: int, ray_address: str | None) -> Runner:
    """The runner of a name.

    Raises:
        InputError: No such runner, or it cannot do this job: a model in memory stays in its process.
    """
    if runner not in RUNNERS:
        raise InputError(f"unknown runner {runner!r}", f"runners: {', '.join(RUNNERS)}")
    check_count("workers", workers, most=_MOST_WORKERS)
    if ray_address is not None and runner != "ray":
        raise InputError("a Ray address goes with the runner ray", "give --runner ray")
    if loaded is not None and (runner != "local" or workers > 1):
        raise InputError("workers load a model by name, and this one is in memory", "give its name or directory")
    if job.loading.get("device_map") is not None and runner == "local" and workers > 1:
        raise InputError("a device map spreads one model, and each worker would spread its own", "give --workers 1")
    if runner == "ray":
        from headscope.corpus.ray_actors import RayActors

        return RayActors(job, workers, ray_address)
    if workers == 1:
        return Here(job, loaded)
    # Workers share the cores.
    shared = replace(job, threads=max(1, torch.get_num_threads() // workers))
    return Processes(shared, workers, _devices(job))


def _devices(job: Job) -> tuple[str, ...]:
    """All GPUs where any would do; none leaves the choice to the job."""
    several = torch.cuda.device_count()
    if job.loading.get("device") in ("auto", "cuda") and job.loading.get("device_map") is None and several > 1:
        return tuple(f"cuda:{i}" for i in range(several))
    return ()
