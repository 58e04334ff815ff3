"""`heatmap`: one picture of an analysis, of any kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import TYPE_CHECKING

from headscope.errors import InputError, check_type
from headscope.heads.medium import Heard, Medium, Seen
from headscope.results import MOST_CELLS, Analysis, AttentionMap
from headscope.views.heatmaps import DPI, picture
from headscope.views.panels import Panels, panels_of
from headscope.views.pooling import pooled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headscope.views.figure_base import Look

KINDS = ("heads", "mean", "rollout", "map", "similarity")
FILE_FORMATS = ("png", "svg", "pdf")


def heatmap(
    analysis: Analysis,
    kind: str | None = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    stack: str | None = None,
    metric: str | None = None,
    query: int | None = None,
    matrix: bool = False,
    file_format: str = "png",
    dpi: int = DPI,
    cmap: str = "cividis",
    vmax: float | None = None,
    title: str | None = None,
) -> bytes:
    """One picture of an analysis.

    Attention over an image is drawn on it, over a sound below its spectrogram, everything else as matrices. Long texts
    are pooled: cells are then means of square tiles.

    Args:
        analysis: What to draw; made with `maps=True` or `maps="pooled"` for heads and means, with `maps=True` or
            `maps="mean"` for rollout; the map of the model needs none.
        kind: `heads`, one large or several in a grid; `mean`, over the heads of each layer; `rollout`, over layers
            (Abnar and Zuidema 2020); `map`, every head's label beside a metric; `similarity`, how alike heads are,
            of an analysis with the type `redundant`. Heads, or the map where there are no matrices, unless given.
        layer, head, stack: Draw only this layer, head or stack of what the analysis has.
        metric: The metric of the map; the first one measured unless given.
        query: The token whose row is drawn over an image, counted from 0; the class token unless given, and where there
            is none the mean of all rows.
        matrix: Draw plain matrices of images and sounds as well.
        file_format: `png`, `svg` or `pdf`.
        dpi: Dots an inch.
        cmap: Name of a colour map of matplotlib.
        vmax: The value of the last colour, for all alike; each matrix's largest unless given.
        title: In place of ours.

    Returns:
        The file's bytes.

    Raises:
        InputError: An argument is wrong, or the analysis has not what the picture needs.
    """
    check_type("analysis", analysis, Analysis, "what headscope.analyze returns")
    for name, number in (("layer", layer), ("head", head), ("query", query)):
        check_type(name, number, Integral, "a whole number")
    for name, text in (("kind", kind), ("stack", stack), ("metric", metric)):
        check_type(name, text, str, "a name")
    kind = kind or ("heads" if analysis.maps else "map")
    check_arguments(kind, file_format, dpi, cmap, vmax)
    whole = kind in ("map", "similarity")
    maps = () if whole else _chosen(analysis, layer, head, stack)
    medium = None if matrix or whole else _medium(analysis, maps)
    if query is not None and not isinstance(medium, Seen):
        raise InputError("query is for attention over an image", "leave --query out")

    panels = None if whole else panels_of(analysis, kind, maps)
    row = None if panels is None or not isinstance(medium, Seen) else _row(medium, panels.attention, query)

    def build() -> Figure:
        from headscope.views.figure_base import Look

        look = Look(cmap, vmax, title)
        if kind == "similarity":
            from headscope.views.similarity_figure import similarity_figure

            return similarity_figure(analysis, look)
        if panels is None:
            from headscope.views.map_figure import map_figure

            return map_figure(analysis, metric, look)
        return _figure(analysis, panels, medium, row, look)

    return picture(build, file_format, dpi)


def _figure(analysis: Analysis, panels: Panels, medium: Seen | Heard | None, row: int | None, look: Look) -> Figure:
    from headscope.views.attention_figures import grid_figure, matrix_figure
    from headscope.views.image_figure import image_figure

    attention = panels.attention
    if isinstance(medium, Seen):
        weights = attention.weights.mean(axis=1) if row is None else attention.weights[:, row]
        looks = "mean of all rows" if row is None else f"seen from {_query_name(medium, attention, row)}"
        return image_figure(analysis, medium, weights, panels.titles, f"{panels.title}, {looks}", look, row)
    # Matrices of long texts are drawn with positions; a decoder's few rows over many keys keep their tokens.
    if attention.weights.shape[1] == attention.weights.shape[2]:
        attention = pooled(attention, MOST_CELLS)
    if len(panels.titles) == 1:
        return matrix_figure(analysis, attention, panels.title, look=look, heard=medium, what=panels.what)
    return grid_figure(
        analysis, attention, panels.titles, panels.title, look=look, heard=medium, columns=panels.columns
    )


def _row(seen: Seen, attention: AttentionMap, query: int | None) -> int | None:
    """The row to draw; None for the mean of all."""
    if attention.tile > 1:
        raise InputError("matrices over an image are needed as they are, not pooled", "analyze with maps=True")
    if query is None:
        return 0 if seen.queries and seen.before[:1] == ("class",) else None
    count = len(attention.queries)
    if not -count <= query < count:
        raise InputError(
            f"query {query} is none of the {count} tokens", f"0 to {count - 1}; negative ones from the end"
        )
    return query % count


def _query_name(seen: Seen, attention: AttentionMap, row: int) -> str:
    from headscope.views.figure_text import figure_label

    name = seen.name(row) if seen.queries else figure_label(attention.queries[row])
    return f"token {row} ({name})"


def check_arguments(kind: str, file_format: str, dpi: int, cmap: str, vmax: float | None) -> None:
    """Raises InputError for values that no picture can be drawn with."""
    import matplotlib

    for name, text in (("kind", kind), ("file_format", file_format), ("cmap", cmap)):
        if not isinstance(text, str):
            raise InputError(f"{name} is a {type(text).__name__}, not a name", "give a text")
    for name, number in (("dpi", dpi), ("vmax", vmax)):
        if number is not None and not isinstance(number, Real):
            raise InputError(f"{name} is a {type(number).__name__}, not a number", "give a number")
    if kind not in KINDS:
        raise InputError(f"unknown kind of picture {kind!r}", f"kinds: {', '.join(KINDS)}")
    if file_format not in FILE_FORMATS:
        raise InputError(f"unknown file format {file_format!r}", f"formats: {', '.join(FILE_FORMATS)}")
    if cmap not in matplotlib.colormaps:
        near = get_close_matches(cmap, list(matplotlib.colormaps), 3)
        raise InputError(f"unknown colour map {cmap!r}", f"like {', '.join(near or ('cividis', 'viridis', 'magma'))}")
    if vmax is not None and not (math.isfinite(vmax) and vmax > 0):
        raise InputError(f"vmax is {vmax}", "give a number above 0: the weight that gets the last colour")
    if not 10 <= dpi <= 2400:
        raise InputError(f"dpi is {dpi}", "give 10 to 2400 dots an inch")


def _chosen(analysis: Analysis, layer: int | None, head: int | None, stack: str | None) -> tuple[AttentionMap, ...]:
    """The matrices to draw."""
    if not analysis.maps:
        raise InputError("the analysis kept no attention", "analyze with maps='pooled', or draw the kind 'map'")
    found = [m for m in analysis.maps if stack in (None, m.stack) and layer in (None, m.layer)]
    if head is not None:
        found = [_only(m, head) for m in found if head in m.heads]
    if not found:
        layers = ", ".join(dict.fromkeys(f"{m.stack} {m.layer}" for m in analysis.maps))
        raise InputError(f"no attention of stack {stack}, layer {layer}, head {head}", f"layers kept: {layers}")
    return tuple(found)


def _only(attention: AttentionMap, head: int) -> AttentionMap:
    index = attention.heads.index(head)
    peak = None if attention.peak is None else attention.peak[index : index + 1]
    return replace(attention, heads=(head,), weights=attention.weights[index : index + 1], peak=peak)


def _medium(analysis: Analysis, maps: Sequence[AttentionMap]) -> Seen | Heard | None:
    """What all of them lie on, if it is the same for all."""
    found: list[Medium | None] = [analysis.media.get(name) for name in dict.fromkeys(m.stack for m in maps)]
    if len(found) > 1 or found[0] is None:
        return None
    if isinstance(found[0], str):
        raise InputError(f"{maps[0].stack}: {found[0]}", "--matrix (matrix=True) draws plain matrices")
    return found[0]
