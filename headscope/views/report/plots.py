"""The page's plots, drawn by Bokeh in the browser: described here, filled and coloured by the page's script.

Bokeh is imported when the first plot is made, never by importing this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headscope.errors import InputError
from headscope.pruning.curve_result import Point
from headscope.views.curve import RANDOM, line_name
from headscope.views.report.curve_file import Losses
from headscope.views.text import visible

if TYPE_CHECKING:
    from bokeh.plotting import figure

# Okabe and Ito (2008), "Color Universal Design", those that show on white and on near-black; dashes do without colour.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7")
_GREY = "#888888"
# Below this part of the largest loss the scale is linear, and below 1 % of perplexity at the latest.
_LINEAR_PART, _LINEAR_MOST = 1e-2, 1e-2


def bokeh_script() -> str:
    """The library's own JavaScript, as it is put into pages.

    Raises:
        InputError: Bokeh is not installed.
    """
    try:
        from bokeh.resources import Resources
    except ImportError as error:
        raise InputError("a report is drawn by Bokeh, which is missing", 'pip install "headscope[report]"') from error
    return str(Resources(mode="inline", components=["bokeh"]).js_raw[0])


def plot_items(losses: Losses | None) -> dict[str, Any]:
    """Bokeh's JSON of each plot by its place in the page."""
    from bokeh.embed import json_item

    plots = {"weights": weights_plot(), "ranked": ranked_plot("ranked")}
    if losses is not None:
        plots["curve"] = curve_plot(losses)
    # A plot gets its element, by the same name, when the script puts it there.
    ids: dict[str, str] = {}
    return {name: _renumbered(json_item(plot), ids) for name, plot in plots.items()}


def _renumbered(found: Any, ids: dict[str, str]) -> Any:
    """Bokeh counts its models over the life of the process; here from the first of the page, so that pages repeat."""
    if isinstance(found, list):
        return [_renumbered(item, ids) for item in found]
    if not isinstance(found, dict):
        return found
    return {
        key: ids.setdefault(value, f"p{1000 + len(ids)}")
        if key in ("id", "root_id") and isinstance(value, str)
        else _renumbered(value, ids)
        for key, value in found.items()
    }


def _figure(name: str, **options: Any) -> figure:
    from bokeh.plotting import figure

    return figure(name=name, toolbar_location=None, tools="", output_backend="canvas", **options)


def weights_plot() -> figure:
    """One head's weights: a square a cell, queries down, keys across; empty until the script fills it."""
    from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d
    from bokeh.palettes import Cividis256
    from bokeh.transform import linear_cmap

    ranges = {"x_range": Range1d(start=-0.5, end=0.5), "y_range": Range1d(start=0.5, end=-0.5)}
    plot = _figure("weights", **ranges, frame_width=300, frame_height=300, min_border=2)
    names = ("x", "y", "shade", "weight", "query", "key")
    source = ColumnDataSource(data={name: [] for name in names}, name="weights-source")
    # Shades are roots of weights: on a linear scale one sink near 1 leaves everything else in the dark.
    fill = linear_cmap("shade", list(Cividis256), low=0, high=1)
    # Outlines in the fill's own colour close the hairlines between squares.
    plot.rect("x", "y", width=1, height=1, fill_color=fill, line_color=fill, source=source)
    plot.add_tools(HoverTool(tooltips=[("query", "@query"), ("key", "@key"), ("weight", "@weight{0.000}")]))
    for axis in (plot.xaxis, plot.yaxis):
        axis.ticker = FixedTicker(ticks=[])
        axis.major_tick_line_color = None
    plot.xaxis.major_label_orientation = "vertical"
    plot.xaxis.axis_label, plot.yaxis.axis_label = "key", "query"
    plot.grid.visible = False
    return plot


def ranked_plot(name: str) -> figure:
    """All heads from low to high: a dot each, with its interval and what chance gives; filled by the script."""
    from bokeh.models import ColumnDataSource, DataRange1d, HoverTool, TapTool

    plot = _figure(name, sizing_mode="stretch_width", height=280, y_range=DataRange1d(range_padding=0.08))
    names = ("x", "value", "low", "high", "chance", "color", "head", "label", "interval")
    source = ColumnDataSource(data={column: [] for column in names}, name=f"{name}-source")
    plot.segment("x", "low", "x", "high", line_color=_GREY, source=source)
    plot.scatter("x", "chance", marker="dash", size=7, line_color=_GREY, source=source)
    dots = plot.scatter("x", "value", size=8, fill_color="color", line_color=_GREY, source=source)
    shown = [("head", "@head"), ("label", "@label"), ("value", "@value{0.0000}"), ("interval", "@interval")]
    shown.append(("chance", "@chance{0.000}"))
    plot.add_tools(HoverTool(tooltips=shown, renderers=[dots]), TapTool(renderers=[dots]))
    plot.xaxis.ticker = []
    plot.xaxis.axis_label = "heads, from low to high"
    plot.xgrid.visible = False
    return plot


