"""The projections that are refitted, in the original model and in the pruned one, and what cannot be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headscope.capture.outputs import Output, find_outputs
from headscope.errors import InputError, ModelError
from headscope.models.batches import Batch
from headscope.models.parts import is_plain_linear
from headscope.repair.streams import Stream, find_streams

_HINT = "Go without a repair."


@dataclass(frozen=True, eq=False)
class Place:
    """A projection to refit.

    Attributes:
        name: `stack.layer` of an output projection, the path of a down projection.
        stream: What its result goes into.
        module: The projection in the pruned model.
        weight: Its weight, (in_features, out_features), sharing memory.
        columns: int64: the input features that still count; the weights of the others stay as they are.
        axis: The axis of a batch that its tokens come from.
    """

    name: str
    stream: Stream
    module: nn.Module
    weight: Tensor
    columns: Tensor
    axis: str


def find_places(
    original: PreTrainedModel,
    pruned: PreTrainedModel,
    batch: Batch,
    layers: Sequence[str] | None = None,
    *,
    mlp: bool = False,
) -> tuple[Place, ...]:
    """Where to refit, in the order in which a forward pass comes there.

    Args:
        batch: Some of it is tried to find the streams.
        layers: As `stack.layer`, those whose output projections are refitted; None for all that lost heads.
        mlp: Down projections, too, from the first of these layers on.

    Raises:
        InputError: There is no such layer, or it has no heads to refit.
        ModelError: No layer lost heads, a projection's weights are shared or not run exactly once on these texts, or
            weights are not in memory.
    """
    _check_models(original, pruned)
    outputs, after = find_outputs(original), {o.name: o for o in find_outputs(pruned)}
    chosen = _chosen(outputs, after, layers)
    paths = {id(m): path for path, m in original.named_modules()}
    names = {paths[id(o.module)]: o for o in chosen}
    down = down_projections(original, outputs) if mlp else {}
    _check_own(pruned, [pruned.get_submodule(path) for path in (*names, *down)])
    modules = {path: original.get_submodule(path) for path in (*names, *down)}
    streams, calls = find_streams(original, modules, batch)
    _check_calls(names, calls)
    found = [_of_heads(after[o.name], streams[path]) for path, o in names.items()]
    start = min(place.stream.order for place in found)
    for path, axis in down.items():
        stream = streams.get(path)
        if stream is not None and stream.joined and stream.order > start:
            found.append(_of_mlp(pruned, path, stream, axis))
    return tuple(sorted(found, key=lambda p: p.stream.order))


def _of_heads(output: Output, stream: Stream) -> Place:
    return Place(output.name, stream, output.module, output.weight, alive(output), output.sites[0].query_axis)


def _of_mlp(pruned: PreTrainedModel, path: str, stream: Stream, axis: str) -> Place:
    module = pruned.get_submodule(path)
    weight = weight_of(module)
    return Place(path, stream, module, weight, torch.arange(len(weight)), axis)


def alive(output: Output) -> Tensor:
    """int64: the input features of an output projection that come from a head and have a weight."""
    units = output.units()
    if not units:
        return torch.empty(0, dtype=torch.int64)
    columns = torch.cat([unit.columns for unit in units]).sort().values
    weight = output.weight[columns.to(output.weight.device)]
    return columns[weight.ne(0).any(-1).cpu()]


def weight_of(module: nn.Module) -> Tensor:
    """(in_features, out_features) of a linear module, sharing memory, without gradient."""
    weight = module.get_parameter("weight").detach()
    return weight if isinstance(module, Conv1D) else weight.mT


# ------------------------------------------------------------------ down projections
def down_projections(model: PreTrainedModel, outputs: Sequence[Output]) -> dict[str, str]:
    """Linear modules of attention layers, by path, that give what is as wide as the stream, with the axis of their
    tokens: the down projections of feed-forward parts, and others that only a trial tells from them."""
    sites = [(site, output) for output in outputs for site in output.sites]
    layers = {(site.path, site.layer) for site, _ in sites}
    found: dict[str, str] = {}
    for site, output in sites:
        root = _layer_path(site.path, site.layer, layers)
        width = output.weight.shape[1]
        for name, module in model.get_submodule(root).named_modules():
            path = ".".join(part for part in (root, name) if part)
            inside = any(f"{path}.".startswith(f"{p}.") for p, _ in layers)
            if not inside and all(module is not o.module for o in outputs) and _gives(module, width):
                found.setdefault(path, site.query_axis)
    return found


def _layer_path(path: str, layer: int, layers: set[tuple[str, int]]) -> str:
    """The largest module around an attention module in which there is no other layer's."""
    while path:
        above = path.rpartition(".")[0]
        prefix = f"{above}." if above else ""
        if any(p.startswith(prefix) and number != layer for p, number in layers):
            break
        path = above
    return path


def _gives(module: nn.Module, width: int) -> bool:
    """Whether a module is a plain linear map to so many features."""
    plain = isinstance(module, Conv1D) or is_plain_linear(module)
    weight = module._parameters.get("weight") if plain else None
    return weight is not None and weight.is_floating_point() and weight_of(module).shape[1] == width


# ------------------------------------------------------------------ what cannot be refitted
def _check_models(original: PreTrainedModel, pruned: PreTrainedModel) -> None:
    for model in (original, pruned):
        if any(p.is_meta for p in model.parameters()):
            raise ModelError(
                f"weights of {type(model).__name__} are not in memory: offloaded or never loaded",
                "Load the model as a whole: without --device-map, or on a device that has room for it.",
            )


def _chosen(outputs: Sequence[Output], after: Mapping[str, Output], layers: Sequence[str] | None) -> tuple[Output, ...]:
    named = {o.name: o for o in outputs}
    unknown = [name for name in layers or () if name not in named or name not in after]
    if unknown:
        raise InputError(f"there is no layer {unknown[0]} to repair", f"Layers: {', '.join(named)}.")
    lost = tuple(o for o in outputs if o.name in after and len(alive(after[o.name])) < len(alive(o)))
    chosen = lost if layers is None else tuple(named[name] for name in dict.fromkeys(layers))
    if not chosen:
        raise ModelError("no layer lost heads, so there is nothing to repair", "Remove or zero some heads first.")
    shared = next((o for o in chosen if len(o.sites) > 1), None)
    if shared is not None:
        raise ModelError(f"several layers run {shared.sites[0].path}: shared weights cannot be refitted", _HINT)
    return chosen


def _check_own(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    owners: Counter[int] = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    for module in modules:
        if owners[id(module._parameters.get("weight"))] != 1:
            path = next(path for path, m in model.named_modules() if m is module)
            raise ModelError(f"{path} shares its weight with another module: shared weights cannot be refitted", _HINT)


def _check_calls(names: Mapping[str, Output], calls: Mapping[str, int]) -> None:
    for path in names:
        if calls.get(path, 0) == 0:
            raise ModelError(f"{path} does not run on these texts, so it cannot be refitted", _HINT)
        if calls[path] > 1:
            raise ModelError(f"{path} runs {calls[path]} times on a text: shared weights cannot be refitted", _HINT)


def paths_of(places: Sequence[Place]) -> Iterator[tuple[str, nn.Module]]:
    """The projections in the pruned model, by path."""
    return ((place.stream.projection, place.module) for place in places)
