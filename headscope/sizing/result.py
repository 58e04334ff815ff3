"""What a stack of attention layers takes in parameters and bytes: plain numbers, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SIZE_SCHEMA = "headscope/size@1"

# Scores in the largest tile that streaming computes at once on a CPU, in float32 (`headscope.attention.tiles`).
TILE_CELLS = 1 << 22
FLOAT32 = 4


@dataclass(frozen=True)
class LayerSize:
    """One attention computation of a forward pass.

    Attributes:
        layer: The model's own layer number.
        num_heads, num_kv_heads: Heads that are left, where some were removed; None where it cannot be told.
        head_dim, value_dim: Numbers in a query or key, and in a value, of one head.
        qkv_params, o_params: Weights, biases not counted.
        repeated: The same weights served an earlier layer.
        cached: Numbers kept for each token that was read, 0 where none are, None where it cannot be told.
        window: Tokens that the cache keeps at most, None for all.
    """

    layer: int
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    value_dim: int | None
    qkv_params: int
    o_params: int
    repeated: bool = False
    cached: int | None = 0
    window: int | None = None


@dataclass(frozen=True)
class StackSize:
    """One stack of attention layers: a row of the table. Bytes are for `batch_size` sequences, the cache's for one.

    Attributes:
        name: The model's, as the user named it.
        stack: The stack's name, `self` for the only one.
        kind: The model's type and class, empty for numbers without a model.
        hidden_size: Width of a token's vector where queries are made, None where it cannot be told.
        num_layers: Layers of the model; a hybrid one has fewer with attention.
        layers: Those with attention.
        total_params: Parameters of the whole model, tied ones once; None where it cannot be told.
        length: Tokens that look; None where it cannot be told.
        key_length: Tokens that are looked at.
        dtype, dtype_bytes: Of weights, matrices and cache.
        keeps_cache: Whether generation keeps keys and values.
        cross: Keys come from another sequence, so the cache grows with that.
        source: `projections` (shapes of the model's own), `config` or `numbers` (formulas on these).
        notes: What the numbers mean here, one line each.
    """

    name: str
    stack: str
    kind: str
    hidden_size: int | None
    num_layers: int
    layers: tuple[LayerSize, ...]
    total_params: int | None
    length: int | None
    key_length: int | None
    dtype: str
    dtype_bytes: int
    batch_size: int
    keeps_cache: bool
    cross: bool
    source: str
    notes: tuple[str, ...] = ()

    @property
    def num_heads(self) -> int | None:
        """Query heads a layer, None where layers differ."""
        return _same([layer.num_heads for layer in self.layers])

    @property
    def num_kv_heads(self) -> int | None:
        """Key-value heads a layer, None where layers differ."""
        return _same([layer.num_kv_heads for layer in self.layers])

    @property
    def head_dim(self) -> int | None:
        """Numbers in a query of one head, None where layers differ."""
        return _same([layer.head_dim for layer in self.layers])

    @property
    def qkv_params_per_layer(self) -> int | None:
        """Weights that make queries, keys and values in a layer, None where layers differ."""
        return _same([layer.qkv_params for layer in self.layers])

    @property
    def o_params_per_layer(self) -> int | None:
        """Weights of a layer's output projection, None where layers differ."""
        return _same([layer.o_params for layer in self.layers])

    @property
    def attention_params(self) -> int:
        """Weights of all projections of the stack; what layers share is counted once."""
        return sum(layer.qkv_params + layer.o_params for layer in self.layers if not layer.repeated)

    @property
    def attention_share(self) -> float | None:
        """The stack's part of all parameters of the model, 0 to 1."""
        return self.attention_params / self.total_params if self.total_params else None

    @property
    def attention_matrix_bytes(self) -> int | None:
        """Bytes of all attention matrices of one forward pass: the sum over layers of heads × length × key_length."""
        return _sum([self._matrix_bytes(layer) for layer in self.layers])

    @property
    def layer_matrix_bytes(self) -> int | None:
        """Bytes of one layer's matrices, of the layer that has most heads."""
        known = [size for layer in self.layers if (size := self._matrix_bytes(layer)) is not None]
        return max(known, default=None)

    @property
    def streaming_bytes(self) -> int | None:
        """Bytes of scores that streaming holds at once on a CPU: one tile, float32, at most 16 MiB at any length."""
        largest = self.layer_matrix_bytes
        return None if largest is None else FLOAT32 * min(largest // self.dtype_bytes, TILE_CELLS)

    @property
    def kv_cache_bytes_per_token(self) -> int | None:
        """Bytes that generation keeps for each token of one sequence, windows not reached; None for no cache."""
        if not self.keeps_cache:
            return None
        kept = _sum([layer.cached for layer in self.layers])
        return None if kept is None else kept * self.dtype_bytes

    @property
    def kv_cache_bytes(self) -> int | None:
        """Bytes of the cache when all tokens are read; windows bound their layers'."""
        tokens = self.key_length
        if self.kv_cache_bytes_per_token is None or tokens is None:
            return None
        numbers = (layer.cached * min(tokens, layer.window or tokens) for layer in self.layers if layer.cached)
        return self.batch_size * self.dtype_bytes * sum(numbers)

    @property
    def kv_cache_share(self) -> float | None:
        """The cache a token against one in which every query head of every layer keeps a key and a value of its own."""
        full = _sum([_full(layer) for layer in self.layers])
        kept = self.kv_cache_bytes_per_token
        return kept / (self.dtype_bytes * full) if kept is not None and full else None

    def _matrix_bytes(self, layer: LayerSize) -> int | None:
        if layer.num_heads is None or self.length is None or self.key_length is None:
            return None
        return self.batch_size * layer.num_heads * self.length * self.key_length * self.dtype_bytes

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON has it; None where something cannot be told."""
        return {
            "name": self.name,
            "stack": self.stack,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "attention_layers": len(self.layers),
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "qkv_params_per_layer": self.qkv_params_per_layer,
            "o_params_per_layer": self.o_params_per_layer,
            "attention_params": self.attention_params,
            "total_params": self.total_params,
            "attention_share": self.attention_share,
            "length": self.length,
            "key_length": self.key_length,
            "batch_size": self.batch_size,
            "dtype": self.dtype,
            "attention_matrix_bytes": self.attention_matrix_bytes,
            "layer_matrix_bytes": self.layer_matrix_bytes,
            "streaming_bytes": self.streaming_bytes,
            "kv_cache_bytes_per_token": self.kv_cache_bytes_per_token,
            "kv_cache_bytes": self.kv_cache_bytes,
            "kv_cache_share": self.kv_cache_share,
            "source": self.source,
            "kind": self.kind,
            "layers": [
                {"layer": x.layer, "num_heads": x.num_heads, "num_kv_heads": x.num_kv_heads, "window": x.window}
                for x in self.layers
            ],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Sizes:
    """The rows, in the order in which models were named; a model has one a stack."""

    models: tuple[StackSize, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """What `--format json` prints."""
        return {
            "schema": SIZE_SCHEMA,
            "models": [row.to_dict() for row in self.models],
            "versions": dict(self.versions),
        }


def window_note(windows: Sequence[int | None]) -> str:
    """How many layers keep how many tokens at most, from each layer's window."""
    bounded = [window for window in windows if window]
    most = " or ".join(f"{window:,}" for window in sorted(set(bounded)))
    return f"{len(bounded)} of {len(windows)} layers keep no more than {most} tokens"


def _full(layer: LayerSize) -> int | None:
    if layer.num_heads is None or layer.head_dim is None or layer.value_dim is None:
        return None
    return layer.num_heads * (layer.head_dim + layer.value_dim)


def _same(values: Sequence[int | None]) -> int | None:
    return values[0] if len(set(values)) == 1 else None


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
