"""`headscope analyze --types`, from the command line to what it prints and its exit code."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import headscope
from fixtures.circuits import induction_model
from headscope.cli.main import main

TEXT = "the man saw the dog and the woman saw the man . a dog saw the cat and the man saw the dog ."
DATA = Path(__file__).parents[1] / "fixtures" / "data"
TYPES = "previous_token,duplicate_token,induction,sink"


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["analyze", *argv])
    return int(left.value.code or 0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("induction")
    induction_model().save(path)
    return str(path)


def test_json_is_what_the_python_api_gives(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TEXT, "-m", directory, "--types", TYPES, "--seed", "3", "-f", "json", "--quiet") == 0
    out, err = capsys.readouterr()
    assert err == ""
    printed = json.loads(out)
    expected = json.loads(json.dumps(headscope.analyze(directory, TEXT, types=TYPES, seed=3).to_dict()))
    for info in (*printed["catalogue"]["types"], *expected["catalogue"]["types"]):
        info["seconds"] = None
    assert printed == expected
    assert {t["type"] for h in printed["heads"] for t in h["types"]} > {"previous_token", "induction"}


def test_the_ablation_check_end_to_end(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TEXT, "-m", directory, "--types", "induction", "--ablate-check", "-f", "json") == 0
    out, err = capsys.readouterr()
    catalogue = json.loads(out)["catalogue"]
    ablation = catalogue["ablation"]
    assert [(h["layer"], h["head"]) for h in ablation["heads"]] == [(1, 3)]
    # Each token of the second copy is certain before, and one of 256 without.
    assert ablation["base"]["second_copy"] < 0.1 and ablation["top"]["added"] > 4
    # What it costs is said while it runs, each line once.
    notes = [line for line in err.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(set(notes)) >= 2 and any("repetition" in line for line in notes)


@pytest.mark.parametrize("format", ["table", "csv", "markdown", "jsonl"])
def test_every_format_names_the_heads_that_were_found(
    directory: str, format: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = (TEXT, "-m", directory, "--types", "previous_token,induction", "-l", "0,1")
    assert run(*argv, "--quiet", "-f", format) == 0
    out, err = capsys.readouterr()
    assert err == "" and "error" not in out
    if format == "csv":
        rows = {(row["layer"], row["head"]): row for row in csv.DictReader(out.splitlines())}
        assert rows["1", "3"]["types"] == "induction" and rows["0", "1"]["types"] == "previous_token"
        assert float(rows["1", "3"]["induction_score"]) == pytest.approx(1, abs=1e-4)
        assert rows["0", "0"]["types"] == ""
    elif format == "jsonl":
        lines = [json.loads(line) for line in out.splitlines()]
        assert [t["type"] for t in lines[7]["types"]] == ["induction"]
    else:
        assert "induction" in out and "previous_token" in out
    assert run(*argv, "--quiet", "-f", format, "-o", str(tmp_path / "result")) == 0
    assert capsys.readouterr().out == "" and (tmp_path / "result").read_text("utf-8")


def test_without_types_nothing_of_them_is_measured(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TEXT, "-m", directory, "-f", "json", "--quiet") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["catalogue"] is None and not any(h["types"] for h in printed["heads"])


# ------------------------------------------------------------------ what is refused before a model is loaded
BAD_FILES = {
    "conllu": ("syntax", b"1\tthe\tno columns\n\n"),
    "mentions": ("coreference", b"{not json}\n"),
    "needles": ("retrieval", b'{"needle": 5}\n'),
    "haystack": ("retrieval", b"no text: \xff\n"),
}
GOOD_FILES = {"haystack": DATA / "haystack.txt", "needles": DATA / "needles.jsonl"}


@pytest.mark.parametrize("option", BAD_FILES)
@pytest.mark.parametrize("what", ["malformed", "empty", "missing", "a directory"])
def test_files_are_read_before_the_model_is_loaded(
    option: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, content = BAD_FILES[option]
    path = tmp_path / "given.jsonl"
    if what == "a directory":
        path.mkdir()
    elif what != "missing":
        path.write_bytes(content if what == "malformed" else b"")
    files = (GOOD_FILES if name == "retrieval" else {}) | {option: path}
    given = [word for key, value in files.items() for word in (f"--{key}", str(value))]
    # The model's name would be another error, and exit code 3.
    assert run(TEXT, "-m", str(tmp_path / "no_model"), "--types", name, *given) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and str(path) in err and len(err.splitlines()) <= 2


REFUSED = {
    "unknown type": (["--types", "induction,inductoin"], "inductoin"),
    "no type": (["--types", ""], "--types"),
    "no file": (["--types", "syntax"], "--conllu"),
    "one file of two": (["--types", "retrieval", "--needles", str(DATA / "needles.jsonl")], "--haystack"),
    "file without types": (["--conllu", str(DATA / "english.conllu")], "--types"),
    "file without its type": (["--types", "induction", "--conllu", str(DATA / "english.conllu")], "syntax"),
    "nothing to zero": (["--types", "sink", "--ablate-check"], "induction"),
}


@pytest.mark.parametrize(("argv", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_before_the_model_is_loaded(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(TEXT, "-m", "no_such/model", *argv) == 2
    out, err = capsys.readouterr()
    error, hint = err.splitlines()
    assert out == "" and error.startswith("error: ") and hint.startswith("hint: ") and said in error


# ------------------------------------------------------------------ what the model cannot do
@pytest.mark.parametrize("argv", [["--ablate-check"], ["--types", "copying"]])
def test_an_encoder_can_do_without_neither(
    constructed_bert_dir: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("the cat sat", "-m", str(constructed_bert_dir), *argv, "--quiet") == 3
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) <= 2


def test_a_type_that_no_row_can_show_is_one_clear_error(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TEXT, "-m", directory, "--types", "next_token", "--quiet") == 2
    assert "next_token was measured on no head" in capsys.readouterr().err


def test_a_picture_model_is_measured_as_far_as_it_goes(
    family_dir: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    Image.new("RGB", (32, 32), (9, 90, 200)).save(tmp_path / "a.png")
    argv = ("--image", str(tmp_path / "a.png"), "-m", str(family_dir("vit")), "--quiet", "-f", "json")
    assert run(*argv, "--types", "all") == 0
    types = {t["name"]: t for t in json.loads(capsys.readouterr().out)["catalogue"]["types"]}
    assert "reads no text" in types["induction"]["skipped"] and types["broad"]["measured"] > 0
    assert run(*argv, "--types", "induction") == 3
