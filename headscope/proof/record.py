"""What a model computed at each attention site in one forward pass, for a comparison afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.capture.layerwise import Call, run
from headscope.errors import ModelError
from headscope.models.projections import projections
from headscope.models.sites import Site

# A method that adds position-dependent scores which no mask or position argument shows (DeBERTa).
BIAS_METHOD = "disentangled_attention_bias"


# The names under which a record keeps what entered the projections themselves.
PROJECTION_INPUT = {role: f"input of the {role} projection" for role in ("query", "key", "value")}


@dataclass
class SiteRecord:
    """One site's computation.

    Attributes:
        call: The attention weights, and what the attention function was given where the module calls one.
        tensors: The module's floating-point tensor arguments as (batch, n, features), by name, and what entered its
            projections under the names of `PROJECTION_INPUT`.
        rotations: Its (cos, sin) arguments, or complex rotations as such pairs.
        merged: (batch, query, features), the input of the output projection; None where there is none.
        output: (batch, query, features), the output of the output projection; None where there is none.
        bias: What the module's own bias method returned, None where it has none.
        arguments: All keyword arguments of the module.
    """

    call: Call
    tensors: dict[str, Tensor]
    rotations: list[tuple[Tensor, Tensor]]
    arguments: dict[str, Any]
    merged: Tensor | None = None
    output: Tensor | None = None
    bias: Tensor | None = None

    @property
    def site(self) -> Site:
        """The site."""
        return self.call.site


@dataclass
class _Module:
    """What the hooks of one module have seen in its present call."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    merged: Tensor | None = None
    output: Tensor | None = None
    bias: Tensor | None = None
    entering: dict[str, Tensor] = field(default_factory=dict)


def record(
    model: PreTrainedModel, sites: Sequence[Site], inputs: Mapping[str, Tensor]
) -> tuple[list[SiteRecord], dict[str, str]]:
    """Run one forward pass and keep what every site computed.

    Returns:
        A record for each site that ran, in the order in which they did, and a reason for each path that gave no
        attention weights.
    """
    seen = {id(s.module): _Module() for s in sites}
    calls: list[tuple[Call, _Module]] = []

    def take(call: Call) -> None:
        calls.append((call, seen[id(call.site.module)]))

    with ExitStack() as stack:
        for site in {id(s.module): s for s in sites}.values():
            stack.enter_context(_watched(model, site, seen))
        run(model, sites, inputs, take)
    found = {c.site.path for c, _ in calls}
    silent = {s.path: "no attention weights on this input" for s in sites if s.path not in found}
    return [_record(call, state) for call, state in calls], silent


def _record(call: Call, state: _Module) -> SiteRecord:
    tensors, rotations = _arguments(state)
    tensors |= {name: _as_sequence(t) for name, t in state.entering.items() if t.ndim in (2, 3, 4)}
    return SiteRecord(call, tensors, rotations, state.kwargs, state.merged, state.output, state.bias)


@contextmanager
def _watched(model: nn.Module, site: Site, seen: dict[int, _Module]) -> Iterator[None]:
    """Hooks on a module and on its projections, wherever the output projection sits."""
    module, key = site.module, id(site.module)
    handles = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[key] = _Module(args, dict(kwargs))

    def projected(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and seen[key].output is None:
            seen[key].merged, seen[key].output = args[0], output

    def entering(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                seen[key].entering.setdefault(name, args[0])

        return keep

    handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
    try:
        found = projections(site, model=model)
    except ModelError:  # not plain projections: the reason is given where the weights are read
        found = None
    for role in ("query", "key", "value") if found is not None else ():
        owner = getattr(found, role).weight.owner
        if owner is not module:
            handles.append(owner.register_forward_pre_hook(entering(PROJECTION_INPUT[role])))
    if found is not None and found.output is not None and found.output.weight.owner is not module:
        handles.append(found.output.weight.owner.register_forward_hook(projected))
    try:
        with _watched_bias(module, seen, key):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watched_bias(module: nn.Module, seen: dict[int, _Module], key: int) -> Iterator[None]:
    method = getattr(module, BIAS_METHOD, None)
    if method is None:
        yield
        return

    @wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        seen[key].bias = result = method(*args, **kwargs)
        return result

    setattr(module, BIAS_METHOD, watched)
    try:
        yield
    finally:
        delattr(module, BIAS_METHOD)


def _arguments(state: _Module) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    given = {f"argument {i}": v for i, v in enumerate(state.args)} | state.kwargs
    tensors, rotations = {}, []
    for name, value in given.items():
        if isinstance(value, Tensor) and value.is_complex():
            rotations.append((value.real, value.imag))
        elif isinstance(value, Tensor) and value.is_floating_point() and value.ndim in (2, 3, 4):
            tensors[name] = _as_sequence(value)
        elif isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, Tensor) for v in value):
            rotations.append((value[0], value[1]))
    return tensors, rotations


def _as_sequence(tensor: Tensor) -> Tensor:
    """(batch, n, features): one sequence of packed tokens, or an image's rows one after the other."""
    return tensor[None] if tensor.ndim == 2 else tensor.flatten(1, 2) if tensor.ndim == 4 else tensor


def to_float(tensor: Tensor) -> Tensor:
    """float32 on the CPU, detached."""
    return tensor.detach().to("cpu", torch.float32)
