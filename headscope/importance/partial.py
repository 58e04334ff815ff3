"""Forward passes in which layers that come before a change are not run again, but give what they gave before."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.capture.outputs import Output, watching
from headscope.models.sites import find_sites

T = TypeVar("T")
Kept = Mapping[nn.Module, Any]
"""What layers gave, by the layer."""


@dataclass(frozen=True)
class Recorded:
    """What a forward pass was seen to do.

    Attributes:
        kept: For each output projection that was called, the layers that were done before its first call, with what
            they gave: nothing that changes there can change them. Layers within others of these are left out.
        share: For each, the share of the pass that is run when those layers are not.
        seconds: How long the whole pass took.
    """

    kept: Mapping[Output, Kept]
    share: Mapping[Output, float]
    seconds: float


def layers_of(model: PreTrainedModel) -> dict[nn.Module, str]:
    """The elements of all module lists with attention somewhere in them, and their paths."""
    layers: dict[nn.Module, str] = {}
    for site in find_sites(model):
        parts = site.path.split(".")
        for path in (".".join(parts[:i]) for i in range(1, len(parts))):
            container = model.get_submodule(path)
            if isinstance(container, nn.ModuleList):
                layers |= {m: f"{path}.{n}" for n, m in container.named_children() if m not in layers}
    return layers


def record(layers: Mapping[nn.Module, str], outputs: Sequence[Output], run: Callable[[], T]) -> tuple[T, Recorded]:
    """Call `run`, which makes one forward pass, and keep what each layer gives; what `run` returns comes first.

    What is kept shares memory with the pass. A layer is left out if it is called several times, if it gives more than
    tensors, or if something writes into what it gave.
    """
    tick = count()
    given: dict[nn.Module, list[_Given]] = defaultdict(list)
    called: dict[Output, int] = {}

    def see(output: Output, context: Tensor) -> None:
        called.setdefault(output, next(tick))

    def watched(layer: nn.Module) -> Callable[..., Any]:
        forward = layer.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            start = _now()
            result = forward(*args, **kwargs)
            given[layer].append(_Given(result, _versions(result), next(tick), _now() - start))
            return result

        return call

    start = _now()
    with forwards({layer: watched(layer) for layer in layers}), watching(outputs, see):
        result = run()
    seconds = _now() - start
    usable = {layer: calls[0] for layer, calls in given.items() if len(calls) == 1 and calls[0].whole}
    before = {o: _outermost({m: g for m, g in usable.items() if g.done < at}, layers) for o, at in called.items()}
    return result, Recorded(
        {output: {m: g.result for m, g in found.items()} for output, found in before.items()},
        {output: 1 - sum(g.seconds for g in found.values()) / seconds for output, found in before.items()},
        seconds,
    )


@contextmanager
def giving(kept: Kept) -> Iterator[None]:
    """Within the block these layers give what they gave before, whatever they are called with."""

    def given(result: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: result

    with forwards({layer: given(result) for layer, result in kept.items()}):
        yield


@contextmanager
def forwards(functions: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within the block these modules have other `forward` functions."""
    before = {module: vars(module).get("forward") for module in functions}
    try:
        for module, function in functions.items():
            vars(module)["forward"] = function
        yield
    finally:
        for module, own in before.items():
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own


# ------------------------------------------------------------------ details
@dataclass(frozen=True)
class _Given:
    """What one call of a layer gave, with its tensors' versions then; `done` is when, among all that was seen."""

    result: Any
    versions: tuple[int, ...] | None
    done: int
    seconds: float

    @property
    def whole(self) -> bool:
        """Whether it can be given again: it is all tensors, and nothing was written into them since."""
        return self.versions is not None and self.versions == _versions(self.result)


def _versions(value: Any) -> tuple[int, ...] | None:
    """How often each tensor in a result was written to; None if it holds what a later pass could not be given."""
    if isinstance(value, Tensor):
        return (value._version,)
    if value is None or isinstance(value, bool | int | float | str):
        return ()
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else None
    found = [None] if parts is None else [_versions(part) for part in parts]
    return None if None in found else tuple(v for part in found for v in part or ())


def _outermost(found: Mapping[nn.Module, _Given], layers: Mapping[nn.Module, str]) -> dict[nn.Module, _Given]:
    paths = {layers[m] for m in found}

    def within(path: str) -> bool:
        return any(path.startswith(f"{other}.") for other in paths)

    return {m: g for m, g in found.items() if not within(layers[m])}


def _now() -> float:
    """Seconds; accelerators have done what they were told until now."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
