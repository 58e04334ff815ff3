"""The norms that a module puts on queries, keys and values, recognised by what they do."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_NAMES = {
    "query": ("q_norm", "query_norm", "q_layernorm", "query_layernorm", "norm_q", "q_layer_norm", "qk_norm"),
    "key": ("k_norm", "key_norm", "k_layernorm", "key_layernorm", "norm_k", "k_layer_norm", "qk_norm"),
    "value": ("v_norm", "value_norm"),
}


@dataclass(frozen=True)
class Norm:
    """A norm as numbers.

    Attributes:
        kind: `rms` or `layer`.
        weight, bias: Broadcast to (batch, heads, n, dim), or (width,) where `whole`; None for none.
        offset: Added to the weight.
        whole: Over all heads' dimensions together.
        heads: The number of heads, to put them apart again.
    """

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float
    whole: bool
    heads: int


def norm_of(module: nn.Module, role: str, heads: int, dim: int) -> Norm | None:
    """The norm on `query`, `key` or `value`, None where there is none or where it is of no kind that we have.

    The kind is the one that gives what the norm's module gives on random numbers.
    """
    found = next((m for m in (getattr(module, n, None) for n in _NAMES[role]) if isinstance(m, nn.Module)), None)
    if found is None or isinstance(found, nn.Identity):
        return None
    x = torch.randn(2, heads, 3, dim, generator=torch.Generator().manual_seed(0))
    for norm in _candidates(found, heads, dim):
        expected = _run(found, x, norm)
        if expected is not None and torch.allclose(_apply(x, norm), expected, rtol=1e-4, atol=1e-5):
            return norm
    return None


def has_norm(module: nn.Module) -> bool:
    """Whether the module has anything under the name of such a norm."""
    return any(isinstance(getattr(module, n, None), nn.Module) for names in _NAMES.values() for n in names)


def _candidates(found: nn.Module, heads: int, dim: int) -> Iterator[Norm]:
    weight, bias = (_parameter(found, n) for n in ("weight", "bias"))
    eps = [getattr(found, n, None) for n in ("variance_epsilon", "eps", "epsilon", "norm_eps")]
    epsilon = next((float(v) for v in eps if isinstance(v, float)), 1e-6)
    whole = weight is not None and weight.ndim == 1 and weight.numel() == heads * dim and heads > 1
    per_head = [None if t is None else t if t.ndim == 1 else t.reshape(-1, 1, t.shape[-1]) for t in (weight, bias)]
    for kind, offset in (("rms", 0.0), ("rms", 1.0), ("layer", 0.0)):
        yield Norm(kind, per_head[0], per_head[1], epsilon, offset, whole, heads)


def _parameter(found: nn.Module, name: str) -> Tensor | None:
    value = getattr(found, name, None)
    # A copy: what belongs to the checkpoint must not change with the model.
    return value.detach().to("cpu", torch.float32, copy=True) if isinstance(value, Tensor) else None


def _run(found: nn.Module, x: Tensor, norm: Norm) -> Tensor | None:
    """What the module makes of (batch, heads, n, dim), fed in the axes that it takes, in float32 without its hooks."""
    forward = deepcopy(found).cpu().float().forward
    try:
        with torch.no_grad():
            if norm.whole:
                y = _apart(forward(_together(x)), norm.heads)
            elif norm.weight is not None and norm.weight.ndim == 3:
                y = forward(x.transpose(1, 2)).transpose(1, 2)
            else:
                y = forward(x)
    except (RuntimeError, TypeError, ValueError):
        return None
    return y if isinstance(y, Tensor) and y.shape == x.shape else None


def _apply(x: Tensor, norm: Norm) -> Tensor:
    y = _together(x) if norm.whole else x
    function = torch.nn.functional.layer_norm if norm.kind == "layer" else torch.nn.functional.rms_norm
    y = function(y, (y.shape[-1],), eps=norm.eps)
    y = y if norm.weight is None else y * (norm.weight + norm.offset)
    y = y if norm.bias is None else y + norm.bias
    return _apart(y, norm.heads) if norm.whole else y


def _together(x: Tensor) -> Tensor:
    """(batch, heads, n, dim) -> (batch, n, heads * dim)."""
    return x.transpose(1, 2).flatten(2)


def _apart(x: Tensor, heads: int) -> Tensor:
    """(batch, n, heads * dim) -> (batch, heads, n, dim)."""
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)
