"""Corpora, pictures, rules, scores and finished parts from somebody who means harm: no code, no way out, no bombs."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from headscope.corpus.checkpoint import Checkpoint
from headscope.corpus.fingerprint import fingerprint
from headscope.corpus.partition import Partition
from headscope.corpus.store import from_bytes
from headscope.errors import InputError
from headscope.heads.catalogue.mentions import read_mentions
from headscope.heads.rules import load_rules
from headscope.importance.scores import read_scores
from headscope.models.media_inputs import load_image
from headscope.models.selection import parse_selection
from headscope.pruning.spec import parse_heads
from headscope.reading import open_corpus


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A directory that appears as soon as a payload runs."""
    return tmp_path / "canary"


class Payload:
    """What, unpickled, makes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (self.canary,)


def refused(call: Callable[[], Any]) -> str:
    """The message of an InputError, which is one line of no great length."""
    with pytest.raises(InputError) as caught:
        call()
    message = caught.value.message
    assert "\n" not in message and len(message) < 600
    return message


# ------------------------------------------------------------------ code
@pytest.mark.parametrize("inside", ["corpus.py", "corpus/corpus.py", "dataset_script.py"])
def test_no_script_of_a_corpus_runs(inside: str, tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "corpus" / inside
    script.parent.mkdir(parents=True)
    script.write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    for name in ("corpus", "./corpus", f"corpus/{inside}", "corpus/*"):
        refused(lambda name=name: open_corpus(name))
    assert not canary.exists()


def pickled_part(canary: Path, *, under: str) -> bytes:
    out = io.BytesIO()
    array = np.empty(1, dtype=object)
    array[0] = Payload(canary)
    np.savez(out, **{under: array}, allow_pickle=True)
    return out.getvalue()


@pytest.mark.parametrize("under", ["meta", "0/sums", "table/text"])
def test_no_finished_part_runs_code(under: str, tmp_path: Path, canary: Path) -> None:
    data = pickled_part(canary, under=under)
    with pytest.raises(ValueError, match="allow_pickle"):
        from_bytes(data)
    folder = tmp_path / "kept" / fingerprint({"model": "m"})
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "000000.npz").write_bytes(data)
    kept = Checkpoint(tmp_path / "kept", {"model": "m"}, resume=True)
    assert kept.part(Partition(0, ())) is None
    assert not canary.exists()
    np.load(io.BytesIO(data), allow_pickle=True)[under]
    assert canary.exists()  # it would run


@pytest.mark.parametrize("suffix", ["png", "jpg", "eps"])
def test_a_picture_that_is_a_program_is_not_run(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"a.{suffix}"
    file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(canary) run\n%%EOF\n")
    called: list[object] = []

    def run(*args: object, **how: object) -> Any:
        called.append(args)
        raise OSError("it was run")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    assert "cannot read the image" in refused(lambda: load_image(file))
    assert called == []
    with Image.open(file) as opened, pytest.raises(OSError, match="it was run"):
        opened.load()


# ------------------------------------------------------------------ files elsewhere
def saved(folder: Path, *, splits: bool) -> Path:
    table = datasets.Dataset.from_dict({"text": ["theirs"]})
    (datasets.DatasetDict({"train": table}) if splits else table).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("place", ["../outside/{}", "{root}/outside/{}", "sub/../../outside/{}"])
def test_a_saved_dataset_reads_nothing_outside(place: str, tmp_path: Path) -> None:
    corpus, outside = saved(tmp_path / "corpus", splits=False), saved(tmp_path / "outside", splits=False)
    arrow = next(outside.glob("*.arrow")).name
    state = json.loads((corpus / "state.json").read_text())
    state["_data_files"] = [{"filename": place.format(arrow, root=tmp_path)}]
    (corpus / "state.json").write_text(json.dumps(state))
    assert "outside of it" in refused(lambda: open_corpus(corpus))


def test_a_saved_dataset_has_no_splits_outside(tmp_path: Path) -> None:
    corpus, _ = saved(tmp_path / "corpus", splits=True), saved(tmp_path / "outside", splits=False)
    assert [r.text for r in open_corpus(corpus).records()] == ["theirs"]
    (corpus / "dataset_dict.json").write_text(json.dumps({"splits": ["../outside"]}))
    assert "outside of it" in refused(lambda: open_corpus(corpus))


@pytest.mark.parametrize("text", ["[]", "5", '{"splits": 5}', '{"splits": [5]}', "{", "[" * 100_000])
def test_a_saved_dataset_with_other_things_in_its_files(text: str, tmp_path: Path) -> None:
    corpus = saved(tmp_path / "corpus", splits=True)
    (corpus / "dataset_dict.json").write_text(text)
    refused(lambda: open_corpus(corpus))
    shutil.move(corpus / "train", tmp_path / "plain")
    (tmp_path / "plain" / "state.json").write_text(text)
    refused(lambda: open_corpus(tmp_path / "plain"))


# ------------------------------------------------------------------ bombs
def test_a_line_that_a_small_file_unpacks_to_does_not_fill_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "bomb.txt.gz"
    with gzip.open(file, "wb", compresslevel=1) as packed:
        for _ in range(300):
            packed.write(b"a" * (1 << 20))
        packed.write(b"\na good line\n")
    assert file.stat().st_size < 4 << 20
    tracemalloc.start()
    try:
        found = [record.text for record in open_corpus(file).records()]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == ["a good line"]
    assert peak < 200 << 20


def test_a_picture_that_a_small_file_unpacks_to_is_refused(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    file = tmp_path / "bomb.png"
    size = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 20))
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    assert "cannot read the image" in refused(lambda: load_image(file))


DEEP, LONG = "[" * 100_000, "1" * 100_000
TEXTS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "deep rules": ("a.toml", f"name = {DEEP}", load_rules),
    "rules with a long number": ("a.toml", f"runner_up_above = {LONG}", load_rules),
    "rules with a deep key": ("a.toml", "a" + ".a" * 20_000 + " = 1", load_rules),
    "deep scores": ("a.json", DEEP, read_scores),
    "scores with a long number": ("a.json", '{"seed": ' + LONG + "}", read_scores),
    "deep mentions": ("a.jsonl", DEEP, read_mentions),
    "mentions with a long number": ("a.jsonl", '{"tokens": ["a"], "clusters": [[[0, ' + LONG + "]]]}", read_mentions),
    "mentions that open and open": ("a.conll", "#begin document (a)\n1 1 1 w " + "(" * 50_000, read_mentions),
    "a corpus that is deep": ("a.jsonl", DEEP, lambda path: list(open_corpus(path).records())),
    "a corpus with a long number": ("a.jsonl", LONG, lambda path: list(open_corpus(path).records())),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_deep_and_long_things_are_refused_on_a_line(kind: str, tmp_path: Path) -> None:
    name, text, read = TEXTS[kind]
    (tmp_path / name).write_text(text)
    start = time.monotonic()
    refused(lambda: read(tmp_path / name))
    assert time.monotonic() - start < 10


PATTERNS = ["5:", "0,", "0-9,", "-", "a.", ";", "L5H", "1", " ", ".", "(", "5:0,3;", "a" * 50 + ".", "1 - 2 ,"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("end", ["", "x", ":", "-", "!"])
def test_no_selection_takes_long_to_refuse(pattern: str, end: str) -> None:
    """Time grows with the length, not with its square."""
    text = pattern * (50_000 // len(pattern)) + end
    start = time.monotonic()
    for read in (parse_heads, lambda text: parse_selection("layer", text)):
        try:
            read(text)
        except InputError as error:
            assert len(error.message) < 300
    assert time.monotonic() - start < 8
