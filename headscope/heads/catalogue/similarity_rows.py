"""The rows that heads are compared on: a sample of a text's rows, with the weights of every head.

Only sampled rows are ever looked at, and of these only the keys up to the last one that is visible, so memory is
heads x rows x keys and bounded: where a model has many heads or a text is long, fewer rows are taken.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.attention.visibility import Visibility
from headscope.capture.blocks import BLOCK_CELLS, RowBlock, Rows, StreamedRows
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.result import Place
from headscope.models.pruned import head_numbers
from headscope.models.sites import Site

# Weights kept in all, float32: 256 MiB.
CELLS = 1 << 26
# Sums of two heads' weights at one key, each with a logarithm: a minute or two on one core.
SUMS = 1 << 34
# A row that leaves less than this to keys, beside a learned sink, says nothing of where it looks.
_LEAST = 1e-3


@dataclass(frozen=True)
class LayerPart:
    """What one layer adds to a row.

    Attributes:
        places: Its heads.
        weights: Float32 (head, key): keys behind the last visible one left out.
        trivial: Float64 (head, 2): divergence, in units of log 2, from a head that looks at the first token only, and
            from one that spreads evenly over the keys that this layer sees.
    """

    places: list[Place]
    weights: Tensor
    trivial: Tensor


@dataclass(frozen=True)
class SampledRow:
    """One row of attention, of all heads that were shown.

    Attributes:
        batch, text, position: Where the row is: a batch, an example in it, a query token.
        axis: Name of the query tokens' axis.
        parts: Layer by layer.
    """

    batch: int
    text: int
    position: int
    axis: str
    parts: list[LayerPart] = field(default_factory=list)

    def without(self, layers: Container[tuple[str, int]]) -> SampledRow:
        """The same row without some layers, given by stack and number."""
        return replace(self, parts=[part for part in self.parts if part.places[0][:2] not in layers])

    @property
    def heads(self) -> list[Place]:
        """The heads of all layers."""
        return [place for part in self.parts for place in part.places]

    def scaled(self) -> Tensor:
        """Float64, (head, key), scaled to sum to one; NaN for heads of which the row says nothing."""
        rows = torch.zeros(len(self.heads), max(part.weights.shape[1] for part in self.parts), dtype=torch.float64)
        start = 0
        for weights in (part.weights for part in self.parts):
            rows[start : start + len(weights), : weights.shape[1]] = weights
            start += len(weights)
        return scaled(rows)


def scaled(rows: Tensor) -> Tensor:
    """Rows of weights, (..., key), divided by their sums; NaN where next to nothing is there to be scaled."""
    total = rows.sum(dim=-1, keepdim=True)
    return rows / torch.where(total >= _LEAST, total, torch.nan)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of rows that sum to one, (..., key) each, in units of log 2: 0 to 1."""
    both = p + q
    nats = (torch.xlogy(p, p) + torch.xlogy(q, q) - torch.xlogy(both, both)).sum(dim=-1) / 2
    return nats / math.log(2) + 1


