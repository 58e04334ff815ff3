"""Attention sites: where a loaded model computes attention, and which stack and layer each place is.

A module is a site if its code calls transformers' registered attention functions, or if it has projections for queries,
keys and values and computes a softmax itself or with a function of torch. Names of models play no part.
"""

from __future__ import annotations

import re
import reprlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headscope.errors import InputError, ModelError
from headscope.models.exceptions import SHARED_LAYERS, WEIGHT_AXES
from headscope.models.layouts import Layout, layout_of

_CROSS = re.compile(r"cross|enc(oder)?_?dec(oder)?_?att|encoder_att", re.IGNORECASE)
_TOWERS = (
    ("vision", re.compile(r"vision|visual|image|img|pixel|video|vit(?![a-z])", re.IGNORECASE)),
    ("audio", re.compile(r"audio|speech|wav|acoustic|sound", re.IGNORECASE)),
    ("text", re.compile(r"text|language", re.IGNORECASE)),
)

# What modules that compute attention themselves call for it.
_ATTENTION_FUNCTIONS = (
    *("softmax", "Softmax", "XSoftmax"),
    *("scaled_dot_product_attention", "multi_head_attention_forward", "eager_attention_forward"),
)


@dataclass(frozen=True)
class Site:
    """One attention computation of a forward pass.

    Attributes:
        path: The module's path in the model.
        module: The attention module itself.
        stack: The stack's name, as in `--stack`.
        layer: The model's own layer number.
        call: Which call of the module in one forward pass this is; above 0 only where layers share a module.
        cross: Keys come from another sequence than queries.
        uses_interface: The module calls transformers' registered attention functions.
        query_axis, key_axis: The input that the tokens come from: `text`, `decoder`, `vision`, `audio`, `other`.
        weight_axes: Where the module's own output has (batch, head, query, key).
    """

    path: str
    module: nn.Module = field(compare=False, repr=False)
    stack: str
    layer: int
    call: int
    cross: bool
    uses_interface: bool
    query_axis: str
    key_axis: str
    weight_axes: tuple[int, int, int, int] = (0, 1, 2, 3)

    @property
    def layout(self) -> Layout | None:
        """The projection layout of the module, None where it is not in the table."""
        return layout_of(self.module)

    @property
    def causal(self) -> bool:
        """Whether the model means this site to be causal: a token must not look at later ones."""
        marks = (getattr(self.module, "is_causal", None), getattr(self.module, "is_decoder", None))
        return True in marks and not self.cross

    @property
    def has_sink(self) -> bool:
        """Whether the module has a learned sink: a logit in its softmax that takes attention and has no column."""
        return any("sink" in name for name, _ in self.module.named_parameters())


@dataclass(frozen=True)
class _Found:
    """An attention module on the way to becoming a site."""

    path: str
    module: nn.Module
    container: str
    numbers: tuple[int, ...]
    cross: bool
    uses_interface: bool


def find_sites(model: PreTrainedModel) -> tuple[Site, ...]:
    """Every attention site of `model`, in the order of its modules.

    Raises:
        ModelError: The model has no attention.
    """
    found = list(_find_modules(model))
    if not found:
        raise _no_attention(model)
    groups = _group(found)
    names = _name_groups(groups, model)
    sites: list[Site] = []
    for key, members in groups.items():
        sites.extend(_number(model, names[key], members))
    return tuple(sites)


def select_stacks(sites: Iterable[Site], wanted: Iterable[str] | None) -> tuple[Site, ...]:
    """The sites of the stacks, or else below the module paths, that `wanted` names (None for all).

    Raises:
        InputError: A name is neither a stack nor a module path with sites; the message names the stacks.
    """
    sites = tuple(sites)
    if wanted is None:
        return sites
    chosen: set[Site] = set()
    for name in wanted:
        # A stack's name comes first: `decoder` is the stack, not also the cross-attention below `decoder.`
        found = {s for s in sites if s.stack == name} or {s for s in sites if f"{s.path}.".startswith(f"{name}.")}
        if not found:
            stacks = ", ".join(dict.fromkeys(s.stack for s in sites))
            raise InputError(
                f"stack {reprlib.repr(name)} does not exist in this model",
                f"Stacks: {stacks}; or a module path such as {sites[0].path}.",
            )
        chosen |= found
    return tuple(s for s in sites if s in chosen)


