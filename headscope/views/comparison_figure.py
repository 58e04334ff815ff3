"""Two models compared in one figure: how far each head is from its namesake, and which head is most like which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from headscope.comparison.result import Between, Comparison, HeadChange, Match
from headscope.errors import InputError
from headscope.views.figure_base import COLOR_MAP, GREY, place, place_bar
from headscope.views.figure_text import drawable, tick_step
from headscope.views.heatmaps import DPI, picture
from headscope.views.labels import LabelStyle, label_styles
from headscope.views.sections import plural

# A cell of the map, the side of the matching's panel and what lies around them, in inches.
_CELL, _SIDE, _GAP, _BELOW, _TOP = 0.27, 4.2, 1.3, 0.75, 0.3
# A map of many heads has smaller cells.
_WIDEST = 8.0
_BAR = 2.4
_LONGEST_NAME = 70
# A letter of the notes, in inches.
_LETTER = 0.062


def comparison_picture(result: Comparison, *, file_format: str = "png", dpi: int = DPI) -> bytes:
    """The figure as `png`, `svg` or `pdf`. Raises InputError: there are no heads."""
    return picture(lambda: comparison_figure(result), file_format, dpi)


def comparison_figure(result: Comparison) -> Figure:
    """Left a map, layers down and heads across, right the distances of all heads to all and the best matching.

    On the map colours are distances to the head of the same number, letters are a label that changed, from and to;
    − and + are heads that only A or only B has. On the right each ring is a pair of the matching.

    Raises:
        InputError: There are no heads to draw.
    """
    if not result.heads:
        raise InputError("there are no heads to draw", "choose at least one layer and head")
    stacks: dict[str, list[HeadChange]] = {}
    for change in result.heads:
        stacks.setdefault(change.stack, []).append(change)
    found = {each.stack: each for each in result.between}
    across = 1 + max(h.head for h in result.heads)
    cell = min(_CELL, _WIDEST / across)
    maps = {stack: cell * len({h.layer for h in heads}) for stack, heads in stacks.items()}
    heights = [max(maps[stack], _SIDE if stack in found else 0.0) for stack in stacks]
    left = cell * across + _GAP
    whole = left + _SIDE if found else cell * across
    figure = Figure(figsize=(whole, _TOP + sum(heights) + _BELOW * (len(heights) - 1)))
    styles = label_styles(p for h in result.heads if h.changed for p in (h.pattern_a, h.pattern_b) if p is not None)
    top, scale = _TOP, Normalize(0, _largest(result))
    for (stack, heads), height in zip(stacks.items(), heights, strict=True):
        _map(place(figure, 0, top, cell * across, maps[stack]), heads, styles, scale, across)
        if stack in found:
            panel = place(figure, left, top, _SIDE, _SIDE)
            _matching(panel, found[stack], [m for m in result.matching if m.stack == stack])
        top += height + _BELOW
    if found:
        place_bar(figure, scale, cell * across + 0.12, _TOP, min(_BAR, next(iter(maps.values()))), "distance")
        place_bar(figure, Normalize(0, 1), whole + 0.12, _TOP, _BAR, "distance: 0 the same, 1 no key in common")
    _titles(figure, result)
    last = _TOP + sum(heights[:-1]) + _BELOW * (len(heights) - 1) + [*maps.values()][-1]
    _signs(figure, result, styles, last + 0.45, max(left, 3.0))
    return figure


def _largest(result: Comparison) -> float:
    """The end of the map's scale: distances of namesakes are small beside those of unlike heads."""
    known = max((h.distance for h in result.heads if h.distance is not None), default=0.0)
    return next((step for step in (0.05, 0.1, 0.2, 0.5) if known <= step), 1.0)


