"""What all figures share: style, colours, and panels placed in inches.

Figures have no layout engine: panels are placed by arithmetic, and saving with a tight box takes in every label around
them. That draws each figure once instead of three times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure

from headscope.results import Analysis
from headscope.views.figure_text import drawable, font_families

# Even in lightness and safe for colour-blind readers (Nuñez, Anderton and Renslow 2018), so it prints in grey.
COLOR_MAP = "cividis"
GREY = "#555555"


@dataclass(frozen=True)
class Look:
    """What a user may choose of a picture.

    Attributes:
        cmap: Name of a colour map of matplotlib.
        vmax: The value of the last colour; None takes the largest that is drawn.
        title: Stands over the picture in place of ours.
    """

    cmap: str = COLOR_MAP
    vmax: float | None = None
    title: str | None = None


PLAIN = Look()


@contextmanager
def figure_style() -> Iterator[None]:
    """matplotlib's defaults with our fonts, whatever the user's settings say; these come back afterwards."""
    with matplotlib.style.context("default", after_reset=True):
        # A fixed salt gives the parts of an SVG the same names each time.
        matplotlib.rcParams.update(
            {"font.family": list(font_families()), "axes.titlelocation": "left", "svg.hashsalt": "headscope"}
        )
        yield


def weight_scale(largest: float, root: int = 2) -> Normalize:
    """Colours of weights from 0 to `largest` by their square root, or another one.

    On a linear scale one sink near 1 leaves everything else in the dark.
    """
    return PowerNorm(1 / root, vmin=0.0, vmax=largest if largest > 0 else 1.0)


def place(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """A panel of `width` × `height` inches, `left` and `top` inches from the figure's upper left corner."""
    whole_width, whole_height = figure.get_size_inches()
    bottom = whole_height - top - height
    return figure.add_axes((left / whole_width, bottom / whole_height, width / whole_width, height / whole_height))


def decades(largest: float) -> list[float]:
    """Ticks for a scale of high roots: 0, some powers of ten, and `largest` itself."""
    top = largest if largest > 0 else 1.0
    first = math.floor(math.log10(top / 2))
    return [0.0, *(10.0**power for power in range(first - 2, first + 1)), top]


def place_bar(
    figure: Figure, scale: Normalize, left: float, top: float, height: float, label: str, cmap: str = COLOR_MAP
) -> Colorbar:
    """A colour bar, `height` inches high, with its label."""
    bar = figure.colorbar(ScalarMappable(scale, cmap), cax=place(figure, left, top, 0.14, height))
    bar.set_label(label, fontsize=7.5, parse_math=False)
    bar.ax.tick_params(labelsize=6.5)
    return bar


def add_title(figure: Figure, analysis: Analysis, title: str, inches: float = 0.06) -> None:
    """`title` over the figure's upper left corner, `inches` above it, and the model's name in grey over that."""
    height = figure.get_size_inches()[1]
    title_at, model_at = 1 + inches / height, 1 + (inches + 0.2) / height
    figure.text(0, title_at, title, fontsize=10, va="bottom", parse_math=False)
    figure.text(0, model_at, _model_line(analysis), fontsize=7.5, color=GREY, va="bottom", parse_math=False)


def _model_line(analysis: Analysis) -> str:
    """The model's name, short enough to stand over a figure: the end of a long path."""
    name = drawable(analysis.model.name)
    return name if len(name) <= 60 else "…" + name[-59:]
