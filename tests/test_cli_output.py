"""The sink: a file appears whole or not at all, and nothing that exists is lost by accident."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headscope.cli.output import Sink, check_target, replacing
from headscope.errors import InputError


class Interrupted(Exception):
    """Stands for anything that stops a writer half-way."""


@given(old=st.none() | st.binary(max_size=20), chunks=st.lists(st.binary(max_size=20)), stop=st.booleans())
def test_all_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, old: bytes | None, chunks: list[bytes], stop: bool
) -> None:
    path = tmp_path_factory.mktemp("sink") / "a.json"
    if old is not None:
        path.write_bytes(old)
    try:
        with replacing(path, force=True) as file:
            for chunk in chunks:
                file.write(chunk)
            if stop:
                raise Interrupted
    except Interrupted:
        pass
    expected = old if stop else b"".join(chunks)
    assert (path.read_bytes() if path.exists() else None) == expected
    assert [p for p in path.parent.iterdir() if p != path] == []


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_is_utf8_byte_for_byte(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("sink") / "a.txt"
    Sink(path).text(text)
    assert path.read_bytes() == text.encode()


def test_existing_file_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(InputError, match="exists"):
        Sink(path).check()
    with pytest.raises(InputError, match="exists"):
        Sink(path).text("new")
    assert path.read_text() == "old"
    Sink(path, force=True).check()
    Sink(path, force=True).text("new")
    assert path.read_text() == "new"


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    sink = Sink(path)
    sink.check()
    path.write_text("someone else's")
    with pytest.raises(InputError, match="exists"):
        sink.text("ours")
    assert path.read_text() == "someone else's"


def test_the_mode_is_that_of_an_ordinary_new_file(tmp_path: Path) -> None:
    ordinary, ours = tmp_path / "ordinary", tmp_path / "ours"
    ordinary.touch()
    Sink(ours).text("x")
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


def test_a_device_is_written_to_not_replaced() -> None:
    before = os.stat(os.devnull)
    Sink(Path(os.devnull)).check()
    Sink(Path(os.devnull)).text("x")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert os.stat(os.devnull).st_ino == before.st_ino


def test_a_pipe_gets_the_text(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    Sink(pipe).text("through")
    reader.join(timeout=10)
    assert got == [b"through"]


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_target(tmp_path / "a.json", force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [200, 250])
def test_long_file_names(tmp_path: Path, length: int) -> None:
    path = tmp_path / ("a" * (length - 5) + ".json")
    Sink(path).text("x")
    assert path.read_text() == "x"


def test_standard_output_is_utf8_whatever_the_locale(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    Sink(None).text("猫🙂\n")
    assert capfdbinary.readouterr().out == "猫🙂\n".encode()
