"""Where heads' results meet: the output projections of a model, each with the features that come from each head.

Everything that scores, ablates or refits heads works here and needs hooks on these modules only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.errors import ModelError
from headscope.models.parts import NotPlain
from headscope.models.projections import Projection, projections, state_of
from headscope.models.pruned import HeadState
from headscope.models.sites import Site, find_sites


@dataclass(frozen=True)
class Unit:
    """What is scored and removed as a whole: a head, or all heads that share a key-value head.

    Attributes:
        number: The head's or the key-value head's number in the original model.
        heads: The query heads that it holds, in original numbers, those only that still give something.
        columns: int64: where their results lie among the output projection's input features.
    """

    number: int
    heads: tuple[int, ...]
    columns: Tensor


@dataclass(frozen=True, eq=False)
class Output:
    """The output projection of one attention module.

    Attributes:
        sites: The layers that the module serves: one, but for models that share weights between layers.
        state: Its heads, original and left.
        module: What is called with all heads' results side by side, features last.
        projection: Its weight, by head.
    """

    sites: tuple[Site, ...]
    state: HeadState
    module: nn.Module
    projection: Projection
    _units: dict[str, tuple[Unit, ...]] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """`stack.layer` of the first layer that it serves."""
        return f"{self.sites[0].stack}.{self.sites[0].layer}"

    @property
    def weight(self) -> Tensor:
        """(in_features, out_features), sharing memory with the model, without gradient."""
        return self.projection.matrix()

    def units(self, unit: str = "head") -> tuple[Unit, ...]:
        """Its heads or, with `kv-group`, its groups, as far as they still give something."""
        if unit not in self._units:
            self._units[unit] = tuple(self._found(unit))
        return self._units[unit]

    def columns(self, heads: Sequence[int]) -> Tensor:
        """int64: where the results of some heads lie, in the order of the weights."""
        return self.projection.rows.index()[self.state.places(tuple(heads))].flatten()

    def _found(self, unit: str) -> Iterator[Unit]:
        alive = [h for h in self.state.kept if h not in self.state.zeroed]
        size = 1 if unit == "head" else self.state.group
        for number in dict.fromkeys(h // size for h in alive):
            heads = tuple(h for h in alive if h // size == number)
            yield Unit(number, heads, self.columns(heads))


def find_outputs(model: PreTrainedModel, chosen: Sequence[Site] | None = None) -> tuple[Output, ...]:
    """The output projections of all attention modules whose heads can be told apart there, in the model's order.

    Args:
        model: Pruned or not.
        chosen: Only those of these sites; None for all.

    Raises:
        ModelError: There is none; the message has the reason for the first module that was left out.
    """
    by_module: dict[int, list[Site]] = {}
    for site in find_sites(model) if chosen is None else chosen:
        by_module.setdefault(id(site.module), []).append(site)
    found: list[Output] = []
    reasons: list[str] = []
    for sites in by_module.values():
        try:
            found.append(_output(model, tuple(sites)))
        except ModelError as reason:
            reasons.append(str(reason))
    if not found:
        raise ModelError(
            f"no head of {type(model).__name__} can be scored: {reasons[0] if reasons else 'no such layer'}",
            "Heads are scored at plain output projections.",
        )
    return tuple(found)


def _output(model: PreTrainedModel, sites: tuple[Site, ...]) -> Output:
    found = projections(sites[0], model=model)
    if found.output is None:
        raise NotPlain(f"{sites[0].path} has no output projection that is known")
    module = found.output.weight.owner
    if module is sites[0].module or isinstance(module, nn.Conv1d | nn.Conv2d):
        raise NotPlain(f"{sites[0].path} has no output projection that is a linear module of its own")
    return Output(sites, state_of(sites[0], found), module, found.output)


# ------------------------------------------------------------------ hooks
@contextmanager
def watching(outputs: Sequence[Output], see: Callable[[Output, Tensor], Tensor | None]) -> Iterator[None]:
    """Within the block, `see` is called with what goes into each output projection, (..., in_features).

    What it returns goes in instead, if it returns anything.
    """

    def hook(output: Output) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            changed = see(output, args[0])
            return None if changed is None else (changed, *args[1:])

        return before

    handles = [o.module.register_forward_pre_hook(hook(o)) for o in outputs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Within the block no parameter takes gradients; afterwards each takes them as before, and none has new ones."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)
