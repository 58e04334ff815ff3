"""What a metric is, and the decorators that register one; `headscope.heads.metrics` is where authors find both."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope.attention.visibility import Target
from headscope.capture.blocks import Rows
from headscope.errors import InputError
from headscope.heads import plugins

RowValues = tuple[Tensor, Tensor]
"""Values (batch, head, rows) and the rows that can show the metric, bool, broadcastable to them."""


@dataclass(frozen=True)
class Metric:
    """A named metric.

    Attributes:
        rows: From rows of attention to row values.
        direction: `high` where more means more of the behaviour, `low` where less does, None where neither.
        cross: Whether it makes sense when keys are another sequence.
        target: For a share of attention on one key a row: that key, else None.
        unit: `share`, `nats` or `tokens`.
        home: The module that defines it.
    """

    name: str
    rows: Callable[[Rows], RowValues]
    direction: str | None
    cross: bool
    unit: str
    target: Target | None = None
    home: str = ""


METRICS: dict[str, Metric] = {}
# Also what is not in use: an entry point may name a function whose module was imported long ago.
DECORATED: dict[Callable[..., Any], Metric] = {}


def metric(
    direction: str | None, unit: str = "share", cross: bool = True
) -> Callable[[Callable[[Rows], RowValues]], Callable[[Rows], RowValues]]:
    """Register a function on rows as the metric of the function's name.

    Args:
        direction: `high` where more means more of the behaviour, `low` where less does, None where neither.
        unit: `share`, `nats` or `tokens`.
        cross: Whether it makes sense when keys are another sequence.

    Raises:
        InputError: No metric can have that name.
    """

    def register(function: Callable[[Rows], RowValues]) -> Callable[[Rows], RowValues]:
        name, home = function.__name__, function.__module__
        rows = function if home.startswith("headscope.") else _checked(function)
        _register(function, Metric(name, rows, direction, cross, unit, home=home))
        return function

    return register


def target_metric(cross: bool = False, seen: bool = False) -> Callable[[Callable[[], Target]], Callable[[], Target]]:
    """Register the share of attention on one key a row; the function says which key.

    Args:
        cross: Whether it makes sense when keys are another sequence.
        seen: Only rows that may look at that key can show it; without, a key out of sight counts as 0.

    Raises:
        InputError: The function returns no target, or no metric can have its name.
    """

    def register(function: Callable[[], Target]) -> Callable[[], Target]:
        target = function()
        if not isinstance(target, Target):
            raise InputError(
                f"the metric {function.__name__!r} returns a {type(target).__name__}, not a Target",
                "return a Target, as the metrics of headscope.heads.metrics do",
            )

        def rows(rows: Rows) -> RowValues:
            eligible = rows.valid & rows.has(target)
            return rows.at(target), eligible & rows.sees(target) if seen else eligible

        _register(function, Metric(function.__name__, rows, "high", cross, "share", target, function.__module__))
        return function

    return register


def _register(function: Callable[..., Any], found: Metric) -> None:
    """Add a metric; the first module that takes a name keeps it, and may define it anew."""
    if not plugins.metric_name_allowed(found.name):
        raise InputError(
            f"a metric cannot be called {found.name!r}", "core, all, …_rest and …_adjusted mean something else."
        )
    DECORATED[function] = found
    first = METRICS.setdefault(found.name, found)
    if first.home == found.home:
        METRICS[found.name] = found
    else:
        text = f"the metric {found.name!r} of {found.home} is not used: {first.home} has one of that name"
        warnings.warn(text, stacklevel=3)


def _checked(function: Callable[[Rows], RowValues]) -> Callable[[Rows], RowValues]:
    """A function that refuses values of a shape that would be broadcast into wrong numbers."""

    def rows(rows: Rows) -> RowValues:
        values, eligible = function(rows)
        batch = (1, len(rows.lengths))
        if values.dim() != 3 or values.shape[0] not in batch or values.shape[-1] != rows.size:
            raise _unusable(function, f"values of shape {tuple(values.shape)}")
        if eligible.dtype != torch.bool or eligible.dim() > 3 or eligible.shape[-1:] not in ((1,), (rows.size,)):
            raise _unusable(function, f"eligible rows as {eligible.dtype} of shape {tuple(eligible.shape)}")
        return values, eligible

    return rows


def _unusable(function: Callable[..., Any], what: str) -> InputError:
    return InputError(
        f"the metric {function.__name__!r} of {function.__module__} gives {what}",
        "It returns values (batch, head, rows) and bool that broadcasts to them.",
    )
