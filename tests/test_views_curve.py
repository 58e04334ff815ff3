"""What removing heads costs: the picture's lines, axes and bands, and the numbers beside it."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from matplotlib.colors import to_hex
from rich.console import Console

from headscope.errors import InputError
from headscope.pruning.curve_result import Point
from headscope.views.curve import curve_csv, curve_picture, curve_rows, curve_table, lines_of, render_curve
from headscope.views.curve_figure import curve_figure
from headscope.views.figure_base import figure_style
from tests.importance_samples import COSTS, curve, model_info
from tests.views_samples import FEW, hostile_text

SIGNATURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Every warning is an error: a glyph that is missing, a scale that has no room."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def figure(found):
    with figure_style():
        return curve_figure(found)


def drawn_lines(axes) -> dict:
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


# ------------------------------------------------------------------ the picture
def test_lines_are_the_points() -> None:
    found = curve()
    lines = drawn_lines(figure(found).axes[0])
    assert set(lines) == {"random", "random, repaired", "gradient", "gradient, repaired", "surgeon, repaired"}
    for (method, repaired), points in lines_of(found).items():
        line = lines[f"{method}, repaired" if repaired else method]
        assert list(line.get_xdata()) == [0.0, *(100 * p.share for p in points)]
        assert list(line.get_ydata()) == [0.0, *COSTS[method][repaired]]
        assert line.is_dashed() is not repaired


def test_colours_belong_to_methods_and_order_to_the_ends() -> None:
    axes = figure(curve()).axes[0]
    lines = drawn_lines(axes)
    assert lines["gradient"].get_color() == lines["gradient, repaired"].get_color()
    colors = {to_hex(line.get_color()) for line in lines.values()}
    assert len(colors) == 3
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == sorted(lines, key=lambda name: -lines[name].get_ydata()[-1])


def test_methods_of_ones_own_look_different() -> None:
    points = [Point(f"mine {i}", False, 0.5, 10, 1.0 + i, 0.9, 3.5, 1) for i in range(3)]
    lines = drawn_lines(figure(curve(points=tuple(points))).axes[0])
    assert len({(line.get_color(), line.get_marker()) for line in lines.values()}) == 3


def test_random_is_a_band_and_others_have_intervals() -> None:
    axes = figure(curve()).axes[0]
    bands = [c for c in axes.collections if type(c).__name__ in ("PolyCollection", "FillBetweenPolyCollection")]
    assert len(bands) == 2
    corners = bands[0].get_paths()[0].vertices
    at_half = corners[np.isclose(corners[:, 0], 50), 1]
    assert [min(at_half), max(at_half)] == pytest.approx([0.6 * COSTS["random"][0][3], 1.4 * COSTS["random"][0][3]])
    intervals = [c for c in axes.collections if type(c).__name__ == "LineCollection"]
    assert len(intervals) == 3
    ends = {tuple(np.round(s[:, 1], 6)) for c in intervals for s in c.get_segments()}
    assert (round(0.85 * 0.169, 6), round(1.15 * 0.169, 6)) in ends


def test_both_axes_say_the_same() -> None:
    left, right = figure(curve()).axes
    assert left.get_yscale() == right.get_yscale() == "symlog"
    assert left.get_ylim() == right.get_ylim()
    assert left.transData.transform((0, 0.5))[1] == pytest.approx(right.transData.transform((0, 0.5))[1])
    figure_ticks = [(tick, label) for tick, label in zip(right.get_yticks(), formatted(right), strict=True)]
    for place, label in figure_ticks:
        assert float(label.replace(",", "")) == pytest.approx(100 * math.expm1(place), rel=1e-6, abs=1e-9)
    assert {"0", "1", "10", "100"} <= {label for _, label in figure_ticks}
    assert "perplexity" in right.get_ylabel() and "nats" in left.get_ylabel()


def formatted(axes) -> list[str]:
    return axes.yaxis.get_major_formatter().format_ticks(axes.get_yticks())


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.05, 1.0, 40.0])
@pytest.mark.parametrize("loss", ["causal", "output"])
def test_small_losses_can_be_read(scale: float, loss: str) -> None:
    """The least of them is a twentieth of the axis above 0, and ticks neither crowd nor lack."""
    axes = figure(curve(loss, scale)).axes[0]
    height = axes.bbox.height
    least = min(cost for lines in COSTS.values() for line in lines for cost in line or ()) * scale
    above = axes.transData.transform((0, least))[1] - axes.transData.transform((0, 0))[1]
    assert above > height / 20
    for one in axes.figure.axes:
        bottom, top = one.get_ylim()
        places = [one.transData.transform((0, tick))[1] for tick in one.get_yticks() if bottom <= tick <= top]
        assert len(places) >= 4 and np.diff(places).min() > 9


def test_only_losses_a_token_have_perplexity() -> None:
    assert len(figure(curve("causal")).axes) == len(figure(curve("decoder")).axes) == 2
    for loss in ("masked", "classifier", "output"):
        (axes,) = figure(curve(loss)).axes
        assert "perplexity" not in axes.get_ylabel() and "perplexity_rise" not in curve_csv(curve(loss))
    assert "cosine" in figure(curve("output")).axes[0].get_ylabel()


def test_the_title_says_what_was_removed_and_measured() -> None:
    texts = [t.get_text() for t in figure(curve(unit="kv-group", model=model_info("some/model"))).texts]
    assert texts == ["What removing KV groups costs", "some/model, measured on 16 texts, 4,080 tokens"]
    long = [t.get_text() for t in figure(curve(model=model_info("x" * 500), sizes={})).texts]
    assert long[0] == "What removing heads costs" and len(long[1]) <= 60 and long[1].startswith("…")


def test_gains_and_what_is_not_finite() -> None:
    """A loss may fall; a loss without a number is left out; an interval may be missing."""
    given = (
        Point("gradient", False, 0.1, 27, -0.02, -0.03, -0.01, 1),
        Point("gradient", False, 0.3, 81, math.inf, math.inf, math.inf, 1),
        Point("gradient", True, 0.3, 81, 0.5, math.nan, math.nan, 1),
    )
    found = curve(points=given)
    axes = figure(found).axes[0]
    assert list(drawn_lines(axes)["gradient"].get_ydata()) == [0.0, -0.02]
    assert axes.get_ylim()[0] < -0.03
    assert curve_picture(found, dpi=40)
    assert [row[2:] for row in curve_rows(found)[1:]] == [["-0.020 (-0.030–-0.010)", "-"], ["-", "0.500"]]
    assert [r["added"] for r in map(json.loads, render_curve(found, "jsonl").splitlines())] == [-0.02, None, 0.5]
    assert curve_picture(curve(points=()), dpi=40)


@pytest.mark.parametrize("file_format", SIGNATURES)
def test_pictures_are_what_their_suffix_says_and_always_the_same(file_format: str) -> None:
    first, second = (curve_picture(curve(), file_format=file_format, dpi=50) for _ in "ab")
    assert first.startswith(SIGNATURES[file_format])
    if file_format == "png":
        assert first == second


# ------------------------------------------------------------------ the numbers
def test_csv_is_the_picture() -> None:
    found = curve()
    rows = list(csv.DictReader(io.StringIO(curve_csv(found))))
    assert len(rows) == len(found.points)
    by_key = {(p.method, str(p.repaired), p.share): p for p in found.points}
    for row in rows:
        point = by_key[row["method"], row["repaired"], float(row["share"])]
        assert [float(row[name]) for name in ("added", "low", "high")] == [point.added, point.low, point.high]
        assert (int(row["count"]), int(row["seeds"]), row["unit"]) == (point.count, point.seeds, "head")
        assert row["interval"] == ("seeds" if point.method == "random" else "95% over texts")
        assert float(row["perplexity_rise"]) == pytest.approx(math.exp(point.added) - 1)
    assert render_curve(found, "csv") == curve_csv(found)
    assert [json.loads(line)["added"] for line in render_curve(found, "jsonl").splitlines()] == [
        float(row["added"]) for row in rows
    ]


def test_json_is_the_curve() -> None:
    assert json.loads(render_curve(curve(), "json")) == curve().to_dict()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_table_has_every_number_at_every_width(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(curve_table(curve()))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for cell in (cell for row in curve_rows(curve())[1:] for cell in row):
        assert cell in text
    assert "of 270 heads" in text and "5 draws" in " ".join(text.split())


def test_every_number_of_a_table_has_as_many_decimals() -> None:
    rows = curve_rows(curve())
    assert rows[1][:4] == ["10 %", "27", "0.4000 (0.2400–0.5600)", "0.1200 (0.0720–0.1680)"]
    assert rows[4][-1] == "0.1690 (0.1436–0.1943)"
    assert {
        len(number) - number.index(".") - 1 for row in rows[1:] for c in row for number in re.findall(r"\d+\.\d+", c)
    } == {4}


def test_markdown() -> None:
    text = render_curve(curve(warnings=("few *texts*",)), "markdown")
    assert "| removed | of 270 heads | random | random, repaired | gradient |" in text
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 5
    assert r"- few \*texts\*" in text and "repair 100 texts, 25,500 tokens" in text
    with pytest.raises(InputError, match="unknown format 'xml'"):
        render_curve(curve(), "xml")


@settings(FEW, max_examples=12)
@given(hostile_text(), hostile_text(), hostile_text())
def test_nothing_steers_a_terminal_or_breaks_a_picture(name: str, method: str, warning: str) -> None:
    points = (Point("by " + method, False, 0.5, 10, 1.0, 0.9, 1.1, 1),)
    found = curve(points=points, model=model_info(name), warnings=(warning,))
    for form in ("table", "csv", "markdown"):
        assert not CONTROL.search(render_curve(found, form))
    assert render_curve(found, "json").isascii()
    curve_picture(found, dpi=20)
