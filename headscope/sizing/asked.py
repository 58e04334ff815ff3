"""What the sizes are asked for: a length, a dtype, a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headscope.models.placement import pick_dtype
from headscope.models.selection import check_count


@dataclass(frozen=True)
class Asked:
    """What the user said; None for what each model's configuration says.

    Raises:
        InputError: A number is not positive, or there is no such dtype.
    """

    length: int | None = None
    dtype: str | torch.dtype | None = None
    batch_size: int = 1

    def __post_init__(self) -> None:
        for name, value in (("length", self.length), ("batch_size", self.batch_size)):
            check_count(name, value)
        pick_dtype(self.dtype)

    def dtype_of(self, config: Any) -> tuple[str, int]:
        """Name and bytes of the numbers: the dtype asked for, else the config's, else float32."""
        chosen = pick_dtype(self.dtype)
        if not isinstance(chosen, torch.dtype):
            chosen = _said(config) or torch.float32
        return str(chosen).removeprefix("torch."), chosen.itemsize


def _said(config: Any) -> torch.dtype | None:
    named = getattr(config, "dtype", None)
    found = getattr(torch, named.removeprefix("torch."), None) if isinstance(named, str) else named
    return found if isinstance(found, torch.dtype) else None
