"""What a pruned module needs while it runs: a config with its own numbers, and less of what it is told for each head.

All of it is made of plain objects in the module, so that it is copied, pickled and moved with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headscope.models.exceptions import BIAS_WITHOUT_HEADS, PER_HEAD_MASKS

# Arguments of attention modules that hold something for each head of the original model.
PER_HEAD_ARGUMENTS = ("alibi", "position_bias", "relative_position_bias", "rel_pos", "rel_2d_pos")
_MASKS = ("attention_mask", "mask")
_ATTRIBUTE = "headscope_inputs"


class ConfigView:
    """A module's config with other numbers of heads. Everything else is read from the config itself and written to it.

    A copy of the config would not notice when the model's attention implementation is changed.
    """

    def __init__(self, base: Any, numbers: dict[str, int]) -> None:
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "numbers", numbers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("base", "numbers"):
            raise AttributeError(name)
        return self.numbers[name] if name in self.numbers else getattr(self.base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.numbers:
            self.numbers[name] = value
        else:
            setattr(self.base, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigView, (self.base, self.numbers)


class Subset:
    """Reduces arguments of a module that hold something for each original head to the heads that are left."""

    def __init__(self, kept: Sequence[int], num_heads: int) -> None:
        self.kept, self.num_heads = list(kept), num_heads

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A forward pre-hook."""
        named = _named(module, args, kwargs)
        for name in (*PER_HEAD_ARGUMENTS, *_MASKS):
            if isinstance(named.get(name), Tensor):
                named[name] = self.take(named[name], name)
        return (), named

    def take(self, tensor: Tensor, name: str) -> Tensor:
        """The kept heads of (batch, head, query, key), of (head, query, key), or of (batch * head, 1, key)."""
        index = torch.tensor(self.kept, device=tensor.device)
        if tensor.ndim == 4 and tensor.shape[1] == self.num_heads:
            return tensor.index_select(1, index)
        if name == "alibi" and tensor.ndim == 3 and tensor.shape[0] % self.num_heads == 0:
            apart = tensor.reshape(-1, self.num_heads, *tensor.shape[1:])
            return apart.index_select(1, index).flatten(0, 1)
        if name not in _MASKS and tensor.ndim == 3 and tensor.shape[0] == self.num_heads:
            return tensor.index_select(0, index)
        return tensor


class SharedBias(Subset):
    """`Subset` for modules that hand the bias for all original heads on to the next layer (T5).

    Within the module there is the bias of the heads that are left; what it returns is the whole one again. The table
    that the first layer of a stack makes it from stays whole.
    """

    whole: Tensor | None = None
    computed: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A forward pre-hook."""
        named = _named(module, args, kwargs)
        self.whole, self.computed = named.get("position_bias"), None
        if self.whole is not None:
            named["position_bias"] = self.take(self.whole, "position_bias")
        return (), named

    def of_table(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """A forward hook of the table: (query, key, heads)."""
        self.computed = output
        return output.index_select(-1, torch.tensor(self.kept, device=output.device))

    def after(self, module: nn.Module, args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward hook: the output's second part is the bias."""
        bias: Tensor = output[1]
        whole = self.whole
        if whole is None and self.computed is not None:
            whole = self.computed.permute(2, 0, 1)[None]
            # In older releases the mask is part of it, the same one for all heads.
            whole = whole + (bias - whole[:, list(self.kept)])[:, :1]
        if whole is None:
            whole = bias[:, :1].expand(-1, self.num_heads, -1, -1)
        self.whole = self.computed = None
        return (output[0], whole, *output[2:])


def _named(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs


def keep_heads(module: nn.Module, kept: Sequence[int], num_heads: int) -> None:
    """Let a module that is told something for each original head see that of the heads `kept` only."""
    known = getattr(module, _ATTRIBUTE, None)
    if isinstance(known, Subset):
        known.kept = list(kept)
        return
    if not takes_per_head(module):
        return
    inputs: Subset
    if shares_bias(module):
        inputs = SharedBias(kept, num_heads)
        module.register_forward_hook(inputs.after)
        table = getattr(module, "relative_attention_bias", None)
        if isinstance(table, nn.Embedding):
            table.register_forward_hook(inputs.of_table)
    else:
        inputs = Subset(kept, num_heads)
    module.register_forward_pre_hook(inputs, with_kwargs=True)
    setattr(module, _ATTRIBUTE, inputs)


def takes_per_head(module: nn.Module) -> bool:
    """Whether a module's forward pass is told something for each head."""
    kind = type(module).__name__
    told = bool(set(PER_HEAD_ARGUMENTS) & set(inspect.signature(module.forward).parameters))
    return kind in PER_HEAD_MASKS or (told and kind not in BIAS_WITHOUT_HEADS)


def shares_bias(module: nn.Module) -> bool:
    """Whether a module returns the bias that it was given or made, for the next layer."""
    takes = "position_bias" in inspect.signature(module.forward).parameters
    return takes and hasattr(module, "has_relative_attention_bias")
