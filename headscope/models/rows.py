"""Which rows of a weight belong to which head: one description for every layout, separate and fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.errors import ModelError
from headscope.models.layouts import Arrangement, Role


@dataclass(frozen=True)
class HeadShape:
    """How many heads an attention module has and how wide they are.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key-value heads; consecutive query heads share one.
        head_dim: Numbers in a query or key of one head.
        value_dim: Numbers in a value of one head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int

    def heads_of(self, role: Role) -> int:
        """How many heads a role has: as many as queries, or as many as keys."""
        return self.num_kv_heads if role in ("key", "value") else self.num_heads

    def width_of(self, role: Role) -> int:
        """How many rows one head of a role has."""
        return self.value_dim if role in ("value", "output") else self.head_dim


@dataclass(frozen=True)
class Rows:
    """Where the heads of one role lie along a weight's axis: in each of `runs` equal runs, its share from `start` on.

    Attributes:
        heads, dim: How many heads, and rows each.
        runs: Number of equal runs.
        length: Rows in one run, other roles' rows included.
        start: The role's first row within a run.
    """

    heads: int
    dim: int
    runs: int
    length: int
    start: int = 0

    @staticmethod
    def alone(heads: int, dim: int) -> Rows:
        """The rows of a weight that holds one role and nothing else, head after head."""
        return Rows(heads, dim, 1, heads * dim)

    @property
    def total(self) -> int:
        """Rows of the whole weight."""
        return self.runs * self.length

    def take(self, matrix: Tensor) -> Tensor:
        """(total, features) → (heads, dim, features), sharing memory with `matrix` where its strides allow."""
        return self._own(matrix).reshape(self.heads, self.dim, matrix.shape[1])

    def put(self, matrix: Tensor, values: Tensor) -> None:
        """Write (heads, dim, features) into their rows of `matrix`, (total, features), in place."""
        own = self._own(matrix)
        own.copy_(values.reshape(own.shape))

    def index(self) -> Tensor:
        """int64, (heads, dim): the row of the weight that each row of each head is."""
        return self.take(torch.arange(self.total, device="cpu")[:, None])[..., 0]

    def index_of(self, places: Sequence[int]) -> Tensor:
        """int64, (len(places) * dim,): the rows of some of the heads, ascending.

        Ascending rows keep the arrangement: what is left is laid out as the whole was.
        """
        return self.index()[list(places)].flatten().sort().values

    def _own(self, matrix: Tensor) -> Tensor:
        """(runs, rows of the role in a run, features): a view."""
        end = self.start + self.heads // self.runs * self.dim
        return matrix.view(self.runs, self.length, matrix.shape[1])[:, self.start : end]


def fused_rows(arrangement: Arrangement, shape: HeadShape) -> dict[Role, Rows]:
    """The rows of every role in a fused weight.

    Raises:
        ModelError: The heads cannot be shared out evenly among the runs.
    """
    runs = shape.num_kv_heads if arrangement.runs == "kv_heads" else arrangement.runs
    shares = {role: shape.heads_of(role) * shape.width_of(role) for role in arrangement.order}
    if any(shape.heads_of(role) % runs for role in shares):
        raise ModelError(
            f"{shape.num_heads} heads with {shape.num_kv_heads} key-value heads do not make {runs} equal runs",
            "is the config.json the one of these weights?",
        )
    length = sum(shares.values()) // runs
    rows: dict[Role, Rows] = {}
    start = 0
    for role, size in shares.items():
        rows[role] = Rows(shape.heads_of(role), shape.width_of(role), runs, length, start)
        start += size // runs
    return rows
