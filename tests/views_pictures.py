"""Reading the views' pictures back: for their tests."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from headscope.results import Analysis, AttentionMap
from tests.views_samples import analysis, record


def pixels(png: bytes) -> NDArray[np.int64]:
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    return np.asarray(image.convert("RGB")).astype(np.int64)


def one_map(weights: NDArray[np.float64], tokens: tuple[str, ...] | None = None) -> tuple[Analysis, AttentionMap]:
    """A model of one layer whose heads have these weights (heads, query, key)."""
    heads = tuple(range(len(weights)))
    queries = tokens or tuple(f"q{i}" for i in range(weights.shape[1]))
    keys = tokens or tuple(f"k{i}" for i in range(weights.shape[2]))
    attention = AttentionMap("self", 0, heads, weights.astype(np.float32), queries, keys)
    return analysis([record(0, h) for h in heads], maps=(attention,)), attention


def panel_box(figure: Figure, axes_index: int, png: NDArray[np.int64], dpi: int) -> NDArray[np.int64]:
    """The pixels of one panel, found from the figure's own geometry: everything is placed in inches."""
    box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer()).padded(0.06)
    position = figure.axes[axes_index].get_position()
    width, height = figure.get_size_inches()
    left, right = (round((x * width - box.x0) * dpi) for x in (position.x0, position.x1))
    top, bottom = (round((box.y1 - y * height) * dpi) for y in (position.y1, position.y0))
    return png[top:bottom, left:right]
