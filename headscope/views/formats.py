"""What the formats of all results share."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import TypeVar

from rich.console import Console, RenderableType

from headscope.errors import InputError

_Result = TypeVar("_Result")


def in_format(result: _Result, name: str, formats: Mapping[str, Callable[[_Result], str]]) -> str:
    """A result in one of the formats that there are for it.

    Raises:
        InputError: There is no such format.
    """
    if name not in formats:
        raise InputError(f"unknown format {name!r}", f"formats: {', '.join(formats)}")
    return formats[name](result)


def plain_text(*parts: RenderableType, width: int = 100) -> str:
    """What is shown on a terminal, for files, where there is no terminal to ask: without colour, `width` cells wide."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
