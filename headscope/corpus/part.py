"""One partition, measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from headscope.corpus.summary import Summary

Table = Mapping[str, NDArray[Any]]
"""Columns of equal length."""


@dataclass(frozen=True)
class Part:
    """What came of a partition.

    Attributes:
        number, digest: The partition's.
        summary: Its sums.
        table: A row a text and head, where each text's values were asked for.
    """

    number: int
    digest: str
    summary: Summary
    table: Table | None = None