# ------------------------------------------------------------------ what removing heads costs
def curve_plot(losses: Losses) -> figure:
    """The added loss against the share that is removed, a line a method, solid where a repair followed."""
    from bokeh.models import HoverTool

    finite = [p for p in losses.points if math.isfinite(p.added)]
    linear = _linear(finite)
    plot = _figure("curve", sizing_mode="stretch_width", height=360)
    dots = []
    methods = list(dict.fromkeys(p.method for p in finite))
    for method in methods:
        color = _GREY if method == RANDOM else _COLORS[methods.index(method) % len(_COLORS)]
        for repaired in (False, True):
            points = sorted((p for p in finite if (p.method, p.repaired) == (method, repaired)), key=lambda p: p.share)
            if points:
                dots.append(_line(plot, points, color, linear))
    shown = [("", "@method"), ("removed", "@share{0.[0]} %, @count"), ("added loss", "@added{0.0000}")]
    plot.add_tools(HoverTool(tooltips=[*shown, ("from", "@low"), ("to", "@high")], renderers=dots))
    ticks = _steps(linear, finite)
    plot.yaxis.ticker = [_place(tick, linear) for tick in ticks]
    plot.yaxis.major_label_overrides = {_place(tick, linear): f"{tick:g}" for tick in ticks}
    plot.yaxis.axis_label = "added loss, nats a token" if losses.nats else "added loss"
    plot.xaxis.axis_label = f"{'heads' if losses.unit == 'head' else 'KV groups'} removed (%)"
    if dots:
        plot.legend.location = "top_left"
        plot.legend.label_text_font_size = "11px"
        plot.add_layout(plot.legend[0], "below")
        plot.legend.ncols = 2
    return plot


def _line(plot: figure, points: Sequence[Point], color: str, linear: float) -> Any:
    """One line with its intervals, from nothing removed and nothing added on; gives the dots."""
    from bokeh.models import ColumnDataSource

    first = points[0]
    name = visible(line_name(first.method, first.repaired))
    dash = "solid" if first.repaired else "dashed"
    line = [(0.0, 0.0), *((100 * p.share, _place(p.added, linear)) for p in points)]
    shares, places = [x for x, _ in line], [y for _, y in line]
    plot.line(shares, places, line_width=2, legend_label=name, line_color=color, line_dash=dash)
    # Of what has no interval, both ends are the loss itself.
    ends = [(p.low, p.high) if math.isfinite(p.low + p.high) else (p.added, p.added) for p in points]
    source = ColumnDataSource(
        data={
            "share": [100 * p.share for p in points],
            "place": [_place(p.added, linear) for p in points],
            "bottom": [_place(low, linear) for low, _ in ends],
            "top": [_place(high, linear) for _, high in ends],
            "added": [p.added for p in points],
            "low": [f"{low:.4f}" for low, _ in ends],
            "high": [f"{high:.4f}" for _, high in ends],
            "count": [p.count for p in points],
            "method": [name] * len(points),
        }
    )
    plot.segment("share", "bottom", "share", "top", line_color=color, source=source)
    return plot.scatter("share", "place", size=8, fill_color=color, line_color=color, source=source)


def _linear(points: Sequence[Point]) -> float:
    """Where the scale turns from linear to logarithmic: a power of ten."""
    largest = max((abs(p.added) for p in points), default=0.0) or 1.0
    return float(10.0 ** math.floor(math.log10(min(_LINEAR_MOST, _LINEAR_PART * largest))))


def _place(value: float, linear: float) -> float:
    """Where a loss stands on the axis: linear near 0, logarithmic further out, below 0 alike."""
    return math.asinh(value / linear)


def _steps(linear: float, points: Sequence[Point]) -> list[float]:
    """0 and 1, 3, 10, 30 … times the end of the linear part, as far as losses go; the same below 0."""
    highest, lowest = (pick([0.0, *(p.added for p in points)]) for pick in (max, min))
    sizes = [linear * step * 10**power for power in range(7) for step in (1, 3)]
    return [*(-s for s in reversed(sizes) if s <= -lowest), 0.0, *(s for s in sizes if s <= 1.25 * highest)]
