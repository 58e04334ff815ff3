"""Scores in a grid for a terminal: layers down, heads across, a colour by a score's place among all."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from rich.text import Text

from headscope.views.columns import Column
from headscope.views.labels import ink_on

MISSING = "-"
# Seven steps of the colour map cividis, evenly apart.
SHADES = ("#00224e", "#2a3f6d", "#575d6d", "#7d7c78", "#a59c74", "#d2c060", "#fee838")


@dataclass(frozen=True)
class Scored:
    """The score of a unit, `head` or `kv-group`, and its standard error where there is one."""

    unit: str
    stack: str
    layer: int
    number: int
    heads: tuple[int, ...]
    score: float
    error: float | None

    @property
    def name(self) -> str:
        """`L5H3`, or `L5G1 (3-5)` for a group with its heads."""
        if self.unit == "head":
            return f"L{self.layer}H{self.number}"
        run = len(self.heads) > 1 and self.heads == tuple(range(self.heads[0], self.heads[-1] + 1))
        heads = f"{self.heads[0]}-{self.heads[-1]}" if run else ",".join(map(str, self.heads))
        return f"L{self.layer}G{self.number} ({heads})"

    @property
    def finite(self) -> bool:
        """Whether the score is a number."""
        return math.isfinite(self.score)

    @property
    def noise(self) -> bool:
        """Whether it lies within two standard errors of 0."""
        return self.error is not None and abs(self.score) <= 2 * self.error


@dataclass(frozen=True)
class Scale:
    """How scores are written: times 10 to the power of minus `power`, with so many decimals."""

    power: int
    decimals: int

    def show(self, value: float) -> str:
        """A score as it stands in the grid; never -0."""
        if not math.isfinite(value):
            return MISSING
        return f"{round(self._scaled(value), self.decimals) + 0.0:.{self.decimals}f}"

    def precise(self, value: float) -> str:
        """A score on the same scale, with three digits however small it is."""
        if not math.isfinite(value):
            return MISSING
        scaled = self._scaled(value) + 0.0
        return f"{scaled:.0f}" if abs(scaled) >= 999.5 else f"{scaled:#.3g}".removesuffix(".")

    def _scaled(self, value: float) -> float:
        # Dividing by a power of ten that is no fraction rounds once only.
        return value * 10.0**-self.power if self.power < 0 else value / 10.0**self.power

    @property
    def note(self) -> str:
        """What a reader has to know; nothing where scores are written as they are."""
        if not self.power:
            return ""
        sign = "×" if self.power < 0 else "÷"
        return f"scores {sign} {f'{10 ** abs(self.power):,}' if abs(self.power) <= 6 else f'1e{abs(self.power)}'}"


def scale_of(scores: Sequence[Scored]) -> Scale:
    """A scale on which the middle score has two digits: a few are far above all others, and the low ones matter."""
    sizes = [abs(s.score) for s in scores if s.finite and s.score]
    exponent = math.floor(math.log10(median(sizes))) if sizes else 0
    power = 0 if -1 <= exponent <= 2 else 3 * (exponent // 3)
    return Scale(power, max(0, 1 - (exponent - power)))


@dataclass(frozen=True)
class Grid:
    """One stack's scores for one kind of unit: by layer, then by the head's or group's number."""

    stack: str
    unit: str
    rows: dict[int, dict[int, Scored]]

    @property
    def title(self) -> str:
        """`self: heads`."""
        return f"{self.stack}: {'heads' if self.unit == 'head' else 'KV groups'}"

    @property
    def numbers(self) -> list[int]:
        """The numbers that some layer has."""
        return sorted({number for found in self.rows.values() for number in found})

    @property
    def names(self) -> list[str]:
        """`H0`, or `G0` for groups."""
        return [f"{'H' if self.unit == 'head' else 'G'}{number}" for number in self.numbers]

    def columns(self, scale: Scale, scores: Sequence[Scored]) -> Iterator[Column]:
        """The layers' names, then a column a head.

        Args:
            scores: All those among which a score's place says its colour.
        """
        ordered = sorted(s.score for s in scores if s.finite)
        marked = any(s.noise for s in scores)
        cells = {s: _cell(s, scale, marked) for found in self.rows.values() for s in found.values()}
        width = max(map(len, [*cells.values(), *self.names]))
        yield Column(Text("layer"), tuple(Text(f"L{layer}") for layer in self.rows))
        for number, name in zip(self.numbers, self.names, strict=True):
            found = (row.get(number) for row in self.rows.values())
            # Padded here, so that the colour fills the cell.
            shown = (Text("") if s is None else Text(cells[s].rjust(width), _shade(s, ordered)) for s in found)
            yield Column(Text(name), tuple(shown), "right")


def _cell(score: Scored, scale: Scale, marked: bool) -> str:
    return scale.show(score.score) + ("~" if score.noise else " " if marked else "")


def _shade(score: Scored, ordered: Sequence[float]) -> str:
    if not score.finite:
        return ""
    fill = SHADES[len(SHADES) * bisect_left(ordered, score.score) // len(ordered)]
    return f"{ink_on(fill)} on {fill}"


def grids_of(unit: str, scores: Sequence[Scored]) -> list[Grid]:
    """A grid a stack, layers in the order in which they come."""
    stacks: dict[str, dict[int, dict[int, Scored]]] = {}
    for s in scores:
        stacks.setdefault(s.stack, {}).setdefault(s.layer, {})[s.number] = s
    return [Grid(stack, unit, rows) for stack, rows in stacks.items()]
