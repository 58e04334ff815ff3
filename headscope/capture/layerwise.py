"""The layerwise engine: one eager forward pass that hands on each layer's attention matrix and then forgets it.

Modules that call transformers' registered attention functions are read where they call them, with the very function
that their own file defines as eager; all others at their output. Nothing stays changed afterwards.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from headscope.errors import ModelError, ResourceError
from headscope.models.sites import Site


@dataclass(frozen=True)
class Arguments:
    """What a registered attention function was given, and the context that it gave back.

    Attributes:
        query, key, value: (batch, head or key/value head, query or key, dim), positions applied.
        mask: Additive or boolean, None where there was none.
        options: The keyword arguments, such as `scaling`, `softcap`, `s_aux` or `position_bias`.
        context: (batch, query, head, dim).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: Mapping[str, Any]
    context: Tensor


@dataclass(frozen=True)
class Call:
    """One attention computation as the model did it.

    Attributes:
        number: Which call of its module in this forward pass this is; a site's own `call`, unless there are too many.
        weights: (batch, head, query, key) in the model's dtype, as the module's own eager attention returns them.
        arguments: What the attention function was given; None for a module that computes attention itself.
        masks: What hid keys from rows, additive or of zeros and ones, as far as it is known; broadcastable to `weights`
            or, of two axes, (batch, key).
    """

    site: Site
    number: int
    weights: Tensor
    arguments: Arguments | None
    masks: tuple[Tensor, ...] = ()

    @property
    def num_kv_heads(self) -> int | None:
        """From the keys' shape; None where they are not known."""
        return None if self.arguments is None else self.arguments.key.shape[1]

    @property
    def head_dim(self) -> int | None:
        """From the queries' shape; None where they are not known."""
        return None if self.arguments is None else self.arguments.query.shape[-1]


Take = Callable[[Call], None]


def run(model: PreTrainedModel, sites: Sequence[Site], inputs: Mapping[str, Tensor], take: Take) -> tuple[Site, ...]:
    """Run one forward pass in evaluation mode and call `take` for every attention matrix, layer by layer.

    A module that computes attention more often than it has sites gives calls beyond its last site, for the caller to
    refuse. The model's training mode, attention implementation and hooks are as before afterwards, also after an error.

    Returns:
        The sites whose modules ran but gave no attention weights.

    Raises:
        ModelError: The forward pass fails, or nothing is captured.
        ResourceError: Out of memory.
    """
    recorder = _Recorder(sites, take)
    with ExitStack() as stack:
        stack.enter_context(eager_evaluation(model))
        stack.enter_context(_listening(recorder))
        stack.enter_context(_hooked(recorder))
        stack.enter_context(torch.no_grad())
        _forward(model, inputs, recorder)
    silent = recorder.silent()
    if not any(recorder.calls.values()):
        which = ", ".join(sorted({type(s.module).__name__ for s in silent or sites})[:3])
        raise ModelError(
            f"none of the model's attention modules returned attention weights on this input ({which})",
            "Modules that attend to blocks or windows of tokens, or keep their weights to themselves, cannot be read."
            if silent
            else "None of them ran: give the input that this part of the model reads.",
        )
    return silent


# ------------------------------------------------------------------ one forward pass
def _forward(model: PreTrainedModel, inputs: Mapping[str, Tensor], recorder: _Recorder) -> None:
    parameters = inspect.signature(model.forward).parameters
    extra: dict[str, Any] = {}
    if recorder.reads_outputs() and ("output_attentions" in parameters or _takes_any(parameters)):
        extra["output_attentions"] = True
    if "use_cache" in parameters:
        extra["use_cache"] = False
    try:
        model(**inputs, **extra)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(inputs) from error
    except Exception as error:  # whatever a model's code raises, the user needs its first line
        if error is recorder.failure:
            raise
        if "not enough memory" in str(error) or "can't allocate memory" in str(error):
            raise _out_of_memory(inputs) from error
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{type(model).__name__} fails on this input: {first}",
            "Check that the input fits the model; --debug shows where it failed.",
        ) from error


def _out_of_memory(inputs: Mapping[str, Tensor]) -> ResourceError:
    shapes = ", ".join(f"{k} {tuple(v.shape)}" for k, v in inputs.items() if isinstance(v, Tensor))
    return ResourceError(f"out of memory in the forward pass ({shapes})", "Use --max-length or --batch-size.")


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


# ------------------------------------------------------------------ recording
class _Recorder:
    """Matches what the model computes with its sites."""

    def __init__(self, sites: Sequence[Site], take: Take) -> None:
        self.sites: dict[int, list[Site]] = defaultdict(list)
        for site in sites:
            self.sites[id(site.module)].append(site)
        self.take = take
        self.calls: dict[int, int] = defaultdict(int)
        self.entered: set[int] = set()
        self.handed: dict[int, Tensor] = {}
        self.failure: Exception | None = None
        self.thread = threading.get_ident()

    def watches(self, module: nn.Module) -> bool:
        """Whether a module that now runs is one of ours, in our own forward pass and not in another thread's."""
        return id(module) in self.sites and threading.get_ident() == self.thread

    def modules(self) -> list[nn.Module]:
        return [sites[0].module for sites in self.sites.values()]

    def silent(self) -> tuple[Site, ...]:
        """The sites whose modules ran without giving weights."""
        return tuple(s for key in self.entered if not self.calls[key] for s in self.sites[key])

    def reads_outputs(self) -> bool:
        """Whether any module keeps its attention to itself, so that it has to be asked for weights."""
        return any(not sites[0].uses_interface for sites in self.sites.values())

    def record(
        self, module: nn.Module, weights: Tensor, arguments: Arguments | None, masks: tuple[Tensor, ...]
    ) -> None:
        number = self.calls[id(module)]
        self.calls[id(module)] += 1
        known = self.sites[id(module)]
        self.handed[id(module)] = weights
        try:
            self.take(Call(known[min(number, len(known) - 1)], number, weights, arguments, masks))
        except Exception as error:  # passed on as it is, so that a consumer's fault is not taken for the model's
            self.failure = error
            raise


