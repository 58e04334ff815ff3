"""One forward pass, and what the model's attention modules do in it, whichever engine listens."""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.capture.softmax_inside import Inside, watching, weights_inside
from headscope.errors import ModelError, ResourceError, is_out_of_memory
from headscope.models.sites import Site


class Recorder:
    """Matches what the model computes with its sites."""

    def __init__(self, sites: Sequence[Site], take: Callable[[Any], None]) -> None:
        self.sites: dict[int, list[Site]] = defaultdict(list)
        for site in sites:
            self.sites[id(site.module)].append(site)
        self.take = take
        self.calls: dict[int, int] = defaultdict(int)
        self.entered: set[int] = set()
        self.handed: dict[int, Any] = {}
        self.failure: Exception | None = None
        self.thread = threading.get_ident()

    def watches(self, module: nn.Module) -> bool:
        """Whether a module that now runs is one of ours, in our own forward pass and not in another thread's."""
        return id(module) in self.sites and threading.get_ident() == self.thread

    def modules(self) -> list[nn.Module]:
        """The modules of all sites, each once."""
        return [sites[0].module for sites in self.sites.values()]

    def all_sites(self) -> tuple[Site, ...]:
        """The sites of all modules."""
        return tuple(s for sites in self.sites.values() for s in sites)

    def silent(self) -> tuple[Site, ...]:
        """The sites whose modules ran without giving weights."""
        return tuple(s for key in self.entered if not self.calls[key] for s in self.sites[key])

    def reads_outputs(self) -> bool:
        """Whether any module keeps its attention to itself, so that it has to be asked for weights."""
        return any(not sites[0].uses_interface for sites in self.sites.values())

    def record(self, module: nn.Module, weights: Any, make: Callable[[Site, int], Any]) -> None:
        """Hand on a call of `module`, as `make` puts it together from the site and the number of the call."""
        number = self.calls[id(module)]
        self.calls[id(module)] += 1
        known = self.sites[id(module)]
        self.handed[id(module)] = weights
        try:
            self.take(make(known[min(number, len(known) - 1)], number))
        except Exception as error:  # passed on as it is, so that a consumer's fault is not taken for the model's
            self.failure = error
            raise


# ------------------------------------------------------------------ one forward pass
def forward(model: PreTrainedModel, inputs: Mapping[str, Tensor], recorder: Recorder) -> tuple[Site, ...]:
    """One forward pass; returns the sites whose modules ran but gave no attention weights.

    Raises:
        ModelError: The forward pass fails, or nothing is captured.
        ResourceError: Out of memory.
    """
    _run(model, inputs, recorder)
    silent = recorder.silent()
    if not any(recorder.calls.values()):
        which = ", ".join(sorted({type(s.module).__name__ for s in silent or recorder.all_sites()})[:3])
        raise ModelError(
            f"none of the model's attention modules returned attention weights on this input ({which})",
            "Modules that attend to blocks or windows of tokens, or keep their weights to themselves, cannot be read."
            if silent
            else "None of them ran: give the input that this part of the model reads.",
        )
    return silent


def _run(model: PreTrainedModel, inputs: Mapping[str, Tensor], recorder: Recorder) -> None:
    parameters = inspect.signature(model.forward).parameters
    extra: dict[str, Any] = {}
    if recorder.reads_outputs() and ("output_attentions" in parameters or _takes_any(parameters)):
        extra["output_attentions"] = True
    if "use_cache" in parameters and "use_cache" not in inputs:
        extra["use_cache"] = False
    try:
        model(**inputs, **extra)
    except Exception as error:  # whatever a model's code raises, the user needs its first line
        if error is recorder.failure:
            raise
        if is_out_of_memory(error):
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


# ------------------------------------------------------------------ modules that compute attention themselves
@contextmanager
def hooked(recorder: Recorder, read: Callable[[nn.Module, Tensor, tuple[Tensor, ...]], None]) -> Iterator[None]:
    """Read weights at the output of modules that did not call the interface, and keep the model from hoarding any.

    Args:
        recorder: Whose modules.
        read: Takes the module, its weights (batch, head, query, key) and what may be masks.
    """
    before: dict[int, int] = {}
    inside: dict[int, list[Inside]] = {}

    def enter(module: nn.Module, args: Any) -> None:
        if recorder.watches(module):
            recorder.entered.add(id(module))
            before[id(module)] = recorder.calls[id(module)]

    def leave(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not recorder.watches(module):
            return output
        found = inside.pop(id(module), [])
        if recorder.calls[id(module)] == before.get(id(module)):
            axes = recorder.sites[id(module)][0].weight_axes
            weights, masks = _weights_in(output), _masks_of(module, args, kwargs, axes)
            kept = weights_inside(module, found, (*args, *kwargs.values())) if weights is None else None
            if weights is not None:
                read(module, weights.permute(axes), masks)
                recorder.handed[id(module)] = weights
            elif kept is not None:
                read(module, kept.weights, (*masks, *kept.masks))
                recorder.handed[id(module)] = kept.original
        handed = recorder.handed.pop(id(module), None)
        if handed is None or not isinstance(output, tuple | list):
            return output
        # What sdpa returns in its place; modules that compute attention themselves may count on a tensor.
        instead = None if recorder.sites[id(module)][0].uses_interface else handed.new_empty((0,) * handed.ndim)
        return type(output)(instead if part is handed else part for part in output)

    with ExitStack() as stack:
        for module in recorder.modules():
            if _keeps_to_itself(recorder.sites[id(module)][0]):
                wanted, show = partial(recorder.watches, module), partial(inside.__setitem__, id(module))
                stack.enter_context(watching(module, wanted, show))
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, prepend=True, with_kwargs=True).remove)
        yield


def _keeps_to_itself(site: Site) -> bool:
    """Whether a module's weights may have to be found inside; those in another order are only known at its output."""
    return not site.uses_interface and site.weight_axes == (0, 1, 2, 3)


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
    """The one tensor of an attention module's output that can be attention weights: 4-D, no negative value.

    One matrix shown for every head is a mean over heads.
    """
    parts = list(_flat(output))[1:] if isinstance(output, tuple | list) else []
    fit = [p for p in parts if p.ndim == 4 and p.is_floating_point() and not bool((p < 0).any())]
    return fit[0] if len(fit) == 1 and not (fit[0].shape[1] > 1 and fit[0].stride(1) == 0) else None


def _flat(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _flat(part)
