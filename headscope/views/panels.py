"""Which matrices a picture shows, and what stands over each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headscope.errors import InputError
from headscope.heads.rollout import head_mean, rollout
from headscope.models.selection import ranges
from headscope.results import Analysis, AttentionMap
from headscope.views.figure_text import drawable
from headscope.views.sections import plural
from headscope.views.text import shorten

_MOST_PANELS = 512
_MOST_COLUMNS = 16


@dataclass(frozen=True)
class Panels:
    """Matrices to draw side by side.

    Attributes:
        attention: All of them as one map.
        titles: What stands over each.
        title: What stands over all of them, or over the only one.
        columns: How many to draw side by side; None leaves that open.
        what: What the numbers are.
    """

    attention: AttentionMap
    titles: tuple[str, ...]
    title: str
    columns: int | None = None
    what: str = "attention weight"


def panels_of(analysis: Analysis, kind: str, maps: Sequence[AttentionMap]) -> Panels:
    """The panels of one kind of picture: `heads`, `mean` or `rollout`.

    Raises:
        InputError: The maps are of different tokens, means of heads where heads are asked for, or too many.
    """
    if kind == "rollout":
        return _rollout(analysis, maps)
    if kind == "mean":
        return _means(analysis, maps)
    if not all(one.heads for one in maps):
        raise InputError("the analysis kept means over heads only", "analyze with maps='pooled', or draw kind 'mean'")
    return _heads(analysis, maps)


def _heads(analysis: Analysis, maps: Sequence[AttentionMap]) -> Panels:
    records = [analysis.head(one.layer, head, one.stack) for one in maps for head in one.heads]
    attention = _joined(maps, len(records))
    first = records[0]
    if len(records) == 1:
        rest = f" (rest: {first.rest_pattern})" if first.rest_pattern is not None else ""
        title = f"{drawable(first.stack)} {first.name}: {drawable(first.pattern + rest)}"
        return Panels(attention, (first.name,), title)
    several = len(maps) > 1
    titles = tuple(f"{r.name if several else f'H{r.head}'} {shorten(drawable(r.pattern), 16)}" for r in records)
    counts = {len(one.heads) for one in maps}
    columns = counts.pop() if several and len(counts) == 1 else None
    title = f"{drawable(first.stack)} {_layers(maps)}"
    return Panels(attention, titles, title, columns if columns and 1 < columns <= _MOST_COLUMNS else None)


def _means(analysis: Analysis, maps: Sequence[AttentionMap]) -> Panels:
    attention = _joined([head_mean(one) for one in maps], len(maps))
    titles = tuple(f"layer {one.layer}" for one in maps)
    return Panels(attention, titles, f"{drawable(maps[0].stack)} {_layers(maps)}: mean of {_count(analysis, maps)}")


def _rollout(analysis: Analysis, maps: Sequence[AttentionMap]) -> Panels:
    title = f"{drawable(maps[0].stack)}: attention rollout, {_layers(maps)}, {_count(analysis, maps)}"
    return Panels(rollout(maps), ("rollout",), title, what="share of each input token")


def _layers(maps: Sequence[AttentionMap]) -> str:
    numbers = sorted(one.layer for one in maps)
    return f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {ranges(numbers)}"


def _count(analysis: Analysis, maps: Sequence[AttentionMap]) -> str:
    """How many heads a layer went into a mean: `12 heads each`."""
    keys = {(one.stack, one.layer) for one in maps}
    kept = {(one.stack, one.layer): len(one.heads) for one in maps}
    counts = [
        kept[key] or sum((record.stack, record.layer) == key for record in analysis.heads) for key in sorted(keys)
    ]
    if len(set(counts)) > 1:
        return f"{min(counts)} to {max(counts)} heads each"
    return plural(counts[0], "head") + (" each" if len(counts) > 1 else "")


def _joined(maps: Sequence[AttentionMap], count: int) -> AttentionMap:
    """All matrices as one map."""
    if count > _MOST_PANELS:
        raise InputError(f"{count:,} matrices in one picture", "choose fewer with --layer and --head, or --kind map")
    first = maps[0]
    for one in maps:
        if (one.queries, one.keys) != (first.queries, first.keys) or one.tokens != first.tokens:
            raise InputError(
                f"{first.stack} layer {first.layer} and {one.stack} layer {one.layer} are of different tokens",
                "choose one of them with --stack or --layer",
            )
    peaks = [one.peak for one in maps if one.peak is not None]
    return replace(
        first,
        heads=tuple(head for one in maps for head in one.heads),
        weights=np.concatenate([one.weights for one in maps]),
        peak=np.concatenate(peaks) if len(peaks) == len(maps) else None,
    )
