"""How many heads an attention module has and how wide they are, from what it says and the shapes of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from headscope.errors import ModelError
from headscope.models.parts import Part, Parts, find_parts
from headscope.models.pruned import pruned_state
from headscope.models.rows import HeadShape
from headscope.models.sites import Site

# What modules call their number of heads.
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "num_attn_heads", "attention_heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads")
_HEAD_DIM = (
    "head_dim",
    "attention_head_size",
    "head_size",
    "dim_head",
    "d_head",
    "key_value_proj_dim",
    "qk_channels_per_head",
    "attention_head_dim",
    "depth",
)


@dataclass(frozen=True)
class _Said:
    """What a module and its config say of their heads; None where they say nothing. The module goes first."""

    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    config_heads: int | None
    config_dim: int | None


def head_shape(site: Site) -> HeadShape:
    """Heads and widths of a site's module.

    Widths come from the module, else from its config; numbers of heads from the shapes of its weights, and what the
    module says must agree with them.

    Raises:
        NotPlain: Its projections are not plain.
        ModelError: What it says and its shapes do not agree, or do not tell.
    """
    return shape_of(site, find_parts(site))


def shape_of(site: Site, parts: Parts) -> HeadShape:
    """`head_shape` of a site whose parts are known already."""
    left = pruned_state(site.module)
    if left is not None:
        return HeadShape(len(left.kept), len(left.kept_kv), left.head_dim, left.value_dim)
    said = _said(site.module)
    shape = _of_fused(site, parts, said) if parts.fused else _of_separate(site, parts, said)
    heads = (("num_heads", said.num_heads, shape.num_heads), ("num_kv_heads", said.num_kv_heads, shape.num_kv_heads))
    for name, claim, found in heads:
        if claim is not None and claim != found:
            raise _disagree(site, f"it says {name} = {claim}, its weights have {found}")
    if shape.num_heads % shape.num_kv_heads:
        raise _disagree(site, f"{shape.num_heads} query heads cannot share {shape.num_kv_heads} key-value heads evenly")
    return shape


def is_gated(parts: Parts, shape: HeadShape) -> bool:
    """Whether the query projection holds a gate beside each head's query, as in Qwen3-Next."""
    return parts.query is not None and parts.query.num_outputs == 2 * shape.num_heads * shape.head_dim


# ------------------------------------------------------------------ from shapes
def _of_separate(site: Site, parts: Parts, said: _Said) -> HeadShape:
    assert parts.query is not None and parts.key is not None and parts.value is not None
    wide = parts.query.num_outputs
    dim = _dim(site, said, wide)
    kv_heads = _divide(site, "key", parts.key.num_outputs, dim)
    value_dim = _divide(site, "value", parts.value.num_outputs, kv_heads)
    heads = _divide(site, "query", wide, dim)
    expected = _divide(site, "output", parts.output.num_inputs, value_dim) if parts.output else said.num_heads
    if expected is not None and heads == 2 * expected:
        heads = expected
    if expected is not None and heads != expected:
        raise _disagree(site, f"its queries have {heads} heads of {dim}, its output projection {expected}")
    return HeadShape(heads, kv_heads, dim, value_dim)


def _of_fused(site: Site, parts: Parts, said: _Said) -> HeadShape:
    assert parts.fused is not None
    rows = parts.fused.num_outputs
    wide = _query_width(site, parts, said, rows)
    dim = _dim(site, said, wide)
    heads = _divide(site, "query", wide, dim)
    kv_heads = _divide(site, "fused", rows if parts.query else rows - wide, 2 * dim)
    return HeadShape(heads, kv_heads, dim, dim)


def _query_width(site: Site, parts: Parts, said: _Said, rows: int) -> int:
    """Rows of all queries together: of their own projection, what the output takes in, or what the module says."""
    beside: Part | None = parts.query or parts.output
    if beside is not None:
        return beside.num_outputs if beside is parts.query else beside.num_inputs
    if said.num_heads and said.head_dim:
        return said.num_heads * said.head_dim
    if said.num_kv_heads in (None, said.num_heads):
        return _divide(site, "fused", rows, 3)
    raise _disagree(site, "nothing tells the queries of its fused projection from keys and values")


def _dim(site: Site, said: _Said, wide: int) -> int:
    """Numbers in a query of one head, where all have `wide` together."""
    if said.head_dim:
        return said.head_dim
    if said.num_heads:
        return _divide(site, "query", wide, said.num_heads)
    if said.config_dim:
        return said.config_dim
    if said.config_heads:
        return _divide(site, "query", wide, said.config_heads)
    raise _disagree(site, "neither it nor its config says how many heads it has")


def _divide(site: Site, name: str, size: int, by: int) -> int:
    if by < 1 or size < 1 or size % by:
        raise _disagree(site, f"the {size} rows of its {name} projection cannot be cut into pieces of {by}")
    return size // by


def _disagree(site: Site, what: str) -> ModelError:
    return ModelError(
        f"cannot tell the heads of {site.path} apart: {what}",
        "leave this layer out with --layer, or take another model",
    )


# ------------------------------------------------------------------ what is said
def _said(module: nn.Module) -> _Said:
    config = getattr(module, "config", None)
    return _Said(
        num_heads=_number(module, NUM_HEADS),
        num_kv_heads=_number(module, _NUM_KV_HEADS),
        head_dim=_number(module, _HEAD_DIM),
        config_heads=_number(config, NUM_HEADS),
        config_dim=_number(config, ("head_dim", "d_kv")),
    )


def _number(holder: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        try:
            value = getattr(holder, name, None)
        except RuntimeError:  # a config whose layers differ refuses to name one number for all of them
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
