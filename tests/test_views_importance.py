"""Scores as a grid and in every format: the right numbers in the right cells, at every width."""

from __future__ import annotations

import csv
import io
import json
import math
import re

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from rich.console import Console

from headscope.errors import InputError
from headscope.importance.result import HeadScore
from headscope.views.importance import header_lines, importance_table, render_importance
from headscope.views.score_grid import SHADES, Scale, Scored, scale_of
from tests.importance_samples import importance, model_info
from tests.views_samples import FEW, hostile_text

FORMATS = ("table", "json", "jsonl", "csv", "markdown")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


def shown(result, width: int, **how) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=bool(how), legacy_windows=False, **how)
    console.print(importance_table(result))
    return out.getvalue()


def scored(*scores: float, error: float | None = None) -> list[Scored]:
    return [Scored("head", "self", 0, i, (i,), score, error) for i, score in enumerate(scores)]


# ------------------------------------------------------------------ the grid
@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize(("layers", "heads", "group"), [(6, 12, 4), (3, 32, 8), (30, 9, 3), (2, 64, 0)])
def test_every_score_is_in_its_cell_at_every_width(width: int, layers: int, heads: int, group: int) -> None:
    result = importance(layers, heads, group=group)
    text = shown(result, width)
    assert max(map(len, text.splitlines())) <= width
    heads_part, _, groups_part = text.partition("self: KV groups")
    scale = scale_of(scored(*(s.score for s in result.heads)))
    assert read_grid(heads_part) == {(s.layer, f"H{s.head}"): scale.show(s.score) for s in result.heads}
    scale = scale_of(scored(*(s.score for s in result.kv_groups)))
    assert read_grid(groups_part) == {(s.layer, f"G{s.kv_group}"): scale.show(s.score) for s in result.kv_groups}


def read_grid(text: str) -> dict[tuple[int, str], str]:
    """Cells by layer and column name, from all blocks of a grid."""
    cells: dict[tuple[int, str], str] = {}
    names: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["layer"]:
            names = words[1:]
        elif words and re.fullmatch(r"L\d+", words[0]):
            assert len(words) == len(names) + 1
            cells |= {(int(words[0][1:]), name): word for name, word in zip(names, words[1:], strict=True)}
    return cells


def test_low_scores_keep_their_digits_beside_a_high_one() -> None:
    assert scale_of(scored(0.002, 0.003, 0.9)) == Scale(-3, 1)
    assert scale_of(scored(0.2, 0.35, 1.5)) == Scale(0, 2)
    assert scale_of(scored(12.0, 350.0, 3.0)) == Scale(0, 0)
    assert scale_of(scored(4e6, 2e6, 3e6)) == Scale(6, 1)
    assert scale_of(scored(0.0, math.nan)) == Scale(0, 1)
    assert Scale(-3, 1).show(0.0123) == "12.3" and Scale(-3, 1).note == "scores × 1,000"
    assert Scale(6, 1).show(2.5e6) == "2.5" and Scale(6, 1).note == "scores ÷ 1,000,000"
    assert Scale(0, 2).note == "" and Scale(-9, 1).note == "scores × 1e9"
    assert Scale(0, 2).show(-0.001) == "0.00" and Scale(-3, 1).precise(-1.234e-6) == "-0.00123"
    assert [Scale(0, 2).precise(v) for v in (215.4, 56.04, 1234.5, 0.0)] == ["215", "56.0", "1234", "0.00"]


