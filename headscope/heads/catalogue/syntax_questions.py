"""Which words could show a dependency, and whether what they attend to is its other end.

Words of all sentences are numbered one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headscope.heads.catalogue.attended import Visible
from headscope.heads.catalogue.treebank import Parsed

DIRECTIONS = ("dependent_to_head", "head_to_dependent")
ALL = "all"
# Nearest first: of offsets that are alike the first is taken.
OFFSETS = tuple(sign * k for k in range(1, 7) for sign in (-1, 1))

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Text:
    """The words of all sentences.

    Attributes:
        begin: int64 (sentence,): each sentence's first word.
        sentence: int64 (word,): each word's sentence.
        parent: int64 (word,): the word that it depends on, -1 for none.
        relation: (word,): its relation, "" for none.
    """

    begin: Ints
    sentence: Ints
    parent: Ints
    relation: NDArray[np.str_]

    @staticmethod
    def of(sentences: Sequence[Parsed]) -> Text:
        """Number the words. Of a word with several heads, as a contraction may be, the first counts."""
        sizes = np.array([len(s.words) for s in sentences], np.int64)
        begin = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        parent = np.full(sizes.sum(), -1, np.int64)
        relation = [""] * len(parent)
        for start, s in zip(begin.tolist(), sentences, strict=True):
            for arc in reversed(s.arcs):
                parent[start + arc.dependent] = start + arc.head
                relation[start + arc.dependent] = arc.relation
        return Text(begin, np.repeat(np.arange(len(sizes)), sizes), parent, np.array(relation))

    def numbered(self, words: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
        """Numbers of words in their sentences, (..., word) each, as numbers of all; -1 stays."""
        parts = [np.where(w >= 0, w + start, -1) for w, start in zip(words, self.begin.tolist(), strict=True)]
        return np.concatenate(parts, axis=-1).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Seen:
    """What the words can see.

    Attributes:
        first, last: int64 (word,): first and last visible word.
        others: int64 (word,): how many other words are visible.
    """

    first: Ints
    last: Ints
    others: Ints

    @staticmethod
    def of(text: Text, visible: Visible) -> Seen:
        """The same in numbers of all words; a word that sees nothing has no stretch."""
        start = text.begin[text.sentence]
        first, last = (np.concatenate(ends).astype(np.int64) + start for ends in (visible.first, visible.last))
        return Seen(first, last, np.concatenate([visible.others(s) for s in range(len(text.begin))]))

    def sees(self, query: Ints, key: Ints) -> NDArray[np.bool_]:
        """Whether words `query` can see words `key`."""
        seen: NDArray[np.bool_] = (self.first[query] <= key) & (key <= self.last[query])
        return seen

    def at(self, offset: int) -> Ints:
        """The word at an offset from each word, -1 where there is none or it is not visible."""
        here = np.arange(len(self.first))
        return np.where(self.sees(here, here + offset), here + offset, -1)


@dataclass(frozen=True, eq=False)
class Question:
    """One relation in one direction: words that see the other end of it, and what they should attend to.

    From a head to its dependents any of them is right where it has several by the relation. (Clark et al. ask each
    dependent instead which word attends to it most; rows that compete for a column say less of what a head looks at.)

    Attributes:
        words: int64 (eligible,): the words, ascending.
        chance: float64 (eligible,): how often a random other visible word is right.
    """

    relation: str
    direction: str
    words: Ints
    chance: Floats
    _parent: Ints
    _by_relation: NDArray[np.bool_]

    def right(self, attended: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether eligible words attend to the other end; (..., word) of all words to (..., eligible)."""
        chosen = attended[..., self.words]
        if self.direction == DIRECTIONS[0]:
            right: NDArray[np.bool_] = chosen == self._parent[self.words]
        else:
            right = (self._parent[chosen] == self.words) & self._by_relation[chosen]
        return right & (chosen >= 0)


def questions(text: Text, seen: Seen) -> Iterator[Question]:
    """Every relation of the text, first all together, in both directions."""
    for relation in (ALL, *np.unique(text.relation[text.parent >= 0]).tolist()):
        chosen = (text.parent >= 0) & ((text.relation == relation) | (relation == ALL))
        dependents = np.flatnonzero(chosen)
        for direction in DIRECTIONS:
            if direction == DIRECTIONS[0]:
                words = dependents[seen.sees(dependents, text.parent[dependents])]
                ends = np.ones(len(words), np.int64)
            else:
                heads = text.parent[dependents]
                words, ends = np.unique(heads[seen.sees(heads, dependents)], return_counts=True)
            yield Question(relation, direction, words, ends / seen.others[words], text.parent, chosen)
