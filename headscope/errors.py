"""Exceptions that carry what a command line needs: one line, a hint, an exit code."""

from __future__ import annotations

import errno

_MEMORY_WORDS = ("out of memory", "allocate memory", "not enough memory", "bad_alloc", "memory allocation")
_DISK_WORDS = ("no space left on device", "quota exceeded", "file too large", "os error 28", "os error 122")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


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


def check_type(name: str, value: object, kinds: type | tuple[type, ...], what: str) -> None:
    """Refuse an argument of another kind; None passes.

    Args:
        what: The kinds in words.

    Raises:
        InputError: It names the argument and what it is.
    """
    if value is not None and not isinstance(value, kinds):
        raise InputError(f"{name} is a {type(value).__name__}, not {what}", f"give {what}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, of Python, NumPy, torch on any device, or the system."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    # torch raises an error of its own on some devices, and a plain one on the CPU; both say so.
    return not isinstance(error, HeadscopeError) and any(words in str(error).lower() for words in _MEMORY_WORDS)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error is that there is no room on the disk, whoever raises it: libraries in Rust have their own."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NO_ROOM
    return not isinstance(error, HeadscopeError) and any(words in str(error).lower() for words in _DISK_WORDS)


def lack(error: BaseException) -> ResourceError | None:
    """What an error amounts to where it came of a lack of memory or disk space, whatever was made of it on the way."""
    found: BaseException | None = error
    # An error that is raised from itself has no first cause.
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, ResourceError):
            return found
        if is_out_of_memory(found):
            return ResourceError(
                "out of memory", "take fewer or shorter texts (--batch-size 1, --max-length) or a smaller model"
            )
        if is_disk_full(found):
            said = found.strerror if isinstance(found, OSError) and found.strerror else " ".join(str(found).split())
            return ResourceError(
                f"cannot write: {said}", "free some space or write elsewhere; nothing half-written remains"
            )
        found = found.__cause__
    return None