# ------------------------------------------------------------------ modules that call the attention interface
@contextmanager
def _listening(recorder: _Recorder) -> Iterator[None]:
    """Let the recorder see every call of a registered attention function by one of its modules."""
    choose: Callable[..., Callable[..., Any]] = AttentionInterface.get_interface

    def get_interface(self: AttentionInterface, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return _recorded(choose(self, *args, **kwargs), recorder)

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]  # that is the point
    try:
        yield
    finally:
        AttentionInterface.get_interface = choose  # type: ignore[method-assign]  # as above


def _recorded(function: Callable[..., Any], recorder: _Recorder) -> Callable[..., Any]:
    """`function` as it is, but the weights of the recorder's modules are shown to it."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = function(module, *args, **kwargs)
        weights = result[1] if isinstance(result, tuple) and len(result) > 1 else None
        if isinstance(weights, Tensor) and recorder.watches(module):
            given = {**kwargs, **dict(zip(_FUNCTION_ARGUMENTS, args, strict=False))}
            mask = given.get("attention_mask")
            masks = (mask,) if isinstance(mask, Tensor) else ()
            recorder.record(module, weights, _arguments(given, result[0]), masks)
        return result

    return call


_FUNCTION_ARGUMENTS = ("query", "key", "value", "attention_mask")


def _arguments(given: Mapping[str, Any], context: Tensor) -> Arguments | None:
    tensors = [given.get(name) for name in _FUNCTION_ARGUMENTS[:3]]
    query, key, value = (t if isinstance(t, Tensor) and t.ndim == 4 else None for t in tensors)
    if query is None or key is None or value is None:
        return None
    mask = given.get("attention_mask")
    options = {name: value for name, value in given.items() if name not in _FUNCTION_ARGUMENTS}
    return Arguments(query, key, value, mask if isinstance(mask, Tensor) else None, options, context)


# ------------------------------------------------------------------ modules that compute attention themselves
@contextmanager
def _hooked(recorder: _Recorder) -> Iterator[None]:
    """Read weights at the output of modules that did not call the interface, and keep the model from hoarding any."""
    handles = []
    before: dict[int, int] = {}

    def enter(module: nn.Module, args: Any) -> None:
        if recorder.watches(module):
            recorder.entered.add(id(module))
            before[id(module)] = recorder.calls[id(module)]

    def leave(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not recorder.watches(module):
            return output
        if recorder.calls[id(module)] == before.get(id(module)):
            weights = _weights_in(output)
            if weights is not None:
                axes = recorder.sites[id(module)][0].weight_axes
                recorder.record(module, weights.permute(axes), None, _masks_of(module, args, kwargs, axes))
                recorder.handed[id(module)] = weights
        handed = recorder.handed.pop(id(module), None)
        if handed is None or not isinstance(output, tuple | list):
            return output
        # What sdpa returns in its place; modules that compute attention themselves may count on a tensor.
        instead = None if recorder.sites[id(module)][0].uses_interface else handed.new_empty((0,) * handed.ndim)
        return type(output)(instead if part is handed else part for part in output)

    try:
        for module in recorder.modules():
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, prepend=True, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _masks_of(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], axes: tuple[int, int, int, int]
) -> tuple[Tensor, ...]:
    """What may be masks of a module that computes attention itself: arguments called so, and square tables it keeps."""
    given = {**kwargs, **dict(zip(inspect.signature(module.forward).parameters, args, strict=False))}
    masks = [m for name, m in given.items() if "mask" in name and isinstance(m, Tensor)]
    masks = [m.permute(axes) if m.ndim == 4 and axes != tuple(range(4)) else m for m in masks]
    tables = [b for b in module.buffers(recurse=False) if b.ndim == 4 and b.shape[2] == b.shape[3]]
    return (*masks, *tables)


def _weights_in(output: Any) -> Tensor | None:
    """The one tensor of an attention module's output that can be attention weights: 4-D, no negative value."""
    parts = list(_flat(output))[1:] if isinstance(output, tuple | list) else []
    fit = [p for p in parts if p.ndim == 4 and p.is_floating_point() and not bool((p < 0).any())]
    return fit[0] if len(fit) == 1 else None


def _flat(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _flat(part)


# ------------------------------------------------------------------ the model as it has to be, and back
_one_at_a_time = threading.RLock()


@contextmanager
def eager_evaluation(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode and eager attention in every part of the model, each restored on the way out.

    Threads take turns: models may share a config, and all share transformers' table of attention functions.
    """
    with _one_at_a_time:
        training = [(m, m.training) for m in model.modules()]
        configs = _configs(model)
        implementations = [c._attn_implementation_internal for c in configs]
        try:
            model.train(mode=False)
            for config in configs:
                config._attn_implementation_internal = "eager"
            yield
        finally:
            for config, implementation in zip(configs, implementations, strict=True):
                config._attn_implementation_internal = implementation
            for module, mode in training:
                module.training = mode


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config object in the model: modules hold copies, and composite configs hold others."""
    found: dict[int, PreTrainedConfig] = {}
    own = (getattr(m, "config", None) for m in model.modules())
    queue = [c for c in own if isinstance(c, PreTrainedConfig)]
    while queue:
        config = queue.pop()
        if id(config) not in found:
            found[id(config)] = config
            queue.extend(v for v in vars(config).values() if isinstance(v, PreTrainedConfig))
    return list(found.values())
