"""Which texts of a corpus are measured, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headscope.reading import Corpus, Record, Skipped
from headscope.reading.order import sample, shuffled


@dataclass
class Texts:
    """The texts to measure, in the order to measure them.

    Attributes:
        skipped: What could not be read.
        first: The first text, once there is one.
    """

    corpus: Corpus
    sample: int | None
    until: float | None
    seed: int
    skipped: Skipped = field(default_factory=Skipped)
    first: Record | None = None

    def records(self) -> Iterator[Record]:
        """In the corpus' order, or drawn at random."""
        for record in self._chosen():
            self.first = self.first or record
            yield record

    def _chosen(self) -> Iterator[Record]:
        if self.until is not None:
            return shuffled(self.corpus, self.seed, self.sample, skipped=self.skipped)
        if self.sample is not None:
            return sample(self.corpus, self.sample, self.seed, self.skipped)
        return self.corpus.records(self.skipped)

    def share(self) -> float | None:
        """How much of the corpus is read; not known where texts are drawn from all of it."""
        return self.corpus.share() if self.until is None else None
