"""Attention matrices as figures: one head with its tokens, and all heads of a layer.

A map that comes pooled is that of a long text: it is drawn with a whole number of pixels a cell, with positions in
place of tokens, and on a fourth-root scale, for weights become small when they spread over thousands of tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headscope.results import MOST_CELLS, Analysis, AttentionMap, HeadRecord
from headscope.views.drawn import Drawn
from headscope.views.figure_base import COLOR_MAP, add_title, place
from headscope.views.figure_text import drawable, tick_labels, tick_step
from headscope.views.text import shorten

_HEAD_INCHES = 6.0
_PANEL_CELLS = 128
_LABEL_INCHES = 0.13
_PANEL_LABEL_INCHES = 0.08
_POSITION_INCHES = 0.6


def head_figure(analysis: Analysis, attention: AttentionMap, head: int, largest: bool = False) -> Figure:
    """One head's weights, queries down and keys across, on a scale of roots from 0 to the largest that is drawn.

    Args:
        largest: Draw each tile's largest weight instead of the mean, where the map is pooled.

    Raises:
        ValueError: `attention` holds no such head.
    """
    record = analysis.head(attention.layer, head, attention.stack)
    drawn = Drawn.of(_only(attention, head), largest, MOST_CELLS)
    width, height = panel_size(drawn.tokens, drawn.inches(min(max(0.3 * max(drawn.tokens), 1.2), _HEAD_INCHES)))
    figure = Figure(figsize=(width, height))
    axes = place(figure, 0, 0, width, height)
    _draw(axes, drawn, 0)
    if drawn.positions:
        _position_axes(axes, drawn, (width, height))
    else:
        _token_axes(axes, attention, int(height / _LABEL_INCHES), int(width / _LABEL_INCHES))
    bar_place = (width + 0.15, 0, min(max(height, 1.2), 3.0))
    drawn.bar(figure, drawn.largest(0), "attention weight", bar_place)
    add_title(figure, analysis, f"{drawable(attention.stack)} {record.name}: {_label(record)}{drawn.title}")
    return figure


def _only(attention: AttentionMap, head: int) -> AttentionMap:
    """The map of one head."""
    index = attention.heads.index(head)
    part = slice(index, index + 1)
    peak = None if attention.peak is None else attention.peak[part]
    return replace(attention, heads=(head,), weights=attention.weights[part], peak=peak)


def panel_size(shape: tuple[int, ...], longest: float) -> tuple[float, float]:
    """Width and height in inches of a matrix with square cells; the short side is a quarter of the long or more."""
    rows, columns = shape
    unit = longest / max(rows, columns)
    shortest = max(longest / 4, 0.3)
    return max(columns * unit, shortest), max(rows * unit, shortest)


def _label(record: HeadRecord) -> str:
    rest = f" (rest: {record.rest_pattern})" if record.rest_pattern is not None else ""
    return drawable(record.pattern + rest)


def _draw(axes: Axes, drawn: Drawn, index: int) -> None:
    """Draw one head's matrix, filling the panel; axes count tokens."""
    weights = drawn.weights[index]
    # Tiles at the far edges may reach past the last token; the limits below cut them there.
    extent = (-0.5, weights.shape[1] * drawn.tile - 0.5, weights.shape[0] * drawn.tile - 0.5, -0.5)
    scale = drawn.scale(drawn.largest(index))
    # Above the frame, half of whose line lies within: a sink's column may be two pixels wide.
    axes.imshow(weights, cmap=COLOR_MAP, norm=scale, extent=extent, aspect="auto", interpolation="nearest", zorder=3)
    axes.set_xlim(-0.5, drawn.tokens[1] - 0.5)
    axes.set_ylim(drawn.tokens[0] - 0.5, -0.5)


def _token_axes(axes: Axes, attention: AttentionMap, rows: int, columns: int) -> None:
    positions, labels = tick_labels(attention.queries, rows)
    axes.set_yticks(positions, labels, fontsize=7.5, parse_math=False)
    positions, labels = tick_labels(attention.keys, columns)
    axes.set_xticks(positions, labels, fontsize=7.5, rotation=90, parse_math=False)
    axes.set_ylabel("query", fontsize=8)
    axes.set_xlabel("key", fontsize=8)


