"""Attention weights that a module computes and keeps to itself, seen while its own code runs.

What counts as attention weights is what makes attention: the softmax over keys that values are then summed with. So a
softmax counts only once its result, in its own order or with rows and columns swapped, enters a matrix product over
keys; the weights inside torch's own attention functions are computed again from what these are given. A softmax that
gates or routes enters no such product, and nothing is taken where several do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headscope.capture.torch_attention import dot_product, layer_masks
from headscope.capture.visible import CLOSED, open_cells
from headscope.models.head_counts import NUM_HEADS

_SOFTMAXES = (torch.softmax, Tensor.softmax, nn.functional.softmax, torch.special.softmax)
_PRODUCTS = (torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm)

# Functions that give the same numbers in the same order, whether they copy them or not; in evaluation dropout does too.
_SAME_ORDER = {
    *("dropout", "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone"),
    *("view", "reshape", "view_as", "reshape_as", "unflatten", "flatten", "unsqueeze", "squeeze"),
}
_SWAPS = {"transpose", "permute", "swapaxes", "swapdims", "__get__"}


@dataclass(frozen=True)
class Inside:
    """A softmax over keys.

    Attributes:
        weights: What it gave, as the module has it.
        scores: What it was given; None where torch's own functions computed it.
        masks: What hid keys from rows, as far as it is known.
        used: Values were summed with it.
        original: The weights before their axes were put in order; a module may return them, too.
    """

    weights: Tensor
    scores: Tensor | None = None
    masks: tuple[Tensor, ...] = ()
    used: bool = True
    original: Tensor | None = None


class SoftmaxWatch(TorchFunctionMode):
    """Notes every softmax over the last axis and whether values are summed with it.

    Attributes:
        found: In the order in which they are computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Inside] = []
        # By id: the tensor, held so that its id stays its own; which of `found` it is; rows and columns swapped.
        self._followed: dict[int, tuple[Tensor, int, bool]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Let torch do what it does, and note what it is."""
        kwargs = kwargs or {}
        if func is nn.functional.multi_head_attention_forward:
            return self._multi_head(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is nn.functional.scaled_dot_product_attention:
            weights, masks = dot_product(*args, **kwargs)
            self.found.append(Inside(weights, masks=masks))
        elif func in _SOFTMAXES:
            self._note(result, args, kwargs)
        elif self._followed and func in _PRODUCTS:
            self._use_in_product([*args, *kwargs.values()])
        elif self._followed and func is torch.einsum:
            self._use_in_einsum(args)
        elif self._followed and args and isinstance(result, Tensor):
            self._follow(getattr(func, "__name__", ""), args[0], result)
        return result

    def _note(self, weights: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        scores = args[0] if args else kwargs["input"]
        axis = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
        if weights.ndim >= 3 and axis in (-1, weights.ndim - 1):
            self._followed[id(weights)] = (weights, len(self.found), False)
            self.found.append(Inside(weights, scores, used=False))

    def _follow(self, name: str, source: Any, result: Tensor) -> None:
        known = self._followed.get(id(source))
        if known is None or id(result) in self._followed or result.ndim < 2 or result.numel() != source.numel():
            return
        _, which, swapped = known
        if name in _SAME_ORDER and result.shape[-2:] == source.shape[-2:]:
            self._followed[id(result)] = (result, which, swapped)
        elif name in _SWAPS and _is_swapped(source, result):
            self._followed[id(result)] = (result, which, not swapped)

    def _use_in_product(self, operands: Sequence[Any]) -> None:
        for swapped, operand in zip((False, True), operands, strict=False):
            known = self._followed.get(id(operand))
            if known is not None and known[2] == swapped:
                self._use(known[1])

    def _use_in_einsum(self, args: Sequence[Any]) -> None:
        equation, operands = args[0], args[1] if isinstance(args[1], list | tuple) else args[1:]
        if not isinstance(equation, str) or len(operands) != 2:
            return
        for mine, other in ((0, 1), (1, 0)):
            known = self._followed.get(id(operands[mine]))
            if known is not None and _sums_over_keys(equation, mine, other, swapped=known[2]):
                self._use(known[1])

    def _use(self, which: int) -> None:
        self.found[which] = replace(self.found[which], used=True)

    def _multi_head(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Torch's whole layer: the weights that it gives are means over heads unless it is told otherwise."""
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if given["bias_k"] is not None or given["add_zero_attn"]:
            return func(*args, **kwargs)  # its weights have columns that are no tokens
        needed, averaged = given["need_weights"], given["average_attn_weights"]
        given["need_weights"], given["average_attn_weights"] = True, False
        output, weights = func(*bound.args, **bound.kwargs)
        self.found.append(Inside(weights, masks=tuple(layer_masks(given, weights))))
        return output, (weights.mean(dim=-3) if averaged else weights) if needed else None


def _is_swapped(source: Tensor, result: Tensor) -> bool:
    """Whether a view of a tensor has its last two axes swapped and all else as it was."""

    def axes(tensor: Tensor) -> list[tuple[int, int]]:
        return list(zip(tensor.shape, tensor.stride(), strict=True))

    old, new = axes(source), axes(result)
    return source.data_ptr() == result.data_ptr() and new == [*old[:-2], old[-1], old[-2]]


def _sums_over_keys(equation: str, mine: int, other: int, *, swapped: bool) -> bool:
    """Whether an einsum of weights and values sums over keys alone."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if not arrow or "." in equation or len(names) != 2 or len(names[mine]) < 3:
        return False
    outer, query, key = names[mine][:-2], names[mine][-2], names[mine][-1]
    if swapped:
        query, key = key, query
    summed = key in names[other] and key not in output
    return summed and query in output and query not in names[other] and set(outer) <= set(output)


# ------------------------------------------------------------------ one module
@contextmanager
def watching(module: nn.Module, wanted: Callable[[], bool], show: Callable[[list[Inside]], None]) -> Iterator[None]:
    """Watch every forward pass of `module`, which is as before afterwards.

    Args:
        module: A module that computes attention itself.
        wanted: Whether the forward pass that begins is one to watch.
        show: Takes what was found, after each such pass that ends well.
    """
    own, plain = vars(module).get("forward"), module.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not wanted():
            return plain(*args, **kwargs)
        with SoftmaxWatch() as watch:
            output = plain(*args, **kwargs)
        show(watch.found)
        return output

    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


def weights_inside(module: nn.Module, found: Sequence[Inside], given: Iterable[Any]) -> Inside | None:
    """The one softmax that is the module's attention, (batch, head, query, key), with its masks; else None.

    Weights of three axes hold the heads of an example beside each other, (batch * head, query, key). Positions that the
    module itself added to fill a block are cut off where it masks them.

    Args:
        module: Whose it is.
        found: What a watch of one forward pass saw.
        given: What the module was given.
    """
    used = [inside for inside in found if inside.used]
    if len(used) != 1 or used[0].weights.ndim not in (3, 4) or _fills_windows(given):
        return None
    (inside,) = used
    heads, shape = _number_of_heads(module), tuple(inside.weights.shape)
    if len(shape) == 4 and shape[1] != heads:
        return None
    if len(shape) == 3 and shape[0] % (heads or 1):
        return None
    shape = (shape[0] // (heads or 1), heads or 1, *shape[1:]) if len(shape) == 3 else shape
    masks = tuple(m for m in inside.masks if m.ndim == 4)
    if inside.scores is not None and bool((inside.scores < CLOSED).any()):
        masks = (*masks, (inside.scores >= CLOSED).reshape(shape))
    return _without_filling(Inside(inside.weights.reshape(shape), masks=masks, original=inside.weights))


def _fills_windows(given: Iterable[Any]) -> bool:
    """Whether the image that a module is given, (batch, height, width, channel), has tokens of zeros.

    Windows larger than what is left of an image are filled up with them, and nothing masks them.
    """
    states = next((x for x in given if isinstance(x, Tensor)), None)
    return states is not None and states.ndim == 4 and bool((states == 0).all(dim=-1).any())


def _without_filling(inside: Inside) -> Inside | None:
    """Without the last positions, if masks hide them from all others and all from them; None if others see nothing."""
    rows, keys = inside.weights.shape[2:]
    seen = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=inside.weights.device)
    for mask in inside.masks:
        seen = seen & open_cells(mask, rows, keys)
    alive = seen.any(dim=-1)
    if bool(alive.all()):
        return inside
    n = int(alive[0].sum())
    whole = bool(alive[..., :n].all()) and not bool(alive[..., n:].any()) and not bool(seen[..., :n, n:].any())
    if rows != keys or n == 0 or not whole:
        return None
    masks = tuple(m[..., : n if m.shape[2] == rows else 1, :n] for m in inside.masks)
    return replace(inside, weights=inside.weights[:, :, :n, :n], masks=masks)


def _number_of_heads(module: nn.Module) -> int | None:
    """What a module says; None where it says nothing, as modules of one head do."""
    numbers = (getattr(module, name, None) for name in NUM_HEADS)
    return next((n for n in numbers if isinstance(n, int) and n > 0), None)
