"""`headscope report` from the command line: what it refuses before a model is loaded, and the page it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headscope.cli.main import main
from headscope.views.curve import curve_csv
from tests.importance_samples import curve
from tests.report_samples import Page


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["report", *words])
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a text"], "none is named"),
        (["a text", "-o", "page.pdf"], "does not end so"),
        (["a text", "-o", "none/page.html"], "no such directory"),
        (["-o", "page.html"], "there is no text"),
        (["a text", "-o", "page.html", "--sample", "3"], "--sample is for a corpus"),
        (["a text", "-o", "page.html", "--importance", "none.json"], "cannot read none.json"),
        (["a text", "-o", "page.html", "--curve", "none.csv"], "cannot read none.csv"),
    ],
)
def test_it_refuses_before_a_model_is_loaded(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*words, "--model", "no/such-model") == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_it_writes_a_page_of_texts_with_scores_and_curve(
    tmp_path: Path, constructed_bert_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = [{"stack": "self", "layer": 0, "head": 1, "score": 0.25}]
    scores = {"schema": "headscope/importance@1", "method": "gradient", "heads": heads}
    (tmp_path / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
    (tmp_path / "curve.csv").write_text(curve_csv(curve()), encoding="utf-8")
    page = tmp_path / "page.html"
    words = ["the cat sat", "--model", str(constructed_bert_dir), "-o", str(page), "--types", "sink"]
    words += ["--importance", str(tmp_path / "scores.json"), "--curve", str(tmp_path / "curve.csv")]
    assert run(*words) == 0
    assert f"{page} is written, " in capsys.readouterr().err
    data = Page(page.read_text(encoding="utf-8")).data
    column = data["columns"][-1]
    place = next(i for i, h in enumerate(data["heads"]) if (h["layer"], h["head"]) == (0, 1))
    assert (column["kind"], column["values"][place]) == ("importance", 0.25)
    assert {"weights", "ranked", "curve"} == set(data["plots"])
    assert len(data["maps"]) == len({h["layer"] for h in data["heads"]})
    assert run(*words) == 2
    assert run(*words, "--force", "--quiet") == 0


def test_a_corpus_comes_with_its_spread(tmp_path: Path, constructed_bert_dir: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat\nthe dog ran away\na cat and a dog\n", encoding="utf-8")
    page = tmp_path / "page.html"
    assert run("--data", str(texts), "--model", str(constructed_bert_dir), "-o", str(page)) == 0
    data = Page(page.read_text(encoding="utf-8")).data
    sink = next(column for column in data["columns"] if column["name"] == "sink")
    assert set(sink["texts"]) == {3}
    assert all(low <= value <= high for low, value, high in zip(sink["low"], sink["values"], sink["high"], strict=True))
    assert data["maps"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "texts.txt"]
