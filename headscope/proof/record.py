"""What a model computed at each attention site in one forward pass, for a comparison afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from headscope.capture.evaluation import config_around
from headscope.capture.layerwise import Call, run
from headscope.errors import ModelError
from headscope.models.projections import Projections, projections
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
        config: The module's config, or that of the nearest module around it; None where none has any.
        mixed: The model read more than tokens: images or sounds.
    """

    call: Call
    tensors: dict[str, Tensor]
    rotations: list[tuple[Tensor, Tensor]]
    arguments: dict[str, Any]
    config: PreTrainedConfig | None
    mixed: bool
    merged: Tensor | None = None
    output: Tensor | None = None
    bias: Tensor | None = None

    @property
    def site(self) -> Site:
        """The site."""
        return self.call.site


@dataclass
class _Seen:
    """What the hooks of one module have seen in its present call; of modules that are called twice in it, the first."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    entering: dict[str, Tensor] = field(default_factory=dict)
    merged: Tensor | None = None
    output: Tensor | None = None
    bias: Tensor | None = None


def record(
    model: PreTrainedModel, sites: Sequence[Site], inputs: Mapping[str, Tensor]
) -> tuple[list[SiteRecord], dict[str, str]]:
    """Run one forward pass and keep what every site computed.

    Returns:
        A record for each site that ran, in the order in which they did, and a reason for each path that gave no
        attention weights.
    """
    watchers = {id(s.module): _Watcher(s, model) for s in sites}
    calls: list[tuple[Call, _Seen]] = []

    def take(call: Call) -> None:
        calls.append((call, watchers[id(call.site.module)].seen))

    with ExitStack() as stack:
        for watcher in watchers.values():
            stack.enter_context(watcher.watching())
        run(model, sites, inputs, take)
    found = {c.site.path for c, _ in calls}
    silent = {s.path: "no attention weights on this input" for s in sites if s.path not in found}
    mixed = any(isinstance(t, Tensor) and t.is_floating_point() for t in inputs.values())
    return [_record(model, call, seen, mixed) for call, seen in calls], silent


def _record(model: nn.Module, call: Call, seen: _Seen, mixed: bool) -> SiteRecord:
    tensors, rotations = _arguments(seen)
    tensors |= {name: _as_sequence(t) for name, t in seen.entering.items() if t.ndim in (2, 3, 4)}
    return SiteRecord(
        call=call,
        tensors=tensors,
        rotations=rotations,
        arguments=seen.kwargs,
        config=config_around(model, call.site.path),
        mixed=mixed,
        merged=seen.merged,
        output=seen.output,
        bias=seen.bias,
    )


class _Watcher:
    """Hooks on one module and on its projections, wherever the output projection sits."""

    def __init__(self, site: Site, model: nn.Module) -> None:
        self.module = site.module
        self.seen = _Seen()
        try:
            self.projections: Projections | None = projections(site, model=model)
        except ModelError:  # not plain projections: the reason is given where the weights are read
            self.projections = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the end of the block."""
        handles = [self.module.register_forward_pre_hook(self._enter, with_kwargs=True), *self._on_projections()]
        try:
            with self._on_bias_method():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_projections(self) -> Iterator[RemovableHandle]:
        if self.projections is None:
            return
        for role, name in PROJECTION_INPUT.items():
            owner = getattr(self.projections, role).weight.owner
            if owner is not self.module:
                yield owner.register_forward_pre_hook(self._keep_input(name))
        output = self.projections.output
        if output is not None and output.weight.owner is not self.module:
            yield output.weight.owner.register_forward_hook(self._projected)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen = _Seen(args, dict(kwargs))

    def _keep_input(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                self.seen.entering.setdefault(name, args[0])

        return keep

    def _projected(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and self.seen.output is None:
            self.seen.merged, self.seen.output = args[0], output

    @contextmanager
    def _on_bias_method(self) -> Iterator[None]:
        method = getattr(self.module, BIAS_METHOD, None)
        if method is None:
            yield
            return

        @wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.seen.bias = result = method(*args, **kwargs)
            return result

        setattr(self.module, BIAS_METHOD, watched)
        try:
            yield
        finally:
            delattr(self.module, BIAS_METHOD)


def _arguments(seen: _Seen) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    given = {f"argument {i}": v for i, v in enumerate(seen.args)} | seen.kwargs
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
