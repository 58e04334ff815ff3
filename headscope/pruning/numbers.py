"""The numbers of heads and their widths that an attention module keeps as attributes, or reads from its config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from headscope.models.pruned import HeadState
from headscope.models.rows import HeadShape
from headscope.pruning.edits import Set
from headscope.pruning.runtime import ConfigView

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "num_attn_heads", "attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads", "num_kv")
GROUPS = ("num_key_value_groups", "num_kv_groups", "num_queries_per_kv", "n_rep")
# Widths of all heads together. Some of these names mean the model's width in modules that do not read them any more
# after they were built, so only those count that the module's code reads.
WIDTHS = (
    "all_head_size",
    "head_size",
    "inner_dim",
    "split_size",
    "embed_dim",
    "hidden_size",
    "hidden_dim",
    "dim",
    "d_model",
    "n_embd",
    "q_dim",
    "q_size",
    "attn_dim",
    "attention_dim",
    "hidden_size_output",
    "num_hidden",
)
KV_WIDTHS = ("kv_dim", "kv_size")
TRACKED = "headscope_numbers"


def number_edits(module: nn.Module, shape: HeadShape, after: HeadState) -> Iterator[Set]:
    """What has to be said anew in an attention module, so that its forward pass computes with the heads that are left.

    Args:
        shape: The module's heads now.
    """
    read = names_read(type(module))
    roles = getattr(module, TRACKED, None) or _roles(module, shape, read)
    new = _values(HeadShape(len(after.kept), len(after.kept_kv), after.head_dim, after.value_dim))
    for name, role in roles.items():
        yield Set(module, name, new[role])
    yield Set(module, TRACKED, roles)
    view = _config_view(module, shape, new, read)
    if view is not None:
        yield Set(module, "config", view)


def _values(shape: HeadShape) -> dict[str, int]:
    return {
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "groups": shape.num_heads // shape.num_kv_heads,
        "width": shape.num_heads * shape.head_dim,
        "value_width": shape.num_heads * shape.value_dim,
        "kv_width": shape.num_kv_heads * shape.head_dim,
    }


def _roles(module: nn.Module, shape: HeadShape, read: set[str]) -> dict[str, str]:
    """What each of a module's numbers counts, by its name and its value."""
    now = _values(shape)
    table = (("heads", HEADS), ("kv_heads", KV_HEADS), ("groups", GROUPS))
    roles = {name: role for role, names in table for name in names if _is(module, name, now[role])}
    widths = (("width", WIDTHS), ("value_width", WIDTHS), ("kv_width", KV_WIDTHS))
    for role, names in widths:
        for name in names:
            if name in read and name not in roles and _is(module, name, now[role]):
                roles[name] = role
    return roles


def _is(module: Any, name: str, value: int) -> bool:
    found = vars(module).get(name)
    return isinstance(found, int) and not isinstance(found, bool) and found == value


def _config_view(module: nn.Module, shape: HeadShape, new: dict[str, int], read: set[str]) -> ConfigView | None:
    """A config that says the new numbers, for a module whose code asks its config for them; None for others."""
    config = getattr(module, "config", None)
    if config is None or "config" not in read:
        return None
    now = _values(shape)
    numbers: dict[str, int] = {}
    for role, names in (("heads", HEADS), ("kv_heads", KV_HEADS)):
        for name in names:
            if name in read and name not in vars(module) and getattr(config, name, None) == now[role]:
                numbers[name] = new[role]
    if not numbers:
        return None
    base = config.base if isinstance(config, ConfigView) else config
    return ConfigView(base, numbers)


def names_read(cls: type) -> set[str]:
    """Every attribute name in the code of a module's methods but its constructor."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for method, member in vars(base).items():
            function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if method != "__init__" and isinstance(code, CodeType):
                names |= _names_in(code)
    return names


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= _names_in(const)
    return names
