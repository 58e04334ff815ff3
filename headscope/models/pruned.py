"""What is left of an attention module's heads after some were removed, in the numbers of the original model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

_ATTRIBUTE = "headscope_heads"


@dataclass(frozen=True)
class HeadState:
    """The heads of one attention module, original and left.

    Attributes:
        num_heads, num_kv_heads: Of the original model.
        head_dim, value_dim: Numbers in a query or key, and in a value, of one head. Never change.
        removed: Query heads that are not in the weights any more, ascending.
        zeroed: Query heads that are still in the weights, but whose slices of the output projection are zero: they
            keep groups of query heads equally large, or a layer from being empty. Ascending.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    removed: tuple[int, ...] = ()
    zeroed: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """Query heads that shared one key-value head in the original model."""
        return self.num_heads // self.num_kv_heads

    @property
    def kept(self) -> tuple[int, ...]:
        """Query heads in the weights, zeroed ones included, in the order of the weights."""
        gone = set(self.removed)
        return tuple(h for h in range(self.num_heads) if h not in gone)

    @property
    def kept_kv(self) -> tuple[int, ...]:
        """Key-value heads in the weights, in their order there."""
        return tuple(sorted({h // self.group for h in self.kept}))

    @property
    def gone(self) -> tuple[int, ...]:
        """Heads that give nothing any more: removed or zeroed."""
        return tuple(sorted({*self.removed, *self.zeroed}))

    def places(self, heads: tuple[int, ...]) -> list[int]:
        """Where heads lie among those in the weights. Raises ValueError for one that was removed."""
        return [self.kept.index(h) for h in heads]

    def kv_places(self, kv_heads: tuple[int, ...]) -> list[int]:
        """Where key-value heads lie among those in the weights."""
        return [self.kept_kv.index(h) for h in kv_heads]


def pruned_state(module: nn.Module) -> HeadState | None:
    """What was removed from an attention module, None where nothing was."""
    found = getattr(module, _ATTRIBUTE, None)
    return found if isinstance(found, HeadState) else None


def head_numbers(module: nn.Module, count: int) -> tuple[int, ...]:
    """The original numbers of a module's `count` heads, in the order of its weights."""
    state = pruned_state(module)
    return tuple(range(count)) if state is None or len(state.kept) != count else state.kept


def set_pruned_state(module: nn.Module, state: HeadState) -> None:
    """Write down what was removed. The state travels with the module when it is copied or pickled."""
    setattr(module, _ATTRIBUTE, state)
