"""Multi-head attention as a torch module: the twin of `reference.MultiHeadAttention`."""

from __future__ import annotations

from typing import Any, Self

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from headscope.attention.reference import MultiHeadAttention
from headscope.attention.shapes import check_batch, check_width, mask_position_for_heads
from headscope.attention.torch_attention import attention_torch, check_tensors, efficient_mha

__all__ = ["MultiHeadAttentionTorch", "attention_torch", "efficient_mha"]


class MultiHeadAttentionTorch(nn.Module):
    """One layer of multi-head attention as a torch module, with the arguments of `reference.MultiHeadAttention`.

    Parameters have the reference's names and orientation (`W_q` is (d_model, heads · head_dim), and so on), and the
    same seed gives the same weights.

    Args:
        d_model, num_heads, num_kv_heads, head_dim, value_dim, context_dim, bias, scale, softcap, sinks, seed: As in
            `reference.MultiHeadAttention`.
        device, dtype: Of the parameters; None for torch's defaults.
    """

    W_q: Tensor
    W_k: Tensor
    W_v: Tensor
    W_o: Tensor
    b_q: Tensor | None
    b_k: Tensor | None
    b_v: Tensor | None
    b_o: Tensor | None
    sinks: Tensor | None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        *,
        context_dim: int | None = None,
        bias: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: ArrayLike | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        reference = MultiHeadAttention(
            d_model, num_heads, num_kv_heads, head_dim, value_dim,
            context_dim=context_dim, bias=bias, scale=scale, softcap=softcap, sinks=sinks, seed=seed,
        )  # fmt: skip
        self._take(reference, device, dtype)

    @classmethod
    def from_reference(
        cls,
        mha: MultiHeadAttention,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Copy a reference layer's sizes and weights."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(mha, device, dtype)
        return module

    def _take(self, mha: MultiHeadAttention, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.num_heads, self.num_kv_heads = mha.num_heads, mha.num_kv_heads
        self.scale, self.softcap = mha.scale, mha.softcap
        placed: dict[str, Any] = {"device": device, "dtype": dtype or torch.get_default_dtype()}
        for name in ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o", "sinks"):
            array = getattr(mha, name)
            self.register_parameter(name, None if array is None else nn.Parameter(torch.tensor(array, **placed)))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        context: Tensor | None = None,
        bias: Tensor | None = None,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer.

        Args:
            x: (…, n_q, d_model).
            mask: Boolean, True is blocked: (n_q, n_k), (…, n_q, n_k) or (…, heads, n_q, n_k).
            context: (…, n_k, context_dim), what is looked at in cross-attention; None for x itself.
            bias: Added to the scores, broadcasts to (…, heads, n_q, n_k).
            need_weights: False takes the fused path of `efficient_mha`.

        Returns:
            output (…, n_q, d_model) and weights (…, heads, n_q, n_k), or None without `need_weights`.

        Raises:
            TypeError: What is given is no tensor.
            ValueError: Shapes or dtypes that do not fit, or a layer that cannot be fused.
        """
        context = x if context is None else context
        check_tensors("MultiHeadAttentionTorch", {"x": x, "context": context}, self.W_q.dtype)
        check_width("MultiHeadAttentionTorch", "x", x.shape, self.W_q.shape[0])
        check_width("MultiHeadAttentionTorch", "context", context.shape, self.W_k.shape[0])
        check_batch("MultiHeadAttentionTorch", {"x": x.shape[:-2], "context": context.shape[:-2]})
        if mask is not None and mask_position_for_heads("MultiHeadAttentionTorch", mask.ndim, x.ndim):
            mask = mask[..., None, :, :]  # (…, 1, n_q, n_k)
        query = _split(_project(x, self.W_q, self.b_q), self.num_heads)  # (…, heads, n_q, head_dim)
        key = _split(_project(context, self.W_k, self.b_k), self.num_kv_heads)  # (…, kv_heads, n_k, head_dim)
        value = _split(_project(context, self.W_v, self.b_v), self.num_kv_heads)  # (…, kv_heads, n_k, value_dim)
        keywords: dict[str, Any] = {
            "scale": self.scale, "mask": mask, "bias": bias, "softcap": self.softcap, "sinks": self.sinks
        }  # fmt: skip
        weights = None
        if need_weights:
            mixed, weights = attention_torch(query, key, value, **keywords)  # (…, heads, n_q, value_dim)
        else:
            mixed = efficient_mha(query, key, value, **keywords)  # (…, heads, n_q, value_dim)
        return _project(mixed.transpose(-3, -2).flatten(-2), self.W_o, self.b_o), weights  # (…, n_q, d_model)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight  # (…, n, d_in) · (d_in, d_out) → (…, n, d_out)
    return y if bias is None else y + bias  # (…, n, d_out)


def _split(x: Tensor, num_heads: int) -> Tensor:
    pieces = x.reshape(*x.shape[:-1], num_heads, -1)  # (…, n, heads, width)
    return pieces.transpose(-3, -2)  # (…, heads, n, width)
