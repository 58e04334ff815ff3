"""What callers may pass for a tokenizer."""

from __future__ import annotations

import os
from typing import Any

from headscope.errors import InputError


def given_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer or its name, as it was given. Raises InputError for anything else."""
    named = os.fspath(tokenizer) if isinstance(tokenizer, os.PathLike) else tokenizer
    if named is not None and not isinstance(named, str) and not hasattr(named, "added_tokens_decoder"):
        raise InputError(f"tokenizer is a {type(named).__name__}", "give a tokenizer of transformers, or its name")
    return named
