"""`headscope analyze` hands the options to `headscope.analyze` and the result to the right place."""

from __future__ import annotations

import csv
import inspect
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headscope
from headscope.cli.main import main
from headscope.results import Analysis
from headscope.views.records import FORMATS, render
from tests import views_samples as samples

TEXT = "The cat sat on the mat because it was tired."


class Recorder:
    """Stands in for `headscope.analyze` and keeps what it was called with."""

    def __init__(self, result: Analysis) -> None:
        self.result = result
        self.arguments: dict[str, Any] = {}

    def __call__(self, *args: Any, **keywords: Any) -> Analysis:
        bound = inspect.signature(REAL).bind(*args, **keywords)
        bound.apply_defaults()
        self.arguments = dict(bound.arguments)
        return self.result


REAL = headscope.analyze


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    maps = (samples.causal_map(5, 12, samples.TOKENS),)
    found = Recorder(samples.analysis(samples.model_heads(6, 12), maps=maps, warnings=("something [odd]",)))
    monkeypatch.setattr(headscope, "analyze", found)
    return found


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["analyze", *argv])
    return int(left.value.code or 0)


def defaults() -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(REAL).parameters.items() if p.default is not p.empty}


def test_without_options_the_defaults_of_the_python_api_hold(recorder: Recorder) -> None:
    assert run(TEXT) == 0
    assert recorder.arguments == {**defaults(), "model": None, "texts": [TEXT]}


OPTIONS: dict[str, tuple[list[str], str, Any]] = {
    "model": (["-m", "some/model"], "model", "some/model"),
    "revision": (["--revision", "abc"], "revision", "abc"),
    "layer": (["-l", "-1"], "layer", "-1"),
    "layers": (["--layer", "0,2-3"], "layer", "0,2-3"),
    "head": (["--head", "0-3"], "head", "0-3"),
    "stack": (["--stack", "encoder"], "stack", ["encoder"]),
    "stacks": (["--stack", "encoder,cross", "--stack", "decoder"], "stack", ["encoder", "cross", "decoder"]),
    "rules": (["--rules", "calibrated"], "rules", "calibrated"),
    "metrics": (["--metrics", "all"], "metrics", "all"),
    "engine": (["--engine", "full"], "engine", "full"),
    "tokenizer": (["--tokenizer", "some/dir"], "tokenizer", "some/dir"),
    "decoder text": (["--decoder-text", "Die Katze"], "decoder_texts", ["Die Katze"]),
    "max length": (["--max-length", "7"], "max_length", 7),
    "strict length": (["--strict-length"], "strict_length", True),
    "batch size": (["--batch-size", "3"], "batch_size", 3),
    "words": (["--words"], "words", True),
    "exclude special": (["--exclude-special"], "exclude_special", True),
    "device": (["--device", "cpu"], "device", "cpu"),
    "dtype": (["--dtype", "bfloat16"], "dtype", "bfloat16"),
    "device map": (["--device-map", "auto"], "device_map", "auto"),
    "remote code": (["--trust-remote-code"], "trust_remote_code", True),
}


@pytest.mark.parametrize(("argv", "name", "value"), OPTIONS.values(), ids=OPTIONS.keys())
def test_an_option_is_handed_on(recorder: Recorder, argv: list[str], name: str, value: Any) -> None:
    assert run(TEXT, *argv) == 0
    assert recorder.arguments == {**defaults(), "model": None, "texts": [TEXT], name: value}


def test_texts_and_files_add_up(recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bom.txt").write_bytes("\ufeffthird\nfourth\r\n".encode())
    assert run("first", "second", "--file", str(tmp_path / "bom.txt")) == 0
    assert recorder.arguments["texts"] == ["first", "second", "third\nfourth"]

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Käse\n".encode())))
    assert run("--file", "-") == 0
    assert recorder.arguments["texts"] == ["Käse"]


def test_a_file_that_is_not_utf8(recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin1.txt").write_bytes("Käse".encode("latin-1"))
    assert run("--file", str(tmp_path / "latin1.txt")) == 2
    assert "not UTF-8 text (byte 1)" in capsys.readouterr().err


def test_ids_images_and_sounds(recorder: Recorder, tmp_path: Path) -> None:
    assert run("--ids", "101 7592,102", "--ids", "5") == 0
    assert recorder.arguments["ids"] == [[101, 7592, 102], [5]]
    assert recorder.arguments["texts"] is None

    for name in ("a.png", "b.wav"):
        (tmp_path / name).touch()
    assert run("--image", str(tmp_path / "a.png")) == 0
    assert recorder.arguments["images"] == [str(tmp_path / "a.png")]
    assert run("a caption", "--image", str(tmp_path / "a.png")) == 0
    assert recorder.arguments["texts"] == ["a caption"]
    assert run("--audio", str(tmp_path / "b.wav")) == 0
    assert recorder.arguments["audio"] == [str(tmp_path / "b.wav")]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "table"])
