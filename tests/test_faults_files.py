"""Files and directories that appear whole or not at all, whoever is killed, and whoever else writes to them."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headscope.corpus.checkpoint import Checkpoint
from headscope.errors import InputError
from headscope.files import new_directory, new_file, new_files, placing, together, undisturbed

OLD, NEW = b"old", b"new"


def killed(work: Callable[[], Any]) -> None:
    """Run in a process that kills itself, at the latest when it is done."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def die(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_file(target: Path, data: bytes = NEW, force: bool = True) -> None:
    with new_file(target, force=force) as file:
        file.write(data)


def write_directory(target: Path, data: bytes = NEW, force: bool = True) -> None:
    with new_directory(target, force=force) as folder:
        (folder / "config.json").write_bytes(data)


def content(target: Path) -> bytes | None:
    place = target / "config.json" if target.is_dir() else target
    return place.read_bytes() if place.exists() else None


both = pytest.mark.parametrize("write", [write_file, write_directory])


# ------------------------------------------------------------------ two at the same time
@both
@pytest.mark.parametrize("force", [False, True])
def test_of_two_writers_one_wins_whole(write: Callable[..., None], force: bool, tmp_path: Path) -> None:
    target, opened = tmp_path / "a", new_file if write is write_file else new_directory
    try:
        with opened(target, force=force) as other:
            other.write(OLD) if write is write_file else (other / "config.json").write_bytes(OLD)
            write(target, NEW, force)
        won = OLD
    except InputError as error:
        assert "exists" in error.message and not force
        won = NEW
    assert content(target) == won == (OLD if force else NEW)
    assert os.listdir(tmp_path) == ["a"]


@both
def test_where_names_cannot_change_places_in_one_step(
    write: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(placing, "_system_call", lambda: None)
    monkeypatch.setattr(placing.os, "link", refuse)
    write(tmp_path / "a", OLD, False)
    with pytest.raises(InputError, match="exists"):
        write(tmp_path / "a", NEW, False)
    assert content(tmp_path / "a") == OLD
    write(tmp_path / "a", NEW, True)
    assert content(tmp_path / "a") == NEW and os.listdir(tmp_path) == ["a"]


def test_names_change_places_where_this_system_can(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(OLD)
    (tmp_path / "b").write_bytes(NEW)
    if placing.exchange(tmp_path / "a", tmp_path / "b"):
        assert content(tmp_path / "a") == NEW and content(tmp_path / "b") == OLD
    assert not placing.exchange(tmp_path / "a", tmp_path / "missing")


# ------------------------------------------------------------------ killed
@both
def test_what_a_killed_process_leaves_goes_the_next_time(write: Callable[..., None], tmp_path: Path) -> None:
    target = tmp_path / ("猫" * 83 + ".txt")  # 253 bytes: no room for an ending
    write(target, OLD)

    def dies() -> None:
        placing.os.replace = placing.os.rename = die
        write(target, NEW)

    for _ in range(2):
        killed(dies)
        assert content(target) == OLD
    left = [name for name in os.listdir(tmp_path) if name != target.name]
    assert len(left) == 1 and left[0].startswith(".猫")
    write(target, NEW)
    assert content(target) == NEW and os.listdir(tmp_path) == [target.name]


def test_killed_when_the_old_one_is_aside_it_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename = tmp_path / "a", os.rename
    write_directory(target, OLD)
    monkeypatch.setattr(placing, "exchange", lambda a, b: False)

    def dies() -> None:
        def renamed(source: Path, to: Path) -> None:
            rename(source, to)
            if to.suffix == ".before":
                die()

        placing.os.rename = renamed
        write_directory(target, NEW)

    killed(dies)
    assert not target.exists() and len(os.listdir(tmp_path)) == 2
    with pytest.raises(ZeroDivisionError), new_directory(target, force=True):
        raise ZeroDivisionError
    assert content(target) == OLD and os.listdir(tmp_path) == ["a"]


def test_what_somebody_is_at_and_what_is_not_ours_stay(tmp_path: Path) -> None:
    others = [".a.part", ".a.12345678.parts", ".a.b.12345678.part", ".aa.12345678.part", "a.12345678.part"]
    for name in others:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".a.87654321.part").symlink_to(tmp_path / "a.12345678.part")
    with new_file(tmp_path / "a", force=True) as file:
        write_file(tmp_path / "a", OLD)
        file.write(NEW)
    assert content(tmp_path / "a") == NEW
    assert set(others) < set(os.listdir(tmp_path))


# ------------------------------------------------------------------ signals
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_everything_is_in_its_place(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before, place = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}, placing.place_directory

    def disturbed(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(number)
        place(*arguments, **options)
        signal.raise_signal(number)

    monkeypatch.setattr("headscope.files.new.place_directory", disturbed)
    write_directory_old = tmp_path / "a"
    try:
        write_directory_old.mkdir()
        with pytest.raises(KeyboardInterrupt):
            write_directory(write_directory_old, NEW)
        assert [signal.getsignal(n) for n in before] == [stop, stop]
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert content(tmp_path / "a") == NEW and os.listdir(tmp_path) == ["a"]


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with undisturbed():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------------ together
@pytest.mark.parametrize(("error", "written"), [(None, True), (ValueError, False), (BrokenPipeError, True)])
def test_all_or_none(error: type[Exception] | None, written: bool, tmp_path: Path) -> None:
    def write() -> None:
        with together():
            write_file(tmp_path / "a", NEW)
            write_directory(tmp_path / "b", NEW)
            assert not (tmp_path / "a").exists()
            if error is not None:
                raise error

    if error is None:
        write()
    else:
        with pytest.raises(error):
            write()
    assert sorted(os.listdir(tmp_path)) == (["a", "b"] if written else [])


def test_files_for_a_directory_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(OLD)

    def write(force: bool) -> None:
        with new_files(tmp_path, force=force) as folder:
            for name in "abc":
                (folder / name).write_bytes(NEW)

    with pytest.raises(InputError, match="exists"):
        write(force=False)
    assert os.listdir(tmp_path) == ["b"] and content(tmp_path / "b") == OLD
    write(force=True)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"] and content(tmp_path / "b") == NEW


# ------------------------------------------------------------------ parts of a run
class _Part:
    number = 0


def test_a_run_is_held_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscope.corpus.checkpoint.to_bytes", lambda part: NEW)
    first = Checkpoint(tmp_path, {}, resume=False)
    second = Checkpoint(tmp_path, {}, resume=False)  # nothing is there that it could see
    first.save(_Part())  # type: ignore[arg-type]
    for resume in (False, True):
        with pytest.raises(InputError, match="another process is at this run"):
            Checkpoint(tmp_path, {}, resume)
    with pytest.raises(InputError, match="another process"):
        second.save(_Part())  # type: ignore[arg-type]
    assert len(list(tmp_path.glob("*/*.npz"))) == 1
    first.close()
    third = Checkpoint(tmp_path, {}, resume=True)
    third.remove()
    third.close()
    assert not tmp_path.exists()
