"""Exceptions that carry what a command line needs: one line, a hint, an exit code."""

from __future__ import annotations


class HeadscopeError(Exception):
    """Base of every error that headscope raises on purpose.

    Args:
        message: One line that says what is wrong, naming the argument and the value that was given.
        hint: One line that says what to do about it.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(HeadscopeError):
    """Bad arguments or input: unknown layer, empty text, unreadable file, a target that exists (exit code 2)."""


class ModelError(HeadscopeError):
    """The model cannot be loaded, or does not support what was asked (exit code 3)."""

    exit_code = 3


class ResourceError(HeadscopeError):
    """Out of memory or disk (exit code 4)."""

    exit_code = 4


class CheckError(HeadscopeError):
    """A check ran and failed: numbers differ where they must not (exit code 1)."""

    exit_code = 1
