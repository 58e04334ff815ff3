"""The report as a file: what it holds, that its numbers are the analysis's, and that nothing in it can run."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headscope
from headscope.errors import InputError
from headscope.results import AttentionMap
from headscope.views.curve import curve_csv
from headscope.views.report.build import report
from headscope.views.report.curve_file import losses_of
from headscope.views.report.matrices import MOST_BYTES, cells_allowed, compact
from headscope.views.report.plots import plot_items
from headscope.views.text import token_label, visible
from tests.importance_samples import curve, importance
from tests.report_samples import EVIL, Page, hostile, over_texts, small, with_types
from tests.views_samples import FEW, TOKENS, analysis, hostile_analyses, model_heads


def page_of(found, **more) -> Page:
    return Page(report(found, **more).html)


# ------------------------------------------------------------------ numbers
def test_every_number_of_the_analysis_is_in_the_page() -> None:
    found = over_texts()
    data = page_of(found).data
    columns = {column["name"]: column for column in data["columns"]}
    assert [(h["stack"], h["layer"], h["head"]) for h in data["heads"]] == [
        (r.stack, r.layer, r.head) for r in found.heads
    ]
    for i, record in enumerate(found.heads):
        assert data["heads"][i]["label"] == record.pattern
        for name, value in record.metrics.items():
            column, spread = columns[name], record.spread[name]
            assert (column["values"][i], column["chance"][i]) == (value, record.chance[name])
            assert [column[k][i] for k in ("sd", "low", "high", "texts")] == [
                spread.sd,
                spread.low,
                spread.high,
                spread.texts,
            ]
        marked = [name for name in record.metrics if (columns[name]["at_chance"] or [None] * (i + 1))[i]]
        assert marked == list(record.at_chance)
        assert columns["stability"]["values"][i] == record.stability


def test_the_same_analysis_is_the_same_page() -> None:
    """Also in one process, where Bokeh counts on; what is drawn refers to nothing but itself."""
    pages = [report(small(), curve=curve()).html for _ in range(2)]
    assert pages[0] == pages[1]
    items = plot_items(losses_of(curve()))
    made, named = set(), set()

    def look(found: object) -> None:
        for value in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
            look(value)
        if isinstance(found, dict) and isinstance(found.get("id"), str):
            (made if "type" in found or "name" in found else named).add(found["id"])

    look(list(items.values()))
    assert made and named and named <= made
    assert {item["root_id"] for item in items.values()} <= made and len(items) == 3


def test_what_was_not_measured_is_null() -> None:
    found = small()
    heads = (replace(found.heads[0], metrics={**found.heads[0].metrics, "sink": None}), *found.heads[1:])
    column = page_of(replace(found, heads=heads)).data["columns"][0]
    assert column["name"] == "sink"
    assert column["values"][0] is None
    assert column["values"][1] == heads[1].metrics["sink"]
    assert column["low"] is None


def test_types_come_with_their_evidence() -> None:
    page = page_of(with_types(small()))
    column = next(c for c in page.data["columns"] if c["kind"] == "type")
    assert (column["values"][3], column["has"][:2]) == (3 / 8, [False, True])
    name, numbers, looks = page.data["heads"][1]["types"][0]
    assert name == "previous_token"
    assert numbers.startswith("score 0.812 [0.700, 0.900], chance 0.125, previous_token alone 0.250, p 0.003, 12 rows")
    assert looks == "'the cat sat' looks at 'the cat sat' 0.750, in: the cat sat"
    assert page.data["heads"][0]["types"] == []
    assert any("what they look at" in text.lower() for text in page.text)


def weights_of(data: dict, layer: int) -> np.ndarray:
    """float64, (heads, query, key): the weights of the only stack's layer, as the note on the page says."""
    found = next(m for m in data["maps"] if m["layer"] == layer)
    sides = (len(found["heads"]), len(data["axes"][found["queries"]]), len(data["axes"][found["keys"]]))
    cells = np.frombuffer(base64.b64decode(found["weights"]), dtype=np.uint8).reshape(sides)
    return np.array(found["scales"])[:, None, None] * (cells / 255.0) ** 2


