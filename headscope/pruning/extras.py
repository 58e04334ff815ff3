"""What an attention module has for each head besides its projections, and what only looks like it.

A tensor of a module is known by its name, in one table. One that no row names is taken to belong to no head unless one
of its axes is as long as there are heads, or numbers in all heads: then it is refused, because pruning around it could
be wrong without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from headscope.models.parts import NotPlain
from headscope.models.pruned import HeadState
from headscope.models.rows import HeadShape, Rows
from headscope.models.sites import Site
from headscope.pruning.edits import Cut, Slot

Unit = Literal["free", "head", "row", "value", "kv_head", "kv_row"]
"""What lies along the axis: nothing per head; one entry a query head; head_dim or value_dim entries a query head; one
entry, or head_dim entries, a key-value head."""


@dataclass(frozen=True)
class Extra:
    """One row of the table: a tensor's name inside the attention module, as a pattern, and what lies on which axis."""

    name: str
    unit: Unit
    axis: int = 0


EXTRAS = (
    # Norms over what comes in or goes out, reductions of it, positions of tokens.
    Extra(r"(LayerNorm|layer_norm|layernorm[12]|norm_media|norm_latents)\.(weight|bias)", "free"),
    Extra(r"(.*\.)?(sequence_reduction|spatial_reduction|sr)\..*", "free"),
    Extra(r"sequence_reduction\.layer_norm\.(weight|bias)", "free"),
    Extra(r"(.*\.)?rotary(_pos)?_emb\..*|(.*\.)?inv_freq", "free"),
    Extra(r"rel_pos_[hw]|distance_embedding\.weight|emb_rel_[kv]|relative_coords_table", "free"),
    Extra(r"continuous_position_bias_mlp\.0\.(weight|bias)", "free"),
    Extra(r"dense_bias", "free"),
    # Learned sinks and scales, biases by position.
    Extra(r"sinks?", "head"),
    Extra(r"logit_scale", "head"),
    Extra(r"continuous_position_bias_mlp\.2\.weight", "head"),
    Extra(r"(.*\.)?relative_position_bias_table", "head", axis=1),
    Extra(r"relative_attention_bias\.weight", "head", axis=1),
    Extra(r"(pos_)?bias_[uv]|r_[wrs]_bias", "head"),
    Extra(r"r|r_kernel|seg_embed", "head", axis=1),
    # Projections of positions, and further ones of tokens.
    Extra(r"(pos_key_proj|pos_query_proj|pos_proj|pos_q_proj|linear_pos|relative_k_proj)\.(weight|bias)", "row"),
    Extra(r"(query|key|value)_global\.(weight|bias)|(w2e|e2w|e2e)_query\.(weight|bias)", "row"),
    # Gates of the heads' results.
    Extra(r"gate_bias", "head"),
)
GATES = re.compile(r"(gate_proj|g_proj)\.(weight|bias)")
NORMS = re.compile(r"((?P<q>q|query|qk|norm_q)|(?P<k>k|key|norm_k)|(?P<v>v|value))(_?(layer_?)?norm)?\.(?P<rest>.*)")


def extra_cuts(site: Site, shape: HeadShape, before: HeadState, after: HeadState, used: set[int]) -> Iterator[Cut]:
    """The cuts that heads leaving a module means for everything but its projections.

    Args:
        shape: The module's heads now.
        used: The ids of its projections' parameters.

    Raises:
        NotPlain: It has something whose part for each head is not known, or that heads share.
    """
    for path, slot in _tensors(site.module):
        tensor = slot.value
        if id(tensor) in used or not tensor.is_floating_point():
            continue
        found = None if _spans_heads(slot.owner) else _known(path, tensor, shape)
        if found is None:
            _refuse_unknown(site, path, tensor, shape)
        elif found[0] != "free":
            yield Cut(slot, found[1], _index(found[0], before, after))


