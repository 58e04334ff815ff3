"""All importance methods; importing their modules registers them."""

from __future__ import annotations

from headscope.errors import InputError
from headscope.importance.ablation import ablation
from headscope.importance.baselines import confidence, magnitude, random
from headscope.importance.gradient import gradient, gradient_token
from headscope.importance.method import METHODS, Method
from headscope.importance.surgeon import reconstruction, surgeon

__all__ = [
    "METHODS",
    "ablation",
    "confidence",
    "gradient",
    "gradient_token",
    "magnitude",
    "method_named",
    "random",
    "reconstruction",
    "surgeon",
]


def method_named(name: str) -> Method:
    """The method of a name.

    Raises:
        InputError: There is none.
    """
    if name not in METHODS:
        raise InputError(f"there is no importance method '{name}'", f"Methods: {', '.join(METHODS)}.")
    return METHODS[name]
