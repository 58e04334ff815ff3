"""The whole model in one figure: every head's label, and a metric beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from headscope.errors import InputError
from headscope.results import Analysis, HeadRecord
from headscope.views.figure_base import PLAIN, Look, add_title, place, place_bar
from headscope.views.figure_text import drawable, tick_step
from headscope.views.labels import LabelStyle, cell_letters, labels_shown, marked
from headscope.views.sections import Layers, by_stack, metric_names, unstable

_CELL_INCHES = 0.23
_GAP_INCHES = 0.8
# Wider maps stand under each other rather than side by side.
_WIDE = 28


def map_figure(analysis: Analysis, metric: str | None = None, look: Look = PLAIN) -> Figure:
    """Layers down, heads across: on the left (or above) the labels, on the right (or below) `metric`.

    Args:
        analysis: What to draw; its maps are not needed.
        metric: One of the metrics measured; the first of them unless given.
        look: Colours of the metric, and the title.

    Raises:
        InputError: There is no such metric, or none at all.
    """
    chosen = _chosen_metric(analysis, metric)
    stacks = by_stack(analysis)
    styles = labels_shown(analysis)
    scale = _metric_scale(analysis.heads, chosen, look.vmax)
    width = 1 + max(record.head for record in analysis.heads)
    beside = width <= _WIDE
    figure, tops = _sized(list(stacks.values()), width, beside)
    across = width * _CELL_INCHES + _GAP_INCHES
    for (stack, layers), (top, second_top) in zip(stacks.items(), tops, strict=True):
        height = len(layers) * _CELL_INCHES
        left = place(figure, 0, top, width * _CELL_INCHES, height)
        right = place(figure, across if beside else 0, second_top, width * _CELL_INCHES, height)
        _label_panel(left, layers, width, styles)
        _metric_panel(right, layers, width, chosen, scale, look.cmap)
        for axes, what in ((left, "label"), (right, chosen)):
            axes.set_title(f"{drawable(stack)}: {drawable(what)}", fontsize=8, y=1.0, parse_math=False)
    edge = (2 * across - _GAP_INCHES if beside else width * _CELL_INCHES) + 0.15
    bar_height = min(figure.get_figheight() - tops[0][1] - 0.15, 3.0)
    place_bar(figure, scale, edge, tops[0][1], bar_height, drawable(chosen), look.cmap)
    add_title(figure, analysis, "Attention heads" if look.title is None else drawable(look.title))
    _legend(figure, analysis, styles)
    return figure


def _chosen_metric(analysis: Analysis, metric: str | None) -> str:
    names = metric_names(analysis)
    if not names:
        raise InputError(
            "no metric was measured, so there is no map to draw", hint="choose at least one head and metric"
        )
    chosen = metric or names[0]
    if chosen not in names:
        raise InputError(f"unknown metric {chosen!r}", hint=f"measured: {', '.join(names)}")
    return chosen


def _metric_scale(records: Sequence[HeadRecord], metric: str, vmax: float | None) -> Normalize:
    values = [value for record in records if (value := record.metrics.get(metric)) is not None]
    low, high = min([0.0, *values]), max(values, default=1.0) if vmax is None else vmax
    return Normalize(low, high if high > low else low + 1.0)


def _sized(stacks: Sequence[Layers], width: int, beside: bool) -> tuple[Figure, list[tuple[float, float]]]:
    """The figure, and in inches from its top where each stack's two panels start."""
    tops, top = [], 0.3
    for layers in stacks:
        step = len(layers) * _CELL_INCHES + _GAP_INCHES
        tops.append((top, top if beside else top + step))
        top += step if beside else 2 * step
    whole = width * _CELL_INCHES
    # Room for the colour bar beside a model of one or two layers.
    height = max(top - 0.3, tops[0][1] + 1.35)
    return Figure(figsize=(2 * whole + _GAP_INCHES if beside else whole, height)), tops


def _label_panel(axes: Axes, layers: Layers, width: int, styles: Mapping[str, LabelStyle]) -> None:
    numbers = {label: i for i, label in enumerate(styles)}
    grid = np.full((len(layers), width), np.nan)
    for row, records in enumerate(layers.values()):
        for record in records:
            grid[row, record.head] = numbers[record.pattern]
            letters = marked(cell_letters(record, styles), record)
            _write(axes, record.head, row, letters, styles[record.pattern].ink)
    colors = ListedColormap([style.fill for style in styles.values()])
    axes.imshow(grid, cmap=colors, vmin=-0.5, vmax=len(styles) - 0.5, aspect="auto", interpolation="nearest")
    _axes(axes, layers, width)


def _metric_panel(axes: Axes, layers: Layers, width: int, metric: str, scale: Normalize, cmap: str) -> None:
    grid = metric_grid(layers, width, metric)
    axes.imshow(grid, cmap=cmap, norm=scale, aspect="auto", interpolation="nearest")
    for row, records in enumerate(layers.values()):
        for record in records:
            if not np.isfinite(grid[row, record.head]):
                _write(axes, record.head, row, "–", "#000000")
    _axes(axes, layers, width)


def _write(axes: Axes, head: int, row: int, letters: str, color: str) -> None:
    text = axes.text(head, row, letters, color=color, fontsize=6.5, ha="center", va="center_baseline")
    text.set_in_layout(False)  # It lies inside the panel; measuring a thousand of them takes seconds.


def metric_grid(layers: Layers, width: int, metric: str) -> NDArray[np.float64]:
    """(layer, head) values of `metric`, NaN where there is no head or nothing could be measured."""
    grid = np.full((len(layers), width), np.nan)
    for row, records in enumerate(layers.values()):
        for record in records:
            value = record.metrics.get(metric)
            grid[row, record.head] = np.nan if value is None else value
    return grid


def _axes(axes: Axes, layers: Layers, width: int) -> None:
    last = max(record.head for records in layers.values() for record in records)
    rows = range(0, len(layers), tick_step(len(layers), 48))
    numbers = list(layers)
    axes.set_xticks(range(0, last + 1, tick_step(width, 32)))
    axes.set_yticks(rows, [str(numbers[row]) for row in rows])
    axes.tick_params(labelsize=6, length=0, pad=2)
    axes.set_xlabel("head", fontsize=7, loc="left")
    axes.set_ylabel("layer", fontsize=7)
    axes.spines[:].set_visible(False)
    # White lines between the cells keep equal neighbours apart.
    axes.set_xticks(np.arange(width + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(layers) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="minor", length=0)


def _legend(figure: Figure, analysis: Analysis, styles: Mapping[str, LabelStyle]) -> None:
    handles = [
        Patch(facecolor=style.fill, edgecolor="#555555", linewidth=0.5, label=f"{style.letter}  {drawable(label)}")
        for label, style in styles.items()
    ]
    notes = ["small letter: what a sink does with the rest of its attention"]
    notes = notes if any(record.rest_pattern is not None for record in analysis.heads) else []
    notes += ["* not stable: many texts give another label"] if any(map(unstable, analysis.heads)) else []
    width, height = figure.get_size_inches()
    legend = figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 0.02 / height),
        borderaxespad=0,
        ncols=max(1, min(int(width / 1.2), len(handles))),
        fontsize=7,
        frameon=False,
        title="\n".join(notes) or None,
        title_fontsize=6.5,
        alignment="left",
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
