"""The versions that a result depends on."""

from __future__ import annotations

import platform

import torch
import transformers


def versions() -> dict[str, str]:
    """By package name; `python` for the interpreter."""
    from headscope import __version__

    return {
        "headscope": __version__,
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
