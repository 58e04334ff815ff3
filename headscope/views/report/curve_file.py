"""The table that `headscope prune --curve` writes, read back."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, nan
from os import PathLike
from pathlib import Path

from headscope.errors import InputError
from headscope.pruning.curve_result import Curve, Point
from headscope.reading.whole import read_whole

_HINT = "give the .csv that `headscope prune --curve` wrote beside its picture"
_COLUMNS = ("method", "repaired", "unit", "share", "count", "added", "low", "high", "seeds")


@dataclass(frozen=True)
class Losses:
    """What removing heads costs, as far as a table of a curve says it.

    Attributes:
        unit: `head` or `kv-group`.
        nats: Whether losses are nats a token, of which perplexity is made; else their unit is not known.
    """

    unit: str
    points: tuple[Point, ...]
    nats: bool


def losses_of(curve: Curve | str | PathLike[str]) -> Losses:
    """The points of a curve, or of the file that one was written to.

    Raises:
        InputError: The file cannot be read or is no such table; the message names the line.
    """
    if isinstance(curve, Curve):
        from headscope.views.choosing import counts_tokens

        return Losses(curve.unit, curve.points, counts_tokens(curve.loss))
    path = Path(curve)
    try:
        reader = csv.DictReader(io.StringIO(read_whole(path).decode("utf-8-sig"), newline=""))
        rows = list(reader)
        fields = list(reader.fieldnames or [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is no table of a curve: {error}", _HINT) from error
    missing = [name for name in _COLUMNS if name not in fields]
    if missing or not rows:
        what = f"it has no column {missing[0]!r}" if missing else "it has no rows"
        raise InputError(f"{path} is no table of a curve: {what}", _HINT)
    points = tuple(_point(row, f"{path}, line {number}") for number, row in enumerate(rows, 2))
    return Losses(rows[0]["unit"], points, "perplexity_rise" in fields)


def _point(row: Mapping[str, str | None], where: str) -> Point:
    try:
        share, count, seeds = float(row["share"] or ""), int(row["count"] or ""), int(row["seeds"] or "")
        # An empty field stands for what is not a finite number.
        added, low, high = (float(row[name] or nan) for name in ("added", "low", "high"))
    except ValueError as error:
        raise InputError(f"{where}: {error}", _HINT) from error
    if not isfinite(share):
        raise InputError(f"{where}: the share is {share}", _HINT)
    return Point(row["method"] or "", row["repaired"] == "True", share, count, added, low, high, seeds)
