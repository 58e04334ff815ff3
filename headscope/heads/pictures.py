"""Keeping one text's attention matrices for pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headscope.capture.blocks import Rows
from headscope.capture.session import SiteFacts
from headscope.heads.selection import Selection
from headscope.heads.statistics import Layer
from headscope.heads.tokens import token_labels
from headscope.models.inputs import Batch
from headscope.models.sites import Site
from headscope.results import AttentionMap


@dataclass
class Keep:
    """Keeps one text's matrices of the batch it is in."""

    row: int
    weights: dict[Layer, list[NDArray[np.float32]]] = field(default_factory=dict)

    def rows(self, site: Site, rows: Rows) -> None:
        """Copy the text's rows."""
        for block in rows.blocks():
            part = block.weights[self.row].float().cpu().numpy().copy()
            self.weights.setdefault((site.stack, site.layer), []).append(part)


def attention_maps(
    keep: Keep, batch: Batch, facts: Mapping[Layer, SiteFacts], heads: Selection, words: bool, exclude_special: bool
) -> tuple[AttentionMap, ...]:
    """The kept matrices, padding cut off, with the selected heads and a label for each row and column."""
    result = []
    for (stack, layer), rows in keep.weights.items():
        site = facts[stack, layer].site
        weights = np.concatenate(rows, axis=1)
        numbers = heads.within(range(weights.shape[0]))
        queries, keys = (
            token_labels(batch, name, keep.row, size, words, exclude_special)
            for name, size in ((site.query_axis, weights.shape[1]), (site.key_axis, weights.shape[2]))
        )
        cut = weights[list(numbers), : len(queries), : len(keys)]
        result.append(AttentionMap(stack, layer, numbers, np.ascontiguousarray(cut), queries, keys))
    return tuple(result)
