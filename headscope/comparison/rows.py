"""Rows of attention of two models on the same tokens: drawn in the first model, found again in the second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headscope.capture.blocks import Rows
from headscope.heads.catalogue.similarity_rows import CELLS, weights_at
from headscope.heads.tokens import group_numbers
from headscope.models.batches import Batch, TokenAxis
from headscope.models.pruned import head_numbers
from headscope.models.selection import Selection
from headscope.models.sites import Site
from headscope.models.tokens import join_labels

Wanted = Callable[[Site, Rows], Sequence[tuple[int, int]]]
"""Which rows of a site to keep: an example of the batch and a query position each."""


@dataclass(frozen=True)
class Row:
    """Where a row is.

    Attributes:
        text, position: A text of the user's and a query token, or word, in it.
        keys: How many keys there are where it is not known what tokens they are, as of an image; else 0.
    """

    stack: str
    text: int
    position: int
    keys: int


Kept = dict[Row, dict[int, Tensor]]
"""By row and layer: weights, float32 (head, key), of the heads in the weights that are selected, on the CPU."""


@dataclass
class RowKeeper:
    """The consumer that keeps some rows of one batch."""

    batch: Batch
    heads: Selection
    wanted: Wanted
    kept: Kept
    _found: dict[tuple[str, int], Sequence[tuple[int, int]]] = field(default_factory=dict)

    def rows(self, site: Site, rows: Rows) -> None:
        """Keep what is wanted; a site's first block decides for all layers of its stack."""
        key = (site.stack, rows.view.rows)
        if key not in self._found:
            self._found[key] = self.wanted(site, rows)
        numbers = head_numbers(site.module, rows.num_heads)
        index = torch.tensor([numbers.index(h) for h in self.heads.within(numbers)], dtype=torch.long)
        examples: dict[int, list[int]] = {}
        for example, position in self._found[key]:
            examples.setdefault(position, []).append(example)
        keys = 0 if site.key_axis in self.batch.axes else rows.view.keys
        for position, weights in weights_at(rows, sorted(examples)):
            for example in examples[position]:
                row = Row(site.stack, self.batch.order[example], position, keys)
                self.kept.setdefault(row, {})[site.layer] = weights[example].float().cpu()[index]


@dataclass
class Drawing:
    """Rows by chance: real ones that see two keys or more, and no more than memory is for.

    Attributes:
        count: How many to draw from each stack in this batch.
        layers: How many layers are read in all.
        room: Weights that may still be kept; what is drawn comes off.
    """

    rng: np.random.Generator
    layers: int
    count: int = 0
    room: dict[str, int] = field(default_factory=dict)

    def __call__(self, site: Site, rows: Rows) -> Sequence[tuple[int, int]]:
        """Draw from one batch's rows."""
        batch, device, keys = len(rows.lengths), rows.valid.device, rows.view.keys
        real = torch.arange(rows.view.rows, device=device) < rows.lengths[:, None]
        seen = rows.view.counts(device).expand(batch, 1, -1)[:, 0]
        eligible = (real & (seen >= 2)).nonzero().cpu().numpy()
        left = self.room.setdefault(site.stack, CELLS // (rows.num_heads * self.layers))
        drawn = self.rng.permutation(eligible)[: min(self.count, left // keys)]
        self.room[site.stack] = left - keys * len(drawn)
        return [(int(example), int(position)) for example, position in drawn]


@dataclass(frozen=True)
class Again:
    """The rows that another model has kept.

    Attributes:
        order: The texts of this batch.
        stacks: This model's stacks, and what the other one calls them.
        positions: By stack of the other model and text.
    """

    order: tuple[int, ...]
    stacks: Mapping[str, str]
    positions: Mapping[tuple[str, int], Sequence[int]]

    def __call__(self, site: Site, rows: Rows) -> Sequence[tuple[int, int]]:
        """Those of them that this model has."""
        stack, lengths = self.stacks.get(site.stack, ""), rows.lengths.tolist()
        return [
            (example, position)
            for example, text in enumerate(self.order)
            for position in self.positions.get((stack, text), ())
            if position < lengths[example]
        ]


def tokens_of(axis: TokenAxis, text: int, words: bool, exclude_special: bool) -> tuple[str, ...]:
    """What the tokens, or words, of a text say, letters of either case alike; special tokens say nothing."""
    merged: dict[int, list[str]] = {}
    special = axis.special[text].tolist()
    for i, group in enumerate(group_numbers(axis, text, words, exclude_special)):
        if group >= 0:
            merged.setdefault(group, []).append("" if special[i] else axis.labels[text][i])
    return tuple(join_labels(merged[group]).casefold() for group in sorted(merged))
