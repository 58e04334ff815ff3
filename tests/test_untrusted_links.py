"""Links that somebody planted where results go: nothing is written, made or removed where they lead."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headscope.cli.output import Sink
from headscope.corpus.checkpoint import Checkpoint
from headscope.corpus.fingerprint import fingerprint
from headscope.corpus.part import Part
from headscope.corpus.per_text import PerText
from headscope.corpus.summary import Summary
from headscope.errors import InputError
from headscope.pruning.directory import new_directory
from headscope.views.heatmaps import write_heatmaps
from headscope.views.report.build import Report
from tests.views_samples import analysis, causal_map, model_heads

IDENTITY = {"model": "m"}


def write_values(path: Path, force: bool) -> None:
    with PerText(path, force) as table:
        table.add({"text": np.arange(2)})
        table.finish()


def write_model(path: Path, force: bool) -> None:
    with new_directory(path, force=force) as folder:
        (folder / "config.json").write_text("{}")


def write_pictures(path: Path, force: bool) -> None:
    write_heatmaps(analysis(model_heads(1, 2), maps=(causal_map(0, 2, ["a", "b"]),)), path.parent, force)


FILES: dict[str, tuple[str, Callable[[Path, bool], None]]] = {
    "a result": ("a.json", lambda path, force: Sink(path, force).text("new")),
    "values of each text": ("a.parquet", write_values),
    "a page": ("a.html", lambda path, force: Report("t", "new").write(path, force)),
    "a picture": ("map.png", write_pictures),
    "a picture of a head": ("self.L0H1.png", write_pictures),
    "a model": ("model", write_model),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory that is somebody else's."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text("theirs")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("theirs")
    (folder / "empty").mkdir()
    return folder


def seen(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("aim", ["file", "model", "empty", "nothing", "nowhere/at/all", "itself"])
@pytest.mark.parametrize("kind", FILES)
def test_a_link_in_the_place_of_a_result_is_not_followed(
    kind: str, aim: str, force: bool, tmp_path: Path, outside: Path
) -> None:
    name, write = FILES[kind]
    (tmp_path / "out").mkdir()
    link = tmp_path / "out" / name
    link.symlink_to(link if aim == "itself" else outside / aim)
    before, led = seen(outside), os.readlink(link)
    with pytest.raises(InputError) as caught:
        write(link, force)
    assert any(words in caught.value.message for words in ("is a link", "exists", "is a directory"))
    assert seen(outside) == before
    assert os.readlink(link) == led and os.listdir(link.parent) == [name]


@pytest.mark.parametrize("kind", FILES)
def test_links_above_are_followed_and_what_is_plain_is_replaced(kind: str, tmp_path: Path, outside: Path) -> None:
    """Otherwise the test above would show nothing."""
    name, write = FILES[kind]
    (tmp_path / "link").symlink_to(outside)
    (outside / "model" / "config.json").write_text("old")
    if name != "model":
        (outside / name).write_text("old")
    write(tmp_path / "link" / name, True)
    assert (tmp_path / "link").is_symlink()
    written = outside / name / "config.json" if name == "model" else outside / name
    assert written.read_bytes() not in (b"old", b"theirs") and written.stat().st_size


def test_devices_are_written_through_links(tmp_path: Path) -> None:
    """As /dev/stdout is one."""
    (tmp_path / "link").symlink_to(os.devnull)
    Sink(tmp_path / "link").text("x")
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", ["kept", f"kept/{fingerprint(IDENTITY)}"])
@pytest.mark.parametrize("resume", [False, True])
def test_finished_parts_are_not_kept_behind_a_link(name: str, resume: bool, tmp_path: Path, outside: Path) -> None:
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    before = seen(outside)
    with pytest.raises(InputError, match="is a link"):
        Checkpoint(tmp_path / "kept", IDENTITY, resume).save(Part(0, "", Summary(), None))
    assert seen(outside) == before


@pytest.mark.parametrize("name", [".run.json.part", ".000000.npz.part", "run.json", "000000.npz"])
def test_a_link_among_finished_parts_is_not_followed(name: str, tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / fingerprint(IDENTITY)
    kept = Checkpoint(tmp_path, IDENTITY, resume=False)
    folder.mkdir()
    (folder / name).symlink_to(outside / "file")
    kept.save(Part(0, "", Summary(), None))
    assert (outside / "file").read_text() == "theirs"
    assert (folder / "000000.npz").stat().st_size > 100
    kept.remove()
    assert (outside / "file").read_text() == "theirs" and not folder.exists()