def test_standard_output_carries_the_result_and_nothing_else(
    recorder: Recorder, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(TEXT, "-f", name) == 0
    out, err = capsys.readouterr()
    assert out == render(recorder.result, name)
    assert "sentence-transformers/all-MiniLM-L6-v2" in err
    assert "warning: something [odd]" in err


def test_quiet_leaves_only_the_warnings(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TEXT, "-f", "json", "--quiet") == 0
    assert capsys.readouterr().err == "warning: something [odd]\n"


def test_a_terminal_without_unicode_gets_escapes(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    assert run(TEXT, "--layer", "0") == 0
    assert b"S=attention_sink" in stream.buffer.getvalue()  # type: ignore[attr-defined]  # a BytesIO


def test_the_table_is_plain_in_a_pipe(
    recorder: Recorder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for width in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert run(TEXT) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "S=attention_sink" in out
        assert "BertModel" not in out  # the header belongs to standard error
        assert max(map(len, out.splitlines())) <= width


@pytest.mark.parametrize("suffix", [suffix for known in FORMATS.values() for suffix in known.suffixes])
def test_the_suffix_chooses_the_format(recorder: Recorder, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"result{suffix}"
    assert run(TEXT, "-o", str(path)) == 0
    name = next(known.name for known in FORMATS.values() if suffix in known.suffixes)
    assert path.read_bytes().decode() == render(recorder.result, name)


def test_a_given_format_beats_the_suffix(
    recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.csv"
    assert run(TEXT, "-o", str(path), "-f", "json") == 0
    assert json.loads(path.read_text())["schema"] == "headscope/analysis@1"
    assert capsys.readouterr().out == ""
    assert run(TEXT, "-o", str(path)) == 2
    assert run(TEXT, "-o", str(path), "--force") == 0
    assert len(list(csv.DictReader(path.open()))) == 6 * 12


def test_weights_come_back_as_they_were(recorder: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    assert run(TEXT, "--weights", str(path)) == 0
    assert recorder.arguments["maps"] is True
    (expected,) = recorder.result.maps
    with np.load(path, allow_pickle=False) as arrays:
        assert set(arrays) == {"tokens", "self.5", "heads.self.5", "queries.self.5", "keys.self.5"}
        assert arrays["self.5"].dtype == np.float32
        np.testing.assert_array_equal(arrays["self.5"], expected.weights)
        assert tuple(arrays["heads.self.5"]) == expected.heads
        assert tuple(arrays["queries.self.5"]) == expected.queries
        assert tuple(arrays["keys.self.5"]) == expected.keys
        assert tuple(arrays["tokens"]) == samples.TOKENS


def test_weights_without_matrices_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(headscope, "analyze", Recorder(samples.analysis(samples.model_heads(1, 1))))
    assert run(TEXT, "--weights", str(tmp_path / "w.npz")) == 2
    assert "no attention matrices" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_heatmaps_are_drawn(recorder: Recorder, tmp_path: Path) -> None:
    assert run(TEXT, "--heatmaps", str(tmp_path / "pictures")) == 0
    assert recorder.arguments["maps"] == "pooled"
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert {"self.L5.png", "map.png"} <= drawn
    assert {f"self.L5H{head}.png" for head in range(12)} <= drawn


def test_weights_are_whole_beside_heatmaps(recorder: Recorder, tmp_path: Path) -> None:
    assert run(TEXT, "--heatmaps", str(tmp_path / "pictures"), "--weights", str(tmp_path / "w.npz")) == 0
    assert recorder.arguments["maps"] is True
    assert run(TEXT) == 0
    assert recorder.arguments["maps"] is False


def test_the_seed_decides_what_is_drawn(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    import torch

    drawn: list[tuple[float, float, float]] = []

    def draw(*args: Any, **keywords: Any) -> Analysis:
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return recorder.result

    monkeypatch.setattr(headscope, "analyze", draw)
    for seed in ("1", "2", "1"):
        assert run(TEXT, "-f", "json", "--seed", seed) == 0
    assert drawn[0] == drawn[2]
    assert all(a != b for a, b in zip(drawn[0], drawn[1], strict=True))
