"""What a model computes at its attention sites, and what per-head weights say that it should: for comparing the two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from headscope.capture.layerwise import Call, run
from headscope.models.projections import Projection, Projections, projections
from headscope.models.sites import Site, find_sites
from headscope.models.weights import HeadWeights, read_weights

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
PRODUCTS = {
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    torch.baddbmm,
    Tensor.baddbmm,
    torch.einsum,
}


@dataclass
class Observed:
    """One site in one forward pass.

    Attributes:
        inputs: What each of its projections was given, by the path of the weight.
        output: What its output projection gave.
        products: The two factors of every matrix product within the module.
        call: The attention weights, and queries, keys and values where the module hands them to transformers.
    """

    site: Site
    found: Projections
    weights: HeadWeights
    inputs: dict[str, Tensor] = field(default_factory=dict)
    output: Tensor | None = None
    products: list[tuple[Tensor, ...]] = field(default_factory=list)
    call: Call | None = None


class _Products(TorchFunctionMode):
    """Keeps the factors of matrix products while one of the watched modules runs."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Observed] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.running and func in PRODUCTS:
            tensors = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)]
            # What some products are added to comes before the factors.
            self.running[-1].products.append(tuple(t.detach().clone() for t in tensors[-2:]))
        return func(*args, **(kwargs or {}))


def observe(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Observed]:
    """Run the model once; what each site computed in its module's first call, in the order of sites."""
    sites = [s for s in find_sites(model) if s.call == 0]
    all_seen = [Observed(s, projections(s, model=model), read_weights(s, model=model)) for s in sites]
    by_path = {seen.site.path: seen for seen in all_seen}
    products = _Products()
    handles = [h for seen in all_seen for h in _watch(seen, products)]
    calls: list[Call] = []
    try:
        with products:
            run(model, sites, inputs, calls.append)
    finally:
        for handle in handles:
            handle.remove()
    for call in calls:
        by_path[call.site.path].call = by_path[call.site.path].call or call
    return [seen for seen in all_seen if seen.call is not None]


def _watch(seen: Observed, products: _Products) -> Iterator[Any]:
    def enter(module: nn.Module, args: Any) -> None:
        products.running.append(seen)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        products.running.pop()

    yield seen.site.module.register_forward_pre_hook(enter)
    yield seen.site.module.register_forward_hook(leave)
    for part in seen.found:
        owner = part.weight.owner
        if owner is not seen.site.module:
            yield owner.register_forward_hook(_keep(seen, part))


def _keep(seen: Observed, part: Projection) -> Any:
    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.inputs.setdefault(part.weight.path, args[0].detach().clone())
        if part.role == "output" and seen.output is None:
            seen.output = output.detach().clone()

    return keep


# ------------------------------------------------------------------ what the weights say
def expected(seen: Observed, role: str) -> Tensor:
    """(batch, heads, n, width): the role's canonical weights applied to what its projection was given."""
    part = getattr(seen.found, role)
    x = seen.inputs[part.weight.path]
    y = torch.einsum("bni,hdi->bhnd", x, getattr(seen.weights, role))
    bias = getattr(seen.weights, f"{role}_bias")
    return y if bias is None else y + bias[:, None]


def agreement(given: Tensor, wanted: Tensor) -> str:
    """How `given` follows from `wanted`: the same; the same at the first position, where rotations turn nothing, and of
    the same length elsewhere; of the same length up to one factor; or not at all."""
    if given.shape != wanted.shape:
        return "shape"
    if torch.allclose(given, wanted, **TOLERANCE):
        return "same"
    ratio = given.norm(dim=-1) / wanted.norm(dim=-1)
    factor = float(ratio.flatten()[0])
    if not torch.allclose(ratio, torch.full_like(ratio, factor), rtol=1e-3, atol=0):
        return "other"
    return "turned" if torch.allclose(given[:, :, 0], wanted[:, :, 0], **TOLERANCE) else "scaled"


def agreements(seen: Observed, wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """The agreement of queries, keys and values, each (batch, heads, n, width), with what the module handed to
    transformers; where it hands nothing, with its own products: queries come first there, keys and values second."""
    assert seen.call is not None
    given = seen.call.arguments
    if given is not None:
        return {role: agreement(getattr(given, role), wanted[role]) for role in ("query", "key", "value")}
    return {role: _among(seen, wanted[role], 0 if role == "query" else 1) for role in ("query", "key", "value")}


def _among(seen: Observed, wanted: Tensor, position: int) -> str:
    """The best agreement with any product's first or second factor, however it is laid out."""
    results = {agreement(*pair) for factors in seen.products for pair in _pairs(factors[position], wanted)}
    return next((r for r in ("same", "turned", "scaled") if r in results), "other")


def _pairs(factor: Tensor, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The factor as (batch, heads, n, width) in every way that it can be, key heads repeated or not."""
    repeats = factor.numel() // wanted.numel()
    if factor.ndim < 3 or factor.numel() % wanted.numel() or not repeats:
        return
    wanted = wanted.repeat_interleave(repeats, dim=1)
    for view in (factor, factor.mT, factor.transpose(1, 2)):
        if view.shape[-2:] == wanted.shape[-2:]:
            yield view.reshape(wanted.shape), wanted


def context(seen: Observed) -> Tensor:
    """(batch, heads, query, width): the model's own attention weights times canonical values, gated where gated."""
    assert seen.call is not None
    value = expected(seen, "value")
    value = value.repeat_interleave(seen.call.weights.shape[1] // value.shape[1], dim=1)
    result = seen.call.weights @ value
    return result if seen.weights.gate is None else result * expected(seen, "gate").sigmoid()


def projected(seen: Observed) -> Tensor:
    """(batch, query, features): the context of every head through its own slice of the output projection, summed."""
    assert seen.weights.output is not None
    y = torch.einsum("bhnd,hdo->bno", context(seen), seen.weights.output)
    return y if seen.weights.output_bias is None else y + seen.weights.output_bias


# ------------------------------------------------------------------ taking a head out
@contextmanager
def without_context(model: nn.Module, site: Site, head: int) -> Iterator[None]:
    """Let one head of a site give zeros: in the attention function where the module calls one, else before its output
    projection."""
    if site.uses_interface:
        with _interface_without(site, head):
            yield
        return
    found = projections(site, model=model)
    assert found.output is not None
    width = found.shape.value_dim

    def zero(module: nn.Module, args: Any) -> Any:
        merged = args[0].clone()
        merged[..., head * width : (head + 1) * width] = 0
        return (merged, *args[1:])

    handle = found.output.weight.owner.register_forward_pre_hook(zero)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _interface_without(site: Site, head: int) -> Iterator[None]:
    choose = AttentionInterface.get_interface

    def get_interface(self: AttentionInterface, *args: Any, **kwargs: Any) -> Any:
        function = choose(self, *args, **kwargs)

        def call(module: nn.Module, *a: Any, **k: Any) -> Any:
            result, weights = function(module, *a, **k)
            if module is site.module:
                result = result.clone()
                result[:, :, head] = 0
            return result, weights

        return call

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        AttentionInterface.get_interface = choose  # type: ignore[method-assign]


def forward(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """All floating-point tensors that the model gives."""
    with torch.no_grad():
        output = model(**inputs)
    return [t for t in _tensors(output) if t.is_floating_point()]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def scramble(weights: HeadWeights) -> HeadWeights:
    """Other numbers of the same shapes and dtypes."""
    other: dict[str, Any] = defaultdict(lambda: None)
    for name, tensor in vars(weights).items():
        other[name] = None if tensor is None else torch.randn_like(tensor)
    return HeadWeights(**other)
