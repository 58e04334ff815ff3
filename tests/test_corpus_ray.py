"""Ray actors: the same numbers as here, whatever happens to them; and what a cluster may do, played by a stand-in."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.corpus import ray_actors, ray_cluster
from headscope.corpus.command import analyze_corpus
from headscope.corpus.part import Part
from headscope.corpus.partition import Partition
from headscope.corpus.progress import Progress
from headscope.corpus.queue import MOST_ATTEMPTS
from headscope.corpus.ray_actors import RayActors
from headscope.corpus.remote import Failure
from headscope.corpus.summary import Summary
from headscope.errors import InputError, ModelError, ResourceError
from headscope.reading import Record
from tests import corpus_samples as samples

ROOT = Path(__file__).parents[1]


# ------------------------------------------------------------------ no cluster
@pytest.mark.parametrize("kind", ["", "ray://"])
def test_nobody_at_the_address(kind: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"{kind}127.0.0.1:{taken.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(InputError) as raised, ray_cluster.connected(1, address):
            raise AssertionError
    assert raised.value.message.startswith(f"the Ray cluster at {address} cannot be reached: ")
    assert "ray start" in (raised.value.hint or "")
    assert time.monotonic() - begun < 30


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actors, "find_spec", lambda name: None)
    with pytest.raises(InputError) as raised:
        RayActors(samples.job("any"), 2, None)
    assert raised.value.hint == 'pip install "headscope[ray]"'


# ------------------------------------------------------------------ a stand-in for Ray
class Lost(Exception):
    """Ray's error for an actor that has died."""


@dataclass(eq=False)
class Asked:
    """Something that was asked of an actor."""

    actor: Actor
    partition: Partition | None = None


@dataclass(eq=False)
class Actor:
    """An actor, of which one thing is asked at a time."""

    asked: Asked | None = None
    there: bool = False

    def _ask(self, partition: Partition | None) -> Asked:
        assert self.asked is None
        self.asked = Asked(self, partition)
        return self.asked

    @property
    def version(self) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda: self._ask(None))

    @property
    def measure(self) -> SimpleNamespace:
        assert self.there
        return SimpleNamespace(remote=self._ask)


@dataclass
class StandIn:
    """Ray as far as it is used. Actors answer in any order, and some die; there is room for some of them only."""

    drawn: Random
    room: int
    death: float = 0.0
    death_at_start: float = 0.0
    said: str = ray_actors.headscope.__version__
    gpus: int = 0
    actors: list[Actor] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    options_given: list[dict[str, Any]] = field(default_factory=list)
    exceptions = SimpleNamespace(RayError=Lost)

    def nodes(self) -> list[dict[str, Any]]:
        alive = {"Alive": True, "Resources": {"CPU": 4.0} | ({"GPU": float(self.gpus)} if self.gpus else {})}
        return [alive, {"Alive": False, "Resources": {"CPU": 4.0, "GPU": 99.0}}]

    def remote(self, kind: type) -> StandIn:
        return self

    def options(self, **given: Any) -> SimpleNamespace:
        self.options_given.append(given)

        def start(job: Any) -> Actor:
            self.actors.append(Actor())
            return self.actors[-1]

        return SimpleNamespace(remote=start)

    def wait(self, asked: list[Asked], num_returns: int, timeout: float | None) -> tuple[list[Asked], list[Asked]]:
        able = [one for one in asked if one.actor in self.actors[: self.room]]
        assert able or timeout is not None, "nobody will ever answer"
        return ([self.drawn.choice(able)] if able else []), []

    def get(self, asked: Asked) -> Part | Failure | str:
        if self.drawn.random() < (self.death_at_start if asked.partition is None else self.death):
            self.actors.remove(asked.actor)
            if asked.partition is not None:
                self.lost.append(asked.partition.number)
            raise Lost("The actor died.\nIts node has no such package.\n")
        asked.actor.asked, asked.actor.there = None, True
        if asked.partition is None:
            return self.said
        return Part(asked.partition.number, asked.partition.digest, Summary())

    def kill(self, actor: Actor) -> None:
        self.actors.remove(actor)


