"""Attention tile by tile: the context and what is wanted of the weights, with memory that grows with n and not n².

Softmax weights are exp(score - log-sum-exp), so they need no matrix: a tile of scores is made, exponentiated, summed,
multiplied with its values, and forgotten. The sums of tiles simply add up, because rows are not shifted by their
maximum, which is known only at the end, but by their score on the mean key, which costs one subtraction from the keys.
Should a row's scores lie too far from that for float32, the pass is made again with the true maximum.

The first key is kept out of the tiles and added at the end: what rows do without it, sinks aside, is then known to full
precision, however little it is.

Entropy is log(sum e) - sum(e s) / sum(e) with e = exp(s): two sums a tile and no second logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headscope.attention.visibility import Target, Visibility

# A tile's rows, and the cells that it holds with all its heads: two tiles stay within a core's caches.
TILE_ROWS, TILE_CELLS = 64, 1 << 18

# What stands for minus infinity: times zero it is still zero.
_HIDDEN = -1e30
# Between these a sum of powers of two is exact: nothing in it overflowed, and what underflowed does not show.
_LEAST, _MOST = 1e-25, 1e30
_MOST_POWER = 99.0
_LOG2E = math.log2(math.e)


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


def attend(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, terms: Terms
) -> tuple[Tensor, StreamedWeights]:
    """Softmax attention without its matrix.

    Args:
        query: (batch, num_heads, query, head_dim), positions applied.
        key: (batch, num_kv_heads, key, head_dim); num_heads is a multiple of num_kv_heads.
        value: (batch, num_kv_heads, key, value_dim).
        visibility: What each row may look at. A row that sees nothing gets the mean of all values, as it does where
            the most negative number is added to all of its scores.
        terms: Scaling and the like.

    Returns:
        The context, (batch, query, num_heads, value_dim) in the values' dtype, and what is known of the weights.
        Everything is computed in float32.
    """
    problem = _Problem.of(query, key, value, visibility, terms)
    sums = _sums(problem, None)
    if not bool(_exact(problem, sums.total)):
        sums = _sums(problem, _largest_scores(problem))
    return sums.context.to(value.dtype), StreamedWeights(problem, sums)


# ------------------------------------------------------------------ the computation, arranged for tiles
@dataclass(frozen=True)
class _Band:
    """Some rows of some examples and key/value heads; tiles are cut from it, a range of keys each."""

    examples: slice
    heads: slice
    rows: slice


@dataclass(frozen=True, eq=False)
class _Problem:
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
    def of(query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, terms: Terms) -> _Problem:
        batch, heads, rows, width = query.shape
        kv_heads = key.shape[1]
        groups = heads // kv_heads
        scaled = query.float() * (terms.scaling * _LOG2E)
        scaled = scaled.reshape(batch, kv_heads, groups, rows, width).transpose(2, 3)
        scaled = scaled.reshape(batch, kv_heads, rows * groups, width).contiguous()
        keys = key.float()
        mean = keys.mean(dim=2, keepdim=True) * (terms.softcap is None)
        return _Problem(scaled, (keys - mean).contiguous(), value.float().contiguous(), mean, groups, visibility, terms)

    @cached_property
    def biases(self) -> tuple[Tensor, ...]:
        return tuple(b.float().clamp(min=_HIDDEN) for b in self.terms.biases)

    @property
    def everything(self) -> _Band:
        """All rows in one band."""
        batch, kv_heads = self.key.shape[:2]
        return _Band(slice(0, batch), slice(0, kv_heads), slice(0, self.visibility.rows))

    @cached_property
    def width(self) -> int:
        """Keys of a tile."""
        fit = TILE_CELLS // (TILE_ROWS * self.key.shape[1] * self.groups)
        return max(128, fit - fit % 64)

    def bands(self, start: int, stop: int) -> Iterator[tuple[_Band, list[slice]]]:
        """Bands of these rows, each with the ranges of keys that hold all that its rows see."""
        for row in range(start, stop, TILE_ROWS):
            rows = slice(row, min(row + TILE_ROWS, stop))
            ranges = list(self._key_ranges(rows))
            for examples, heads in self._together(rows.stop - row):
                yield _Band(examples, heads, rows), ranges

    def _key_ranges(self, rows: slice) -> Iterator[slice]:
        low, high = self.visibility.span(rows.start, rows.stop)
        # Where a row sees up to itself, only the tile on the diagonal hides anything.
        edge = min(max(rows.start, low), high) if self.visibility.causal else high
        for start, stop in ((low, edge), (edge, high)):
            for key in range(start, stop, self.width):
                yield slice(key, min(key + self.width, stop))

    def _together(self, rows: int) -> Iterator[tuple[slice, slice]]:
        """Whole examples as far as a tile holds them, else some heads of one."""
        batch, kv_heads = self.key.shape[:2]
        cells = rows * self.groups * min(self.width, self.visibility.keys)
        heads = max(1, min(kv_heads, TILE_CELLS // cells))
        examples = max(1, TILE_CELLS // (cells * kv_heads)) if heads == kv_heads else 1
        for example in range(0, batch, examples):
            for head in range(0, kv_heads, heads):
                yield slice(example, min(example + examples, batch)), slice(head, min(head + heads, kv_heads))

    def over_rows(self, tensor: Tensor, band: _Band) -> Tensor:
        """A band's view of (batch, kv_head, query * group, ...), as (batch * kv_head, rows * group, ...)."""
        part = tensor[band.examples, band.heads, band.rows.start * self.groups : band.rows.stop * self.groups]
        return part.view(-1, *part.shape[2:])

    def over_keys(self, tensor: Tensor, band: _Band) -> Tensor:
        """A band's view of (batch, kv_head, key, width), as (batch * kv_head, key, width)."""
        part = tensor[band.examples, band.heads]
        return part.view(-1, *part.shape[2:])

    def spread(self, part: Tensor, band: _Band) -> Tensor:
        """(batch or 1, head or 1, rows, keys) as (batch or 1, kv_head or 1, rows, group or 1, keys)."""
        part = part[band.examples] if part.shape[0] > 1 else part
        if part.shape[1] == 1:
            return part.unsqueeze(3)
        return part.unflatten(1, (-1, self.groups))[:, band.heads].transpose(2, 3)

    def tiles(self, band: _Band, ranges: list[slice], shift: Tensor | None, room: Tensor) -> Iterator[Tensor]:
        """Scores in units of log(2), (batch * kv_head, rows * group, keys) for each range of keys, all in `room`."""
        query, key = self.over_rows(self.query, band), self.over_keys(self.key, band).mT
        less = None if shift is None else self.over_rows(shift, band)[..., None]
        masked = bool(self.biases) or self.visibility.causal or self.visibility.open is not None
        for keys in ranges:
            shape = (query.shape[0], query.shape[1], keys.stop - keys.start)
            scores = torch.bmm(query, key[..., keys], out=room[: math.prod(shape)].view(shape))
            if self.terms.softcap is not None:
                cap = self.terms.softcap * _LOG2E
                scores.div_(cap).tanh_().mul_(cap)
            if masked:
                self._mask(scores, band, keys)
            if less is not None:
                scores.sub_(less)
            yield scores

    def _mask(self, scores: Tensor, band: _Band, keys: slice) -> None:
        rows = band.rows
        closed = self.visibility.closed(rows.start, rows.stop, keys.start, keys.stop, scores.device)
        if closed is None and not self.biases:
            return
        examples = band.examples.stop - band.examples.start
        grid = scores.view(examples, -1, rows.stop - rows.start, self.groups, scores.shape[-1])
        for bias in self.biases:
            part = (bias if bias.shape[2] == 1 else bias[:, :, rows])[..., keys]
            grid.add_(self.spread(part, band), alpha=_LOG2E)
        if closed is not None:
            grid.masked_fill_(self.spread(closed, band), _HIDDEN)

    def room(self) -> Tensor:
        """Memory for one tile."""
        return self.query.new_empty(max(TILE_CELLS, TILE_ROWS * self.groups * self.width))

    def scores_at(self, target: Target) -> Tensor:
        """Scores of each row on its target in units of log(2), (batch, kv_head, query * group); hidden where unseen."""
        batch, kv_heads, _, width = self.query.shape
        rows = torch.arange(self.visibility.rows, device=self.query.device)
        positions = target.positions(rows)
        if target.key is not None:
            scores = self.query @ self.key[:, :, min(target.key, self.visibility.keys - 1), :, None]
        else:
            keys = self.key.index_select(2, positions.clamp(0, self.visibility.keys - 1))
            scores = self.query.view(batch, kv_heads, -1, self.groups, width) @ keys[..., None]
        grid = scores.view(batch, kv_heads, -1, self.groups)
        if self.terms.softcap is not None:
            cap = self.terms.softcap * _LOG2E
            grid = (grid / cap).tanh() * cap
        for bias in self.biases:
            index = positions.clamp(0, bias.shape[3] - 1).view(1, 1, -1, 1).expand(*bias.shape[:2], -1, 1)
            at = bias.expand(-1, -1, len(rows), -1).gather(3, index)
            grid = grid + self.spread(at, self.everything)[..., 0] * _LOG2E
        seen = self.spread(self.visibility.at(positions)[..., None], self.everything)[..., 0]
        return grid.masked_fill(~seen, _HIDDEN).flatten(2)


