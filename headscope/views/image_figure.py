"""Attention over an image: the weights that patches get on the patches, those of other tokens apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from headscope.heads.medium import Seen
from headscope.results import Analysis
from headscope.views.attention_figures import grid_columns
from headscope.views.figure_base import Look, add_title, place, place_bar, weight_scale
from headscope.views.figure_text import drawable

_LARGE, _SMALL = 3.6, 1.5
_OPAQUE = 0.68
_STRIP = {True: 0.24, False: 0.1}


def patch_grid(seen: Seen, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """The weights of the patches as they lie on the image, (rows, columns), from those of all tokens, (token,)."""
    first = len(seen.before)
    return weights[first : first + seen.grid[0] * seen.grid[1]].reshape(seen.grid)


def image_figure(
    analysis: Analysis,
    seen: Seen,
    weights: NDArray[np.float32],
    titles: Sequence[str],
    title: str,
    look: Look,
    query: int | None = None,
) -> Figure:
    """The image as the model saw it, and over it the weights of one row of each matrix.

    Colours go from 0 to the largest weight of a patch. Class tokens, registers and their like often get far more; they
    are squares below the image.

    Args:
        weights: float32, (matrix, token): what each token of the image gets.
        titles: What stands over each; one alone is drawn large.
        query: The token that looks, to be outlined where it is a patch.
    """
    single = len(titles) == 1
    count = 1 + len(titles)
    columns = 2 if single else grid_columns(count)
    width, height = _sizes(seen, _LARGE if single else _SMALL)
    strip = _STRIP[single] + 0.04 if seen.before or seen.after else 0.0
    head = 0.28 if single else 0.4
    across, down = max(width, 1.2) + (0.2 if single else 0.12), head + height + strip + 0.06
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * across - 0.12, rows * down - 0.06))
    tops = [_top(seen, row, look) for row in weights]
    for index in range(count):
        row, column = divmod(index, columns)
        left, top = column * across, row * down + head
        axes = place(figure, left, top, width, height)
        if index == 0:
            _draw_image(axes, seen, 1.0)
            _title(axes, "as the model sees it", single)
            _outline(axes, seen, query)
            continue
        one, scale = weights[index - 1], weight_scale(tops[index - 1])
        _draw_patches(axes, seen, patch_grid(seen, one), scale, look.cmap)
        _outline(axes, seen, query)
        _title(axes, _numbers(seen, one, titles[index - 1], single), single)
        if strip:
            # A single class token needs no bar as wide as the image.
            side = min(width / (len(seen.before) + len(seen.after)), 2.5 * _STRIP[single])
            beside = place(
                figure, left, top + height + 0.04, side * (len(seen.before) + len(seen.after)), _STRIP[single]
            )
            _draw_others(beside, seen, one, scale, look, single)
    if strip and not single:
        _note(figure, seen)
    _bar(figure, tops, look, columns * across + 0.03, head, min(max(rows * down - 0.5, 1.2), 3.0))
    add_title(figure, analysis, title if look.title is None else drawable(look.title))
    return figure


def _sizes(seen: Seen, longest: float) -> tuple[float, float]:
    height, width = seen.pixels.shape[:2]
    unit = longest / max(height, width)
    return max(width * unit, 0.4), max(height * unit, 0.2)


def _top(seen: Seen, weights: NDArray[np.float32], look: Look) -> float:
    return float(patch_grid(seen, weights).max()) if look.vmax is None else look.vmax


def _title(axes: Axes, text: str, single: bool) -> None:
    axes.set_title(text, fontsize=8 if single else 6.5, pad=2, y=1.0, parse_math=False)


def _extent(seen: Seen) -> tuple[float, float, float, float]:
    """Axes count patches, rows downwards."""
    return (-0.5, seen.grid[1] - 0.5, seen.grid[0] - 0.5, -0.5)


def _draw_image(axes: Axes, seen: Seen, share: float) -> None:
    """The image, or a pale one in grey where something lies over it."""
    grey = np.repeat(seen.pixels.mean(axis=2, keepdims=True), 3, axis=2)
    shown = seen.pixels if share == 1 else grey.round().astype(np.uint8)
    axes.imshow(shown, extent=_extent(seen), aspect="auto", interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_patches(axes: Axes, seen: Seen, grid: NDArray[np.float32], scale: Normalize, cmap: str) -> None:
    _draw_image(axes, seen, _OPAQUE)
    axes.imshow(
        grid, cmap=cmap, norm=scale, extent=_extent(seen), aspect="auto", interpolation="nearest", alpha=_OPAQUE
    )


def _outline(axes: Axes, seen: Seen, query: int | None) -> None:
    patch = None if query is None or not seen.queries else query - len(seen.before)
    if patch is not None and 0 <= patch < seen.grid[0] * seen.grid[1]:
        row, column = divmod(patch, seen.grid[1])
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="#d62728", linewidth=1.5))


def _numbers(seen: Seen, weights: NDArray[np.float32], title: str, single: bool) -> str:
    """What stands over one; the name of a single one stands over the figure."""
    grid = patch_grid(seen, weights)
    if single:
        return f"patches together {grid.sum():.2f}, largest {grid.max():.2g}"
    return f"{title}\nmax {grid.max():.2g}, patches {grid.sum():.2f}"


def _note(figure: Figure, seen: Seen) -> None:
    """Below a grid: what the small squares are."""
    names = (*seen.before, *seen.after)
    text = ", ".join(names if len(names) <= 9 else (*names[:8], "…", names[-1]))
    figure.text(
        0, -0.06 / figure.get_figheight(), f"below each image: {text}", fontsize=6.5, va="top", parse_math=False
    )


def _draw_others(
    axes: Axes, seen: Seen, weights: NDArray[np.float32], scale: Normalize, look: Look, single: bool
) -> None:
    """A square a token that is no patch, with its name and weight where there is room."""
    names = (*seen.before, *seen.after)
    first = len(seen.before)
    values = np.concatenate([weights[:first], weights[len(weights) - len(seen.after) :]])
    axes.imshow(values[None], cmap=look.cmap, norm=scale, aspect="auto", interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axes.grid(which="minor", axis="x", color="white", linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    if single and len(names) <= 8:
        short = [name.replace("register", "reg.") for name in names]
        labels = [f"{name}\n{value:.2g}" for name, value in zip(short, values, strict=True)]
        axes.set_xticks(range(len(names)), labels, fontsize=6.5, parse_math=False)
        axes.tick_params(axis="x", length=0, pad=1)


def _bar(figure: Figure, tops: Sequence[float], look: Look, left: float, top: float, height: float) -> None:
    shared = len(tops) == 1 or look.vmax is not None
    label = "attention weight" if shared else "share of each one's\nlargest weight of a patch"
    scale = weight_scale(tops[0] if shared else 1.0)
    place_bar(figure, scale, left, top, height, f"{label},\nsquare-root scale", look.cmap)
