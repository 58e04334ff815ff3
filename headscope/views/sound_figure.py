"""The spectrogram over a matrix whose keys are frames of a sound, and axes in seconds."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from headscope.heads.medium import Heard

_TICK_INCHES = 0.55


def draw_spectrogram(axes: Axes, heard: Heard) -> None:
    """The sound over the same width as the matrix below it, low bands at the bottom; axes count tokens."""
    values = heard.spectrogram
    # Padding and silence are far below all else, and would take most of the colours.
    low = max(float(np.percentile(values, 2)), float(values.max()) - 8.0)
    axes.imshow(
        values,
        cmap="gray_r",
        vmin=low,
        extent=(-0.5, heard.keys - 0.5, -0.5, len(values) - 0.5),
        origin="lower",
        aspect="auto",
        interpolation="antialiased",
    )
    axes.set_xticks([])
    axes.set_yticks([])


def time_axis(
    axes: Axes,
    heard: Heard,
    inches: tuple[float, float],
    *,
    left: bool = True,
    below: bool = True,
    small: bool = False,
) -> None:
    """Seconds, or numbers of frames, across, and down too where queries are frames; at the outer edges only."""
    unit = "s" if heard.seconds is not None else "frame"
    each = 1.0 if heard.seconds is None else heard.keys / heard.seconds
    whole = heard.keys / each
    room = _TICK_INCHES * (0.6 if small else 1)
    if below:
        ticks = _ticks(whole, int(inches[0] / room))
        axes.set_xticks(ticks * each - 0.5, [f"{tick:g}" for tick in ticks], rotation=0)
    if heard.queries and left:
        ticks = _ticks(whole, int(inches[1] / room))
        axes.set_yticks(ticks * each - 0.5, [f"{tick:g}" for tick in ticks])
    if not small:
        axes.set_xlabel(f"key ({unit})", fontsize=8)
        axes.tick_params(labelsize=7.5)
        if heard.queries:
            axes.set_ylabel(f"query ({unit})", fontsize=8)


def _ticks(whole: float, room: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    found = np.asarray(MaxNLocator(max(1, room), steps=[1, 2, 5, 10]).tick_values(0, whole))
    return found[(found >= 0) & (found <= whole * (1 + 1e-9))]
