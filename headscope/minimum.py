"""The oldest Python, torch and transformers that headscope runs with.

The one place in the code that says so; a test holds what is written for installers and readers against it. All of this
has to work on an older Python than the oldest, which is why it imports no more than it needs.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

from headscope.errors import ModelError

PYTHON = (3, 11)
PACKAGES = {"torch": (2, 6), "transformers": (5, 4)}


def check_minimum() -> None:
    """Raise a `ModelError` where Python, torch or transformers is missing or too old; imports neither package."""
    check_python()
    for name in PACKAGES:
        _check_package(name)


def check_python() -> None:
    """Raise a `ModelError` where this interpreter is too old: installers look at that themselves, a clone cannot."""
    if sys.version_info[:2] < PYTHON:
        raise _error("Python", PYTHON, _dotted(sys.version_info[:3]), "run it with a newer interpreter")


def leave_older_pythons() -> None:
    """End a process of a Python that is too old, in the way in which commands end: their code is not for it to read."""
    try:
        check_python()
    except ModelError as exc:
        sys.stderr.write(f"error: {exc.message}\nhint: {exc.hint}\n")
        sys.exit(exc.exit_code)


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (5, 24, 0) for `5.24.0.dev0`, (2, 13, 0) for `2.13.0+cpu`."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers.group().split(".")) if numbers else ()


def version_of(name: str) -> str | None:
    """The version of an installed package; None where its metadata tells none."""
    from importlib import metadata  # Python 3.7 has none

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_package(name: str) -> None:
    oldest, found = PACKAGES[name], version_of(name)
    # A build from source may come without metadata, or with a version of its own making: it is taken as it is.
    if (not found and not find_spec(name)) or (found and () < release(found) < oldest):
        raise _error(name, oldest, found, f"pip install --upgrade '{name}>={_dotted(oldest)}'")


def _error(name: str, oldest: tuple[int, ...], found: str | None, hint: str) -> ModelError:
    have = f"this is {found}" if found else "it is not installed"
    return ModelError(f"headscope needs {name} {_dotted(oldest)} or newer; {have}", hint)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