# ------------------------------------------------------------------ passes over all tiles
@dataclass(frozen=True)
class _Sums:
    """Sums of e = 2^(score - shift), float32, (batch, kv_head, query * group) each.

    Attributes:
        rest: Of e over all keys but the first.
        dot: Of e log2(e) over all keys but the first.
        first: e of the first key.
        sink: e of the learned sink, None for none.
        context: (batch, query, num_heads, value_dim).
        shift: What was subtracted from the scores, None for nothing.
    """

    rest: Tensor
    dot: Tensor
    first: Tensor
    sink: Tensor | None
    context: Tensor
    shift: Tensor | None

    @property
    def total(self) -> Tensor:
        return self.rest + self.first


def _sums(problem: _Problem, shift: Tensor | None) -> _Sums:
    rest, dot = torch.zeros_like(problem.query[..., 0]), torch.zeros_like(problem.query[..., 0])
    context = problem.query.new_zeros(*problem.query.shape[:3], problem.value.shape[-1])
    room, other_room = problem.room(), problem.room()
    for band, ranges in problem.bands(0, problem.visibility.rows):
        value = problem.over_keys(problem.value, band)
        into_rest, into_dot, into_context = (problem.over_rows(t, band) for t in (rest, dot, context))
        for keys, scores in zip(ranges, problem.tiles(band, ranges, shift, room), strict=True):
            if keys.start == 0:
                # It is added at the end. Tiles that began behind it would be slow: nothing would be aligned.
                scores[..., 0] = _HIDDEN
            powers = torch.exp2(scores, out=other_room[: scores.numel()].view(scores.shape))
            into_rest.add_(powers.sum(dim=-1))
            into_context.add_(powers @ value[:, keys])
            into_dot.add_(scores.mul_(powers).sum(dim=-1))
    first = torch.exp2(_shifted(problem.scores_at(Target(key=0)), shift))
    sink = _sink(problem, shift)
    return _Sums(rest, dot, first, sink, _context(problem, context, first, rest, sink), shift)