# ------------------------------------------------------------------ finding modules
_known_names: dict[tuple[type, str], bool] = {}


def _no_attention(model: nn.Module) -> ModelError:
    suspects = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
    if suspects:
        return ModelError(
            f"{type(model).__name__} computes attention in a way that cannot be read yet ({', '.join(suspects[:3])})",
            "Its modules neither call transformers' attention functions nor have projections of a known layout.",
        )
    return ModelError(
        f"{type(model).__name__} has no attention heads: none of its modules computes attention",
        "State-space, recurrent and convolutional models have no heads to look at.",
    )


def _find_modules(model: nn.Module) -> Iterator[_Found]:
    inside: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if any(path.startswith(p + ".") for p in inside):
            continue
        interface = _names_of(type(module), "get_interface")
        if not interface and not _computes_attention(module):
            continue
        inside.append(path)
        container, numbers, tail = _split(path)
        # Without a number nothing tells a stack's name from its modules': `encoder.cross_attention.attention.self`.
        names = tail if numbers else ".".join(path.split(".")[-3:])
        cross = bool(_CROSS.search(names) or _CROSS.search(type(module).__name__)) or bool(
            getattr(module, "is_cross_attention", False)
        )
        yield _Found(path, module, container, numbers, cross, interface)


def _computes_attention(module: nn.Module) -> bool:
    if layout_of(module) is None and not _names_projections(module):
        return False
    return any(_names_of(type(module), name) for name in _ATTENTION_FUNCTIONS) or any(
        isinstance(c, nn.Softmax) for c in module.children()
    )


def _names_projections(module: nn.Module) -> bool:
    """Whether the children of a module are called after queries, keys and values, in whatever words."""
    names = " ".join(name for name, _ in module.named_children())
    return all(word in names for word in ("quer", "key", "value"))


def _names_of(cls: type, name: str) -> bool:
    """Whether any method that `cls` defines or inherits from a model file mentions `name`; remembered."""
    if (cls, name) not in _known_names:
        _known_names[cls, name] = _mentions(cls, name)
    return _known_names[cls, name]


def _mentions(cls: type, name: str) -> bool:
    for base in cls.__mro__:
        if base.__module__.startswith("torch."):
            continue
        for member in vars(base).values():
            code = getattr(getattr(member, "__wrapped__", member), "__code__", None)
            if isinstance(code, CodeType) and name in _all_names(code):
                return True
    return False


def _all_names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= _all_names(const)
    return names


# ------------------------------------------------------------------ naming stacks
def _split(path: str) -> tuple[str, tuple[int, ...], str]:
    """`decoder.block.3.layer.1.EncDecAttention` -> (`decoder.block`, (3, 1), `layer.EncDecAttention`)."""
    parts = path.split(".")
    digits = [i for i, p in enumerate(parts) if p.isdigit()]
    first = digits[0] if digits else len(parts) - 1
    tail = ".".join(p for p in parts[first:] if not p.isdigit())
    return ".".join(parts[:first]), tuple(int(parts[i]) for i in digits), tail


_Key = tuple[str, bool, str]


def _group(found: list[_Found]) -> dict[_Key, list[_Found]]:
    """Modules of one container form a stack, self- and cross-attention apart; several a layer are split by name."""
    groups: dict[_Key, list[_Found]] = defaultdict(list)
    for item in found:
        groups[item.container, item.cross, ""].append(item)
    result: dict[_Key, list[_Found]] = {}
    for (container, cross, _), members in groups.items():
        tails = {_split(m.path)[2] for m in members}
        if len(tails) == 1 or len({m.numbers[:1] for m in members}) == len(members):
            result[container, cross, ""] = members
            continue
        for tail in sorted(tails):
            result[container, cross, tail] = [m for m in members if _split(m.path)[2] == tail]
    return result