def _spans_heads(owner: nn.Module) -> bool:
    """A norm of torch's own over several axes at once: over heads, too."""
    return type(owner) in (nn.LayerNorm, nn.RMSNorm) and len(owner.normalized_shape) > 1  # type: ignore[arg-type]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    for prefix, owner in module.named_modules():
        for name, value in (*owner._parameters.items(), *owner._buffers.items()):
            if value is not None:
                yield f"{prefix}.{name}".removeprefix("."), Slot(owner, name)


def _known(path: str, tensor: Tensor, shape: HeadShape) -> tuple[Unit, int] | None:
    """The unit and the axis of a tensor; None for one that is not known, or not with this shape."""
    if tensor.ndim == 4 and tensor.shape[:2] == (1, 1) and tensor.shape[2] == tensor.shape[3]:
        return "free", 0  # a table of a causal mask
    gate = GATES.fullmatch(path)
    rows: list[Extra] = [row for row in EXTRAS if re.fullmatch(row.name, path)]
    if gate is not None:
        rows = [Extra(path, "head"), Extra(path, "value")]
    rows += _norm_rows(path, tensor, shape)
    for row in rows:
        if row.unit == "free" or (row.axis < tensor.ndim and tensor.shape[row.axis] == _length(row.unit, shape)):
            return row.unit, row.axis
    return None


def _norm_rows(path: str, tensor: Tensor, shape: HeadShape) -> list[Extra]:
    """A norm of queries, keys or values with a weight of its own for each head, or one that all heads have alike."""
    norm = NORMS.fullmatch(path)
    if norm is None or "norm" not in path:
        return []
    if tensor.ndim == 1 and tensor.shape[0] in (shape.head_dim, shape.value_dim):
        return [Extra(path, "free")]
    return [Extra(path, "head" if norm["q"] else "kv_head")] if tensor.ndim > 1 else []


def _length(unit: Unit, shape: HeadShape) -> int:
    heads = shape.num_kv_heads if unit.startswith("kv") else shape.num_heads
    return heads * {"row": shape.head_dim, "kv_row": shape.head_dim, "value": shape.value_dim}.get(unit, 1)


def _index(unit: Unit, before: HeadState, after: HeadState) -> Tensor:
    """The entries that stay along an axis of that unit."""
    if unit.startswith("kv"):
        places, heads = before.kv_places(after.kept_kv), len(before.kept_kv)
    else:
        places, heads = before.places(after.kept), len(before.kept)
    width = {"row": before.head_dim, "kv_row": before.head_dim, "value": before.value_dim}.get(unit, 1)
    return Rows.alone(heads, width).index_of(places)


def _refuse_unknown(site: Site, path: str, tensor: Tensor, shape: HeadShape) -> None:
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    counts = {heads, heads * shape.head_dim, heads * shape.value_dim}
    counts |= {kv_heads, kv_heads * shape.head_dim, kv_heads * shape.value_dim}
    if not (counts - {1}) & set(tensor.shape):
        return
    if "norm" in path or "_ln." in path:
        raise NotPlain(
            f"{site.path}.{path} is a norm over all heads together: without one the rest is normalised otherwise",
            "Its heads can only be zeroed (--save-as masked).",
        )
    raise NotPlain(
        f"{site.path}.{path} of shape {tuple(tensor.shape)} may belong to single heads in a way that is not known",
        "Its heads can only be zeroed (--save-as masked). What is known is in EXTRAS of headscope/pruning/extras.py.",
    )


def one_norm_a_head(site: Site, shape: HeadShape) -> list[tuple[nn.ModuleList, Unit]]:
    """Lists with a norm for each query head or each key-value head (StableLM)."""
    found: list[tuple[nn.ModuleList, Unit]] = []
    for path, module in site.module.named_modules():
        norm = NORMS.fullmatch(f"{path}.")
        if isinstance(module, nn.ModuleList) and norm is not None:
            found.append((module, "head" if norm["q"] else "kv_head"))
    return [(m, unit) for m, unit in found if len(m) == _length(unit, shape) > 1]


def kept_entries(unit: Unit, before: HeadState, after: HeadState) -> list[int]:
    """The entries that stay of a list with one for each head."""
    return [int(i) for i in _index(unit, before, after)]