def _shifted(scores: Tensor, shift: Tensor | None) -> Tensor:
    return scores if shift is None else scores - shift


def _sink(problem: _Problem, shift: Tensor | None) -> Tensor | None:
    """Powers of the learned sinks on the scale of all others, (batch, kv_head, query * group)."""
    if problem.terms.sinks is None:
        return None
    centre = (problem.query @ problem.mean.mT)[..., 0]
    sinks = problem.terms.sinks.float()[..., None] * _LOG2E
    sinks = problem.spread(sinks, problem.everything)[..., 0].expand(-1, -1, problem.visibility.rows, -1).flatten(2)
    powers = _shifted(sinks - centre, shift)
    # What is left beside a sink beyond this is zero for every purpose, but must not turn into infinity.
    return torch.exp2(powers.clamp(max=_MOST_POWER))


def _context(problem: _Problem, sums: Tensor, first: Tensor, rest: Tensor, sink: Tensor | None) -> Tensor:
    """(batch, query, num_heads, value_dim), from the sums over all keys but the first; overwrites them."""
    batch, kv_heads, length, width = sums.shape
    total = first + rest if sink is None else first + rest + sink
    seeing = first + rest > 0
    sums.view(-1, length, width).baddbmm_(first.view(-1, length, 1), problem.value[:, :, :1].flatten(0, 1))
    sums.div_(torch.where(seeing, total, 1.0)[..., None])
    if not bool(seeing.all()):
        sums = torch.where(seeing[..., None], sums, problem.value.mean(dim=2, keepdim=True))
    heads = sums.view(batch, kv_heads, -1, problem.groups, width).transpose(1, 2)
    return heads.reshape(batch, -1, kv_heads * problem.groups, width).contiguous()