def run(ray: StandIn, workers: int, number: int, taken: list[int] | None = None, **loading: Any) -> list[int]:
    """The numbers of the parts."""

    @contextmanager
    def connected(workers: int, address: str | None) -> Iterator[tuple[Any, bool]]:
        yield ray, True

    def partitions() -> Iterator[Partition]:
        for n in range(number):
            if taken is not None:
                taken.append(n)
            yield Partition(n, (Record(n, "a dog", None, f"t.jsonl:{n + 1}"),))

    job = samples.job("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_actors, "connected", connected)
        with closing(RayActors(replace(job, loading={**job.loading, **loading}), workers, None)) as at_work:
            found = []
            for part in at_work.run(partitions()):
                found.append(part.number)
                assert taken is None or len(taken) <= len(found) + workers
    assert ray.actors == []
    return found


@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 4), st.floats(0, 0.4), st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_every_partition_once_whatever_dies(number: int, workers: int, room: int, death: float, seed: int) -> None:
    ray = StandIn(Random(seed), room, death)
    try:
        assert sorted(run(ray, workers, number, taken=[])) == list(range(number))
    except ResourceError as error:
        worst = Counter(ray.lost).most_common(1)[0]
        assert worst[1] == MOST_ATTEMPTS
        place = f"t.jsonl:{worst[0] + 1}"
        assert error.message == f"3 workers died (Lost) on the texts from {place} to {place}"
    else:
        assert max(Counter(ray.lost).values(), default=0) < MOST_ATTEMPTS
    assert len(ray.options_given) <= (workers + len(ray.lost) if number else 0)


def test_actors_that_cannot_start() -> None:
    with pytest.raises(InputError, match=r"actors do not start: Its node has no such package\.") as raised:
        run(StandIn(Random(0), room=2, death_at_start=1.0), 2, 5)
    assert "headscope" in (raised.value.hint or "")


def test_another_version_there() -> None:
    with pytest.raises(InputError, match=r"the Ray cluster has headscope 0\.0\.0, and this is"):
        run(StandIn(Random(0), room=2, said="0.0.0"), 2, 5)


def test_no_room_for_anybody() -> None:
    with pytest.raises(ResourceError, match="has started no actor"):
        run(StandIn(Random(0), room=0), 2, 5)


@pytest.mark.parametrize(
    ("there", "loading", "each"),
    [
        (0, {"device": "auto"}, 0),
        (4, {"device": "auto"}, 1),
        (4, {"device": "cuda"}, 1),
        (4, {"device": "cpu"}, 0),
        (4, {"device": "auto", "device_map": "auto"}, 4),
        (0, {"device": "auto", "device_map": "auto"}, 0),
    ],
)
def test_gpus_of_an_actor(there: int, loading: dict[str, Any], each: int) -> None:
    ray = StandIn(Random(0), room=2, gpus=there)
    assert run(ray, 2, 3, **loading)
    assert ray.options_given == [{"num_cpus": 1, "num_gpus": each}] * 2


# ------------------------------------------------------------------ a cluster on this machine
@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Our own, started once: it takes longer than all that is done on it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before])])
    try:
        with ray_cluster.connected(2, None) as (ray, ours):
            assert ours
            yield ray
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def actors() -> dict[int, str]:
    """Ray names the processes of this test's cluster after what they do."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    found = (line.split(maxsplit=1) for line in listed.splitlines())
    return {int(pid): name for pid, name in found if name.startswith("ray::RemoteWorker")}


def test_ray_gives_what_one_text_at_a_time_gives_though_an_actor_is_killed(
    cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, data = samples.model(tmp_path / "model"), samples.write(tmp_path / "t.jsonl", samples.texts(60))
    here = analyze_corpus(model, data, partition=(8, 100_000))
    seen: set[int] = set()
    killed: list[int] = []

    def report(done: Progress) -> None:
        found = actors()
        seen.update(found)
        if not killed:
            killed.append(next(pid for pid, name in found.items() if "measure" in name or len(found) == 1))
            os.kill(killed[0], signal.SIGKILL)

    there = analyze_corpus(model, data, partition=(8, 100_000), runner="ray", workers=2, report=report)
    assert json.dumps(there.to_dict()) == json.dumps(here.to_dict())
    samples.check_against_single_texts(there, model, samples.texts(60))
    assert killed
    assert len(seen) >= 2
    assert cluster.is_initialized()
    # Ray tells of the death on standard output, a moment later.
    time.sleep(1.0)
    assert capfd.readouterr().out == ""


def test_an_error_comes_out_as_itself(cluster: Any, tmp_path: Path) -> None:
    job = samples.job(tmp_path)
    with pytest.raises(ModelError) as raised, closing(RayActors(job, 1, None)) as at_work:
        list(at_work.run(iter([Partition(0, (Record(0, "a dog", None, "t.jsonl:1"),))])))
    assert raised.value.hint
    assert raised.value.__notes__[0].startswith("In a worker:\nTraceback")
