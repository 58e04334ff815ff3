"""The examples of `--eval`: texts, and labels where there are some."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscope.errors import InputError

Label = str | int
Source = str | Path | Sequence[str | Mapping[str, Any]]
_HINT = 'a .txt file has one text a line, a .jsonl file lines such as {"text": "…", "label": 0}'


@dataclass(frozen=True)
class Examples:
    """Texts, and as many labels; None where a text has none."""

    texts: tuple[str, ...]
    labels: tuple[Label | None, ...]


def read_examples(source: Source) -> Examples:
    """Examples from a `.txt` file (a text a line; empty lines do not count), from a `.jsonl` file (objects with `text`
    and, if need be, `label`), or from texts and such objects themselves.

    Raises:
        InputError: The file cannot be read or understood, or holds no text; the message names the line, from 1.
    """
    if isinstance(source, str | Path):
        found = list(_lines(Path(source)))
    else:
        found = [_example(item, f"example {i}") for i, item in enumerate(source)]
    if not found:
        raise InputError(f"there is no text to evaluate on in {reprlib.repr(str(source))}", _HINT)
    return Examples(tuple(text for text, _ in found), tuple(label for _, label in found))


def _lines(path: Path) -> Iterator[tuple[str, Label | None]]:
    suffix = path.suffix.lower()
    if suffix not in (".txt", ".jsonl", ".ndjson"):
        raise InputError(f"cannot evaluate on {path}: its suffix is neither .txt nor .jsonl", _HINT)
    # Only newlines end a line: texts may hold other separators that Unicode knows.
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        if suffix == ".txt":
            yield line.removesuffix("\r"), None
        else:
            yield _example(_parsed(line, path, number), f"line {number} of {path}")


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})", "convert it to UTF-8 first") from error


def _parsed(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"line {number} of {path} is not JSON: {error}", _HINT) from error


def _example(item: Any, where: str) -> tuple[str, Label | None]:
    text, label = (item.get("text"), item.get("label")) if isinstance(item, Mapping) else (item, None)
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where} has no text", _HINT)
    if label is not None and (isinstance(label, bool) or not isinstance(label, str | int)):
        raise InputError(f"{where} has the label {reprlib.repr(label)}, neither a name nor a whole number", _HINT)
    return text, label
