"""Attention matrices as figures: one matrix with its tokens, and a grid of several.

A map that comes pooled is that of a long text: it is drawn with a whole number of pixels a cell, with positions in
place of tokens, and on a fourth-root scale, for weights become small when they spread over thousands of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headscope.heads.medium import Heard
from headscope.results import MOST_CELLS, Analysis, AttentionMap, HeadRecord
from headscope.views.drawn import Drawn
from headscope.views.figure_base import PLAIN, Look, add_title, place
from headscope.views.figure_text import drawable, tick_labels, tick_step
from headscope.views.sound_figure import draw_spectrogram, time_axis
from headscope.views.text import shorten

_HEAD_INCHES = 6.0
# A picture grows up to here, so that every token of a text of a few sentences has its label.
_MOST_INCHES = 10.0
_SPECTROGRAM_INCHES = 0.9
_PANEL_CELLS = 128
_LABEL_INCHES = 0.12
_PANEL_LABEL_INCHES = 0.08
_POSITION_INCHES = 0.6


def head_figure(
    analysis: Analysis, attention: AttentionMap, head: int, largest: bool = False, look: Look = PLAIN
) -> Figure:
    """One head's weights, as `matrix_figure` draws them.

    Raises:
        ValueError: `attention` holds no such head.
    """
    record = analysis.head(attention.layer, head, attention.stack)
    title = f"{drawable(attention.stack)} {record.name}: {_label(record)}"
    return matrix_figure(analysis, _only(attention, head), title, largest, look)


def _only(attention: AttentionMap, head: int) -> AttentionMap:
    """The map of one head."""
    index = attention.heads.index(head)
    part = slice(index, index + 1)
    peak = None if attention.peak is None else attention.peak[part]
    return replace(attention, heads=(head,), weights=attention.weights[part], peak=peak)


def matrix_figure(
    analysis: Analysis,
    attention: AttentionMap,
    title: str,
    largest: bool = False,
    look: Look = PLAIN,
    heard: Heard | None = None,
    what: str = "attention weight",
) -> Figure:
    """One matrix, queries down and keys across, on a scale of roots from 0 to the largest that is drawn.

    Args:
        attention: A map of one matrix.
        largest: Draw each tile's largest weight instead of the mean, where the map is pooled.
        heard: The sound that the keys are frames of; its spectrogram then stands over the matrix.
        what: What the numbers are.
    """
    drawn = Drawn.of(attention, largest, MOST_CELLS, look)
    width, height = panel_size(drawn.tokens, drawn.inches(_longest(max(drawn.tokens))))
    above = 0.0 if heard is None else _SPECTROGRAM_INCHES + 0.06
    figure = Figure(figsize=(width, above + height))
    axes = place(figure, 0, above, width, height)
    _draw(axes, drawn, 0)
    if drawn.positions:
        _position_axes(axes, drawn, (width, height))
    else:
        _token_axes(axes, attention, int(height / _LABEL_INCHES), int(width / _LABEL_INCHES))
    if heard is not None:
        draw_spectrogram(place(figure, 0, 0, width, _SPECTROGRAM_INCHES), heard)
        time_axis(axes, heard, (width, height))
    drawn.bar(figure, drawn.top(0), what, (width + 0.15, above, min(max(height, 1.2), 3.0)))
    add_title(figure, analysis, f"{title}{drawn.title}" if look.title is None else drawable(look.title))
    return figure


def _longest(tokens: int) -> float:
    """Inches of the longer side of one matrix."""
    labelled = 1.01 * _LABEL_INCHES * tokens
    return labelled if _HEAD_INCHES < labelled <= _MOST_INCHES else min(max(0.3 * tokens, 1.2), _HEAD_INCHES)


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
    """Draw one matrix, filling the panel; axes count tokens."""
    weights, (down, across) = drawn.weights[index], drawn.tile
    # Tiles at the far edges may reach past the last token; the limits below cut them there.
    extent = (-0.5, weights.shape[1] * across - 0.5, weights.shape[0] * down - 0.5, -0.5)
    cmap, scale = drawn.look.cmap, drawn.scale(drawn.top(index))
    # Above the frame, half of whose line lies within: a sink's column may be two pixels wide.
    axes.imshow(weights, cmap=cmap, norm=scale, extent=extent, aspect="auto", interpolation="nearest", zorder=3)
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


def layer_figure(
    analysis: Analysis, attention: AttentionMap, largest: bool = False, look: Look = PLAIN, heard: Heard | None = None
) -> Figure:
    """All heads of a layer, as `grid_figure` draws them."""
    records = [analysis.head(attention.layer, head, attention.stack) for head in attention.heads]
    titles = [f"H{record.head} {shorten(drawable(record.pattern), 16)}" for record in records]
    title = f"{drawable(attention.stack)} layer {attention.layer}"
    return grid_figure(analysis, attention, titles, title, largest, look, heard)


def grid_figure(
    analysis: Analysis,
    attention: AttentionMap,
    titles: Sequence[str],
    title: str,
    largest: bool = False,
    look: Look = PLAIN,
    heard: Heard | None = None,
    columns: int | None = None,
) -> Figure:
    """Several matrices, each on a scale of roots from 0 to the largest that is drawn, which its title gives.

    Args:
        titles: What stands over each matrix of `attention`.
        largest: Draw each tile's largest weight instead of the mean, where the map is pooled.
        heard: The sound that the keys are frames of; its spectrogram then stands over each column.
        columns: How many stand side by side; as many as make a good shape unless given.
    """
    count = len(titles)
    columns = columns or grid_columns(count)
    rows = -(-count // columns)
    drawn = Drawn.of(attention, largest, _PANEL_CELLS, look)
    width, height = panel_size(drawn.tokens, drawn.inches(1.7 if columns <= 5 else 1.35))
    across, down = max(width, 1.2) + 0.12, height + 0.4
    above = 0.0 if heard is None else 0.4
    # The first row's titles stand over the upper edge, so the figure starts a little above it.
    figure = Figure(figsize=(columns * across - 0.12, above + rows * down - 0.1))
    for index, name in enumerate(titles):
        row, column = divmod(index, columns)
        axes = place(figure, column * across, above + row * down + 0.3, width, height)
        _draw(axes, drawn, index)
        top = "largest mean" if drawn.kind == "mean" else "max"
        axes.set_title(f"{name}\n{top} {drawn.largest(index):.2g}", fontsize=6.5, pad=2, y=1.0, parse_math=False)
        _panel_axes(axes, attention, drawn, (width, height), left=column == 0, below=index + columns >= count)
        if heard is not None:
            time_axis(axes, heard, (width, height), left=column == 0, below=index + columns >= count, small=True)
        if heard is not None and row == 0:
            draw_spectrogram(place(figure, column * across, 0, width, 0.34), heard)
    _grid_bar(figure, drawn, (columns * across + 0.05, above + 0.3, max(min(rows * down - 0.4, 3.0), 1.2)))
    add_title(figure, analysis, f"{title}{drawn.title}" if look.title is None else drawable(look.title))
    return figure


def _grid_bar(figure: Figure, drawn: Drawn, bar_place: tuple[float, float, float]) -> None:
    """One bar for all: of shares of each matrix's largest value, unless the user gave one value to all."""
    top = "mean" if drawn.kind == "mean" else "weight"
    if drawn.look.vmax is None:
        drawn.bar(figure, 1.0, f"share of each head's\nlargest {top}", bar_place)
    else:
        drawn.bar(figure, drawn.look.vmax, "attention weight", bar_place)


def grid_columns(count: int) -> int:
    """Columns of a grid of `count` panels: at least as many as rows, without gaps where a divisor allows that."""
    root = math.isqrt(count - 1) + 1
    return next((c for c in range(root, min(2 * root, count) + 1) if count % c == 0), root)


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
