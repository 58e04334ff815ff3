"""Where a model runs and in which precision."""

from __future__ import annotations

import torch

from headscope.errors import InputError, check_type
from headscope.models.checkpoint import first_line


def pick_device(name: str) -> torch.device:
    """The device of this name; `auto` is CUDA, else MPS, else the CPU.

    Raises:
        InputError: torch cannot use this device here.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        message = f"device {name!r} is not available here: {first_line(error, 80)}"
        raise InputError(message, "--device cpu always is") from error
    return device


def pick_dtype(value: str | torch.dtype | None) -> str | torch.dtype:
    """The torch dtype of this name; None and `auto` keep the checkpoint's own and give `auto`.

    Raises:
        InputError: Not a floating-point dtype.
    """
    check_type("dtype", value, (str, torch.dtype), "a torch dtype or its name")
    if value is None or value == "auto":
        return "auto"
    found = value if isinstance(value, torch.dtype) else getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"{value!r} is not a floating-point dtype", "for example float32, bfloat16 or float16")
    return found
