"""Plans for the fixture families, and the original without heads, written without the code that is tested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from fixtures.families import Family
from headscope.models.sites import find_sites

# From an attention module's path to its output projection.
OUTPUTS = ("o_proj", "out_proj", "out_lin", "dense", "c_proj", "o", "../output.dense")


def varied_heads(family: Family, shift: int = 0) -> dict[str, list[int]]:
    """Other heads in each layer: whole groups here, one of every group there."""
    plan = {}
    for stack, spec in family.stacks.items():
        size = spec.num_heads // spec.num_kv_heads
        for place, layer in enumerate(spec.layers):
            if spec.num_kv_heads > 1 and (size == 1 or place % 2 == 0):
                count = 1 if spec.num_kv_heads < 3 else 1 + place % 2
                groups = [(place + shift + 2 * i) % spec.num_kv_heads for i in range(count)]
                heads = [g * size + i for g in groups for i in range(size)]
            else:
                heads = [g * size + (place + shift + g) % size for g in range(spec.num_kv_heads)]
            plan[f"{stack}.{layer}"] = sorted(set(heads))
    return plan


@contextmanager
def without_heads(model: PreTrainedModel, heads: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Zeros in place of some heads' results where the output projection reads them."""
    sites = {f"{s.stack}.{s.layer}": s for s in find_sites(model)}
    stack = ExitStack()
    for name, numbers in heads.items():
        own = sites[name].module._parameters.get("o")
        if own is not None:  # (features, heads, width), with no module of its own to put a hook on
            stack.enter_context(_zeroed(own, list(numbers)))
            continue
        output = output_of(model, sites[name].path)
        inputs = output.nx if hasattr(output, "nx") else output.in_features
        width = inputs // _num_heads(sites[name].module, model)

        def zero(module: nn.Module, args: tuple, numbers: Sequence[int] = numbers, width: int = width) -> tuple:
            merged = args[0].clone()
            for head in numbers:
                merged[..., head * width : (head + 1) * width] = 0
            return (merged, *args[1:])

        stack.callback(output.register_forward_pre_hook(zero).remove)
    with stack:
        yield


@contextmanager
def _zeroed(weight: torch.Tensor, heads: list[int]) -> Iterator[None]:
    before = weight.detach().clone()
    with torch.no_grad():
        weight[:, heads] = 0
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)


def output_of(model: PreTrainedModel, path: str) -> nn.Module:
    """The output projection of the attention module at `path`."""
    for name in OUTPUTS:
        place = f"{path.rpartition('.')[0]}.{name[3:]}" if name.startswith("../") else f"{path}.{name}"
        try:
            return model.get_submodule(place)
        except AttributeError:
            continue
    raise KeyError(path)


def _num_heads(module: nn.Module, model: PreTrainedModel) -> int:
    for holder in (module, getattr(module, "config", model.config), model.config):
        for name in ("num_heads", "n_heads", "num_attention_heads", "n_head"):
            if isinstance(getattr(holder, name, None), int):
                return getattr(holder, name)
    raise KeyError(type(module).__name__)


def outputs(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """What the model gives, the real tokens of it where it is text."""
    with torch.no_grad():
        given = model(**inputs)
    tensors = [t for t in given.to_tuple() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    mask = inputs.get("attention_mask")
    return [t[mask.bool()] if mask is not None and t.shape[:2] == mask.shape else t for t in tensors]


def relative_difference(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the largest number of the same tensor."""
    assert [x.shape for x in a] == [y.shape for y in b]
    return max(float((x - y).abs().max() / x.abs().max()) for x, y in zip(a, b, strict=True))
