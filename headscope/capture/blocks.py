"""Rows of attention: what every consumer sees, whichever engine made them.

`RowBlock` has weights, `StreamedRows` has what is left of them after streaming, `UniformRows` (in `uniform.py`) is
attention that spreads evenly. All answer the same questions, so that a metric is written once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from headscope.attention.streaming import StreamedWeights
from headscope.attention.survey import Survey, Wanted
from headscope.attention.visibility import Target, Visibility
from headscope.capture.key_tokens import REPEATS, SUCCESSORS, KeyTokens
from headscope.models.sites import Site

# Values of weights in one block, small enough for a core's cache in float32.
BLOCK_CELLS = 1 << 19

# What the entropy of the seed rules adds to every weight before its logarithm.
EPSILON = 1e-9
# Up to this many keys, what EPSILON takes off an entropy is less than 2e-6 and its middle is good enough.
_FEW_KEYS = 2048
# Up to this many columns are looked at one by one.
_FEW_COLUMNS = 8


@dataclass(frozen=True)
class Rows(ABC):
    """Some query rows of one layer's attention, for one batch. Sequences are padded on the right.

    Results of methods are float32 or float64, (batch, head, rows), if not said otherwise.

    Attributes:
        first_row: Position of the first row.
        valid: bool, (batch, 1 or head, rows): False for rows that never count, padding first of all.
        view: Which keys rows may look at (mask, window, padding), of all rows of the layer.
        special: bool, (batch or 1, key): keys that are special tokens.
        lengths: int64, (batch,): real query tokens a sequence.
        cross: Keys are another sequence's tokens, so positions cannot be compared.
        first_key: First key that counts; 1 where the first one is left out and rows are scaled to sum to one.
        tokens: What the keys are, where that is known; of self-attention the rows, too.
    """

    first_row: int
    valid: Tensor
    view: Visibility
    special: Tensor
    lengths: Tensor
    cross: bool
    first_key: int
    tokens: KeyTokens | None = field(default=None, kw_only=True)

    @property
    def size(self) -> int:
        """How many rows."""
        return self.valid.shape[-1]

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """Heads that the results are of."""

    @property
    def positions(self) -> Tensor:
        """int64, (rows,): the position of each row's query token."""
        return torch.arange(self.first_row, self.first_row + self.size, device=self.valid.device)

    def has(self, target: Target) -> Tensor:
        """bool, (rows,): whether the target is a key that counts."""

        def find() -> Tensor:
            key = target.positions(self.positions)
            return (key >= self.first_key) & (key < self.view.keys)

        return self._once("has", (target, self.first_key), find)

    def sees(self, target: Target) -> Tensor:
        """bool, (batch or 1, 1, rows): whether each row may look at its target."""

        def find() -> Tensor:
            return self.view.at(target.positions(self.positions), self.first_row).any(dim=1, keepdim=True)

        return self._once("sees", target, find)

    @property
    def counts(self) -> Tensor:
        """int64, (batch or 1, 1, rows): keys that count and that each row may look at."""

        def find() -> Tensor:
            counts = self.view.counts(self.valid.device)[..., self.first_row : self.first_row + self.size]
            return counts - self.sees(Target(key=0)).long() if self.first_key else counts

        return self._once("counts", self.first_key, find)

    def _once(self, what: str, of: object, find: Callable[[], Tensor]) -> Tensor:
        """What is the same for the same rows of every layer that sees the same."""
        return self.view.remember((what, of, self.first_row, self.size, self.valid.device), find)

    @abstractmethod
    def at(self, target: Target) -> Tensor:
        """Each row's weight on its target; meaningless where `has` says that there is none."""

    @abstractmethod
    def total(self) -> Tensor:
        """Each row's sum of weights."""

    @abstractmethod
    def entropy(self, scaled: bool = False) -> Tensor:
        """Each row's -sum w ln(w + 1e-9), in nats; `scaled` divides rows by their sums first."""

    @abstractmethod
    def on(self, columns: Tensor) -> Tensor:
        """Each row's sum of weights on some keys, bool (batch or 1, key)."""

    def on_kind(self, name: str) -> Tensor:
        """Each row's sum of weights on the tokens of a kind. Raises KeyError where the kinds are not known."""
        return self.on(self.kind(name))

    def kind(self, name: str) -> Tensor:
        """bool, (batch, key): the tokens of a kind. Raises KeyError where the kinds are not known."""
        if self.tokens is None:
            raise KeyError(name)
        return self.tokens.marks[name]

    def counts_of(self, name: str) -> Tensor:
        """int64, (batch, 1, rows): keys in a relation to the row, of `KeyTokens.cells`, that it may look at."""
        tokens = self._tokens()

        def find() -> Tensor:
            parts = []
            for start, stop in self.view.chunks():
                related = tokens.cells(name, slice(start, stop), slice(0, self.view.keys))[:, None]
                seen = related & self.view.cells(start, stop, related.device)
                parts.append(seen[..., self.first_key :].sum(dim=-1))
            return torch.cat(parts, dim=-1)

        total: Tensor = self.view.remember(("cells", name, tokens, self.first_key), find)
        return total[..., self.first_row : self.first_row + self.size]

    @abstractmethod
    def onto(self, name: str) -> Tensor:
        """Each row's sum of weights on the keys in a relation to it, of `KeyTokens.cells`."""

    def _tokens(self) -> KeyTokens:
        if self.tokens is None:
            raise KeyError("the tokens are not known")
        return self.tokens

    @abstractmethod
    def received(self) -> Tensor:
        """(batch, head, 2, key): each key's sum of weights over the real rows at even, and at odd positions."""

    @abstractmethod
    def distance(self) -> Tensor:
        """Each row's sum of w |i - j|, in tokens."""

    @abstractmethod
    def largest(self) -> Tensor:
        """Each row's largest weight."""

    @abstractmethod
    def blocks(self) -> Iterator[RowBlock]:
        """The same rows with their weights, computed anew where they are not kept, in blocks of bounded size."""

    @abstractmethod
    def without_first(self) -> Rows:
        """The first key left out and rows scaled to sum to one; rows with less than 1e-3 left do not count."""

    def from_weights(self, function: Callable[[RowBlock], Tensor]) -> Tensor:
        """What a function of blocks with weights gives for each row, (batch, head, rows)."""
        return torch.cat([function(block) for block in self.blocks()], dim=-1)


