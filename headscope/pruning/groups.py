"""Which heads can leave together: query heads that share a key-value head form a group, and groups stay equally large.

A module reshapes its queries to (key-value heads, query heads each), so the number of query heads a group must be the
same in all groups that are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Groups:
    """How the heads of a module hang together.

    Attributes:
        num_heads: Query heads.
        size: Heads in one group.
        fixed: No group may vanish, as where the module's code counts on their number.
    """

    num_heads: int
    size: int
    fixed: bool = False

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.num_heads // self.size

    def left(self, removed: Iterable[int]) -> list[int]:
        """Heads left in each group."""
        gone = Counter(h // self.size for h in set(removed))
        return [self.size - gone[g] for g in range(self.count)]

    def legal(self, removed: Iterable[int]) -> bool:
        """Whether what is left is a rectangle."""
        left = self.left(removed)
        return len(set(left) if self.fixed else set(left) - {0}) <= 1

    def fillers(self, removed: Iterable[int], present: Iterable[int]) -> tuple[int, ...]:
        """The fewest heads out of `removed` that have to stay, zeroed, so that what is left is a rectangle.

        Args:
            removed: Heads that shall give nothing any more.
            present: Heads that are in the weights now; fillers are among them.
        """
        gone, here = set(removed), sorted(set(present))
        left = self.left(gone)
        need = max(left)
        stay: list[int] = []
        for group, count in enumerate(left):
            if count or self.fixed:
                own = [h for h in here if h // self.size == group and h in gone]
                stay += own[: need - count]
        return tuple(sorted(stay))

    def placeholder(self, present: Iterable[int]) -> tuple[int, ...]:
        """The heads that stay, zeroed, where all shall go: one, or one a group where no group may vanish."""
        first: dict[int, int] = {}
        for head in sorted(set(present)):
            first.setdefault(head // self.size, head)
        return tuple(first.values()) if self.fixed else tuple(sorted(first.values())[:1])

    def nearest(self, removed: Iterable[int]) -> list[tuple[tuple[int, ...], str]]:
        """Legal plans near an illegal one, which leaves some heads: each with what it does, the nearest first."""
        gone = set(removed)
        plans = [(self._whole(gone), "whole groups"), (self._even(gone), "as many from every group")]
        plans.append((self._only_whole(gone), "without the rest of the groups"))
        found: dict[tuple[int, ...], str] = {}
        for heads, what in sorted(plans, key=lambda plan: len(gone ^ plan[0])):
            if heads and len(heads) < self.num_heads and self.legal(heads):
                found.setdefault(tuple(sorted(heads)), what)
        return list(found.items())

    def _whole(self, gone: set[int]) -> set[int]:
        """Every group that loses a head loses all."""
        hit = {h // self.size for h in gone}
        return {h for h in range(self.num_heads) if h // self.size in hit}

    def _only_whole(self, gone: set[int]) -> set[int]:
        """Only the groups that lose all anyway."""
        left = self.left(gone)
        return {h for h in gone if left[h // self.size] == 0}

    def _even(self, gone: set[int]) -> set[int]:
        """Every group that is left loses as many heads as the one that loses most of them."""
        left = self.left(gone)
        keep = min(count for count in left if count)
        result = set(gone)
        for group, count in enumerate(left):
            own = [h for h in range(group * self.size, (group + 1) * self.size) if h not in gone]
            result |= set(own[: count - keep])
        return result