def _name_groups(groups: dict[_Key, list[_Found]], model: PreTrainedModel) -> dict[_Key, str]:
    if len(groups) == 1:
        return {next(iter(groups)): "self"}
    plain = [k for k in groups if not k[1]]
    sides = {p for k in plain for p in k[0].split(".")}
    encoder_decoder = _is_encoder_decoder(model) or {"encoder", "decoder"} <= sides
    roles = {k: _role(k, encoder_decoder) for k in groups}
    unnamed = [k for k in plain if not roles[k]]
    if len(unnamed) == 1 and (len(plain) == 1 or ("text" not in roles.values() and _main_axis(model) == "text")):
        # What is left beside towers is the language model; beside nothing but cross-attention, the model itself.
        roles[unnamed[0]] = "self" if len(plain) == 1 else "text"
    names: dict[_Key, str] = {}
    for key, role in roles.items():
        names[key] = role if role and role not in names.values() else _path_name(key, groups[key], names.values())
    return names


def _path_name(key: _Key, members: list[_Found], taken: Collection[str]) -> str:
    """The container's path, with the modules' own where self- and cross-attention share the container."""
    container, _, tail = key
    name = f"{container}.{tail}".strip(".") or members[0].path
    return name if name not in taken else f"{container}.{_split(members[0].path)[2]}"


def _role(key: _Key, encoder_decoder: bool) -> str:
    container, cross, _ = key
    if cross:
        return "cross"
    tower = next((name for name, pattern in _TOWERS if pattern.search(container)), "")
    parts = container.split(".")
    if encoder_decoder and tower in ("", "text"):
        side = next((p for p in parts if p in ("encoder", "decoder")), "")
        return side or tower
    return tower


# ------------------------------------------------------------------ numbering layers
def _number(model: PreTrainedModel, stack: str, members: list[_Found]) -> Iterator[Site]:
    shared = SHARED_LAYERS.get(model.config.model_type)
    if shared is not None:
        yield from _shared_layers(model, stack, members, int(getattr(model.config, shared)))
        return
    varying = _varying(members)
    calls: dict[int, int] = defaultdict(int)
    for position, item in enumerate(members):
        layer = item.numbers[varying[0]] if len(varying) == 1 else position
        call, calls[id(item.module)] = calls[id(item.module)], calls[id(item.module)] + 1
        yield _site(model, item, stack, layer, call)


def _varying(members: list[_Found]) -> list[int]:
    """Which of the numbers in the paths tell the layers apart."""
    shortest = min(len(m.numbers) for m in members)
    if shortest and len(members) == 1:
        return [0]
    return [i for i in range(shortest) if len({m.numbers[i] for m in members}) > 1] if len(members) > 1 else []


def _shared_layers(model: PreTrainedModel, stack: str, members: list[_Found], num_layers: int) -> Iterator[Site]:
    """Layers in order of calls: the first group of modules serves the first layers, each group as many as the others.

    A group runs all its modules in each of its layers.
    """
    groups: dict[int, list[_Found]] = defaultdict(list)
    for item in members:
        groups[item.numbers[0]].append(item)
    each = num_layers / len(groups)
    order = [item for layer in range(num_layers) for item in groups[min(int(layer / each), len(groups) - 1)]]
    calls: dict[int, int] = defaultdict(int)
    for layer, item in enumerate(order):
        yield _site(model, item, stack, layer, calls[id(item.module)])
        calls[id(item.module)] += 1


def _site(model: PreTrainedModel, item: _Found, stack: str, layer: int, call: int) -> Site:
    query = _axis(model, stack, item)
    key = query if not item.cross else _main_axis(model) if _is_encoder_decoder(model) else "other"
    axes = WEIGHT_AXES.get(model.config.model_type, (0, 1, 2, 3))
    return Site(item.path, item.module, stack, layer, call, item.cross, item.uses_interface, query, key, axes)


def _axis(model: PreTrainedModel, stack: str, item: _Found) -> str:
    """The input that a module's query tokens come from; the model's main one unless its path says otherwise."""
    if _is_encoder_decoder(model) and (item.cross or stack == "decoder" or "decoder" in item.container.split(".")):
        return "decoder"
    tower = next((name for name, pattern in _TOWERS if pattern.search(item.container)), "")
    return tower or (stack if stack in ("text", "vision", "audio") else _main_axis(model))


def _is_encoder_decoder(model: PreTrainedModel) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _main_axis(model: Any) -> str:
    name = str(getattr(model, "main_input_name", "input_ids"))
    if name.startswith(("pixel", "flattened_patches", "images")):
        return "vision"
    return "audio" if name.startswith(("input_features", "input_values", "audio")) else "text"