@dataclass(frozen=True)
class RowBlock(Rows):
    """Rows with their weights.

    Attributes:
        weights: float32, (batch, head, rows, key): softmax weights as the model computes them; zeros at padding.
    """

    weights: Tensor

    @property
    def num_heads(self) -> int:
        """Heads that the results are of."""
        return self.weights.shape[1]

    @property
    def visible(self) -> Tensor:
        """bool, (batch or 1, 1, rows, key): the keys that a row may look at."""
        return self.view.cells(self.first_row, self.first_row + self.size, self.weights.device)

    def at(self, target: Target) -> Tensor:
        """Each row's weight on its target."""
        index = target.positions(self.positions).clamp(0, self.weights.shape[-1] - 1)
        return self.weights.gather(-1, index[:, None].expand(*self.weights.shape[:3], 1))[..., 0]

    def total(self) -> Tensor:
        """Each row's sum of weights."""
        return self.weights.sum(dim=-1)

    def entropy(self, scaled: bool = False) -> Tensor:
        """Each row's -sum w ln(w + 1e-9), in nats."""
        weights = self.weights
        if scaled:
            weights = weights / self.total().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        return -(weights * (weights + EPSILON).log_()).sum(dim=-1)

    def on(self, columns: Tensor) -> Tensor:
        """Each row's sum of weights on some keys."""
        return (self.weights @ columns[:, None, :, None].to(self.weights.dtype))[..., 0]

    def onto(self, name: str) -> Tensor:
        """Each row's sum of weights on the keys in a relation to it, of `KeyTokens.cells`."""
        rows = slice(self.first_row, self.first_row + self.size)
        related = self._tokens().cells(name, rows, slice(0, self.weights.shape[-1]))
        return (self.weights * related[:, None]).sum(dim=-1)

    def received(self) -> Tensor:
        """(batch, head, 2, key): each key's sum of weights over the real rows at even, and at odd positions."""
        real = self.positions < self.lengths[:, None]
        halves = torch.stack([real & (self.positions % 2 == parity) for parity in (0, 1)], dim=1)
        # Rows of padding may hold anything, NaN too, which a product with zero would spread.
        weights = self.weights if bool(real.all()) else self.weights.masked_fill(~real[:, None, :, None], 0)
        return halves[:, None].float() @ weights

    def distance(self) -> Tensor:
        """Each row's sum of w |i - j|, in tokens."""
        keys = torch.arange(self.weights.shape[-1], device=self.weights.device)
        distance = (self.positions[:, None] - keys).abs().to(self.weights.dtype)
        return (self.weights * distance).sum(dim=-1, dtype=torch.float64)

    def largest(self) -> Tensor:
        """Each row's largest weight."""
        return self.weights.amax(dim=-1)

    def blocks(self) -> Iterator[RowBlock]:
        """Itself."""
        yield self

    def without_first(self) -> RowBlock:
        """The first column left out and rows scaled to sum to one; rows with less than 1e-3 left do not count."""
        weights = self.weights.clone()
        weights[..., 0] = 0
        left = weights.sum(dim=-1, keepdim=True)
        valid = self.valid & (left[..., 0] >= 1e-3)
        return replace(self, weights=weights / left.clamp(min=1e-3), valid=valid, first_key=1)


