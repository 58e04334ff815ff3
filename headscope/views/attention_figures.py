"""Attention matrices as figures: one head with its tokens, and all heads of a layer."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.results import Analysis, AttentionMap, HeadRecord
from headscope.views.figure_base import COLOR_MAP, add_title, place, place_bar, weight_scale
from headscope.views.figure_text import drawable, tick_labels, tick_step
from headscope.views.text import shorten

_HEAD_INCHES = 6.0
_HEAD_CELLS = 450
_PANEL_CELLS = 128
_LABEL_INCHES = 0.13
_PANEL_LABEL_INCHES = 0.08


def head_figure(analysis: Analysis, attention: AttentionMap, head: int) -> Figure:
    """One head's weights, queries down and keys across, on a square-root scale from 0 to its largest weight.

    Raises:
        ValueError: `attention` holds no such head.
    """
    weights = attention.weights[attention.heads.index(head)]
    record = analysis.head(attention.layer, head, attention.stack)
    width, height = panel_size(weights.shape, min(max(0.3 * max(weights.shape), 1.2), _HEAD_INCHES))
    figure = Figure(figsize=(width, height))
    axes = place(figure, 0, 0, width, height)
    block = _draw(axes, weights, _HEAD_CELLS)
    _token_axes(axes, attention, int(height / _LABEL_INCHES), int(width / _LABEL_INCHES))
    axes.set_ylabel("query", fontsize=8)
    axes.set_xlabel("key", fontsize=8)
    label = "attention weight,\nsquare-root scale" + _block_note(block)
    bar_height = min(max(height, 1.2), 3.0)
    place_bar(figure, weight_scale(_largest(weights)), width + 0.15, 0, bar_height, label)
    add_title(figure, analysis, f"{drawable(attention.stack)} {record.name}: {_label(record)}")
    return figure


def panel_size(shape: tuple[int, ...], longest: float) -> tuple[float, float]:
    """Width and height in inches of a matrix with square cells; the short side is a quarter of the long or more."""
    rows, columns = shape
    unit = longest / max(rows, columns)
    shortest = max(longest / 4, 0.3)
    return max(columns * unit, shortest), max(rows * unit, shortest)


def _label(record: HeadRecord) -> str:
    rest = f" (rest: {record.rest_pattern})" if record.rest_pattern is not None else ""
    return drawable(record.pattern + rest)


def _block_note(block: int) -> str:
    return f",\nlargest of {block} × {block} cells" if block > 1 else ""


def _largest(weights: NDArray[np.float32]) -> float:
    return float(np.fmax.reduce(weights, axis=None, initial=0.0))


def _draw(axes: Axes, weights: NDArray[np.float32], cells: int) -> int:
    """Draw the matrix, filling the panel. Returns the side of the blocks that were put together."""
    pooled, block = block_max(weights, cells)
    # Blocks at the far edges may reach past the last token; the limits below cut them there.
    extent = (-0.5, pooled.shape[1] * block - 0.5, pooled.shape[0] * block - 0.5, -0.5)
    scale = weight_scale(_largest(weights))
    axes.imshow(pooled, cmap=COLOR_MAP, norm=scale, extent=extent, aspect="auto", interpolation="nearest")
    axes.set_xlim(-0.5, weights.shape[1] - 0.5)
    axes.set_ylim(weights.shape[0] - 0.5, -0.5)
    return block


def block_max(weights: NDArray[np.float32], cells: int) -> tuple[NDArray[np.float32], int]:
    """`weights` (query, key) reduced to at most `cells` a side, and the side of the blocks.

    Each block keeps its largest weight: a mean would wash out the diagonals, which are one cell wide.
    """
    block = -(-max(weights.shape) // cells)
    if block == 1:
        return weights, 1
    rows, columns = (-(-n // block) for n in weights.shape)
    padded = np.full((rows * block, columns * block), np.nan, dtype=weights.dtype)
    padded[: weights.shape[0], : weights.shape[1]] = weights
    pooled = padded.reshape(rows, block, columns, block)
    return np.fmax.reduce(np.fmax.reduce(pooled, axis=3), axis=1), block


def _token_axes(axes: Axes, attention: AttentionMap, rows: int, columns: int) -> None:
    positions, labels = tick_labels(attention.queries, rows)
    axes.set_yticks(positions, labels, fontsize=7.5, parse_math=False)
    positions, labels = tick_labels(attention.keys, columns)
    axes.set_xticks(positions, labels, fontsize=7.5, rotation=90, parse_math=False)


def layer_figure(analysis: Analysis, attention: AttentionMap) -> Figure:
    """All heads of a layer, each on a square-root scale from 0 to its own largest weight, which its title gives."""
    count = len(attention.heads)
    columns = grid_columns(count)
    rows = -(-count // columns)
    width, height = panel_size(attention.weights.shape[1:], 1.7 if columns <= 5 else 1.35)
    across, down = max(width, 1.2) + 0.12, height + 0.4
    # The first row's titles stand over the upper edge, so the figure starts a little above it.
    figure = Figure(figsize=(columns * across - 0.12, rows * down - 0.1))
    block = 1
    for index in range(count):
        row, column = divmod(index, columns)
        axes = place(figure, column * across, row * down + 0.3, width, height)
        block = _draw(axes, attention.weights[index], _PANEL_CELLS)
        _panel_title(axes, analysis, attention, index)
        _panel_axes(axes, attention, (width, height), left=column == 0, below=index + columns >= count)
    label = "share of each head's\nlargest weight,\nsquare-root scale" + _block_note(block)
    place_bar(figure, weight_scale(1.0), columns * across + 0.05, 0.3, max(min(rows * down - 0.4, 3.0), 1.2), label)
    add_title(figure, analysis, f"{drawable(attention.stack)} layer {attention.layer}")
    return figure


def grid_columns(count: int) -> int:
    """Columns of a grid of `count` panels: at least as many as rows, without gaps where a divisor allows that."""
    root = math.isqrt(count - 1) + 1
    return next((c for c in range(root, min(2 * root, count) + 1) if count % c == 0), root)


def _panel_title(axes: Axes, analysis: Analysis, attention: AttentionMap, index: int) -> None:
    record = analysis.head(attention.layer, attention.heads[index], attention.stack)
    title = f"H{record.head} {shorten(drawable(record.pattern), 16)}\nmax {_largest(attention.weights[index]):.2g}"
    axes.set_title(title, fontsize=6.5, pad=2, y=1.0, parse_math=False)


def _panel_axes(axes: Axes, attention: AttentionMap, inches: tuple[float, float], *, left: bool, below: bool) -> None:
    """Tokens where all of them fit, else positions; at the grid's outer edges only."""
    axes.tick_params(labelsize=5, length=1.5, pad=1)
    for tokens, side, outer, set_ticks, rotation in (
        (attention.queries, inches[1], left, axes.set_yticks, 0),
        (attention.keys, inches[0], below, axes.set_xticks, 90),
    ):
        room = int(side / _PANEL_LABEL_INCHES)
        if not outer:
            set_ticks([])
        elif len(tokens) <= room:
            positions, labels = tick_labels(tokens, room)
            set_ticks(positions, labels, rotation=rotation, parse_math=False)
        else:
            set_ticks(range(0, len(tokens), tick_step(len(tokens), 6)))
