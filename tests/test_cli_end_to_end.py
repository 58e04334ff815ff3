"""`headscope analyze` on real and constructed models, from the command line to the bytes it prints."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import headscope
from fixtures import constructed
from headscope.cli.main import main

TEXT = "The cat sat on the mat because it was tired."


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["analyze", *argv])
    return int(left.value.code or 0)


@pytest.fixture(autouse=True)
def _no_default_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADSCOPE_MODEL", raising=False)


def test_json_is_what_the_python_api_gives(packaged_model_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TEXT, "a second text", "--layer", "0,-1", "-f", "json") == 0
    printed = json.loads(capsys.readouterr().out)
    expected = headscope.analyze(None, [TEXT, "a second text"], layer="0,-1").to_dict()
    assert printed == json.loads(json.dumps(expected))
    assert {h["layer"] for h in printed["heads"]} == {0, 5}


@pytest.mark.parametrize("rules", ["seed", "calibrated"])
def test_constructed_heads_get_their_labels(
    constructed_bert_dir: Path, rules: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["-m", str(constructed_bert_dir), "--rules", rules, "-f", "csv"]
    assert run(constructed.sample_text(30), *argv) == 0
    rows = csv.DictReader(capsys.readouterr().out.splitlines())
    found = {(int(row["layer"]), int(row["head"])): row["pattern"] for row in rows}
    assert found == constructed.labels(constructed.BERT_KINDS, rules)


def test_weights_are_those_of_transformers(packaged_model_name: str, tmp_path: Path) -> None:
    assert run(TEXT, "--layer", "2,5", "--weights", str(tmp_path / "w.npz"), "-f", "json") == 0
    tokenizer = AutoTokenizer.from_pretrained(packaged_model_name)
    model = AutoModel.from_pretrained(packaged_model_name, attn_implementation="eager").eval()
    with torch.no_grad():
        attentions = model(**tokenizer(TEXT, return_tensors="pt"), output_attentions=True).attentions
    with np.load(tmp_path / "w.npz", allow_pickle=False) as arrays:
        assert {name for name in arrays if name[:4] == "self"} == {"self.2", "self.5"}
        for layer in (2, 5):
            np.testing.assert_allclose(arrays[f"self.{layer}"], attentions[layer][0].numpy(), atol=5e-6)
        assert list(arrays["tokens"]) == tokenizer.tokenize(TEXT, add_special_tokens=True)


def test_heads_selected_are_the_heads_written(tmp_path: Path) -> None:
    assert (
        run(TEXT, "-l", "5", "--head", "3,7", "--weights", str(tmp_path / "w.npz"), "-o", str(tmp_path / "a.json")) == 0
    )
    heads = json.loads((tmp_path / "a.json").read_text())["heads"]
    assert [h["head"] for h in heads] == [3, 7]
    with np.load(tmp_path / "w.npz", allow_pickle=False) as arrays:
        assert arrays["self.5"].shape == (2, 13, 13)
        assert list(arrays["heads.self.5"]) == [3, 7]


MERGED = {
    "pieces": ([], ["[CLS]", "un", "me", "asurable", "story", "[SEP]"]),
    "words": (["--words"], ["[CLS]", "unmeasurable", "story", "[SEP]"]),
    "without special": (["--exclude-special"], ["un", "me", "asurable", "story"]),
    "words without special": (["--words", "--exclude-special"], ["unmeasurable", "story"]),
}


@pytest.mark.parametrize(("argv", "tokens"), MERGED.values(), ids=MERGED.keys())
def test_words_and_special_tokens(argv: list[str], tokens: list[str], tmp_path: Path) -> None:
    argv = ["-l", "5", *argv, "--weights", str(tmp_path / "w.npz"), "-o", str(tmp_path / "a.json")]
    assert run("unmeasurable story", *argv) == 0
    with np.load(tmp_path / "w.npz", allow_pickle=False) as arrays:
        assert list(arrays["queries.self.5"]) == list(arrays["keys.self.5"]) == tokens
        np.testing.assert_allclose(arrays["self.5"].sum(-1), 1, atol=1e-5)


BAD = {
    "layer out of range": (["--layer", "6"], 2, "0-5"),
    "negative layer out of range": (["--layer", "-7"], 2, "0-5"),
    "head out of range": (["--head", "12"], 2, "0-11"),
    "unknown stack": (["--stack", "decoder"], 2, "self"),
    "unknown metric": (["--metrics", "sink,loudness"], 2, "loudness"),
    "unknown rules": (["--rules", "mine"], 2, "mine"),
    "missing rules file": (["--rules", "missing.toml"], 2, "missing.toml"),
    "too long, strictly": (["--max-length", "5", "--strict-length"], 2, "5"),
    "unknown device": (["--device", "abacus"], 2, "abacus"),
    "unknown dtype": (["--dtype", "int3"], 2, "int3"),
    "unknown model": (["--model", "no-such-directory/no-such-model"], 3, "no-such-directory/no-such-model"),
    "unknown tokenizer": (["--tokenizer", "no-such-directory/no-such-tokenizer"], 3, "no-such-tokenizer"),
}


@pytest.mark.parametrize(("argv", "code", "said"), BAD.values(), ids=BAD.keys())
def test_what_only_the_model_can_tell(
    argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(TEXT, *argv) == code
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == ""
    assert first.startswith("error: ")
    assert second.startswith("hint: ")
    assert said in err


def test_wrong_rules_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[rule]]\nlabel = "x"\nmetric = "loudness"\nabove = 0.5\n')
    assert run(TEXT, "--rules", str(path)) == 2
    assert "loudness" in capsys.readouterr().err


def test_a_model_without_attention_says_so(
    family_dir: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("the cat", "-m", str(family_dir("mamba"))) == 3
    assert "no attention" in capsys.readouterr().err


def test_truncation_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TEXT, "--max-length", "5", "-f", "json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["inputs"] == {
        "texts": 1,
        "tokens": 5,
        "truncated": 1,
        "first_tokens": ["[CLS]", "the", "cat", "sat", "[SEP]"],
    }
    assert "warning: " in err


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_has_three_stacks(
    name: str, family_dir: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["-m", str(family_dir(name))]
    assert run("the cat sat", *model, "--decoder-text", "on the mat", "-f", "json") == 0
    analysis = json.loads(capsys.readouterr().out)
    assert [stack["name"] for stack in analysis["model"]["stacks"]] == ["encoder", "decoder", "cross"]
    assert run("the cat sat", *model, "--decoder-text", "on the mat", "-f", "json", "--stack", "cross") == 0
    heads = json.loads(capsys.readouterr().out)["heads"]
    assert {h["stack"] for h in heads} == {"cross"}
    assert {h["metrics"]["prev_token"] for h in heads} == {None}
