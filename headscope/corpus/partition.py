"""A corpus cut into partitions: what a worker measures at once, and what is done again when one is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headscope.reading import Record

# Some ten thousand tokens: seconds of work, and enough texts to find neighbours by length among.
MOST_TEXTS, MOST_CHARACTERS = 512, 1 << 16


@dataclass(frozen=True)
class Partition:
    """Texts that follow each other in the order that the corpus is read in.

    Attributes:
        number: Which partition, from 0.
        records: At least one.
    """

    number: int
    records: tuple[Record, ...]

    @property
    def digest(self) -> str:
        """What tells these texts, in this order, from all others."""
        digest = hashlib.blake2b(digest_size=16)
        for record in self.records:
            text = record.text.encode("utf-8", "surrogatepass")
            digest.update(f"{record.number} {len(text)} ".encode() + text)
        return digest.hexdigest()


def partitions(
    records: Iterable[Record], most_texts: int = MOST_TEXTS, most_characters: int = MOST_CHARACTERS
) -> Iterator[Partition]:
    """Cut records into partitions that are full with this many texts or characters; the same ones for any workers."""
    number = characters = 0
    held: list[Record] = []
    for record in records:
        held.append(record)
        characters += len(record.text)
        if len(held) >= most_texts or characters >= most_characters:
            yield Partition(number, tuple(held))
            number, characters, held = number + 1, 0, []
    if held:
        yield Partition(number, tuple(held))
