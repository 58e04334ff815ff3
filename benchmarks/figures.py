"""What a benchmark found: ratios with their goals, and the table of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True)
class Figure:
    """One figure, mostly a ratio within a run: its median and range over rounds, and the bound that it should keep."""

    what: str
    value: float
    low: float
    high: float
    goal: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the median keeps the bound; None without one."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def cells(self) -> tuple[str, str, str, str, str]:
        """What the table shows of it."""
        goal = "" if self.goal is None else f"{'≥' if self.at_least else '≤'} {self.goal:g}"
        spread = "" if self.low == self.high else f"{_number(self.low)} to {_number(self.high)}"
        return self.what, _number(self.value), spread, goal, {None: "", True: "yes", False: "no"}[self.met]


def _number(value: float) -> str:
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.01 else f"{value:.1e}"


def ratio(
    what: str, taken: Sequence[float], base: Sequence[float], goal: float | None = None, *, at_least: bool = False
) -> Figure:
    """`taken` over `base`, round by round."""
    found = [t / b for t, b in zip(taken, base, strict=True)]
    return Figure(what, statistics.median(found), min(found), max(found), goal, at_least)


def single(what: str, value: float, goal: float | None = None, *, at_least: bool = False) -> Figure:
    """A figure of one round."""
    return Figure(what, value, value, value, goal, at_least)


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one run."""
    start = perf_counter()
    function()
    return perf_counter() - start


def table(figures: Sequence[Figure]) -> str:
    """A Markdown table, aligned."""
    rows = [("figure", "median", "range", "goal", "met"), *(f.cells() for f in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])
