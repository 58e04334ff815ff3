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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from headscope.attention.survey import Survey, Surveying, Wanted
from headscope.attention.tiles import LOG2E, Band, Problem, Terms
from headscope.attention.visibility import HIDDEN, Target, Visibility

# Between these a sum of powers of two is exact: nothing in it overflowed, nor its products with values up to one, nor
# those with its terms' logarithms, and what underflowed does not show.
_LEAST, _MOST = 1e-25, 1e36
_MOST_POWER = 99.0
# Rows whose weights are looked at for what changes little from row to row.
_SAMPLED_ROWS = 16


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
        survey: What was found on the way, if anything was wanted.
    """

    rest: Tensor
    dot: Tensor
    first: Tensor
    sink: Tensor | None
    context: Tensor
    shift: Tensor | None
    survey: Survey | None

    @property
    def total(self) -> Tensor:
        return self.rest + self.first


def _summed(problem: Problem, shift: Tensor | None, wanted: Wanted | None) -> _Sums:
    rest, dot = torch.zeros_like(problem.query[..., 0]), torch.zeros_like(problem.query[..., 0])
    context = problem.query.new_zeros(*problem.query.shape[:3], problem.value.shape[-1])
    first = torch.exp2(_shifted(problem.scores_at(Target(key=0)), shift))
    sink = _sink(problem, shift)
    surveying = None if wanted is None else Surveying(problem, wanted)

    room, other_room = problem.room(), problem.room(1)
    for band, ranges in problem.bands(0, problem.visibility.rows):
        value = problem.over_keys(problem.value, band)
        into_rest, into_dot, into_context = (problem.over_rows(t, band) for t in (rest, dot, context))
        for keys, scores in zip(ranges, problem.tiles(band, ranges, shift, room), strict=True):
            if keys.start == 0:
                # It is added at the end. Tiles that began behind it would be slow: nothing would be aligned.
                scores[..., 0] = HIDDEN
            powers = torch.exp2(scores, out=other_room[: scores.numel()].view(scores.shape))
            into_rest.add_(powers.sum(dim=-1))
            into_context.baddbmm_(powers, value[:, keys])
            into_dot.add_(scores.mul_(powers).sum(dim=-1))
            if surveying is not None:
                if keys.start == 0:
                    powers[..., 0] = problem.over_rows(first, band)
                surveying.add(band, keys, powers)
        if surveying is not None:
            of_band = None if sink is None else problem.over_rows(sink, band)
            scale = _scale(problem, problem.over_rows(first, band), into_rest, of_band)
            if len(ranges) == 1:
                surveying.receive(band, ranges[0], powers, scale)
            else:
                # Now that the sums are known, each tile once more.
                for keys, scores in zip(ranges, problem.tiles(band, ranges, shift, room), strict=True):
                    surveying.receive(band, keys, scores.exp2_(), scale)
    survey = None if surveying is None else surveying.finish(_scale(problem, first, rest, sink))
    return _Sums(rest, dot, first, sink, _context(problem, context, first, rest, sink), shift, survey)


def _scale(problem: Problem, first: Tensor, rest: Tensor, sink: Tensor | None) -> Tensor:
    """What powers have to be divided by; 1 where there are none."""
    total = rest + first
    scale = total if sink is None or problem.terms.sinks_scale_context else total + sink
    return torch.where(total == 0, 1.0, scale)


def _shifted(scores: Tensor, shift: Tensor | None) -> Tensor:
    return scores if shift is None else scores - shift


def _sink(problem: Problem, shift: Tensor | None) -> Tensor | None:
    """Powers of the learned sinks on the scale of all others, (batch, kv_head, query * group)."""
    if problem.terms.sinks is None:
        return None
    centre = (problem.query @ problem.mean.mT)[..., 0]
    sinks = problem.terms.sinks.float()[..., None] * LOG2E
    sinks = problem.spread(sinks, problem.everything)[..., 0].expand(-1, -1, problem.visibility.rows, -1).flatten(2)
    powers = _shifted(sinks - centre, shift)
    # What is left beside a sink beyond this is zero for every purpose, but must not turn into infinity.
    return torch.exp2(powers.clamp(max=_MOST_POWER))


def _context(problem: Problem, sums: Tensor, first: Tensor, rest: Tensor, sink: Tensor | None) -> Tensor:
    """(batch, query, num_heads, value_dim), from the sums over all keys but the first; overwrites them."""
    batch, kv_heads, length, width = sums.shape
    total = first + rest if sink is None else first + rest + sink
    # Not where a sum is more than nothing: that would hide sums that are no numbers.
    blind = first + rest == 0
    sums.view(-1, length, width).baddbmm_(first.view(-1, length, 1), problem.value[:, :, :1].flatten(0, 1))
    sums.div_(torch.where(blind, 1.0, total)[..., None])
    if sink is None and bool(blind.any()):
        sums = torch.where(blind[..., None], problem.value.mean(dim=2, keepdim=True), sums)
    heads = sums.view(batch, kv_heads, -1, problem.groups, width).transpose(1, 2)
    return heads.reshape(batch, -1, kv_heads * problem.groups, width).contiguous()


def _exact(problem: Problem, total: Tensor) -> Tensor:
    """Whether no row's sum has left the range in which float32 keeps it whole."""
    seeing = problem.visibility.seeing()
    least, most = problem.value.aminmax()
    within = (total > _LEAST) & (total < _MOST / torch.maximum(most, -least).clamp(min=1))
    if seeing is not None:
        rows = problem.spread(seeing[..., None], problem.everything)[..., 0]
        within = within | ~rows.expand(*problem.key.shape[:2], problem.visibility.rows, problem.groups).flatten(2)
    return within.all()