def test_matrices_are_those_of_the_analysis() -> None:
    found = small()
    data = page_of(found).data
    assert data["axes"] == [[token_label(token, 24) for token in TOKENS]]
    for attention in found.maps:
        difference = np.abs(weights_of(data, attention.layer) - attention.weights)
        assert difference.max() <= 1 / 255 + 1e-6
        assert difference.max() > 0
        assert (weights_of(data, attention.layer)[:, 0, 1:] == 0).all()


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from([1e-6, 0.3]))
@FEW
def test_no_weight_is_off_by_more_than_the_page_says(heads: int, rows: int, keys: int, seed: int, size: float) -> None:
    weights = (size * np.random.default_rng(seed).random((heads, rows, keys)) ** 4).astype(np.float32)
    labels = [tuple(map(str, range(n))) for n in (rows, keys)]
    kept = compact([AttentionMap("self", 0, tuple(range(heads)), weights, *labels)])
    found = {"maps": kept.maps, "axes": kept.axes}
    assert np.abs(weights_of(found, 0) - weights).max() <= kept.error * (1 + 1e-5)
    assert kept.error == pytest.approx(weights.max() / 255, rel=1e-5)


def test_long_texts_are_pooled_to_tile_means() -> None:
    n = 300
    weights = np.tril(np.random.default_rng(0).random((1, n, n))).astype(np.float32)
    labels = tuple(map(str, range(n)))
    kept = compact([AttentionMap("self", 0, (0,), weights, labels, labels)])
    assert kept.tile == 3
    means = weights.reshape(1, 100, 3, 100, 3).mean(axis=(2, 4))
    assert np.abs(weights_of({"maps": kept.maps, "axes": kept.axes}, 0) - means).max() <= kept.error
    assert kept.axes[0][:2] == ("0–2", "3–5")


def test_a_page_stays_small_however_many_heads_there_are() -> None:
    layers, heads, n = 48, 48, 60
    weights = np.full((heads, n, n), 1 / n, dtype=np.float32)
    maps = tuple(AttentionMap("self", i, tuple(range(heads)), weights, *[("t",) * n] * 2) for i in range(layers))
    made = report(analysis(model_heads(layers, heads), maps=maps))
    assert made.bytes < 6e6
    assert compact(maps).bytes <= MOST_BYTES
    assert [cells_allowed(count) for count in (1, 270, 1024, 10**6)] == [128, 88, 45, 16]


def test_size_and_versions_are_told() -> None:
    made = report(small(), command="headscope report 'a text' -o x.html")
    text = " ".join(Page(made.html).text)
    assert "headscope report 'a text' -o x.html" in text
    assert "headscope 0.1.0" in text
    assert f"8 heads on the first text, {2 * 4 * len(TOKENS) ** 2 / 1e3:.3g} kB" in text
    assert made.bytes == len(made.html.encode("utf-8")) < 1.6e6


def test_an_analysis_without_matrices_says_so() -> None:
    page = page_of(small(maps=()))
    assert page.data["maps"] == []
    assert "none were kept" in " ".join(page.text)


# ------------------------------------------------------------------ importance and curve
def test_importance_is_a_column_of_its_own() -> None:
    scores = importance(2, 4, errors=True)
    page = page_of(small(), importance=scores)
    column = page.data["columns"][-1]
    assert (column["kind"], column["values"]) == ("importance", [s.score for s in scores.heads])
    assert column["high"] == pytest.approx([s.score + 2 * s.error for s in scores.heads], rel=1e-12)
    assert column["low"] == pytest.approx([s.score - 2 * s.error for s in scores.heads], rel=1e-12)
    lowest = min(scores.heads, key=lambda s: s.score)
    assert f"L{lowest.layer}H{lowest.head} {lowest.score:.3g}, " in " ".join(page.text)


def test_importance_of_other_heads_is_refused() -> None:
    with pytest.raises(InputError, match="none of these heads"):
        report(small(), importance=importance(2, 4, stack="other"))


