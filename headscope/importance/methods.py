"""All importance methods; importing their modules registers them."""

from __future__ import annotations

from headscope.errors import InputError
from headscope.importance import ablation, baselines, gradient, surgeon
from headscope.importance.method import METHODS, Method

__all__ = ["METHODS", "ablation", "baselines", "gradient", "method_named", "surgeon"]


def method_named(name: str) -> Method:
    """The method of a name.

    Raises:
        InputError: There is none.
    """
    if name not in METHODS:
        raise InputError(f"there is no importance method '{name}'", f"Methods: {', '.join(METHODS)}.")
    return METHODS[name]
