"""From documents to what a model reads of them and what is asked about it: which earlier mention is meant here?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headscope.heads.catalogue.mentions import Document, Mention
from headscope.heads.catalogue.probing import Probing
from headscope.models.decoder_inputs import has_decoder
from headscope.models.limits import decoder_limit, text_limit
from headscope.models.text_inputs import read_texts

KINDS = ("pronoun", "proper", "nominal")
# Tokens of a run at most: words are compared in whole matrices, which grow with their square.
MOST_TOKENS = 2048

_PRONOUNS = """
i me my mine myself we us our ours ourselves you your yours yourself yourselves thou thee thy
he him his himself she her hers herself it its itself they them their theirs themselves themself one oneself
this that these those who whom whose which
"""


@dataclass(frozen=True, eq=False)
class Question:
    """One mention with an antecedent, and the earlier mentions that it could mean, by their head words.

    Attributes:
        head: Position of its head word in the run.
        kind: One of `KINDS`.
        candidates: int64, ascending: head words of mentions in the run that end before it begins.
        right: bool, one a candidate: whether a mention with this head word means the same.
        same: bool, one a candidate: whether it is the same word, in lower case.
    """

    head: int
    kind: str
    candidates: NDArray[np.int64]
    right: NDArray[np.bool_]
    same: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Run:
    """Sentences of a document that a model reads in one go.

    Attributes:
        document: Its number.
        first: Where the run begins in the document, in words.
    """

    document: int
    first: int
    words: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Runs:
    """All runs, and how many mentions have an antecedent in their document: with those whose antecedents are in an
    earlier run, and those whose earlier mentions in the run all mean the same, so that nothing can be told."""

    runs: tuple[Run, ...]
    with_antecedent: int
    across: int
    certain: int

    @property
    def notes(self) -> list[str]:
        """What is not asked, one line each."""
        of = f"of {self.with_antecedent} mentions with an antecedent"
        lines = []
        if self.across:
            lines.append(f"coreference: {self.across} {of} are lost: their documents are too long to be read in one go")
        if self.certain:
            lines.append(f"coreference: {self.certain} {of} do not count: no other mention comes before them")
        return lines


def runs_of(probing: Probing, documents: Sequence[Document]) -> Runs:
    """Cut documents that are longer than the model takes, or than `MOST_TOKENS`, into runs of sentences that fit."""
    limit = _limit(probing)
    _, read = read_texts(probing.loaded, [" ".join(d.words) for d in documents])
    runs: list[Run] = []
    with_antecedent = asked = certain = 0
    for number, (document, one) in enumerate(zip(documents, read, strict=True)):
        whole = (0, len(document.words))
        with_antecedent += len(_questions(document, *whole))
        for start, stop in [whole] if one.length <= limit else _cuts(probing, document, limit):
            questions = _questions(document, start, stop)
            open_ones = tuple(q for q in questions if not q.right.all())
            asked, certain = asked + len(questions), certain + len(questions) - len(open_ones)
            runs.append(Run(number, start, document.words[start:stop], open_ones))
    return Runs(tuple(runs), with_antecedent, with_antecedent - asked, certain)


def spaces_after(words: Sequence[str]) -> list[bool]:
    """Whether a space follows each word: none before marks and *'s* that belong to the word before them."""
    attached = [w in {".", ",", ";", ":", "!", "?", "'s", "’s"} for w in words]
    return [not (after and word[-1].isalnum()) for word, after in zip(words, [*attached[1:], False], strict=True)]


def kind_of(document: Document, mention: Mention) -> str:
    """What a mention looks like: `pronoun`, `proper` (a name) or `nominal`.

    Pronouns are single words of a plain English list. A name has a head word with a capital letter; where that begins
    a sentence, the document must not have the same word in small letters. So nouns are names in German, and all is
    nominal in a text without capitals.
    """
    word = document.words[mention.head]
    if mention.end - mention.start == 1 and word.lower() in _PRONOUNS.split():
        return "pronoun"
    capital = word[:1].isupper() and (mention.head not in document.sentences or word.lower() not in document.words)
    return "proper" if capital else "nominal"


def _limit(probing: Probing) -> int:
    loaded = probing.loaded
    # A decoder reads its start token first.
    decoder = decoder_limit(loaded.model) if has_decoder(loaded) else None
    limits = (text_limit(loaded.model, loaded.tokenizer), None if decoder is None else decoder - 1)
    return min((MOST_TOKENS, *(n for n in limits if n is not None)))


def _cuts(probing: Probing, document: Document, limit: int) -> list[tuple[int, int]]:
    """Where runs begin and end, in words: as many whole sentences as fit."""
    bounds = list(pairwise((*document.sentences, len(document.words))))
    _, read = read_texts(probing.loaded, [" ".join(document.words[a:b]) for a, b in bounds])
    cuts: list[tuple[int, int]] = []
    used = limit + 1
    for (start, stop), one in zip(bounds, read, strict=True):
        # Within a text a sentence has a space before it, which may be a token.
        tokens = one.made + 1
        if used + tokens > limit:
            cuts.append((start, stop))
            used = tokens + one.length - one.made
        else:
            cuts[-1] = (cuts[-1][0], stop)
            used += tokens
    return cuts


def _questions(document: Document, start: int, stop: int) -> list[Question]:
    """Every mention of these words with an antecedent among them."""
    inside = [m for m in document.mentions if start <= m.head < stop]
    result = []
    for mention in inside:
        means_same: dict[int, bool] = {}
        for m in inside:
            if m.end <= mention.start:
                means_same[m.head] = means_same.get(m.head, False) or m.cluster == mention.cluster
        if any(means_same.values()):
            heads = sorted(means_same)
            word = document.words[mention.head].lower()
            result.append(
                Question(
                    mention.head - start,
                    kind_of(document, mention),
                    np.array(heads, np.int64) - start,
                    np.array([means_same[h] for h in heads]),
                    np.array([document.words[h].lower() == word for h in heads]),
                )
            )
    return result