@dataclass(frozen=True)
class StreamedRows(Rows):
    """All rows of a layer, with what is known of their weights after streaming."""

    weights: StreamedWeights

    @property
    def num_heads(self) -> int:
        """Heads that the results are of."""
        return self.weights.shape[1]

    def at(self, target: Target) -> Tensor:
        """Each row's weight on its target."""
        return self._scaled(self.weights.at(target))

    def total(self) -> Tensor:
        """Each row's sum of weights."""
        return self._scaled(self.weights.total(first=not self.first_key))

    def entropy(self, scaled: bool = False) -> Tensor:
        """Each row's -sum w ln(w + 1e-9), in nats."""
        entropy = self.weights.entropy(first=not self.first_key, scaled=scaled)
        return (entropy - self._off_by_epsilon).clamp(min=0)

    def on(self, columns: Tensor) -> Tensor:
        """Each row's sum of weights on some keys; in one pass, or one product a key where they are few."""
        wanted = [k for k in columns.any(dim=0).nonzero()[:, 0].tolist() if k >= self.first_key]
        if len(wanted) > _FEW_COLUMNS:
            return self._scaled(self.weights.on(columns, first=not self.first_key))
        zero = self.weights.total().new_zeros(self.weights.shape[:3])
        return self._scaled(sum((self.weights.at(Target(key=k)) * columns[:, k, None, None] for k in wanted), zero))

    def on_kind(self, name: str) -> Tensor:
        """Each row's sum of weights on the tokens of a kind. Raises KeyError where the kinds are not known."""
        if self.first_key or self.tokens is None:
            return super().on_kind(name)
        return self._survey.on[name]

    def onto(self, name: str) -> Tensor:
        """Each row's sum of weights on the keys in a relation to it, of `KeyTokens.cells`."""
        if not self.first_key and not self.cross:
            return self._survey.onto[name]
        return self.from_weights(lambda block: block.onto(name))

    def received(self) -> Tensor:
        """(batch, head, 2, key): each key's sum of weights over the real rows at even, and at odd positions."""
        if self.tokens is not None and not self.first_key:
            return self._survey.received
        return torch.stack([block.received() for block in self.blocks()]).sum(dim=0)

    @cached_property
    def _survey(self) -> Survey:
        """What a pass tells of all kinds of tokens and relations at once."""
        return self.weights.survey(self.wanted)

    @cached_property
    def wanted(self) -> Wanted:
        """What that pass has to look at, where the tokens are known."""
        tokens = self._tokens()
        related = {} if self.cross else {name: partial(tokens.listed, name) for name in (REPEATS, SUCCESSORS)}
        return Wanted(tokens.marks, related, self.positions < self.lengths[:, None])

    def distance(self) -> Tensor:
        """Each row's sum of w |i - j|, in tokens."""
        return self._scaled(self.weights.distance(first=not self.first_key))

    def largest(self) -> Tensor:
        """Each row's largest weight."""
        if self.tokens is not None and not self.first_key:
            return self._survey.largest
        return self._scaled(self.weights.largest(first=not self.first_key))

    def blocks(self) -> Iterator[RowBlock]:
        """The rows with their weights, computed anew."""
        batch, heads, rows, keys = self.weights.shape
        step = max(1, BLOCK_CELLS // max(1, batch * heads * keys))
        facts = {name: getattr(self, name) for name in ("view", "special", "lengths", "cross", "tokens")}
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            block = RowBlock(
                start, self.valid[..., start:stop], **facts, first_key=0, weights=self.weights.rows(range(start, stop))
            )
            yield block.without_first() if self.first_key else block

    def without_first(self) -> StreamedRows:
        """The first key left out and rows scaled to sum to one; rows with less than 1e-3 left do not count."""
        return replace(self, valid=self.valid & (self.weights.total(first=False) >= 1e-3), first_key=1)

    def _scaled(self, values: Tensor) -> Tensor:
        """Divided by what is left of the rows' weights, where the first key is left out."""
        return values / self._left if self.first_key else values

    @cached_property
    def _left(self) -> Tensor:
        return self.weights.total(first=False).clamp(min=1e-3)

    @cached_property
    def _off_by_epsilon(self) -> Tensor:
        """sum w ln(1 + 1e-9 / w), 0 to 1e-9 a visible key: the middle for few keys, of a sample of rows for many."""
        if self.view.keys <= _FEW_KEYS:
            return self._once("off", self.first_key, lambda: self.counts.float() * (EPSILON / 2))
        return self.weights.off_by(EPSILON)


class Consumer(Protocol):
    """What an engine feeds. A consumer must not keep or change the rows' tensors; it may keep sums or copies."""

    def rows(self, site: Site, rows: Rows) -> None:
        """Take the next rows of `site`; they come in order, all of one batch before the next."""