def test_a_curve_reads_back_from_its_table(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text(curve_csv(curve()), encoding="utf-8")
    read, own = losses_of(path), losses_of(curve())
    assert sorted(map(repr, read.points)) == sorted(map(repr, own.points))
    assert (read.unit, read.nats) == (own.unit, own.nats) == ("head", True)
    page = page_of(small(), curve=path)
    assert "curve" in page.data["plots"]
    point = own.points[0]
    assert {f"{point.added:.4f}", f"{100 * point.share:.3g} %"} <= set(page.text)
    assert "curve" not in page_of(small()).data["plots"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column 'method'"),
        ("method,repaired,unit,share,count,added,low,high,seeds\n", "no rows"),
        ("method,repaired,unit,share,count,added,low,high,seeds\na,False,head,x,1,1,1,1,1\n", "line 2: could not"),
        ("method,repaired,unit,share,count,added,low,high,seeds\na,False,head,nan,1,1,1,1,1\n", "share is nan"),
        ("a,b\n1,2\n", "no column 'method'"),
    ],
)
def test_other_tables_are_no_curves(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        losses_of(path)


def test_a_missing_or_binary_curve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        losses_of(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="no table of a curve"):
        losses_of(tmp_path / "binary.csv")


# ------------------------------------------------------------------ nothing can run, nothing is loaded
def check_closed(page: Page) -> None:
    """Only our elements and scripts, all of them allowed by their digest, and no address of anything."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    assert len(digests) == 3
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert page.policy == (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    tags = [tag for tag, _ in page.elements]
    assert (tags.count("script"), tags.count("style")) == (4, 1)
    assert not {"img", "svg", "iframe", "object", "embed", "form", "a", "base"} & set(tags)
    names = {name for _, attributes in page.elements for name in attributes}
    assert not [name for name in names if name.startswith("on") or name in ("src", "srcdoc", "action")]
    assert [attributes["href"] for _, attributes in page.elements if "href" in attributes] == ["data:,"]


def test_the_page_loads_nothing_and_runs_only_its_own_scripts() -> None:
    check_closed(page_of(with_types(over_texts()), importance=importance(2, 4), curve=curve()))


def test_hostile_texts_stay_texts() -> None:
    found = hostile()
    scores = replace(importance(1, 2, stack=EVIL[0]), method=EVIL[1], warnings=EVIL)
    page = page_of(found, importance=scores, command=EVIL[1])
    check_closed(page)
    data = page.data
    assert data["axes"] == [[token_label(token, 24) for token in EVIL]]
    assert [head["label"] for head in data["heads"]] == [visible(EVIL[0]), visible(EVIL[1])]
    assert data["stacks"] == [visible(EVIL[0])]
    text = "".join(page.text)
    assert all(visible(evil) in text for evil in EVIL)


def test_the_embedded_data_cannot_end_its_element() -> None:
    source = report(hostile()).html
    inside = source.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert not re.search("[<>&\u2028\u2029]", inside)
    assert inside.isascii()


@given(hostile_analyses())
@settings(max_examples=8, deadline=None)
def test_any_analysis_makes_a_closed_page(found) -> None:
    check_closed(page_of(found))


# ------------------------------------------------------------------ files, notebooks, the package
def test_a_page_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    made = headscope.report(small(), path)
    assert path.read_text(encoding="utf-8") == made.html
    with pytest.raises(InputError, match="exists"):
        made.write(path)
    made.write(path, force=True)
    with pytest.raises(InputError, match="cannot write"):
        made.write(tmp_path / "none" / "page.html")


def test_a_notebook_shows_it_in_a_frame_of_its_own() -> None:
    made = report(hostile())
    frame = made._repr_html_()
    assert re.match(r'<iframe title="[^"]*" sandbox="allow-scripts" style="[^"]*" srcdoc="[^"]*"></iframe>$', frame)
    assert html.unescape(frame.split('srcdoc="')[1].removesuffix('"></iframe>')) == made.html
    assert len(made._repr_html_()) > len(repr(made))


def test_its_own_files_come_with_the_package() -> None:
    folder = resources.files("headscope.views.report")
    names = {entry.name for entry in folder.iterdir()}
    assert {"page.html", "page.css", "page.js", "map.js", "head.js", "plots.js", "main.js"} <= names


def test_without_bokeh_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bokeh.resources", None)
    with pytest.raises(InputError, match="Bokeh") as error:
        report(small())
    assert error.value.hint == 'pip install "headscope[report]"'


def test_analyze_writes_the_page_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`analyze --html` writes the page of the same analysis, and refuses what `report` refuses."""
    from headscope.cli.main import main
    from tests.tiny_checkpoints import save, wordpiece

    model, page = save(tmp_path / "model", "bert", wordpiece()), tmp_path / "page.html"
    words = ["analyze", "the cat sat", "--model", str(model), "--format", "csv", "--quiet", "--html"]
    for target, code in ((page, 0), (page, 2), (tmp_path / "page.txt", 2)):
        with pytest.raises(SystemExit) as ended:
            main([*words, str(target)])
        assert ended.value.code == code
    assert capsys.readouterr().out.startswith("stack,layer,head")
    text = page.read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>") and str(model) in text