# ------------------------------------------------------------------ the map
def _map(
    axes: Axes, heads: Sequence[HeadChange], styles: Mapping[str, LabelStyle], scale: Normalize, across: int
) -> None:
    layers = sorted({h.layer for h in heads})
    rows = {layer: i for i, layer in enumerate(layers)}
    grid = np.full((len(layers), across), np.nan)
    for h in heads:
        grid[rows[h.layer], h.head] = np.nan if h.distance is None else h.distance
    axes.imshow(grid, cmap=COLOR_MAP, norm=scale, interpolation="nearest", aspect="auto")
    for h in heads:
        share = float(scale(grid[rows[h.layer], h.head]))
        ink = "#000000" if np.isnan(share) or share > 0.5 else "#FFFFFF"
        at = (h.head, rows[h.layer])
        size = 6.5 * min(1.0, _WIDEST / across / _CELL)
        text = axes.text(*at, _letters(h, styles), color=ink, fontsize=size, ha="center", va="center_baseline")
        text.set_in_layout(False)  # It lies inside the panel.
    axes.set_xticks(range(0, across, tick_step(across, 32)))
    ticks = range(0, len(layers), tick_step(len(layers), 48))
    axes.set_yticks(ticks, [str(layers[i]) for i in ticks])
    axes.tick_params(labelsize=6, length=0, pad=2)
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(across + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(layers) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("head", fontsize=7, loc="left")
    axes.set_ylabel("layer", fontsize=7)
    axes.set_title(f"{drawable(heads[0].stack)}: each head in A and in B", fontsize=8, y=1.0, parse_math=False)


def _letters(head: HeadChange, styles: Mapping[str, LabelStyle]) -> str:
    if not head.in_both:
        return "−" if head.pattern_b is None else "+"
    if not head.changed:
        return "?" if head.distance is None else ""
    return "›".join(styles[label].letter for label in (head.pattern_a, head.pattern_b) if label is not None)


# ------------------------------------------------------------------ the matching
def _matching(axes: Axes, found: Between, matches: Sequence[Match]) -> None:
    axes.imshow(found.distance, cmap=COLOR_MAP, vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    rows, columns = ({spot: i for i, spot in enumerate(heads)} for heads in (found.heads_a, found.heads_b))
    size = float(np.clip(_SIDE * 72 / max(len(rows), len(columns)), 1.5, 9))
    for moved, color in ((False, "#FFFFFF"), (True, "#FF5A36")):
        chosen = [m for m in matches if (m.a != m.b) == moved]
        axes.plot(
            [columns[m.b] for m in chosen],
            [rows[m.a] for m in chosen],
            linestyle="",
            marker="o",
            markersize=size,
            markerfacecolor="none",
            markeredgecolor=color,
            markeredgewidth=float(np.clip(size / 5, 0.4, 1.2)),
        )
    for axis, heads, line in ((axes.xaxis, found.heads_b, axes.axvline), (axes.yaxis, found.heads_a, axes.axhline)):
        starts = _starts(heads)
        for start in list(starts.values())[1:]:
            line(start - 0.5, color="white", linewidth=0.5)
        ends = [*list(starts.values())[1:], len(heads)]
        middles = [(first + end - 1) / 2 for first, end in zip(starts.values(), ends, strict=True)]
        step = tick_step(len(starts), 24)
        axis.set_ticks(middles[::step], [f"L{layer}" for layer in list(starts)[::step]])
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(labelsize=6, length=0, pad=2)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("heads of B", fontsize=7, loc="left")
    axes.set_ylabel("heads of A", fontsize=7)
    axes.set_title(f"{drawable(found.stack)}: best matching", fontsize=8, y=1.0, parse_math=False)


def _starts(heads: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Where each layer's heads begin."""
    starts: dict[int, int] = {}
    for i, (layer, _) in enumerate(heads):
        starts.setdefault(layer, i)
    return starts


# ------------------------------------------------------------------ around them
def _titles(figure: Figure, result: Comparison) -> None:
    height = figure.get_figheight()
    both = sum(h.in_both for h in result.heads)
    changed = sum(h.changed for h in result.heads)
    title = f"{changed:,} of {plural(both, 'head')} changed label, on {plural(result.texts, 'text')}"
    figure.text(0, 1 + 0.06 / height, title, fontsize=10, va="bottom", parse_math=False)
    for i, (side, model) in enumerate((("B", result.b), ("A", result.a))):
        at = 1 + (0.28 + 0.16 * i) / height
        figure.text(0, at, f"{side}: {_short(model.name)}", fontsize=7.5, color=GREY, va="bottom", parse_math=False)


def _short(name: str) -> str:
    """The end of a long path."""
    shown = drawable(name)
    return shown if len(shown) <= _LONGEST_NAME else "…" + shown[1 - _LONGEST_NAME :]


def _signs(figure: Figure, result: Comparison, styles: Mapping[str, LabelStyle], top: float, width: float) -> None:
    """What letters, signs and rings say, under the last map: `top` inches from above, `width` inches wide."""
    notes = []
    if styles:
        first, second = ([*styles.values()] * 2)[:2]
        letters = ", ".join(f"{style.letter} {drawable(label)}" for label, style in styles.items())
        notes.append(f"{first.letter}›{second.letter}: label in A › in B ({letters})")
    for sign, there in (("−", "A"), ("+", "B")):
        if any(_letters(h, styles) == sign for h in result.heads):
            notes.append(f"{sign}: only {there} has this head")
    if any(h.in_both and h.distance is None for h in result.heads):
        notes.append("?: rows do not compare")
    if result.matching:
        notes.append("rings: pairs of the best matching, white of the same number, orange of another")
    lines = [line for note in notes for line in wrap(note, int(width / _LETTER), subsequent_indent="    ")]
    at = 1 - top / figure.get_figheight()
    figure.text(0, at, "\n".join(lines), fontsize=7, va="top", linespacing=1.5, parse_math=False)
