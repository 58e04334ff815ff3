"""`headscope analyze --data`: options, formats, progress, exit codes."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import headscope
from fixtures.building import build_family
from fixtures.families import FAMILIES
from fixtures.tokenizers import build_tokenizer
from headscope.cli import corpus
from headscope.cli.main import main
from headscope.corpus.progress import Progress
from tests.test_corpus import assert_same, made_texts

TEXTS = made_texts(21, seed=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    build_family("bert").save_pretrained(folder)
    build_tokenizer(FAMILIES["bert"].tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("texts.jsonl").write_text("".join(json.dumps({"text": t, "body": t}) + "\n" for t in TEXTS))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def analyzed(capsys: pytest.CaptureFixture[str], model: str, *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, "analyze", "-m", model, "-f", "json", *arguments)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_every_form_of_a_corpus_gives_the_same(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("texts.txt").write_text("\n".join(TEXTS))
    with Path("texts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "body"], *enumerate(TEXTS)])
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS}), "texts.parquet")
    Path("some").mkdir()
    Path("some/1.txt").write_text("\n".join(TEXTS[:9]))
    Path("some/2.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS[9:]))
    expected = analyzed(capsys, model, "--data", "texts.jsonl")
    assert expected["inputs"]["texts"] == len(TEXTS) and expected["corpus"]["name"] == "texts.jsonl"
    forms = [
        "texts.txt",
        "some",
        "some/*",
        *(f"texts.{kind} --text-column body" for kind in ("csv", "parquet", "jsonl")),
    ]
    for form in forms:
        found = analyzed(capsys, model, "--data", *form.split())
        assert found["heads"] == expected["heads"], form
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(TEXTS).encode())))
    assert analyzed(capsys, model, "--data", "-")["heads"] == expected["heads"]
    assert not list(Path("cache").rglob("*.npz"))


def test_options_reach_the_run(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--sample 8 --seed 4 --layer 1 --head 0,2 --rules calibrated --metrics all --max-length 9 --batch-size 3"
    found = analyzed(capsys, model, "--data", "texts.jsonl", "--per-text", "each.parquet", *options.split())
    direct = headscope.analyze_corpus(
        model, "texts.jsonl", sample=8, seed=4, layer=1, head="0,2", rules="calibrated", metrics="all", max_length=9
    )
    assert found["corpus"] == direct.to_dict()["corpus"]
    assert [(h["layer"], h["head"]) for h in found["heads"]] == [(1, 0), (1, 2)]
    for a, b in zip(found["heads"], direct.to_dict()["heads"], strict=True):
        assert a["pattern"] == b["pattern"] and a["spread"].keys() == b["spread"].keys()
        assert all(v is None or v == pytest.approx(b["metrics"][n], abs=1e-5) for n, v in a["metrics"].items())
    assert pyarrow.parquet.read_table("each.parquet").num_rows == 8 * 2


def test_until_and_workers(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = analyzed(capsys, model, "--data", "texts.jsonl", "--until", "9", "--workers", "2")
    assert found["corpus"]["reached"] is True and found["corpus"]["until"] == 9
    assert_same(
        headscope.analyze_corpus(model, "texts.jsonl", until=9.0),
        headscope.analyze_corpus(model, "texts.jsonl", until=9.0, workers=2),
    )


def test_one_malformed_line_is_named_and_strict_stops_at_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("texts.jsonl").open("a") as file:
        file.write("{broken\n")
    code, out, err = run(capsys, "analyze", "-m", model, "--data", "texts.jsonl", "-f", "json")
    assert code == 0 and json.loads(out)["corpus"]["skipped"] == 1
    assert "texts.jsonl:22" in next(line for line in err.splitlines() if line.startswith("warning:"))
    code, out, err = run(capsys, "analyze", "-m", model, "--data", "texts.jsonl", "--strict", "-o", "new.json")
    assert (code, out) == (2, "") and "texts.jsonl:22" in err and err.splitlines()[-1].startswith("hint:")
    assert not Path("new.json").exists()


def test_the_table_and_the_header_speak_of_the_corpus(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "analyze", "-m", model, "--data", "texts.jsonl")
    assert code == 0 and "texts.jsonl" in err and "L0" in out


BAD = {
    "a text beside it": ("analyze hello --data texts.jsonl", "--data and a TEXT exclude"),
    "ids beside it": ("analyze --ids 1 --data texts.jsonl", "--data and --ids exclude"),
    "no corpus": ("analyze hello --workers 2", "--workers is for a corpus"),
    "nothing to resume": ("analyze hello --resume", "--resume is for a corpus"),
    "two decoder texts": ("analyze --data texts.jsonl --decoder-text a --decoder-text b", "one for all"),
    "missing file": ("analyze --data missing.jsonl", "missing.jsonl"),
    "unknown suffix": ("analyze --data photo.gif", "photo.gif"),
    "missing column": ("analyze --data texts.csv", "body"),
    "empty file": ("analyze --data empty.txt", "empty.txt"),
    "no sample": ("analyze --data texts.jsonl --sample 0", "--sample"),
    "no width": ("analyze --data texts.jsonl --until 0", "until"),
    "rows of another kind": ("analyze --data texts.jsonl --per-text each.csv", "parquet"),
    "an address alone": ("analyze --data texts.jsonl --ray-address here:1", "ray"),
    "missing texts for scores": ("importance --data missing.jsonl", "missing.jsonl"),
    "missing texts for pruning": ("prune --method gradient --drop 0.3 --data missing.jsonl", "missing.jsonl"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_a_hint(name: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.txt").write_text("")
    Path("photo.gif").write_bytes(b"GIF89a\0\0")
    Path("texts.csv").write_text("body\nhello\n")
    arguments, message = BAD[name]
    before = sorted(Path().rglob("*"))
    code, out, err = run(capsys, *arguments.split(), "-m", model)
    assert (code, out) == (2, "") and message in err
    assert [line.split(":")[0] for line in err.splitlines()[-2:]] == ["error", "hint"]
    assert sorted(Path().rglob("*")) == before


def test_scores_and_pruning_read_the_same_forms(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    long = [" ".join(TEXTS[i : i + 4]) for i in range(len(TEXTS))]
    pyarrow.parquet.write_table(pyarrow.table({"body": long}), "texts.parquet")
    code, out, err = run(
        capsys, *f"importance -m {model} --data texts.parquet --text-column body --method confidence -f json".split()
    )
    assert code == 0, err
    assert json.loads(out)["heads"]


def test_progress_in_words() -> None:
    done = Progress(texts=1200, resumed=200, tokens=30_000, seconds=60.0, tokens_per_second=500.0, share=0.25)
    assert corpus._line(done) == (
        "1,200 texts · 30,000 tokens · 200 texts of an earlier run · 500 tokens/s · 25% · 3:00 left"
    )
    unknown = Progress(texts=1, resumed=0, tokens=5, seconds=1.0, tokens_per_second=5.0, share=None)
    assert corpus._line(unknown) == "1 texts · 5 tokens · 5 tokens/s"
    assert corpus._duration(3_725) == "1:02:05"


def test_an_interrupt_keeps_what_is_finished(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headscope.corpus.worker import Worker

    many = [json.dumps({"text": t}) for t in made_texts(1100, seed=6)]
    Path("many.jsonl").write_text("\n".join(many))
    measure, calls = Worker.measure, []

    def interrupted(self: Worker, partition: Any) -> Any:
        calls.append(partition.number)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, partition)

    monkeypatch.setattr(Worker, "measure", interrupted)
    code, _, err = run(capsys, "analyze", "-m", model, "--data", "many.jsonl", "-o", "out.json")
    assert code == 130 and "--resume" in err and not Path("out.json").exists()
    code, _, err = run(capsys, "analyze", "-m", model, "--data", "many.jsonl", "-o", "out.json", "--resume")
    assert code == 0, err
    # The first part was not measured again.
    assert calls == [0, 1, 1, 2]
    monkeypatch.setattr(Worker, "measure", measure)
    assert run(capsys, "analyze", "-m", model, "--data", "many.jsonl", "-o", "whole.json")[0] == 0
    assert Path("out.json").read_bytes() == Path("whole.json").read_bytes()
    assert sorted(p.name for p in Path().iterdir() if p.name.startswith(".")) == []


def test_a_result_that_cannot_be_written_is_not_lost(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    from headscope.corpus.worker import Worker

    measure, calls = Worker.measure, []

    def meanwhile(self: Worker, partition: Any) -> Any:
        calls.append(partition.number)
        Path("out.json").write_text("somebody else's")
        return measure(self, partition)

    command = ("analyze", "-m", model, "--data", "texts.jsonl", "-o", "out.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "measure", meanwhile)
        code, _, err = run(capsys, *command)
        assert code == 2 and "out.json exists" in err and "--resume goes on" in err
        assert Path("out.json").read_text() == "somebody else's"
        Path("out.json").unlink()
        assert run(capsys, *command, "--resume")[0] == 0
    assert calls == [0] and json.loads(Path("out.json").read_text())["inputs"]["texts"] == len(TEXTS)
    assert not [p for p in Path().iterdir() if p.name.startswith(".")]


def test_a_sample_of_more_than_there_is(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = analyzed(capsys, model, "--data", "texts.jsonl", "--sample", "99")
    assert any("21 texts, fewer than a sample of 99" in warning for warning in found["warnings"])
