"""Names of files that other files give: they must not lead out of their directory."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath


def is_inside(name: object) -> bool:
    """Whether a name that a file gives is a relative path that stays in its directory, on any system."""
    if not isinstance(name, str) or not name.strip():
        return False
    return not any(path.anchor or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name)))
