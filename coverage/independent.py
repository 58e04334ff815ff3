"""The model's own attention weights, found without headscope: one plain eager forward pass, listened to.

Two sources. What the model returns for `output_attentions=True`; and the scores that any of its modules hands to a
softmax, turned into weights here in float64. Returned tensors count only where the scores confirm that they are
attention weights, since many models return hidden states under that name.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from subjects import Subject

Weights = NDArray[np.float64]

_SOFTMAX = (torch.softmax, torch.Tensor.softmax, nn.functional.softmax, torch.special.softmax)

# What additive masks hide is below this.
_HIDDEN = -1e30

# How far float32 weights may lie from the same ones in float64.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Returned:
    """One tensor of a field of the model's output."""

    field: str
    index: int
    weights: Weights


@dataclass
class Observation:
    """What one forward pass showed.

    Attributes:
        softmaxes: Weights by module id and call number, in order; a module's include those of its children.
        calls: Forward passes by module id.
        returned: All tensors of three axes or more in fields that are called attentions.
    """

    softmaxes: dict[tuple[int, int], list[Weights]] = field(default_factory=lambda: defaultdict(list))
    calls: Counter[int] = field(default_factory=Counter)
    returned: list[Returned] = field(default_factory=list)


def observe(subject: Subject) -> Observation:
    """Run the model once as it is, in eager attention and without a cache, which some take for one token at a time."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(subject.model.forward).parameters else {}
    try:
        return _observe(subject, **options, output_attentions=True)
    except Exception:  # some models cannot return their weights; then what they compute has to do
        return _observe(subject, **options)


def _observe(subject: Subject, **options: bool) -> Observation:
    seen = Observation()
    stack: list[tuple[int, int]] = []

    def enter(module: nn.Module, args: Any) -> None:
        stack.append((id(module), seen.calls[id(module)]))
        seen.calls[id(module)] += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    def take(weights: Weights) -> None:
        for key in stack:
            seen.softmaxes[key].append(weights)

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        with torch.no_grad(), _Listening(take):
            output = subject.model(**(subject.run_inputs() | options))
    finally:
        for handle in handles:
            handle.remove()
    seen.returned.extend(_returned(output))
    return seen


class _Listening(TorchFunctionMode):
    """Calls `take` with the float64 softmax of all scores of three axes or more that a softmax is given."""

    def __init__(self, take: Callable[[Weights], None]) -> None:
        super().__init__()
        self.take = take

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SOFTMAX:
            scores = args[0] if args else kwargs["input"]
            axis = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else -1
            if scores.ndim >= 3 and axis in (-1, scores.ndim - 1):
                self.take(softmax(scores.double().numpy()))
        if func is nn.functional.scaled_dot_product_attention:
            self.take(softmax(_dot_product_scores(*args, **kwargs)))
        if func is nn.functional.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["use_separate_proj_weight"]:
                self.take(softmax(_layer_scores(bound.arguments)))
        return func(*args, **kwargs)


# ------------------------------------------------------------------ scores inside torch's own functions
def _dot_product_scores(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, scale: float | None = None
) -> Weights:
    """Scores inside `scaled_dot_product_attention`; no model here gives it more than an additive mask and a scale."""
    q, k = query.double().numpy(), key.double().numpy()
    scores: Weights = np.einsum("...qd,...kd->...qk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is None:
        return scores
    mask = attn_mask.double().numpy()
    # Rows that see nothing fill up a block: no tokens.
    kept = ~(mask < _HIDDEN).all(axis=(0, 1, 3))
    scores = scores + mask
    cut: Weights = scores[:, :, kept][..., kept]
    return scores if kept.all() else cut


def _layer_scores(given: Mapping[str, Any]) -> Weights:
    """Scores inside `multi_head_attention_forward` with projections of their own, (batch, head, query, key)."""
    states = given["query"].double().numpy()
    n, size, width = states.shape
    heads = given["num_heads"]
    biases = np.split(given["in_proj_bias"].double().numpy(), 3)

    def project(name: str, bias: Weights) -> Weights:
        made = states @ given[f"{name}_proj_weight"].double().numpy().T + bias
        parts: Weights = np.transpose(made.reshape(n, size, heads, width // heads), (1, 2, 0, 3))
        return parts

    query, key = project("q", biases[0]), project("k", biases[1])
    scores = np.asarray(query @ np.swapaxes(key, -1, -2) / np.sqrt(width // heads), dtype=np.float64)
    scores += given["attn_mask"].double().numpy().reshape(size, heads, n, n)
    hidden = given["key_padding_mask"]
    if hidden is not None:
        scores[np.broadcast_to(hidden.numpy()[:, None, None, :], scores.shape)] = -np.inf
    return scores


def softmax(scores: Weights) -> Weights:
    """Over the last axis; rows of which all is hidden by infinities are NaN."""
    with np.errstate(invalid="ignore"):
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True)


def _returned(output: Any, path: str = "") -> Iterator[Returned]:
    if not isinstance(output, Mapping):
        return
    for name, value in output.items():
        where = f"{path}{name}"
        if "attentions" in name:
            tensors = [t for t in _flat(value) if t.ndim >= 3 and t.is_floating_point()]
            yield from (Returned(where, i, t.double().numpy()) for i, t in enumerate(tensors))
        else:
            yield from _returned(value, f"{where}.")


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _flat(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)


# ------------------------------------------------------------------ one layer's weights
@dataclass(frozen=True)
class Truth:
    """One layer's weights, (batch, head, query, key).

    Attributes:
        visible: bool: keys that a row may look at. No score of a tiny random model is so low that nothing is left of
            its weight in float64: what has none is hidden.
        returned: The tensor of the model's output that they are; None where they are the softmax of captured scores.
    """

    weights: Weights
    visible: NDArray[np.bool_]
    returned: Returned | None


def truth_of(seen: Observation, module: nn.Module, call: int, size: int, heads: int) -> Truth | None:
    """The weights of one call of an attention module; None where it cannot be told which they are."""
    found = [w for part in seen.softmaxes[id(module), call] for w in _shaped(part, size, heads, module)]
    for weights in found:
        for returned in seen.returned:
            if _same(returned.weights, weights):
                return Truth(returned.weights, weights > 0, returned)
    return Truth(found[0], found[0] > 0, None) if len(found) == 1 else None


def _shaped(weights: Weights, size: int, heads: int, module: nn.Module) -> Iterator[Weights]:
    """Weights as (batch, head, query, key), where they can be that; without the column of a learned sink."""
    shape = weights.shape
    fits = shape[0] * (1 if weights.ndim == 3 else np.prod(shape[1:-2])) == size * heads
    if not fits or (weights.ndim > 3 and shape[0] != size):
        return
    weights = weights.reshape(size, heads, *shape[-2:])
    sink = shape[-1] == shape[-2] + 1 and any("sink" in name for name, _ in module.named_parameters())
    yield weights[..., :-1] if sink else weights


def _same(returned: Weights, weights: Weights) -> bool:
    """Whether a returned tensor is these weights, but for rows of padding that models may empty."""
    if returned.shape != weights.shape:
        return False
    kept = (returned.sum(axis=-1) > 0) & np.isfinite(weights).all(axis=-1)
    return bool(kept.any()) and float(abs(returned - weights)[kept].max()) < _ROUNDING