@dataclass
class RowSampler:
    """The consumer that keeps a seeded sample of one batch's rows.

    Attributes:
        batch: The batch's number.
        count: Rows to take from each kind of tokens.
        part: The share of `CELLS` and `SUMS` that this batch may use.
        rng: What rows are drawn with.
        skipped: Stacks that were not taken, with the reason.
        used: The share that it did use.
    """

    probing: Probing
    batch: int
    count: int
    part: float
    rng: np.random.Generator
    skipped: dict[str, str] = field(default_factory=dict)
    used: float = 0.0
    _samples: dict[tuple[str, int], list[SampledRow]] = field(default_factory=dict)

    def rows(self, site: Site, rows: Rows) -> None:
        """Keep what is in the sample."""
        if rows.cross:
            self.skipped[site.stack] = "its rows and its keys are not the same tokens"
            return
        numbers = head_numbers(site.module, rows.num_heads)
        heads = self.probing.heads.within(numbers)
        if not heads:
            return
        key = (site.stack, rows.view.rows)
        if key not in self._samples:
            self._samples[key] = self._draw(site, rows, len(heads))
        index = torch.tensor([numbers.index(h) for h in heads], device=rows.valid.device)
        places = [(site.stack, site.layer, h) for h in heads]
        wanted: dict[int, list[SampledRow]] = {}
        for row in self._samples[key]:
            wanted.setdefault(row.position, []).append(row)
        for position, weights in weights_at(rows, sorted(wanted)):
            for row in wanted[position]:
                _keep(row, rows.view, places, weights[row.text][index])

    def taken(self) -> list[SampledRow]:
        """The rows of all kinds of tokens, in the order of the text."""
        return [row for sample in self._samples.values() for row in sample if row.parts]

    def _draw(self, site: Site, rows: Rows, heads: int) -> list[SampledRow]:
        """Rows that see two keys or more, as many as may be kept."""
        batch, device = len(rows.lengths), rows.valid.device
        real = torch.arange(rows.view.rows, device=device) < rows.lengths[:, None]
        eligible = (real & (rows.view.counts(device).expand(batch, 1, -1)[:, 0] >= 2)).nonzero().cpu().numpy()
        drawn = self.rng.permutation(eligible)
        ends = np.array([_end(rows.view, int(position)) for _, position in drawn], dtype=np.int64)
        whole = self._whole(site, heads)
        few = _fit(ends, self.part * whole)[: self.count]
        self.used = max(self.used, float(ends[few].sum()) / whole)
        return [SampledRow(self.batch, t, i, site.query_axis) for t, i in sorted(map(tuple, drawn[few].tolist()))]

    def _whole(self, site: Site, heads: int) -> float:
        """Keys of all rows together that may be kept and compared, where all layers have as many heads as this one."""
        wanted = [s for s in self.probing.wanted if not s.cross]
        alike = heads * sum(s.stack == site.stack for s in wanted)
        return min(CELLS / (heads * len(wanted)), 2 * SUMS / alike**2)


def _fit(sizes: NDArray[np.int64], most: float) -> NDArray[np.int64]:
    """Indices of the first things that are at most so large together; larger single ones are passed over."""
    possible = np.flatnonzero(sizes <= most)
    return possible[np.cumsum(sizes[possible]) <= most]


def _end(view: Visibility, position: int) -> int:
    """Keys up to the last one that a row sees in any layer: its own, or all where one layer looks ahead."""
    return position + 1 if view.span(position, position + 1)[1] <= position + 1 else view.keys


def weights_at(rows: Rows, positions: list[int]) -> Iterator[tuple[int, Tensor]]:
    """The weights of some rows, (batch, head, key), those that are in this block, few at a time."""
    if isinstance(rows, RowBlock):
        for i in positions:
            if rows.first_row <= i < rows.first_row + rows.size:
                yield i, rows.weights[:, :, i - rows.first_row]
        return
    assert isinstance(rows, StreamedRows)
    batch, heads, _, keys = rows.weights.shape
    step = max(1, BLOCK_CELLS // (batch * heads * keys))
    for start in range(0, len(positions), step):
        some = positions[start : start + step]
        weights = rows.weights.rows(some)
        yield from ((position, weights[:, :, i]) for i, position in enumerate(some))


def _keep(row: SampledRow, view: Visibility, places: list[Place], weights: Tensor) -> None:
    """Add one layer's heads to a row, float32 (heads, keys)."""
    end = max(1, view.span(row.position, row.position + 1)[1])
    seen = view.cells(row.position, row.position + 1, weights.device)[:, 0, 0, :end]
    own = seen[min(row.text, len(seen) - 1)].cpu().double()
    kept = weights[:, :end].float().cpu().clone()
    full = scaled(kept.double())
    first = torch.zeros_like(own)
    first[0] = 1
    trivial = torch.stack([divergence(full, first), divergence(full, own / own.sum())], dim=-1)
    row.parts.append(LayerPart(places, kept, trivial))