def _exact(problem: _Problem, total: Tensor) -> Tensor:
    """Whether no row's sum has left the range in which float32 keeps it whole."""
    seeing = problem.visibility.seeing()
    within = (total > _LEAST) & (total < _MOST)
    if seeing is not None:
        rows = problem.spread(seeing[..., None], problem.everything)[..., 0]
        within = within | ~rows.expand(*problem.key.shape[:2], problem.visibility.rows, problem.groups).flatten(2)
    return within.all()


def _largest_scores(problem: _Problem) -> Tensor:
    """(batch, kv_head, query * group): each row's largest score in units of log(2), 0 where it sees nothing."""
    largest = problem.scores_at(Target(key=0))
    room = problem.room()
    for band, ranges in problem.bands(0, problem.visibility.rows):
        into = problem.over_rows(largest, band)
        for scores in problem.tiles(band, ranges, None, room):
            torch.maximum(into, scores.amax(dim=-1), out=into)
    return torch.where(largest > _HIDDEN / 2, largest, 0.0)


# ------------------------------------------------------------------ what is known of the weights
class StreamedWeights:
    """Softmax weights that are not there: whatever is asked of them is computed from sums, or in another pass.

    Results are float32, (batch, num_heads, query), of all rows. Where a learned sink takes part, weights sum to less
    than one, as the model's own do. Rows that see nothing have no weights.
    """

    def __init__(self, problem: _Problem, sums: _Sums) -> None:
        self._problem, self._sums = problem, sums
        sink = None if problem.terms.sinks_scale_context else sums.sink
        scale = sums.total if sink is None else sums.total + sink
        self._scale = torch.where(sums.total > 0, scale, 1.0)
        self._powers: dict[Target, Tensor] = {Target(key=0): sums.first}

    @property
    def visibility(self) -> Visibility:
        """What each row may look at."""
        return self._problem.visibility

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, num_heads, query, key)."""
        batch, kv_heads = self._problem.key.shape[:2]
        return batch, kv_heads * self._problem.groups, self.visibility.rows, self.visibility.keys

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self._scale.device

    def at(self, target: Target) -> Tensor:
        """Each row's weight on its target; 0 where it does not see it."""
        if target not in self._powers:
            self._powers[target] = torch.exp2(_shifted(self._problem.scores_at(target), self._sums.shift))
        return self._by_head(self._powers[target] / self._scale)

    def total(self, first: bool = True) -> Tensor:
        """The sum of each row's weights: 1, but for learned sinks; without the first key to full precision, too."""
        return self._by_head((self._sums.total if first else self._sums.rest) / self._scale)

    def entropy(self, first: bool = True, scaled: bool = False) -> Tensor:
        """Each row's -sum w ln w, in nats.

        Args:
            first: Count the first key; without it, rows are always scaled.
            scaled: Scale rows to sum to one: without learned sinks.
        """
        sums = self._sums
        if not first:
            return self._entropy(sums.rest, sums.dot, sums.rest)
        dot = sums.dot + torch.special.xlogy(sums.first, sums.first) * _LOG2E
        return self._entropy(sums.total, dot, sums.total if scaled else self._scale)

    def _entropy(self, total: Tensor, dot: Tensor, scale: Tensor) -> Tensor:
        scale = torch.where(total > 0, scale, 1.0)
        return self._by_head((total * scale.log() - dot / _LOG2E) / scale)

    def on(self, columns: Tensor, first: bool = True) -> Tensor:
        """The sum of each row's weights on some keys, bool (batch or 1, key); takes a pass."""
        batch, kv_heads = self._problem.key.shape[:2]
        wanted = columns.float()[:, None, :, None].expand(batch, kv_heads, -1, 1).contiguous()
        return self._pass(lambda band, keys, p: (p @ self._problem.over_keys(wanted, band)[:, keys])[..., 0], first)

    def distance(self, first: bool = True) -> Tensor:
        """Each row's sum of w |i - j|, in tokens; takes a pass."""
        positions = torch.arange(max(self.shape[2:]), device=self._scale.device)

        def reduce(band: _Band, keys: slice, powers: Tensor) -> Tensor:
            away = (positions[band.rows, None] - positions[keys]).abs().to(powers.dtype)
            return powers.mul_(away.repeat_interleave(self._problem.groups, dim=0)).sum(dim=-1)

        return self._pass(reduce, first)

    def largest(self, first: bool = True) -> Tensor:
        """Each row's largest weight; takes a pass."""
        largest = torch.zeros_like(self._scale)
        for band, _, powers in self._powers_of(first):
            into = self._problem.over_rows(largest, band)
            torch.maximum(into, powers.amax(dim=-1), out=into)
        return self._by_head(largest / self._scale)

    def rows(self, start: int, stop: int) -> Tensor:
        """The weights of some rows as they are, (batch, num_heads, stop - start, key); computed anew."""
        problem, groups = self._problem, self._problem.groups
        batch, heads, _, keys = self.shape
        weights = problem.query.new_zeros(*problem.key.shape[:2], (stop - start) * groups, keys)
        room = problem.room()
        for band, ranges in problem.bands(start, stop):
            into = weights[band.examples, band.heads, (band.rows.start - start) * groups :]
            scale = problem.over_rows(self._scale, band)[..., None]
            for part, scores in zip(ranges, problem.tiles(band, ranges, self._sums.shift, room), strict=True):
                where = into[:, :, : scores.shape[1], part]
                where.copy_(scores.exp2_().div_(scale).view(where.shape))
        return weights.unflatten(2, (-1, groups)).transpose(2, 3).reshape(batch, heads, stop - start, keys)

    def _pass(self, reduce: Callable[[_Band, slice, Tensor], Tensor], first: bool) -> Tensor:
        result = torch.zeros_like(self._scale)
        for band, keys, powers in self._powers_of(first):
            self._problem.over_rows(result, band).add_(reduce(band, keys, powers))
        return self._by_head(result / self._scale)

    def _powers_of(self, first: bool) -> Iterator[tuple[_Band, slice, Tensor]]:
        """Every tile once more, exponentiated."""
        problem, room = self._problem, self._problem.room()
        for band, ranges in problem.bands(0, self.visibility.rows):
            for keys, scores in zip(ranges, problem.tiles(band, ranges, self._sums.shift, room), strict=True):
                if keys.start == 0 and not first:
                    scores[..., 0] = _HIDDEN
                yield band, keys, scores.exp2_()

    def _by_head(self, values: Tensor) -> Tensor:
        batch, heads, rows, _ = self.shape
        return values.view(batch, -1, rows, self._problem.groups).transpose(2, 3).reshape(batch, heads, rows)
