"""What can go wrong around a run over a corpus: odd names, places that cannot be written, damaged checkpoints."""

from __future__ import annotations

import errno
import json
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

import headscope
from fixtures.building import build_family
from fixtures.families import FAMILIES
from fixtures.tokenizers import build_tokenizer
from headscope.cli import corpus
from headscope.cli.main import main
from headscope.corpus.checkpoint import Checkpoint
from headscope.corpus.fingerprint import identity
from headscope.corpus.job import Job
from headscope.corpus.worker import Worker
from headscope.errors import InputError
from headscope.heads.rules import load_rules
from headscope.models.loading import wrap_model
from headscope.models.selection import parse_selection
from tests.test_corpus import made_texts

TEXTS = made_texts(40, seed=8)
SMALL = (8, 1 << 16)


@pytest.fixture(scope="module")
def bert() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return build_family("bert"), build_tokenizer(FAMILIES["bert"].tokenizer)


@pytest.fixture(scope="module")
def model(bert: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    for part in bert:
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("texts.txt").write_text("\n".join(TEXTS))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def broken_off(bert: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Path]:
    """The parts that a run leaves which fails at its fourth partition."""
    measure = Worker.measure

    def failing(self: Worker, partition: Any) -> Any:
        if partition.number == 3:
            raise RuntimeError("lights out")
        return measure(self, partition)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(Worker, "measure", failing)
        measured(bert, checkpoint="kept", **options)
    return sorted(Path("kept").glob("*/*.npz"))


def measured(bert: tuple[Any, Any], **options: Any) -> str:
    found = headscope.analyze_corpus(bert[0], TEXTS, **{"tokenizer": bert[1], "partition": SMALL, **options})
    return json.dumps(found.to_dict())


def count_measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    measure = Worker.measure

    def counted(self: Worker, partition: Any) -> Any:
        calls.append(partition.number)
        return measure(self, partition)

    monkeypatch.setattr(Worker, "measure", counted)
    return calls


# ------------------------------------------------------------------ checkpoints
@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04", b"\x93NUMPY\x01\x00\x04\x00(9,)"])
def test_a_damaged_part_is_measured_again(
    content: bytes, bert: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = measured(bert)
    broken_off(bert, monkeypatch)[1].write_bytes(content)
    calls = count_measured(monkeypatch)
    assert measured(bert, checkpoint="kept", resume=True) == undisturbed
    assert calls == [1, 3, 4]


def test_nothing_is_taken_without_resume(bert: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    broken_off(bert, monkeypatch)
    calls = count_measured(monkeypatch)
    measured(bert, checkpoint="kept")
    assert calls == [0, 1, 2, 3, 4]


def test_another_tokenizer_is_another_run(bert: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    broken_off(bert, monkeypatch)
    other = build_tokenizer(FAMILIES["bert"].tokenizer)
    other.add_tokens(["zebra"])
    with pytest.raises(InputError, match="differs from this one in: model"):
        measured(bert, tokenizer=other, checkpoint="kept", resume=True)
    job = Job(
        None, parse_selection("layer", "all"), parse_selection("head", "all"), None, load_rules("seed"), ("sink",)
    )
    assert identity(job, wrap_model(*bert), {}) == identity(job, wrap_model(*bert), {})
    named = Job(**{**job.__dict__, "model": model, "tokenizer": "words"})
    build_tokenizer(FAMILIES["bert"].tokenizer).save_pretrained("words")
    before = identity(named, None, {})
    other.save_pretrained("words")
    assert identity(named, None, {}) != before


def test_a_refusal_names_options(bert: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = broken_off(bert, monkeypatch)[0].parent
    with pytest.raises(InputError, match=r"in: data, layer, metrics$"):
        headscope.analyze_corpus(
            bert[0],
            "texts.txt",
            tokenizer=bert[1],
            partition=SMALL,
            checkpoint="kept",
            resume=True,
            layer=1,
            metrics="all",
        )
    folder = folder.rename(folder.with_name("other"))
    manifest = folder / "run.json"
    written = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(written | {"versions": written["versions"] | {"headscope": "0.0.1"}}))
    with pytest.raises(InputError, match=r"in: version of headscope$"):
        measured(bert, checkpoint="kept", resume=True)
    manifest.write_text("[]")
    measured(bert, checkpoint="kept", resume=True)


def test_a_full_disk_says_that_the_run_can_go_on(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Checkpoint.save

    def full(self: Checkpoint, part: Any) -> None:
        save(self, part)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Checkpoint, "save", full)
    code, out, err = run(capsys, *f"analyze -m {model} --data texts.txt -f json --checkpoint kept".split())
    assert (code, out) == (4, "") and "note: what is finished is kept" in err and "No space left" in err
    assert len(list(Path("kept").glob("*/*.npz"))) == 1


# ------------------------------------------------------------------ places
def test_a_checkpoint_that_cannot_be_kept_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for place in ("texts.txt", "texts.txt/below", "/proc/nothing"):
        code, out, err = run(capsys, "analyze", "-m", model, "--data", "texts.txt", "--checkpoint", place)
        assert (code, out) == (2, "") and f"cannot keep a checkpoint in {place}" in err


def test_nothing_is_kept_beside_a_device() -> None:
    assert corpus._folder("texts.txt", "m", Path("/dev/null")).is_relative_to(Path("cache").resolve())
    assert corpus._folder("texts.txt", "m", Path("new.json")) == Path(".new.json.parts")
    assert corpus._folder("texts.txt", "m", Path("texts.txt")) == Path(".texts.txt.parts")


def test_values_of_each_text_do_not_take_the_place_of_the_result(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(
        capsys, *f"analyze -m {model} --data texts.txt -f json -o a.parquet --per-text a.parquet".split()
    )
    assert (code, out) == (2, "") and "--output and --per-text both name a.parquet" in err
    assert not Path("a.parquet").exists()


def test_values_of_each_text_that_cannot_be_written_are_refused_at_once(
    bert: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_measured(monkeypatch)
    with pytest.raises(InputError, match="/proc"):
        measured(bert, per_text="/proc/each.parquet")
    assert calls == []


# ------------------------------------------------------------------ texts
def test_an_empty_name_is_not_this_directory() -> None:
    with pytest.raises(InputError, match="empty name"):
        headscope.analyze_corpus("model", "")


def test_a_pipe_is_called_one(model: str) -> None:
    os.mkfifo("pipe")
    with pytest.raises(InputError, match="pipe: it is no file") as error:
        headscope.analyze_corpus(model, "pipe")
    assert "- for a pipe" in str(error.value.hint)


def test_a_text_that_is_too_long_is_named_by_its_place(model: str) -> None:
    Path("some.txt").write_text("the cat\n\na dog\n" + "the dog " * 9)
    with pytest.raises(InputError, match=r"^some.txt:4 has 20 tokens, the limit is 9$"):
        headscope.analyze_corpus(model, "some.txt", max_length=9, strict_length=True, partition=(1, 9))


def test_maps_are_those_of_the_first_text_that_is_measured(bert: tuple[Any, Any]) -> None:
    texts = ["\u200b", "\u200b\u200b", *TEXTS]
    found = headscope.analyze_corpus(bert[0], texts, tokenizer=bert[1], maps=True, partition=(1, 99))
    assert found.inputs.first_tokens == found.maps[0].queries
    assert any("2 texts were left out" in warning for warning in found.warnings)
    expected = headscope.analyze(bert[0], TEXTS[0], tokenizer=bert[1], maps=True)
    np.testing.assert_allclose(found.maps[-1].weights, expected.maps[-1].weights, atol=1e-6)


def test_the_callers_random_numbers_go_on_as_before(bert: tuple[Any, Any]) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seed()
    expected = drawn()
    seed()
    measured(bert)
    assert drawn() == expected


def test_parts_with_values_of_each_text_are_small(bert: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Places and labels repeat in every row."""
    path = broken_off(bert, monkeypatch, per_text="each.parquet", partition=(40, 300))[0]
    with zipfile.ZipFile(path) as archive:
        where = archive.getinfo("table/where.npy")
    assert where.compress_size < where.file_size / 10


def test_heads_stay_whole_numbers_where_a_layer_has_none_of_them() -> None:
    model, tokenizer = build_family("bert"), build_tokenizer(FAMILIES["bert"].tokenizer)
    headscope.prune_heads(model, {0: [3]})
    headscope.analyze_corpus(model, TEXTS[:2], tokenizer=tokenizer, head=3, per_text="each.parquet")
    table = pyarrow.parquet.read_table("each.parquet")
    assert str(table.schema.field("head").type) == "int64"
    assert table["layer"].to_pylist() == [1, 2] * 2