def _largest_scores(problem: Problem) -> Tensor:
    """(batch, kv_head, query * group): each row's largest score in units of log(2), 0 where it sees nothing."""
    largest = problem.scores_at(Target(key=0))
    room = problem.room()
    for band, ranges in problem.bands(0, problem.visibility.rows):
        into = problem.over_rows(largest, band)
        for scores in problem.tiles(band, ranges, None, room):
            torch.maximum(into, scores.amax(dim=-1), out=into)
    return torch.where(largest > HIDDEN / 2, largest, 0.0)


# ------------------------------------------------------------------ what is known of the weights
class StreamedWeights:
    """Softmax weights that are not there: whatever is asked of them is computed from sums, or in another pass.

    Results are float32, (batch, num_heads, query), of all rows. Where a learned sink takes part, weights sum to less
    than one, as the model's own do. Rows that see nothing have no weights. Nothing is computed before it is asked for.

    Args:
        query: (batch, num_heads, query, head_dim), positions applied.
        key: (batch, num_kv_heads, key, head_dim); num_heads is a multiple of num_kv_heads.
        value: (batch, num_kv_heads, key, value_dim).
        visibility: What each row may look at.
        terms: Scaling and the like.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, terms: Terms) -> None:
        self._problem, self._dtype = Problem.of(query, key, value, visibility, terms), value.dtype
        self._wanted: Wanted | None = None
        self._powers: dict[Target, Tensor] = {}
        self._off: dict[float, Tensor] = {}

    def expect(self, wanted: Wanted) -> None:
        """Have a survey made by the pass that is made anyway; if there was one, by another."""
        self._wanted = wanted
        for known in ("_sums", "_scale"):
            vars(self).pop(known, None)

    def survey(self, wanted: Wanted) -> Survey:
        """Each row's largest weight, sums by kind of key and over cells, what each key receives."""
        if self._wanted is not wanted:
            self.expect(wanted)
        assert self._sums.survey is not None
        return self._sums.survey

    @cached_property
    def _sums(self) -> _Sums:
        problem = self._problem
        sums = _summed(problem, None, self._wanted)
        if not bool(_exact(problem, sums.total)):
            sums = _summed(problem, _largest_scores(problem), self._wanted)
        self._powers[Target(key=0)] = sums.first
        return sums

    @cached_property
    def _scale(self) -> Tensor:
        return _scale(self._problem, self._sums.first, self._sums.rest, self._sums.sink)

    @property
    def context(self) -> Tensor:
        """(batch, query, num_heads, value_dim), in the values' dtype.

        A row that sees nothing gets the mean of all values, as it does where the most negative number is added to all
        of its scores; with a learned sink, nothing.
        """
        return self._sums.context.to(self._dtype)

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
        return self._problem.query.device

    def at(self, target: Target) -> Tensor:
        """Each row's weight on its target; 0 where it does not see it."""
        sums = self._sums
        if target not in self._powers:
            self._powers[target] = torch.exp2(_shifted(self._problem.scores_at(target), sums.shift))
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
        dot = sums.dot + torch.special.xlogy(sums.first, sums.first) * LOG2E
        return self._entropy(sums.total, dot, sums.total if scaled else self._scale)

    def _entropy(self, total: Tensor, dot: Tensor, scale: Tensor) -> Tensor:
        scale = torch.where(total > 0, scale, 1.0)
        return self._by_head((total * scale.log() - dot / LOG2E) / scale)

    def on(self, columns: Tensor, first: bool = True) -> Tensor:
        """The sum of each row's weights on some keys, bool (batch or 1, key); takes a pass."""
        batch, kv_heads = self._problem.key.shape[:2]
        wanted = columns.float()[:, None, :, None].expand(batch, kv_heads, -1, 1).contiguous()
        return self._pass(lambda band, keys, p: (p @ self._problem.over_keys(wanted, band)[:, keys])[..., 0], first)

    def distance(self, first: bool = True) -> Tensor:
        """Each row's sum of w |i - j|, in tokens; takes a pass."""
        positions = torch.arange(max(self.shape[2:]), device=self._scale.device)

        def reduce(band: Band, keys: slice, powers: Tensor) -> Tensor:
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

    def rows(self, rows: Sequence[int]) -> Tensor:
        """The weights of some rows as they are, (batch, num_heads, len(rows), key); computed anew."""
        problem, groups, rows = self._problem, self._problem.groups, list(rows)
        places = [row * groups + head for row in rows for head in range(groups)]
        terms = problem.terms
        few = replace(
            problem,
            query=problem.query[:, :, places].contiguous(),
            visibility=Visibility(len(rows), self.shape[3], open=self._seen_by(rows)),
            terms=replace(terms, biases=tuple(b if b.shape[2] == 1 else b[:, :, rows] for b in terms.biases)),
        )
        weights = few.query.new_zeros(*few.query.shape[:3], self.shape[3])
        room, shift = few.room(), self._sums.shift
        shift = None if shift is None else shift[..., places].contiguous()
        for band, ranges in few.bands(0, len(rows)):
            into = few.over_rows(weights, band)
            for keys, scores in zip(ranges, few.tiles(band, ranges, shift, room), strict=True):
                into[..., keys] = scores.exp2_()
        weights.div_(self._scale[..., places, None])
        by_head = weights.view(*weights.shape[:2], len(rows), groups, -1).transpose(2, 3)
        return by_head.reshape(*self.shape[:2], len(rows), -1)

    def off_by(self, epsilon: float) -> Tensor:
        """Each row's sum of w ln(1 + epsilon / w), from a sample of rows and a line between any two; remembered."""
        if epsilon not in self._off:
            count = self.visibility.rows
            weights = self.rows(torch.linspace(0, count - 1, _SAMPLED_ROWS).round().long().tolist())
            off = (weights * (epsilon / weights.clamp(min=1e-30)).log1p_()).sum(dim=-1)
            self._off[epsilon] = functional.interpolate(off, count, mode="linear", align_corners=True)
        return self._off[epsilon]

    def _seen_by(self, rows: list[int]) -> Tensor:
        """bool, (batch or 1, head or 1, len(rows), key)."""
        view = self.visibility
        seen = torch.ones(1, 1, len(rows), view.keys, dtype=torch.bool, device=self.device)
        if view.causal:
            seen = torch.arange(view.keys, device=self.device) <= torch.tensor(rows, device=self.device)[:, None]
            seen = seen[None, None]
        if view.open is None:
            return seen
        return seen & (view.open if view.open.shape[2] == 1 else view.open[:, :, rows])

    def _pass(self, reduce: Callable[[Band, slice, Tensor], Tensor], first: bool) -> Tensor:
        result = torch.zeros_like(self._scale)
        for band, keys, powers in self._powers_of(first):
            self._problem.over_rows(result, band).add_(reduce(band, keys, powers))
        return self._by_head(result / self._scale)

    def _powers_of(self, first: bool) -> Iterator[tuple[Band, slice, Tensor]]:
        """Every tile once more, exponentiated."""
        problem, room = self._problem, self._problem.room()
        for band, ranges in problem.bands(0, self.visibility.rows):
            for keys, scores in zip(ranges, problem.tiles(band, ranges, self._sums.shift, room), strict=True):
                if keys.start == 0 and not first:
                    scores[..., 0] = HIDDEN
                yield band, keys, scores.exp2_()

    def _by_head(self, values: Tensor) -> Tensor:
        batch, heads, rows, _ = self.shape
        return values.view(batch, -1, rows, self._problem.groups).transpose(2, 3).reshape(batch, heads, rows)