@FEW
@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=9))
def test_the_middle_score_has_two_digits(scores: list[float]) -> None:
    middle = sorted(scores)[len(scores) // 2] if len(scores) % 2 else None
    scale = scale_of(scored(*scores))
    if middle is not None:
        digits = scale.show(middle).replace(".", "").lstrip("0")
        assert 2 <= len(digits) <= 4
        assert float(scale.show(middle)) * 10.0**scale.power == pytest.approx(middle, rel=0.05)


def test_lowest_and_highest_are_listed_with_their_errors() -> None:
    heads = tuple(HeadScore("self", i, j, 0.1 * (4 * i + j) + 0.1, 0.09) for i in range(3) for j in range(4))
    text = shown(importance(3, 4, heads=heads), 80)
    lowest = re.findall(r"^(L\dH\d) +(\S+) ±0.0900 +(L\dH\d) +(\S+) ±0.0900", text, re.MULTILINE)
    assert lowest == [
        ("L0H0", "0.100", "L2H3", "1.20"),
        ("L0H1", "0.200", "L2H2", "1.10"),
        ("L0H2", "0.300", "L2H1", "1.00"),
        ("L0H3", "0.400", "L2H0", "0.900"),
        ("L1H0", "0.500", "L1H3", "0.800"),
    ]
    assert "0.10~" in text and "0.20 " in text and "~ within two standard errors of 0" in text
    assert "~" not in shown(importance(3, 4), 80)


def test_a_score_without_a_number_is_not_ranked() -> None:
    scores = (0.5, math.nan, 0.25, math.inf)
    result = importance(1, 4, heads=tuple(HeadScore("self", 0, j, s) for j, s in enumerate(scores)))
    text = shown(result, 80)
    assert read_grid(text)[0, "H1"] == read_grid(text)[0, "H3"] == "-"
    assert "L0H1" not in text and "L0H3" not in text and "- no finite number" in text
    assert [row["score"] for row in json.loads(render_importance(result, "json"))["heads"]] == [0.5, None, 0.25, None]


def test_missing_heads_leave_blanks() -> None:
    heads = tuple(HeadScore("self", layer, head, 0.5) for layer, head in ((0, 0), (0, 2), (4, 1)))
    text = shown(importance(1, 1, heads=heads), 80)
    rows = [line for line in text.splitlines() if re.match(r"L\d ", line)]
    assert [re.sub(r" +", " ", r.rstrip()) for r in rows[:2]] == ["L0 0.50 0.50", "L4 0.50"]
    assert rows[0].index("0.50") != rows[1].index("0.50")


def test_groups_are_named_with_their_heads() -> None:
    text = shown(importance(2, 6, group=3), 80).partition("KV groups")[2]
    assert re.search(r"L\dG0 \(0-2\)", text) and re.search(r"L\dG1 \(3-5\)", text)


def test_colours_are_places_in_the_order(monkeypatch) -> None:
    """Seven scores, one of each seventh, in the colours of the map that pictures use."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert [to_hex(matplotlib.colormaps["cividis"](i / 6)) for i in range(7)] == list(SHADES)
    order = (3, 0, 6, 1, 5, 2, 4)
    result = importance(1, 7, heads=tuple(HeadScore("self", 0, j, 10.0**-place) for j, place in enumerate(order)))
    coloured = shown(result, 80, color_system="truecolor")
    row = next(line for line in coloured.splitlines() if line.startswith("L0"))
    fills = [tuple(map(int, found)) for found in re.findall(r"48;2;(\d+);(\d+);(\d+)", row)]
    wanted = [SHADES[6 - place] for place in order]
    assert fills == [tuple(int(color[i : i + 2], 16) for i in (1, 3, 5)) for color in wanted]


def test_the_header_says_what_was_done() -> None:
    def header(**changes) -> str:
        out = io.StringIO()
        Console(file=out, width=100).print(header_lines(importance(1, 2, **changes)))
        return out.getvalue()

    assert "gradient" in header() and "12 texts, 3,072 tokens" in header() and "zero" not in header()
    assert "zero in its place" in header(method="ablation")
    assert "mean in its place" in header(method="ablation", replace="mean")
    assert "L2 norm" in header(normalised=True)
    assert "data" not in header(method="magnitude", texts=0, tokens=0)


# ------------------------------------------------------------------ formats
def test_records_are_the_scores() -> None:
    result = importance(2, 4, group=2, errors=True)
    lines = [json.loads(line) for line in render_importance(result, "jsonl").splitlines()]
    assert [(x["layer"], x["head"], x["score"], x["error"]) for x in lines if x["unit"] == "head"] == [
        (s.layer, s.head, s.score, s.error) for s in result.heads
    ]
    assert [(x["layer"], x["kv_group"], x["heads"], x["score"]) for x in lines if x["unit"] == "kv-group"] == [
        (s.layer, s.kv_group, list(s.heads), s.score) for s in result.kv_groups
    ]
    rows = list(csv.DictReader(io.StringIO(render_importance(result, "csv"))))
    assert [float(r["score"]) for r in rows] == [x["score"] for x in lines]
    assert [r["heads"] for r in rows] == [" ".join(map(str, x["heads"])) for x in lines]
    assert [r["head"] for r in rows[:4]] == list("0123") and rows[-1]["head"] == "" and rows[-1]["kv_group"] == "1"


def test_markdown_has_a_grid_a_unit() -> None:
    text = render_importance(importance(2, 4, group=2, warnings=("few *texts*",)), "markdown")
    assert "## self: heads" in text and "| layer | H0 | H1 | H2 | H3 |" in text
    assert "## self: KV groups" in text and "| layer | G0 | G1 |" in text
    assert "scores × 1,000" in text and r"- few \*texts\*" in text
    assert len([line for line in text.splitlines() if line.startswith("| L")]) == 4


def test_the_same_result_is_the_same_text() -> None:
    for name in FORMATS:
        assert render_importance(importance(3, 5), name) == render_importance(importance(3, 5), name)
        assert render_importance(importance(3, 5), name).endswith("\n")
    with pytest.raises(InputError, match="unknown format 'xml'"):
        render_importance(importance(1, 1), "xml")


@FEW
@given(hostile_text(), hostile_text(), hostile_text())
def test_nothing_steers_a_terminal(name: str, stack: str, warning: str) -> None:
    result = importance(2, 3, stack=stack, model=model_info(name), warnings=(warning,), group=3)
    assert render_importance(result, "json").isascii()
    for form in ("table", "csv", "markdown"):
        text = render_importance(result, form)
        text.encode("utf-8")
        assert not CONTROL.search(text)
    assert not CONTROL.search(shown(result, 60))


@pytest.mark.parametrize("heads", [(), (HeadScore("self", 0, 0, 0.5),)])
def test_little_is_no_trouble(heads) -> None:
    result = importance(1, 1, heads=heads)
    written = {name: render_importance(result, name) for name in FORMATS}
    assert len(json.loads(written["json"])["heads"]) == len(written["jsonl"].splitlines()) == len(heads)
    assert len(written["csv"].splitlines()) == 1 + len(heads)
    assert [("0.5" in written[name]) for name in ("table", "markdown")] == [bool(heads)] * 2
