"""How alike heads are in one figure: a map with a point a head, and all distances with like heads side by side."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from headscope.errors import InputError
from headscope.heads.catalogue.clustering import average_linkage
from headscope.heads.catalogue.result import Place
from headscope.heads.catalogue.similarity_result import Similarity
from headscope.results import Analysis
from headscope.views.figure_base import GREY, PLAIN, Look, add_title, place, place_bar
from headscope.views.figure_text import drawable
from headscope.views.labels import LabelStyle, label_styles
from headscope.views.sections import plural

# Sides of the two panels and what lies between them, in inches.
_SIDE, _GAP, _BELOW, _TOP = 5.4, 1.0, 0.4, 0.3
# Room of a letter of a head's name on the map, in inches.
_LETTER_WIDE, _NAME_HIGH = 0.053, 0.1
# Up to so many heads each row of the matrix has a name.
_NAMED_ROWS = 72
_NOT_KNOWN = LabelStyle("?", "#FFFFFF", "#000000")


def similarity_figure(analysis: Analysis, look: Look = PLAIN) -> Figure:
    """Left a map whose distances are as near to the heads' as a plane allows, right all distances between heads.

    Points have the colours of the heads' labels and names where there is room; lines join redundant pairs. The matrix
    has like heads side by side, and frames around clusters. Heads that do not compare stand in rows of their own.

    Args:
        analysis: With similarity in its catalogue.
        look: Its colour map is of distances, which go from 0 to 1 always.

    Raises:
        InputError: Similarity was not measured.
    """
    found = None if analysis.catalogue is None else analysis.catalogue.similarity
    if found is None:
        raise InputError("similarity was not measured, so there is nothing to draw", hint="add redundant to --types")
    groups = [group for group in found.groups() if len(group) > 1] or [np.arange(len(found.heads))]
    labels = {(r.stack, r.layer, r.head): r.pattern for r in analysis.heads}
    styles = label_styles(labels[head] for head in found.heads if head in labels)
    figure = Figure(figsize=(2 * _SIDE + _GAP, _TOP + len(groups) * (_SIDE + _BELOW) - _BELOW))
    for number, group in enumerate(groups):
        top = _TOP + number * (_SIDE + _BELOW)
        heads = [found.heads[i] for i in group]
        kinds = [styles.get(labels.get(head, ""), _NOT_KNOWN) for head in heads]
        stack = f"{drawable(heads[0][0])}: " if len(groups) > 1 else ""
        _map_panel(place(figure, 0, top, _SIDE, _SIDE), found, group, kinds, stack)
        _matrix_panel(place(figure, _SIDE + _GAP, top, _SIDE, _SIDE), found, group, kinds, stack, look)
    legend = "distance: 0 the same, 1 no key in common"
    place_bar(figure, Normalize(0, 1), 2 * _SIDE + _GAP + 0.12, _TOP, 2.4, legend, look.cmap)
    title = f"How alike {plural(len(found.heads), 'head')} are, on {plural(found.rows, 'row')}"
    add_title(figure, analysis, title if look.title is None else drawable(look.title))
    _legend(figure, found, styles)
    return figure


# ------------------------------------------------------------------ the map
@dataclass(frozen=True)
class _NamePlace:
    """Where a name stands, in inches from the map's lower left corner, and which of its sides that is."""

    x: float
    y: float
    side: Literal["left", "center", "right"]


