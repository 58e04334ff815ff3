"""What a checkpoint may say of itself: numbers of layers that a model can have, and files in its own directory only.

Whoever publishes a checkpoint writes these files. transformers takes them at their word: it starts to build a thousand
million layers, and reads weights from wherever an index says.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME
from transformers.utils.hub import cached_file

from headscope.errors import ModelError
from headscope.models.source import Source
from headscope.reading.inside import is_inside

MOST_LAYERS = 4_096
"""Of anything that a model has one module for; the deepest ones have about a thousand layers."""
_COUNTS = re.compile(r"(layers?|blocks?|depths?|stages|groups|experts|codebooks|quantizers|levels|cycles)(_count)?$")
_INDEX = ".index.json"


def check_numbers(config: Mapping[str, Any]) -> None:
    """Refuse a configuration with more layers than there can be, before anything is built from it.

    Args:
        config: As in config.json, with those of its parts.

    Raises:
        ModelError: It says more than `MOST_LAYERS` of layers, blocks, experts or the like.
    """
    for key, value in _whole_numbers(config):
        if value > MOST_LAYERS and _COUNTS.search(key):
            raise ModelError(
                f"its configuration has {reprlib.repr(value)} for {key[:60]}, more than the {MOST_LAYERS:,} that "
                "headscope takes",
                "is config.json damaged?",
            )


def _whole_numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """All of them at any depth, with the name that each, or the list that it is in, has."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        key, value = left.pop()
        if isinstance(value, Mapping):
            left += value.items()
        elif isinstance(value, list | tuple):
            left += [(key, one) for one in value]
        elif isinstance(value, int):
            yield str(key), value


def check_index(source: Source, explicit: Any = None) -> None:
    """Refuse an index of weights that names files outside of the checkpoint's directory.

    Args:
        source: The checkpoint.
        explicit: What its configuration calls its file of weights, if it does.

    Raises:
        ModelError: It names a file elsewhere, or cannot be read.
    """
    if source.gguf_file is not None:
        return
    own = [explicit] if isinstance(explicit, str) and explicit.endswith(_INDEX) else []
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, *own):
        found = cached_file(
            source.path,
            name,
            revision=source.revision,
            local_files_only=source.files_only,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if found is not None:
            _check_names(name, found)


def _check_names(name: str, path: str) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            files = set(json.load(file)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{name} is not an index of weights", "download or copy it again") from error
    for one in sorted(map(str, files)):
        if not is_inside(one):
            raise ModelError(
                f"{name} names a file outside of the checkpoint's directory: {one[:100]}",
                "do not trust this checkpoint; with all of its files in one directory it would load",
            )
