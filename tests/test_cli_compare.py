"""`headscope compare`: what is asked of the Python API, what is refused, and what is shown and drawn of the answer."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headscope
from headscope.cli.main import main
from headscope.comparison.result import Between, Comparison, HeadChange, Match
from headscope.errors import InputError
from headscope.results import ModelInfo, RuleInfo, Spread, Stack
from headscope.views.comparison import comparison_table, flat_changes, listed, render_comparison
from headscope.views.comparison_figure import comparison_figure, comparison_picture
from headscope.views.comparison_summary import summary

ROOT = Path(__file__).parents[1]
FORMATS = ("table", "json", "jsonl", "csv", "markdown")


def info(name: str, layers: int = 2) -> ModelInfo:
    stack = Stack("self", tuple(range(layers)), (3,) * layers)
    return ModelInfo(name, "bert", "BertModel", "float32", "cpu", layers, 3, 3, 8, 24, (stack,))


def change(layer: int, head: int, labels: tuple[str | None, str | None], delta: float, distance: float) -> HeadChange:
    both = None not in labels
    spread = {"sink": Spread(0.1, delta - 0.05, delta + 0.05, 4)} if both else None
    metrics = [
        {"sink": None if label is None else value} for label, value in zip(labels, (0.2, 0.2 + delta), strict=True)
    ]
    moved = {"sink": delta if both else None}
    return HeadChange("self", layer, head, *labels, *metrics, moved, spread, distance if both else None, 1.0, 0.75)


def sample(names: tuple[str, str] = ("base", "tuned"), **changes: Any) -> Comparison:
    """Two layers of three heads: one changed label, one moved far, one is nearly the same, two equal, one is pruned."""
    heads = (
        change(0, 0, ("broad", "broad"), 0.0, 0.0),
        change(0, 1, ("broad", "broad"), 0.01, 0.012),
        change(0, 2, ("broad", "attention_sink"), 0.3, 0.21),
        change(1, 0, ("broad", "broad"), -0.125, 0.4),
        change(1, 1, ("prev_token", None), 0.0, 0.0),
        change(1, 2, ("broad", "broad"), 0.0, 0.0),
    )
    spots = tuple((h.layer, h.head) for h in heads)
    distance = np.full((6, 5), 0.5, dtype=np.float32)
    there = [s for s in spots if s != (1, 1)]
    places = {(0, 0): (0, 0), (0, 1): (0, 2), (0, 2): (0, 1), (1, 0): (1, 0), (1, 2): (1, 2)}
    matching = tuple(Match("self", a, b, 0.1) for a, b in places.items())
    return replace(
        Comparison(
            a=info(names[0]),
            b=info(names[1]),
            rules=RuleInfo("seed", {"sink": 0.4}),
            texts=4,
            tokens=(40, 40),
            heads=heads,
            removed=({}, {"self.1": (1,)}),
            matching=matching,
            rows=30,
            between=(Between("self", spots, tuple(there), distance, 30),),
            versions={"headscope": "0"},
            warnings=("intervals are rough",),
        ),
        **changes,
    )


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs `headscope compare` in a directory with `texts.txt` and `old.png`."""
    monkeypatch.chdir(tmp_path)
    for name in ("texts.txt", "old.png"):
        Path(name).write_text("some text\n")

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["compare", *arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the Python API was called with; it answers with a sample."""
    calls: dict[str, Any] = {}

    def function(a: str, b: str, **given: Any) -> Comparison:
        calls.update(given, a=a, b=b)
        return sample()

    monkeypatch.setitem(vars(headscope), "compare", function)
    return calls


# ------------------------------------------------------------------ what is asked
def test_it_asks_for_what_was_given(run, asked) -> None:
    given = "--layer 0,1 --head 2 --stack encoder,cross --rules calibrated --metrics all --engine full --words --seed 3"
    more = "--exclude-special --max-length 9 --batch-size 2 --revision x --revision-b y --device cpu --dtype float32"
    code, out, err = run("one", "two", "a text", "another", *given.split(), *more.split(), "--decoder-text", "d")
    assert code == 0 and "2 pairs" not in out and "1 of 5 heads" in out
    assert "base (BertModel" in err and "tuned" in err and "warning: intervals are rough" in err
    wanted = {"a": "one", "b": "two", "texts": ["a text", "another"], "data": None, "decoder_texts": ["d"]}
    wanted |= {"layer": "0,1", "head": "2", "stack": ["encoder", "cross"], "rules": "calibrated", "metrics": "all"}
    wanted |= {"engine": "full", "words": True, "exclude_special": True, "max_length": 9, "batch_size": 2, "seed": 3}
    wanted |= {"revision": "x", "revision_b": "y", "device": "cpu", "dtype": "float32", "text_column": "text"}
    assert {name: asked[name] for name in wanted} == wanted


def test_texts_come_from_a_corpus_a_file_or_ids(run, asked) -> None:
    assert run("a", "b", "--data", "texts.txt", "--text-column", "body", "--sample", "7", "--decoder-text", "d")[0] == 0
    assert (asked["data"], asked["text_column"], asked["sample"]) == ("texts.txt", "body", 7)
    assert asked["decoder_texts"] == ["d"] and "texts" not in asked
    assert run("a", "b", "--file", "texts.txt", "--quiet")[0] == 0 and asked["texts"] == ["some text"]
    code, _, err = run("a", "b", "--ids", "1 2 3", "--quiet")
    assert code == 0 and asked["ids"] == [[1, 2, 3]] and err == "warning: intervals are rough\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "b"), "nothing to compare on"),
        (("a",), "MODEL_B"),
        (("a", "b", "x", "--data", "texts.txt"), "--data and a TEXT exclude each other"),
        (("a", "b", "x", "--sample", "3"), "--sample is for a corpus"),
        (("a", "b", "x", "--picture", "new.gif"), "--picture draws"),
        (("a", "b", "x", "--picture", "old.png"), "exists"),
        (("a", "b", "x", "--picture", "new.png", "--output", "new.png", "-f", "csv"), "both name new.png"),
        (("a", "b", "x", "--layer", "first"), "cannot read --layer"),
        (("a", "b", "x", "--format", "xml"), "unknown format"),
        (("a", "b", ""), "empty text"),
    ],
)
def test_what_is_refused_is_refused_before_a_model_is_loaded(run, asked, arguments, message) -> None:
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and message in err and "hint:" in err
    assert asked == {} and Path("old.png").read_text() == "some text\n" and not Path("new.png").exists()


def test_it_writes_files(run, asked) -> None:
    code, out, _ = run("a", "b", "x", "--output", "found.json", "--picture", "old.png", "--force")
    assert code == 0 and out == "" and json.loads(Path("found.json").read_text())["models"] == ["base", "tuned"]
    assert Path("old.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = run("a", "b", "x", "-f", "jsonl", "--picture", "new.svg")
    assert code == 0 and len(out.splitlines()) == 6 and "<svg" in Path("new.svg").read_text()


def test_help_needs_no_torch() -> None:
    script = (
        "import sys\nfrom headscope.cli.main import main\ntry:\n    main(['compare', '--help'])\n"
        "except SystemExit:\n    print(*{m.partition('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "matplotlib"} & set(done.stderr.split()) == set()
    assert "--picture" in done.stdout and "MODEL_A" in done.stdout and "MODEL_B" in done.stdout


# ------------------------------------------------------------------ what is shown
def test_changed_heads_come_first_then_the_furthest() -> None:
    assert [h.name for h in listed(sample())] == ["L0H2", "L1H0", "L0H1"]
    assert [h.name for h in listed(sample(), 1)] == ["L0H2", "L1H0"]
    lines = render_comparison(sample(), "table").splitlines()
    assert lines[2].split() == ["L0H2", "broad", "attention_sink", "0.210", "L0H1", "0.100", "+0.300", "±0.050"]
    assert lines[3].split() == ["L1H0", "broad", "same", "0.400", "same", "-0.125", "±0.050"]


def test_the_summary_says_what_was_found() -> None:
    assert summary(sample()) == [
        "1 of 5 heads that both models have changed label",
        "pruned from B: self.1: 1",
        "distance between heads of the same number: 0.124 on average, 0.400 at most, L1H0",
        "2 of 5 differences of metrics have an interval without 0; by chance alone it would be about 0",
        "best matching: 5 pairs, 2 of other numbers (L0H1 → L0H2, L0H2 → L0H1)",
    ]
    deeper = sample(removed=({}, {}))
    assert "only A has 1 head, in 1 layer" in summary(deeper)


def test_equal_models_have_no_table() -> None:
    same = tuple(change(0, h, ("broad", "broad"), 0.0, 0.0) for h in range(3))
    found = sample(heads=same, removed=({}, {}), matching=(), between=())
    text = render_comparison(found, "table")
    assert text.startswith("0 of 3 heads") and "0.000 on average, 0.000 at most\n" in text and "label A" not in text


def test_all_formats_hold_all_heads() -> None:
    found = sample()
    rows = list(csv.DictReader(io.StringIO(render_comparison(found, "csv"))))
    assert [(r["layer"], r["head"]) for r in rows] == [(str(h.layer), str(h.head)) for h in found.heads]
    assert rows[2]["sink"] == "0.3" and rows[2]["changed"] == "True" and rows[2]["match"] == "L0H1"
    assert rows[4]["pattern_b"] == rows[4]["distance"] == rows[4]["sink_low"] == ""
    assert float(rows[3]["sink_b"]) == pytest.approx(0.075) and float(rows[3]["sink_high"]) == pytest.approx(-0.075)
    assert all(row.keys() == flat_changes(found)[0].keys() for row in flat_changes(found))
    lines = [json.loads(line) for line in render_comparison(found, "jsonl").splitlines()]
    whole = json.loads(render_comparison(found, "json"))
    assert lines == whole["heads"] and whole["removed"] == {"a": {}, "b": {"self.1": [1]}}
    assert whole["matching"][1] == {"a": "L0H1", "b": "L0H2", "similarity": 0.9, "stack": "self"}
    with pytest.raises(InputError, match="unknown format"):
        render_comparison(found, "xml")


def test_markdown_is_a_table_and_warnings() -> None:
    text = render_comparison(sample(), "markdown")
    assert "| L0H2 | broad | attention_sink | 0.210 | L0H1 0.100 | +0.300 ±0.050 |" in text
    assert "## Warnings" in text and "- intervals are rough" in text


def test_heads_of_several_stacks_have_their_names() -> None:
    other = replace(sample().heads[2], stack="cross")
    text = render_comparison(sample(heads=(*sample().heads, other)), "table")
    assert "self.L0H2" in text and "cross.L0H2" in text


@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_table_fits_the_terminal(width: int) -> None:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width).print(comparison_table(sample()))
    assert max(map(len, out.getvalue().splitlines())) <= width and "+0.300" in out.getvalue()


@pytest.mark.parametrize("name", FORMATS)
def test_names_are_only_text(name: str) -> None:
    text = render_comparison(sample(("\x1b[31mred", "=1+1|<b>")), name)
    assert "\x1b" not in text and (name != "markdown" or "<b>" not in text)


# ------------------------------------------------------------------ the picture
def test_the_picture_marks_labels_missing_heads_and_pairs() -> None:
    figure = comparison_figure(sample())
    panels = figure.axes[:2]
    grid = np.ma.filled(panels[0].images[0].get_array(), np.nan)
    np.testing.assert_array_equal(grid, [[0, 0.012, 0.21], [0.4, np.nan, 0]])
    signs = {tuple(int(x) for x in t.get_position()): t.get_text() for t in panels[0].texts if t.get_text()}
    assert signs == {(2, 0): "B›S", (1, 1): "−"}
    kept, moved = (np.transpose(line.get_data()).tolist() for line in panels[1].lines[:2])
    # Columns are the second model's heads, of which L1H1 is missing.
    assert kept == [[0, 0], [3, 3], [4, 5]] and moved == [[2, 1], [1, 2]]
    said = "\n".join(t.get_text() for t in figure.texts)
    assert "1 of 5 heads changed label" in said and "base" in said and "tuned" in said
    assert "only A has this head" in said and "only B" not in said and "attention_sink" in said


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures_are_drawn_the_same_each_time(suffix: str, start: bytes) -> None:
    drawn = [comparison_picture(sample(("a$b^c$", "中文")), file_format=suffix, dpi=40) for _ in range(2)]
    assert drawn[0].startswith(start)
    if suffix == "png":
        assert drawn[0] == drawn[1]


def test_pictures_without_rows_and_without_heads() -> None:
    heads = tuple(replace(h, distance=None) for h in sample().heads)
    figure = comparison_figure(sample(heads=heads, matching=(), between=(), rows=0))
    assert len(figure.axes) == 1 and any("rows do not compare" in t.get_text() for t in figure.texts)
    assert comparison_picture(sample(heads=heads, matching=(), between=()), dpi=40)
    with pytest.raises(InputError, match="no heads"):
        comparison_figure(sample(heads=()))