def _map_panel(
    axes: Axes, found: Similarity, group: NDArray[np.int64], kinds: Sequence[LabelStyle], stack: str
) -> None:
    points = _inches(found.position[group])
    axes.set_xlim(0, _SIDE)
    axes.set_ylim(0, _SIDE)
    index = {found.heads[i]: n for n, i in enumerate(group)}
    pairs = [(index[a], index[b]) for a, b, _ in found.redundant if a in index and b in index]
    # Where nearly all heads are alike, thick lines would hide them.
    line = float(np.clip(200 / max(1, len(pairs)), 0.2, 1.4))
    axes.add_collection(LineCollection([points[list(pair)] for pair in pairs], colors="#000000", linewidths=line))
    paired = {i for pair in pairs for i in pair}
    area = float(np.clip(6000 / len(group), 14, 70))
    # Heads of pairs lie on top, and their rims show them where the line is too short to be seen.
    order = sorted(range(len(group)), key=lambda i: i in paired)
    axes.scatter(
        points[order, 0],
        points[order, 1],
        s=area,
        c=[kinds[i].fill for i in order],
        edgecolors=["#000000" if i in paired else GREY for i in order],
        linewidths=[max(line, 0.5) if i in paired else 0.5 for i in order],
        zorder=3,
    )
    names = [_name(found.heads[i]) for i in group]
    for i, at in _free_places(points, names, np.sqrt(area) / 72 / 2, paired).items():
        text = axes.text(at.x, at.y, names[i], fontsize=6, color="#222222", ha=at.side, va="center_baseline", zorder=4)
        text.set_in_layout(False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color("#BBBBBB")
    axes.set_title(f"{stack}map: near points attend alike", fontsize=8, y=1.0, parse_math=False)


def _inches(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Places on the panel, the same scale both ways."""
    middle = (points.max(axis=0) + points.min(axis=0)) / 2
    reach = max(float(np.ptp(points, axis=0).max()), 1e-3) * 0.55
    placed: NDArray[np.float64] = (points - middle + reach) / (2 * reach) * _SIDE
    return placed


def _free_places(
    points: NDArray[np.float64], names: Sequence[str], radius: float, first: Container[int]
) -> dict[int, _NamePlace]:
    """Where names have room, so that they cover neither points nor other names; those of `first` choose first."""
    alone = np.linalg.norm(points[:, None] - points[None], axis=-1)
    np.fill_diagonal(alone, np.inf)
    boxes = np.concatenate([points - radius, points + radius], axis=1)
    away, up = radius + 0.03, radius + 0.02 + _NAME_HIGH / 2
    places: dict[int, _NamePlace] = {}
    for i in sorted(range(len(points)), key=lambda i: (i not in first, -alone[i].min())):
        (x, y), wide = points[i], _LETTER_WIDE * len(names[i])
        for spot, left in (
            (_NamePlace(x + away, y, "left"), x + away),
            (_NamePlace(x - away, y, "right"), x - away - wide),
            (_NamePlace(x, y + up, "center"), x - wide / 2),
            (_NamePlace(x, y - up, "center"), x - wide / 2),
        ):
            box = np.array([left, spot.y - _NAME_HIGH / 2, left + wide, spot.y + _NAME_HIGH / 2])
            if box.min() >= 0 and box.max() <= _SIDE and not _covered(box, boxes):
                places[i] = spot
                boxes = np.concatenate([boxes, box[None]])
                break
    return places


def _covered(box: NDArray[np.float64], boxes: NDArray[np.float64]) -> bool:
    """Whether a box, (left, low, right, high), meets any of others."""
    meets = (boxes[:, :2] < box[2:]) & (boxes[:, 2:] > box[:2])
    return bool(meets.all(axis=1).any())


def _name(head: Place) -> str:
    return f"L{head[1]}H{head[2]}"


# ------------------------------------------------------------------ the matrix
def _matrix_panel(
    axes: Axes, found: Similarity, group: NDArray[np.int64], kinds: Sequence[LabelStyle], stack: str, look: Look
) -> None:
    within = found.distance[np.ix_(group, group)]
    order = average_linkage(within).order()
    axes.imshow(within[np.ix_(order, order)], cmap=look.cmap, vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    numbers = [found.clusters[group[i]] for i in order]
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1]]
    for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
        if stop - start > 1:
            corner, side = (start - 0.5, start - 0.5), stop - start
            axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor="white", linewidth=1.0))
    _strip(axes, [kinds[i] for i in order])
    names = [_name(found.heads[group[i]]) for i in order]
    rows = range(len(names)) if len(names) <= _NAMED_ROWS else ()
    axes.set_yticks(rows, names if rows else ())
    axes.set_xticks([])
    size = float(np.clip(_SIDE * 72 / len(names) * 0.85, 4.5, 7))
    axes.tick_params(labelsize=size, length=0, pad=11)
    axes.spines[:].set_visible(False)
    clusters = f"{plural(len(set(numbers)), 'cluster')} at {found.cut:g}"
    axes.set_title(f"{stack}distances, {clusters}", fontsize=8, y=1.0, parse_math=False)


def _strip(axes: Axes, kinds: Sequence[LabelStyle]) -> None:
    """A narrow column of the heads' label colours, left of the matrix."""
    colors = [kind.fill for kind in kinds]
    strip = axes.inset_axes((-0.024, 0, 0.018, 1))
    strip.imshow(
        np.arange(len(kinds))[:, None],
        cmap=ListedColormap(colors),
        vmin=-0.5,
        vmax=len(kinds) - 0.5,
        aspect="auto",
        interpolation="nearest",
    )
    strip.set_axis_off()


def _legend(figure: Figure, found: Similarity, styles: Mapping[str, LabelStyle]) -> None:
    handles = [
        Line2D(
            [],
            [],
            linestyle="",
            marker="o",
            markersize=6,
            markerfacecolor=style.fill,
            markeredgecolor=GREY,
            markeredgewidth=0.5,
            label=drawable(label),
        )
        for label, style in styles.items()
    ]
    pairs = plural(len(found.redundant), "redundant pair")
    handles.append(Line2D([], [], color="#000000", linewidth=1.4, label=f"{pairs}, nearer than {found.threshold:g}"))
    legend = figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, -0.08 / figure.get_figheight()),
        borderaxespad=0,
        ncols=len(handles),
        fontsize=7,
        frameon=False,
        alignment="left",
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
