"""One attention computation cut into tiles: some rows and some keys at a time, of some examples and heads.

Scores are in units of log(2): their exponential is a power of two, the fastest there is.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from headscope.attention.visibility import HIDDEN, Target, Visibility

# A tile's rows, and how many times as many they may be where there are many keys: what is computed for nothing above
# the diagonal is then a small part, and fewer, larger products are faster.
TILE_ROWS, TILE_ROWS_TIMES = 128, 2
# Rows that are multiplied with their targets in one go.
TARGET_ROWS = 1024

LOG2E = math.log2(math.e)

_rooms = threading.local()


def tile_cells(device: torch.device) -> int:
    """Scores of a tile with all its heads: as many as the second caches hold, or a small part of a GPU's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(max(free // 64, 1 << 20), 1 << 26)
    cache = _capabilities().get("l2_cache_size") or 1 << 19
    return min(max(int(cache) * torch.get_num_threads() // 4, 1 << 19), 1 << 22)


@lru_cache(maxsize=1)
def _capabilities() -> Mapping[str, Any]:
    """What torch knows of the processor, if its release says."""
    known = getattr(torch.cpu, "get_capabilities", None)
    return {} if known is None else known()


@dataclass(frozen=True)
class Terms:
    """What goes into the scores besides queries and keys, and what happens to them.

    Attributes:
        scaling: Factor of query @ key.
        softcap: Scores become softcap * tanh(score / softcap) before biases and masks.
        biases: Added to the scores, (batch or 1, head or 1, query or 1, key) each; minus infinity is allowed.
        sinks: A logit a head, (batch or 1, num_heads, query or 1), that takes part in the softmax and has no key.
        sinks_scale_context: Sinks only scale the context; the weights are those without them.
    """

    scaling: float
    softcap: float | None = None
    biases: tuple[Tensor, ...] = ()
    sinks: Tensor | None = None
    sinks_scale_context: bool = False


@dataclass(frozen=True)
class Band:
    """Some rows of some examples and key/value heads; tiles are cut from it, a range of keys each."""

    examples: slice
    heads: slice
    rows: slice


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention computation, arranged for tiles.

    Attributes:
        query: float32, (batch, kv_head, query * group, head_dim), times scaling and log2(e): scores are powers of two.
        key: float32, (batch, kv_head, key, head_dim), less their mean, unless scores are capped.
        value: float32, (batch, kv_head, key, value_dim).
        mean: float32, (batch, kv_head, 1, head_dim): what was subtracted from the keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mean: Tensor
    groups: int
    visibility: Visibility
    terms: Terms

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, terms: Terms) -> Problem:
        """The computation on tensors as modules have them, (batch, head, token, dim)."""
        batch, heads, rows, width = query.shape
        kv_heads = key.shape[1]
        groups = heads // kv_heads
        # Into memory of the right order at once, for each copy costs as much as the rest of a tile.
        scaled = query.new_empty(batch, kv_heads, rows, groups, width, dtype=torch.float32)
        grouped = query.float().reshape(batch, kv_heads, groups, rows, width).transpose(2, 3)
        torch.mul(grouped, terms.scaling * LOG2E, out=scaled)
        keys = key.float()
        mean = keys.mean(dim=2, keepdim=True) * (terms.softcap is None)
        centred = torch.sub(keys, mean, out=torch.empty_like(keys, memory_format=torch.contiguous_format))
        return Problem(scaled.flatten(2, 3), centred, value.float().contiguous(), mean, groups, visibility, terms)

    @cached_property
    def biases(self) -> tuple[Tensor, ...]:
        """The terms' biases, minus infinity as a number."""
        return tuple(b.float().clamp(min=HIDDEN) for b in self.terms.biases)

    @property
    def everything(self) -> Band:
        """All rows in one band."""
        batch, kv_heads = self.key.shape[:2]
        return Band(slice(0, batch), slice(0, kv_heads), slice(0, self.visibility.rows))

    @cached_property
    def cells(self) -> int:
        """Scores of a tile."""
        return tile_cells(self.query.device)

    @cached_property
    def height(self) -> int:
        """Rows of a tile: an eighth of the keys, within bounds."""
        return TILE_ROWS * min(max(self.visibility.keys // (8 * TILE_ROWS), 1), TILE_ROWS_TIMES)

    @cached_property
    def width(self) -> int:
        """Keys of a tile: as many as fit with one head, since long rows are faster than many heads."""
        fit = self.cells // (self.height * self.groups)
        return max(128, fit - fit % 64)

    def bands(self, start: int, stop: int) -> Iterator[tuple[Band, list[slice]]]:
        """Bands of these rows, each with the ranges of keys that hold all that its rows see."""
        for row in range(start, stop, self.height):
            rows = slice(row, min(row + self.height, stop))
            low, high = self.visibility.span(rows.start, rows.stop)
            ranges = [slice(key, min(key + self.width, high)) for key in range(low, high, self.width)]
            for examples, heads in self._together((rows.stop - row) * min(self.width, max(high - low, 1))):
                yield Band(examples, heads, rows), ranges

    def _together(self, cells: int) -> Iterator[tuple[slice, slice]]:
        """Whole examples as far as a tile holds them, else some heads of one, given the cells of a single head."""
        batch, kv_heads = self.key.shape[:2]
        fit = max(1, self.cells // (cells * self.groups))
        # As many in every part: 6 and 6 heads, not 8 and 4.
        heads = -(-kv_heads // -(-kv_heads // fit))
        examples = max(1, fit // kv_heads) if heads == kv_heads else 1
        for example in range(0, batch, examples):
            for head in range(0, kv_heads, heads):
                yield slice(example, min(example + examples, batch)), slice(head, min(head + heads, kv_heads))

    def over_rows(self, tensor: Tensor, band: Band) -> Tensor:
        """A band's view of (batch, kv_head, query * group, ...), as (batch * kv_head, rows * group, ...)."""
        part = tensor[band.examples, band.heads, band.rows.start * self.groups : band.rows.stop * self.groups]
        return part.view(-1, *part.shape[2:])

    def over_keys(self, tensor: Tensor, band: Band) -> Tensor:
        """A band's view of (batch, kv_head, key, width), as (batch * kv_head, key, width)."""
        part = tensor[band.examples, band.heads]
        return part.view(-1, *part.shape[2:])

    def spread(self, part: Tensor, band: Band) -> Tensor:
        """(batch or 1, head or 1, rows, keys) as (batch or 1, kv_head or 1, rows, group or 1, keys)."""
        part = part[band.examples] if part.shape[0] > 1 else part
        if part.shape[1] == 1:
            return part.unsqueeze(3)
        grouped = part.reshape(part.shape[0], -1, self.groups, *part.shape[2:])
        return grouped[:, band.heads].transpose(2, 3)

    def tiles(self, band: Band, ranges: list[slice], shift: Tensor | None, room: Tensor) -> Iterator[Tensor]:
        """Scores in units of log(2), (batch * kv_head, rows * group, keys) for each range of keys, all in `room`."""
        query, key = self.over_rows(self.query, band), self.over_keys(self.key, band).mT
        less = None if shift is None else self.over_rows(shift, band)[..., None]
        masked = bool(self.biases) or self.visibility.causal or self.visibility.open is not None
        for keys in ranges:
            shape = (query.shape[0], query.shape[1], keys.stop - keys.start)
            scores = torch.bmm(query, key[..., keys], out=room[: math.prod(shape)].view(shape))
            if self.terms.softcap is not None:
                cap = self.terms.softcap * LOG2E
                scores.div_(cap).tanh_().mul_(cap)
            if masked:
                self._mask(scores, band, keys)
            if less is not None:
                scores.sub_(less)
            yield scores

    def _mask(self, scores: Tensor, band: Band, keys: slice) -> None:
        rows = band.rows
        examples = band.examples.stop - band.examples.start
        grid = scores.view(examples, -1, rows.stop - rows.start, self.groups, scores.shape[-1])
        for bias in self.biases:
            part = (bias if bias.shape[2] == 1 else bias[:, :, rows])[..., keys]
            grid.add_(self.spread(part, band), alpha=LOG2E)
        closed = self.visibility.closed(rows.start, rows.stop, keys.start, keys.stop, scores.device)
        if closed is not None:
            grid.masked_fill_(self.spread(closed, band), HIDDEN)
        later = self.visibility.later(rows.start, rows.stop, keys.stop, scores.device)
        if later is not None:
            start = max(keys.start, rows.start)
            grid[..., start - keys.start :].add_(self.spread(later[..., start - rows.start :], band))

    def room(self, number: int = 0) -> Tensor:
        """Memory for one tile, kept by each thread: on a processor, new memory costs more than what is put there."""
        cells = max(self.cells, self.height * self.groups * self.width)
        if self.query.device.type != "cpu":
            return self.query.new_empty(cells)
        room: Tensor | None = getattr(_rooms, str(number), None)
        if room is None or len(room) < cells:
            # What is made in inference mode cannot be written to outside of it.
            with torch.inference_mode(False):
                room = torch.empty(cells)
            setattr(_rooms, str(number), room)
        return room

    def scores_at(self, target: Target) -> Tensor:
        """Scores of each row on its target in units of log(2), (batch, kv_head, query * group); hidden where unseen."""
        rows = torch.arange(self.visibility.rows, device=self.query.device)
        positions = target.positions(rows)
        grid = self._products_at(target)
        if self.terms.softcap is not None:
            cap = self.terms.softcap * LOG2E
            grid = (grid / cap).tanh() * cap
        for bias in self.biases:
            index = positions.clamp(0, bias.shape[3] - 1).view(1, 1, -1, 1).expand(*bias.shape[:2], -1, 1)
            at = bias.expand(-1, -1, len(rows), -1).gather(3, index)
            grid = grid + self.spread(at, self.everything)[..., 0] * LOG2E
        seen = self.spread(self.visibility.at(positions)[..., None], self.everything)[..., 0]
        return grid.masked_fill(~seen, HIDDEN).flatten(2)

    def _products_at(self, target: Target) -> Tensor:
        """Query times key of each row and its target, (batch, kv_head, query, group); 0 where there is no such key."""
        batch, kv_heads, _, width = self.query.shape
        keys, rows = self.visibility.keys, self.visibility.rows
        if target.key is not None:
            products = self.query @ self.key[:, :, min(target.key, keys - 1), :, None]
            return products.view(batch, kv_heads, rows, self.groups)
        offset = target.offset or 0
        query = self.query.view(batch, kv_heads, rows, self.groups, width)
        result = query.new_zeros(batch, kv_heads, rows, self.groups)
        for start in range(max(0, -offset), min(rows, keys - offset), TARGET_ROWS):
            stop = min(start + TARGET_ROWS, rows, keys - offset)
            shifted = self.key[:, :, start + offset : stop + offset, None]
            torch.sum(query[:, :, start:stop] * shifted, dim=-1, out=result[:, :, start:stop])
        return result
