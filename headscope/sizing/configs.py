"""What a configuration alone says of attention, for models that cannot be built without values: names and formulas.

Recognised by the names that a configuration has. Where it does not say something that weights would show, such as a
gate beside the queries, the formulas do not know it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from headscope.models.head_counts import NUM_HEADS
from headscope.sizing.formulas import Latent, Shape

_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_heads")
_HEAD_DIM = ("head_dim", "d_kv", "d_head")
_WINDOWS = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}
_TOWERS = {"vis": "vision", "image": "vision", "audio": "audio", "speech": "audio", "text": "text"}


@dataclass(frozen=True)
class ConfigStack:
    """A stack of attention layers as a configuration states it.

    Attributes:
        stack: Its name.
        layers: The numbers of those layers that have attention.
        num_layers: All layers.
        shapes: Of each of `layers`.
        windows: Tokens that each layer's cache keeps at most, None for all.
        causal: Whether it generates with a cache, as far as the configuration says.
        limit: Tokens that it reads at most, None where it does not say.
    """

    stack: str
    layers: tuple[int, ...]
    num_layers: int
    shapes: tuple[Shape, ...]
    windows: tuple[int | None, ...]
    causal: bool
    limit: int | None


def config_stacks(config: Any) -> list[ConfigStack]:
    """The stacks that a configuration states; none where it says too little."""
    if getattr(config, "is_encoder_decoder", False):
        return list(_both_sides(config))
    inner = {name: _holder(value) for name, value in vars(config).items() if name.endswith("_config")}
    towers = {name: found for name, value in inner.items() if (found := _stack(value, _tower(name))) is not None}
    if not towers or "text_config" not in towers:
        own = _stack(config, "text" if towers else "self")
        return [*towers.values(), *([own] if own else [])]
    return list(towers.values())


# ------------------------------------------------------------------ one stack
def _stack(config: Any, name: str) -> ConfigStack | None:
    depth = _number(config, _LAYERS)
    if depth is None:
        return None
    each = (_number(config, ("num_hidden_layers",)) and getattr(config, "per_layer_config", None)) or [config] * depth
    kinds = _kinds(config, depth)
    layers = tuple(layer for layer, kind in enumerate(kinds[: len(each)]) if _attends(kind))
    shapes = tuple(shape for layer in layers if (shape := _shape(each[layer])) is not None)
    if not layers or len(shapes) < len(layers):
        return None
    windows = tuple(_window(each[layer], kinds[layer]) for layer in layers)
    limit = _number(config, ("max_position_embeddings",))
    return ConfigStack(name, layers, depth, shapes, windows, _generates(config), limit)


def _shape(config: Any, heads_names: Sequence[str] = NUM_HEADS) -> Shape | None:
    hidden, heads = _number(config, _HIDDEN), _number(config, heads_names)
    if hidden is None or heads is None:
        return None
    latent, rotary = _number(config, ("kv_lora_rank",)), _number(config, ("qk_rope_head_dim",))
    if latent is not None and rotary is not None:
        wide, value = (_number(config, ("qk_nope_head_dim",)) or 0) + rotary, _number(config, ("v_head_dim",))
        ranks = Latent(_number(config, ("q_lora_rank",)), latent, rotary)
        return Shape(hidden, heads, heads, wide, value or wide, latent=ranks)
    wide = _number(config, _HEAD_DIM) or hidden // heads
    return Shape(hidden, heads, _kv_heads(config, heads), wide, wide)


def _kv_heads(config: Any, heads: int) -> int:
    """Key-value heads: one under multi-query attention, else as many as said, else as many as query heads."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    if getattr(config, "new_decoder_architecture", None) is False:  # its number then only means something with it
        return heads
    return _number(config, _KV_HEADS) or heads


def _kinds(config: Any, depth: int) -> list[str]:
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list | tuple) and len(kinds) == depth:
            return [str(kind) for kind in kinds]
    kind = next((k for k, name in _WINDOWS.items() if _number(config, (name,))), "full")
    return [f"{kind}_attention"] * depth


def _attends(kind: str) -> bool:
    return ("attention" in kind and "linear" not in kind) or "hybrid" in kind


def _window(config: Any, kind: str) -> int | None:
    return next((_number(config, (name,)) for piece, name in _WINDOWS.items() if piece in kind), None)


def _generates(config: Any) -> bool:
    """Configurations of decoders speak of a cache; those of encoders that could be decoders say which they are."""
    marks = (getattr(config, "is_decoder", None), getattr(config, "is_causal", None))
    return bool(getattr(config, "use_cache", False)) and False not in marks


# ------------------------------------------------------------------ encoder and decoder
def _both_sides(config: Any) -> Iterator[ConfigStack]:
    encoder, decoder = _side(config, "encoder"), _side(config, "decoder")
    if encoder is not None:
        yield encoder
    if decoder is not None:
        yield decoder
        # Every layer of a decoder has both kinds of attention, mostly of one shape.
        yield replace(decoder, stack="cross", limit=None)


def _side(config: Any, side: str) -> ConfigStack | None:
    """One side of an encoder-decoder, whose config speaks of both or holds one for each."""
    inner = _holder(getattr(config, side, None))
    if inner is not None:
        found = _stack(inner, side)
        return found and replace(found, causal=side == "decoder" and found.causal)
    shape = _shape(config, (f"{side}_attention_heads", *NUM_HEADS))
    depth = _number(config, (f"{side}_layers", f"num_{side}_layers", *_LAYERS))
    if shape is None or depth is None:
        return None
    limit = _number(config, ("max_source_positions" if side == "encoder" else "max_target_positions",))
    limit = limit or _number(config, ("max_position_embeddings",))
    generates = side == "decoder" and bool(getattr(config, "use_cache", False))
    return ConfigStack(side, tuple(range(depth)), depth, (shape,) * depth, (None,) * depth, generates, limit)


def _tower(name: str) -> str:
    return next((tower for piece, tower in _TOWERS.items() if piece in name), name.removesuffix("_config"))


def _holder(value: Any) -> Any:
    """What has names: a configuration, or a dictionary as config.json has it."""
    return SimpleNamespace(**value) if isinstance(value, dict) else value


def _number(config: Any, names: Sequence[str]) -> int | None:
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # a config whose layers differ refuses to name one number for all of them
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
