"""Links in the place of what is written: whoever made one chose where it leads, and that may be anywhere."""

from __future__ import annotations

import os
from pathlib import Path

from headscope.errors import InputError


def own_place(path: Path) -> Path:
    """Where a file or directory of this name lies. Links among its parent directories are followed, as everywhere.

    Raises:
        InputError: The name itself is a link, to something or to nothing; also where something may be overwritten.
    """
    if path.is_symlink():
        raise InputError(
            f"{path} is a link, and nothing is written through links",
            f"name {os.path.realpath(path)} itself, or remove the link",
        )
    return Path(os.path.realpath(path.parent), path.name) if path.name not in ("", "..") else path.resolve()
