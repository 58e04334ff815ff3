"""Which keys each row may look at, without a (query, key) matrix where none is needed.

A mask that hides the keys after each row's own is a flag, one that hides padding is a row; only what is neither, such
as a window, is kept as a matrix, and shared by all layers. Shapes: `open` is bool, (batch or 1, head or 1, query or 1,
key).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

# Cells of a boolean matrix that are looked at in one go: bounds the memory of counting.
CELLS = 1 << 22

# What stands for minus infinity: times zero it is still zero.
HIDDEN = -1e30

_Any = TypeVar("_Any")


@dataclass(frozen=True)
class Target:
    """One key a row: the same for all rows, or at a distance from each row's own position.

    Attributes:
        key: The key's position.
        offset: Key position minus row position.
    """

    key: int | None = None
    offset: int | None = None

    def __str__(self) -> str:
        return f"key {self.key}" if self.key is not None else f"the key at offset {self.offset}"

    def positions(self, rows: Tensor) -> Tensor:
        """int64, (rows,): the target of each row position; may lie outside of the keys."""
        if self.key is not None:
            return torch.full_like(rows, self.key)
        return rows + (self.offset or 0)


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which of `keys` keys each of `rows` rows may look at; equal only to itself.

    Attributes:
        causal: A row sees no key after its own position.
        open: What else hides keys, None for nothing.
    """

    rows: int
    keys: int
    causal: bool = False
    open: Tensor | None = None
    _known: dict[object, object] = field(default_factory=dict, repr=False)

    def cells(self, start: int, stop: int, device: torch.device) -> Tensor:
        """bool, (batch or 1, 1, stop - start, keys): what rows start to stop see with any head."""
        part = torch.ones(1, 1, stop - start, self.keys, dtype=torch.bool, device=device)
        if self.causal:
            part = torch.ones(stop - start, self.keys, dtype=torch.bool, device=device).tril(start)[None, None]
        if self.open is not None:
            rows = self.open if self.open.shape[2] == 1 else self.open[:, :, start:stop]
            part = part & rows.any(dim=1, keepdim=True).to(device)
        return part

    def at(self, positions: Tensor, start: int = 0) -> Tensor:
        """bool, (batch or 1, head or 1, rows): whether rows from `start` on see their own of `positions`, int64."""
        exists = (positions >= 0) & (positions < self.keys)
        if self.causal:
            exists = exists & (positions <= torch.arange(start, start + len(positions), device=positions.device))
        exists = exists[None, None]
        if self.open is None:
            return exists
        index = positions.clamp(0, self.keys - 1)
        if self.open.shape[2] == 1:
            return exists & self.open[:, :, 0].index_select(-1, index)
        rows = self.open[:, :, start : start + len(positions)]
        return exists & rows.gather(-1, index[:, None].expand(*rows.shape[:3], 1))[..., 0]

    def counts(self, device: torch.device) -> Tensor:
        """int64, (batch or 1, 1, rows): how many keys each row sees with any head; remembered."""
        if self.open is None:
            rows = torch.arange(1, self.rows + 1, device=device) if self.causal else self.keys
            return torch.as_tensor(rows, device=device).expand(1, 1, self.rows).clamp(max=self.keys)
        return self.remember("counts", lambda: self.sums(None, device))

    def seen(self, device: torch.device) -> Tensor:
        """bool, (batch or 1, 1, keys): keys that any row sees with any head."""
        found = self.cells(0, 1, device)[:, :, 0]
        for start, stop in self.chunks():
            found = found | self.cells(start, stop, device).any(dim=2)
        return found

    def sums(self, columns: Tensor | None, device: torch.device) -> Tensor:
        """(batch, 1, rows): the visible cells summed, times `columns`, (batch or 1, key), where it is given."""
        parts = []
        for start, stop in self.chunks():
            seen = self.cells(start, stop, device)
            parts.append(seen.sum(dim=-1) if columns is None else (seen * columns[:, None, None, :]).sum(dim=-1))
        return torch.cat(parts, dim=-1)

    def distances(self, device: torch.device) -> Tensor:
        """int64, (batch or 1, 1, rows): the distances of a row's position from the keys that it sees, summed."""
        parts = []
        keys = torch.arange(self.keys, device=device)
        for start, stop in self.chunks():
            away = (torch.arange(start, stop, device=device)[:, None] - keys).abs()
            parts.append((self.cells(start, stop, device) * away).sum(dim=-1))
        return torch.cat(parts, dim=-1)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The first key that any of these rows sees and one past the last; (0, 0) for none."""
        last = min(stop, self.keys) if self.causal else self.keys
        if self.open is None:
            return 0, last
        spans = self.remember("spans", self._spans)
        first, end = spans if self.open.shape[2] == 1 else (spans[0][start:stop], spans[1][start:stop])
        low, high = int(first.min()), min(int(end.max()), last)
        return (low, high) if low < high else (0, 0)

    def closed(self, start: int, stop: int, first: int, last: int, device: torch.device) -> Tensor | None:
        """bool, (batch or 1, head or 1, rows or 1, keys): what `open` hides in a tile, None where nothing."""
        if self.open is None:
            return None
        # Asked of a GPU, this would wait for it.
        ask = device.type == "cpu"
        if ask and self.remember(
            ("whole", start, stop, first, last), lambda: bool(self._tile(start, stop, first, last).all())
        ):
            return None
        return ~self._tile(start, stop, first, last)

    def later(self, start: int, stop: int, last: int, device: torch.device) -> Tensor | None:
        """float32, (1, 1, rows, keys from start to last): HIDDEN after each row's own key; None where nothing is."""
        if not self.causal or last <= start + 1:
            return None
        shape = (stop - start, last - start)
        return self.remember(
            ("later", *shape, device), lambda: torch.full(shape, HIDDEN, device=device).triu(1)[None, None]
        )

    def seeing(self) -> Tensor | None:
        """bool, (batch or 1, head or 1, rows): rows that see any key; None where all do."""
        if self.open is None:
            return None
        return self.remember("seeing", self._seeing)

    def within(self, key_valid: Tensor) -> Visibility:
        """The same with keys that are padding hidden, bool (batch, keys)."""
        if bool(key_valid.all()):
            return self
        keys = key_valid[:, None, None, :]
        return replace(self, open=keys if self.open is None else self.open & keys, _known={})

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Row ranges of a bounded number of cells."""
        batch = 1 if self.open is None else self.open.shape[0]
        step = max(1, CELLS // max(1, batch * self.keys))
        return ((start, min(start + step, self.rows)) for start in range(0, self.rows, step))

    def remember(self, what: object, make: Callable[[], _Any]) -> _Any:
        """What `make` returns, computed once."""
        if what not in self._known:
            self._known[what] = make()
        return cast(_Any, self._known[what])

    # -------------------------------------------------------------- details
    def _tile(self, start: int, stop: int, first: int, last: int) -> Tensor:
        assert self.open is not None
        rows = self.open if self.open.shape[2] == 1 else self.open[:, :, start:stop]
        return rows[..., first:last]

    def _spans(self) -> tuple[Tensor, Tensor]:
        """First open key and one past the last of each row of `open`, on the CPU: a tile's limits are read often."""
        assert self.open is not None
        firsts, ends = [], []
        for start, stop in self.chunks():
            any_open = self._tile(start, stop, 0, self.keys).flatten(0, 1).any(dim=0)
            some = any_open.any(dim=-1)
            firsts.append(torch.where(some, any_open.int().argmax(dim=-1), self.keys))
            ends.append(torch.where(some, self.keys - any_open.flip(-1).int().argmax(dim=-1), 0))
            if self.open.shape[2] == 1:
                break
        return torch.cat(firsts).cpu(), torch.cat(ends).cpu()

    def _seeing(self) -> Tensor:
        assert self.open is not None
        if self.causal:
            parts = []
            for start, stop in self.chunks():
                tile = self._tile(start, stop, 0, self.keys)
                below = torch.ones(stop - start, self.keys, dtype=torch.bool, device=tile.device).tril(start)
                parts.append((tile & below).any(dim=-1))
            return torch.cat(parts, dim=-1)
        return self.open.any(dim=-1)