def _position_axes(axes: Axes, drawn: Drawn, inches: tuple[float, float]) -> None:
    (rows, columns), (width, height) = drawn.tokens, inches
    axes.set_yticks(range(0, rows, tick_step(rows, int(height / _POSITION_INCHES))))
    axes.set_xticks(range(0, columns, tick_step(columns, int(width / _POSITION_INCHES))))
    axes.tick_params(labelsize=7.5)
    axes.set_ylabel("query position", fontsize=8)
    axes.set_xlabel("key position", fontsize=8)


def layer_figure(analysis: Analysis, attention: AttentionMap, largest: bool = False) -> Figure:
    """All heads of a layer, each on a scale of roots from 0 to the largest that is drawn, which its title gives.

    Args:
        largest: Draw each tile's largest weight instead of the mean, where the map is pooled.
    """
    count = len(attention.heads)
    columns = grid_columns(count)
    rows = -(-count // columns)
    drawn = Drawn.of(attention, largest, _PANEL_CELLS)
    width, height = panel_size(drawn.tokens, drawn.inches(1.7 if columns <= 5 else 1.35))
    across, down = max(width, 1.2) + 0.12, height + 0.4
    # The first row's titles stand over the upper edge, so the figure starts a little above it.
    figure = Figure(figsize=(columns * across - 0.12, rows * down - 0.1))
    for index in range(count):
        row, column = divmod(index, columns)
        axes = place(figure, column * across, row * down + 0.3, width, height)
        _draw(axes, drawn, index)
        _panel_title(axes, analysis, attention, drawn, index)
        _panel_axes(axes, attention, drawn, (width, height), left=column == 0, below=index + columns >= count)
    top = "mean" if drawn.kind == "mean" else "weight"
    bar_place = (columns * across + 0.05, 0.3, max(min(rows * down - 0.4, 3.0), 1.2))
    drawn.bar(figure, 1.0, f"share of each head's\nlargest {top}", bar_place)
    add_title(figure, analysis, f"{drawable(attention.stack)} layer {attention.layer}{drawn.title}")
    return figure


def grid_columns(count: int) -> int:
    """Columns of a grid of `count` panels: at least as many as rows, without gaps where a divisor allows that."""
    root = math.isqrt(count - 1) + 1
    return next((c for c in range(root, min(2 * root, count) + 1) if count % c == 0), root)


def _panel_title(axes: Axes, analysis: Analysis, attention: AttentionMap, drawn: Drawn, index: int) -> None:
    record = analysis.head(attention.layer, attention.heads[index], attention.stack)
    top = "largest mean" if drawn.kind == "mean" else "max"
    title = f"H{record.head} {shorten(drawable(record.pattern), 16)}\n{top} {drawn.largest(index):.2g}"
    axes.set_title(title, fontsize=6.5, pad=2, y=1.0, parse_math=False)


def _panel_axes(
    axes: Axes, attention: AttentionMap, drawn: Drawn, inches: tuple[float, float], *, left: bool, below: bool
) -> None:
    """Tokens where all of them fit, else positions; at the grid's outer edges only."""
    axes.tick_params(labelsize=5, length=1.5, pad=1)
    for labels, count, side, outer, set_ticks, rotation in (
        (attention.queries, drawn.tokens[0], inches[1], left, axes.set_yticks, 0),
        (attention.keys, drawn.tokens[1], inches[0], below, axes.set_xticks, 90),
    ):
        room = int(side / _PANEL_LABEL_INCHES)
        if not outer:
            set_ticks([])
        elif count <= room and not drawn.positions:
            positions, texts = tick_labels(labels, room)
            set_ticks(positions, texts, rotation=rotation, parse_math=False)
        else:
            set_ticks(range(0, count, tick_step(count, 6)))
