"""Weights of attention from numbers alone: how many heads of which width read and write a vector of which width."""

from __future__ import annotations

from dataclasses import dataclass

from headscope.errors import InputError


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values are made from one narrow vector a token.

    Attributes:
        query_rank: Width of the vector that queries are made from, None where they are made from the token's own.
        key_rank: Width of the vector that keys and values are made from.
        rotary_dim: Numbers of a key that turn with their position; all heads share them.
    """

    query_rank: int | None
    key_rank: int
    rotary_dim: int


@dataclass(frozen=True)
class Shape:
    """What the attention of one layer is made of.

    Attributes:
        hidden_size: Width of a token's vector.
        num_heads, num_kv_heads: Query heads; key-value heads.
        head_dim, value_dim: Numbers in a query or key, and in a value, of one head.
        key_size: Width of the vectors that keys and values are made from, that of other tokens in cross-attention.
        latent: None for keys and values that are projections of the token's own vector.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    key_size: int | None = None
    latent: Latent | None = None

    @property
    def qkv_params(self) -> int:
        """Weights that make queries, keys and values, biases not counted.

        Queries take hidden_size × num_heads × head_dim, keys and values hidden_size × num_kv_heads × their width
        (Vaswani et al. 2017, section 3.2.2; Ainslie et al. 2023 for fewer key-value heads).
        """
        wide = self.num_heads * self.head_dim
        if self.latent is None:
            return self.hidden_size * wide + (self.key_size or self.hidden_size) * self._kv_width
        rank = self.latent.query_rank
        query = self.hidden_size * wide if rank is None else rank * (self.hidden_size + wide)
        down = self.hidden_size * (self.latent.key_rank + self.latent.rotary_dim)
        up = self.latent.key_rank * self.num_heads * (self.head_dim - self.latent.rotary_dim + self.value_dim)
        return query + down + up

    @property
    def o_params(self) -> int:
        """Weights of the output projection: num_heads × value_dim × hidden_size."""
        return self.num_heads * self.value_dim * self.hidden_size

    @property
    def cached(self) -> int:
        """Numbers that generation keeps for each token: keys and values, or the narrow vector with its rotary part."""
        return self._kv_width if self.latent is None else self.latent.key_rank + self.latent.rotary_dim

    @property
    def _kv_width(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.value_dim)


def shape_of_numbers(
    hidden_size: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None
) -> Shape:
    """A layer of these numbers; as many key-value heads as heads, and hidden_size / num_heads wide, unless given.

    Raises:
        InputError: They cannot be those of one layer.
    """
    if head_dim is None and hidden_size % num_heads:
        raise InputError(
            f"a hidden size of {hidden_size} cannot be shared out among {num_heads} heads", "give --head-dim, too"
        )
    kv_heads = num_kv_heads or num_heads
    if num_heads % kv_heads:
        raise InputError(
            f"{num_heads} query heads cannot share {kv_heads} key-value heads evenly",
            "the number of heads is a multiple of that of key-value heads",
        )
    wide = head_dim or hidden_size // num_heads
    return Shape(hidden_size, num_heads, kv_heads, wide, wide)


def total_of_numbers(attention: int, hidden_size: int, num_layers: int, intermediate_size: int, vocab_size: int) -> int:
    """Weights of a plain transformer: its attention, two feed-forward matrices a layer, and one embedding matrix.

    Biases, norms and positions are not counted: about a thousandth of the whole.
    """
    return attention + num_layers * 2 * hidden_size * intermediate_size + vocab_size * hidden_size
