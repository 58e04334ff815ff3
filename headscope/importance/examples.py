"""The examples of `--eval`, `--data` and `--repair`: texts, and labels where there are some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscope.reading.corpus import open_corpus
from headscope.reading.records import Label as Label

Source = str | Path | Sequence[str | Mapping[str, Any]]


@dataclass(frozen=True)
class Examples:
    """Texts, and as many labels; None where a text has none."""

    texts: tuple[str, ...]
    labels: tuple[Label | None, ...]


def read_examples(source: Source, *, text_column: str = "text", label_column: str = "label") -> Examples:
    """All examples of whatever `headscope.reading.corpus.open_corpus` reads: files, datasets, texts, mappings.

    Args:
        text_column: Where texts are found.
        label_column: Where labels are found: names or whole numbers.

    Raises:
        InputError: Something cannot be read or understood, or holds no text; the message names the place.
        ResourceError: There is no room on disk for standard input.
    """
    corpus = open_corpus(source, text_column=text_column, label_column=label_column, strict=True)
    records = list(corpus.records())
    return Examples(tuple(r.text for r in records), tuple(r.label for r in records))
