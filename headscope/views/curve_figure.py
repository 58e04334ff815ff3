"""Added loss against the share of heads removed: a line a method, solid with repair, dashed without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from headscope.pruning.curve_result import Curve, Point
from headscope.views.choosing import counts_tokens, loss_unit
from headscope.views.curve import RANDOM, line_name, lines_of, unit_name
from headscope.views.figure_base import GREY, place
from headscope.views.figure_text import drawable
from headscope.views.sections import plural
from headscope.views.text import shorten

_WIDTH, _HEIGHT = 5.6, 3.6
_LONGEST_NAME = 60
# The scale is linear below this part of the largest loss, and below 1 % of perplexity at the latest.
_LINEAR_PART, _LINEAR_MOST = 1e-2, 1e-2
_SMALLEST = 1e-9
# Perplexity times a thousand: worse than guessing, and beyond it ticks crowd.
_MOST_RISE = 1e3
# exp of more is no float.
_LARGEST = 700.0


@dataclass(frozen=True)
class _Look:
    color: str
    marker: str


# Okabe and Ito (2008), "Color Universal Design": told apart by colour-blind readers; markers do without colour.
_LOOKS = {
    "gradient": _Look("#0072B2", "o"),
    "ablation": _Look("#E69F00", "s"),
    "surgeon": _Look("#009E73", "^"),
    "reconstruction": _Look("#D55E00", "v"),
    "confidence": _Look("#56B4E9", "P"),
    "magnitude": _Look("#CC79A7", "X"),
    RANDOM: _Look("#777777", "."),
}
_SPARE = (_Look("#000000", "D"), _Look("#8C6D00", "<"), _Look("#5B2A86", ">"))


def curve_figure(curve: Curve) -> Figure:
    """The picture of a curve. Random is a band from the lowest to the highest draw, all others have 95 % intervals."""
    figure = Figure(figsize=(_WIDTH, _HEIGHT))
    axes = place(figure, 0, 0, _WIDTH, _HEIGHT)
    lines = lines_of(curve)
    looks = _looks([method for method, _ in lines])
    drawn = sorted(lines.items(), key=lambda line: -_last(line[1]))
    for order, ((method, repaired), points) in enumerate(drawn):
        _draw(axes, points, looks[method], repaired, line_name(method, repaired), 10 + len(drawn) - order)
    _scales(axes, curve, [p for p in curve.points if math.isfinite(p.added)])
    if drawn:
        _legend(axes, 1.18 if counts_tokens(curve.loss) else 1.03)
    _title(figure, curve)
    return figure


def _looks(methods: Sequence[str]) -> dict[str, _Look]:
    others = [m for m in dict.fromkeys(methods) if m not in _LOOKS]
    return _LOOKS | {method: _SPARE[i % len(_SPARE)] for i, method in enumerate(others)}


def _last(points: Sequence[Point]) -> float:
    """The loss where most is removed: the legend has the lines in the order in which they end."""
    return points[-1].added if math.isfinite(points[-1].added) else math.inf


def _draw(axes: Axes, points: Sequence[Point], look: _Look, repaired: bool, name: str, order: int) -> None:
    shown = [p for p in points if math.isfinite(p.added)]
    # Where nothing is removed nothing is added; this needs no measurement.
    start = [] if any(p.share == 0 for p in shown) else [0.0]
    shares = [*start, *(100 * p.share for p in shown)]
    low = [*start, *(p.added if _missing(p.low) else p.low for p in shown)]
    high = [*start, *(p.added if _missing(p.high) else p.high for p in shown)]
    axes.plot(
        shares,
        [*start, *(p.added for p in shown)],
        color=look.color,
        linestyle="-" if repaired else (0, (4, 2)),
        linewidth=1.6 if repaired else 1.2,
        marker=look.marker,
        markersize=5.5,
        markerfacecolor=look.color if repaired else "white",
        markevery=range(len(start), len(shares)) if len(shares) > len(start) else None,
        label=drawable(name),
        zorder=order,
        clip_on=False,
    )
    if look is _LOOKS[RANDOM]:
        axes.fill_between(shares, low, high, color=look.color, alpha=0.3 if repaired else 0.18, linewidth=0, zorder=1)
    else:
        axes.vlines(shares, low, high, color=look.color, linewidth=1.0, zorder=order)


def _missing(value: float | None) -> bool:
    return value is None or not math.isfinite(value)


# ------------------------------------------------------------------ axes
def _scales(axes: Axes, curve: Curve, points: Sequence[Point]) -> None:
    bounds = [v for p in points for v in (p.added, p.low, p.high) if not _missing(v)]
    highest, lowest = max([_SMALLEST, *bounds]), min([0.0, *bounds])
    linear = 10.0 ** math.floor(math.log10(min(_LINEAR_MOST, _LINEAR_PART * max(highest, -lowest))))
    axes.set_yscale("symlog", linthresh=linear)
    axes.set_ylim(1.1 * lowest - 0.15 * linear, 1.25 * highest)
    axes.set_xlim(0, 105 * max([p.share for p in points], default=0.5))
    _ticks(axes, _steps(linear, highest, lowest), "{:g}")
    axes.set_xlabel(f"{unit_name(curve)} removed (%)", fontsize=8.5)
    axes.set_ylabel(drawable(f"added loss ({loss_unit(curve.loss)})"), fontsize=8.5, parse_math=False)
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.axhline(0, color=GREY, linewidth=0.8, zorder=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if counts_tokens(curve.loss):
        _perplexity_axis(axes, linear, highest, lowest)


def _steps(linear: float, highest: float, lowest: float) -> list[float]:
    """0 and 1, 3, 10, 30 … times the end of the linear part, as far as the numbers go; the same below 0."""
    sizes = [linear * step * 10**power for power in range(7) for step in (1, 3)]
    return [*(-s for s in reversed(sizes) if s <= -lowest), 0.0, *(s for s in sizes if s <= 1.25 * highest)]


def _ticks(axes: Axes, values: Sequence[float], form: str) -> None:
    axes.yaxis.set_major_locator(FixedLocator(list(values)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))


def _perplexity_axis(axes: Axes, linear: float, highest: float, lowest: float) -> None:
    """The same numbers on the right, as the rise of perplexity: round ones, where they lie."""
    right = axes.twinx()
    right.set_yscale("symlog", linthresh=linear)
    right.set_ylim(axes.get_ylim())
    rises = _steps(linear, math.expm1(min(1.25 * highest, _LARGEST)) / 1.25, math.expm1(lowest))
    # Above, nats grow with the logarithm of perplexity, so steps of three would crowd.
    rises = [r for r in rises if r <= 3 or (r <= _MOST_RISE and _is_power(r))]
    right.yaxis.set_major_locator(FixedLocator([math.log1p(rise) for rise in rises]))
    right.yaxis.set_minor_locator(NullLocator())
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(math.expm1(value))))
    right.set_ylabel("rise of perplexity (%)", fontsize=8.5)
    right.tick_params(labelsize=8)
    right.spines[["top"]].set_visible(False)


def _is_power(number: float) -> bool:
    return math.isclose(number, 10.0 ** round(math.log10(number)))


def _percent(rise: float) -> str:
    """`0.3`, `30`, `10,000`: three digits count."""
    return f"{float(f'{100 * rise:.3g}'):,g}"


def _legend(axes: Axes, edge: float) -> None:
    legend = axes.legend(
        loc="upper left",
        bbox_to_anchor=(edge, 1.0),
        borderaxespad=0,
        frameon=False,
        fontsize=8,
        handlelength=3,
        title="solid: repaired\ndashed: heads zeroed only",
        title_fontsize=7,
        alignment="left",
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _title(figure: Figure, curve: Curve) -> None:
    name = drawable(curve.model.name)
    name = name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]
    texts, tokens = curve.sizes.get("report", (0, 0))
    measured = f", measured on {plural(texts, 'text')}, {tokens:,} tokens" if texts else ""
    below, above = 1 + 0.1 / _HEIGHT, 1 + 0.3 / _HEIGHT
    figure.text(0, above, f"What removing {unit_name(curve)} costs", fontsize=10, va="bottom", parse_math=False)
    figure.text(0, below, shorten(name + measured, 110), fontsize=7.5, color=GREY, va="bottom", parse_math=False)
