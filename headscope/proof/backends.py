"""One set of names over the two versions of our mathematics: NumPy in float64 and torch in float32."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.attention import norms, reference, rotary
from headscope.attention.torch_attention import apply_rotary_torch, attention_torch
from headscope.proof.norms import Norm

Array = Any
"""A NumPy array or a torch tensor, as the backend has it."""


class Backend(Protocol):
    """What a rebuilt site is made of. All arrays are the backend's own; `array` makes them from tensors."""

    name: str

    def array(self, tensor: Tensor) -> Array:
        """A tensor as this backend's array."""

    def project(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """(batch, n, in) and (heads, dim, in) -> (batch, heads, n, dim)."""

    def normalise(self, x: Array, norm: Norm) -> Array:
        """Apply a norm to (batch, heads, n, dim)."""

    def rotate(self, x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
        """Turn queries or keys (batch, heads, n, dim) by their positions."""

    def attend(self, query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Array]:
        """(context, weights) of all heads."""

    def sigmoid(self, x: Array) -> Array:
        """1 / (1 + exp(-x)), for gates."""

    def merge(self, context: Array, weight: Array, bias: Array | None) -> Array:
        """(batch, heads, n, dim) and (heads, dim, out) -> (batch, n, out)."""

    def numpy(self, x: Array) -> NDArray[np.float64]:
        """Back to NumPy, float64."""


class NumPy:
    """The reference, float64."""

    name = "numpy"

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """float64, or boolean."""
        array = tensor.detach().cpu()
        return array.numpy() if array.dtype == torch.bool else array.double().numpy()

    def project(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """`reference.project` and `reference.split_heads`, with heads already apart."""
        heads, dim, width = weight.shape
        flat = None if bias is None else bias.reshape(heads * dim)
        return reference.split_heads(reference.project(x, weight.reshape(heads * dim, width).T, flat), heads)

    def normalise(self, x: Array, norm: Norm) -> Array:
        """`attention.norms`."""
        x = _to_norm(np, x, norm)
        weight, bias = (None if t is None else self.array(t) for t in (norm.weight, norm.bias))
        if norm.kind == "layer":
            y = norms.layer_norm(x, weight, bias, eps=norm.eps)
        else:
            y = norms.rms_norm(x, weight, eps=norm.eps, weight_offset=norm.offset)
        return _from_norm(np, y, norm)

    def rotate(self, x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
        """`attention.rotary.apply_rotary`."""
        return rotary.apply_rotary(x, cos, sin, interleaved=interleaved)

    def attend(self, query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Array]:
        """`reference.attention`."""
        return reference.attention(query, key, value, **options)

    def sigmoid(self, x: Array) -> Array:
        """Written with tanh, which does not overflow."""
        return 0.5 + 0.5 * np.tanh(0.5 * x)

    def merge(self, context: Array, weight: Array, bias: Array | None) -> Array:
        """`reference.output_projection`."""
        return reference.output_projection(context, weight.reshape(-1, weight.shape[-1]), bias)

    def numpy(self, x: Array) -> NDArray[np.float64]:
        """As it is."""
        return np.asarray(x, np.float64)


class Torch:
    """The torch twin, float32."""

    name = "torch"

    def array(self, tensor: Tensor) -> Tensor:
        """float32, or boolean."""
        tensor = tensor.detach().cpu()
        return tensor if tensor.dtype == torch.bool else tensor.float()

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One matrix product for all heads."""
        heads, dim, width = weight.shape
        flat = None if bias is None else bias.reshape(heads * dim)
        projected = torch.nn.functional.linear(x, weight.reshape(heads * dim, width), flat)
        return projected.reshape(*projected.shape[:-1], heads, dim).transpose(1, 2)

    def normalise(self, x: Tensor, norm: Norm) -> Array:
        """torch's own norms."""
        x = _to_norm(torch, x, norm)
        weight, bias = (None if t is None else self.array(t) for t in (norm.weight, norm.bias))
        width = (x.shape[-1],)
        if norm.kind == "layer":
            y = torch.nn.functional.layer_norm(x, width, eps=norm.eps)
            y = y if weight is None else y * weight
            y = y if bias is None else y + bias
        else:
            y = torch.nn.functional.rms_norm(x, width, eps=norm.eps)
            y = y if weight is None else y * (weight + norm.offset)
        return _from_norm(torch, y, norm)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """`attention.torch_attention.apply_rotary_torch`."""
        return apply_rotary_torch(x, cos, sin, interleaved=interleaved)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """`attention.torch_attention.attention_torch`."""
        return attention_torch(query, key, value, **options)

    def sigmoid(self, x: Tensor) -> Tensor:
        """torch's own."""
        return torch.sigmoid(x)

    def merge(self, context: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One matrix product for all heads."""
        merged = context.transpose(1, 2).flatten(2)
        return torch.nn.functional.linear(merged, weight.reshape(-1, weight.shape[-1]).T, bias)

    def numpy(self, x: Tensor) -> NDArray[np.float64]:
        """float64 on the CPU."""
        return x.detach().double().cpu().numpy()


def _to_norm(xp: Any, x: Array, norm: Norm) -> Array:
    """A norm over the whole projection sees all heads side by side: (batch, n, heads * dim)."""
    if not norm.whole:
        return x
    x = xp.swapaxes(x, 1, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


def _from_norm(xp: Any, y: Array, norm: Norm) -> Array:
    if not norm.whole:
        return y
    return xp.swapaxes(y.reshape(*y.shape[:2], norm.heads, y.shape[2] // norm.heads), 1, 2)
