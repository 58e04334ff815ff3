"""Libraries that are imported when a corpus needs them."""

from __future__ import annotations

import importlib
from typing import Any

from headscope.errors import InputError


def library(module: str, extra: str, purpose: str) -> Any:
    """The module.

    Raises:
        InputError: It is not installed; the hint has the command for the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(f"{purpose} needs {package}", f'pip install "headscope[{extra}]"') from error


def first_line(error: BaseException) -> str:
    """An error of a library on one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
