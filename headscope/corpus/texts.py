"""Which texts of a corpus are measured, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headscope.errors import InputError
from headscope.reading import Corpus, Record, Skipped
from headscope.reading.order import sample, shuffled


@dataclass
class Texts:
    """The texts to measure, in the order to measure them.

    Attributes:
        skipped: What could not be read.
    """

    corpus: Corpus
    sample: int | None
    until: float | None
    seed: int
    skipped: Skipped = field(default_factory=Skipped)

    def records(self) -> Iterator[Record]:
        """In the corpus' order, or drawn at random."""
        if self.until is not None:
            return shuffled(self.corpus, self.seed, self.sample, skipped=self.skipped)
        if self.sample is not None:
            return sample(self.corpus, self.sample, self.seed, self.skipped)
        return self.corpus.records(self.skipped)

    def numbered(self, number: int) -> str:
        """The text with a number, read once more.

        Raises:
            InputError: It is not there any more.
        """
        found = next((r.text for r in self.corpus.records() if r.number == number), None)
        if found is None:
            raise InputError(f"{self.corpus.name} has changed while it was read", "run it again")
        return found

    def share(self) -> float | None:
        """How much of the corpus is read; not known where texts are drawn from all of it."""
        return self.corpus.share() if self.until is None else None
