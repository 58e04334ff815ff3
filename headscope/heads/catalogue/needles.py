"""Sentences to be found in a long text: reading them, and building prompts whose tokens are known one by one.

A needle file has a line each, `{"needle": sentence, "question": ..., "answer": ...}`; a haystack is any text.

Prompts are put together from token ids, so that the needle's positions are known and need not be searched for: the
tokenizer's start tokens, haystack, needle, haystack, cue. Haystack and needle are tokenized as they are written after
a full stop and a space. The cue ends with the needle's first tokens.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headscope.errors import InputError, ModelError
from headscope.models.loading import LoadedModel
from headscope.models.text_inputs import text_sequences
from headscope.models.tokens import TokenReader
from headscope.reading.libraries import first_line
from headscope.reading.lines import Line, lines
from headscope.reading.sources import cannot_read

FIELDS = ("needle", "question", "answer")
HINT = 'A line is {"needle": "The code is red.", "question": "What is the code?", "answer": "red"}.'
_ENDS = (".", "!", "?", "。", "！", "？")
_CLOSING = " \n\r\t\"'”’»)]"
# Tokens of haystack that make a prompt worth its name, and characters that are surely enough for a token.
_LEAST = 16
_CHARACTERS = 32


@dataclass(frozen=True)
class Needle:
    """A sentence, a question that it answers, and the answer."""

    needle: str
    question: str
    answer: str


def read_needles(path: Path | str) -> tuple[Needle, ...]:
    """The needles of a file, blank lines left out.

    Raises:
        InputError: The file cannot be read or has none, or a line is not as described; the message has its number.
    """
    found = tuple(_needle(f"{path}:{line.number}", line.text) for line in _lines(path) if line.text.strip())
    if not found:
        raise InputError(f"{path} holds no needle", HINT)
    return found


def read_haystack(path: Path | str, tokens: int) -> str:
    """A text, or as much of its beginning as is surely enough for so many tokens.

    Raises:
        InputError: The file cannot be read, or has no text.
    """
    parts, size = [], 0
    for line in _lines(path):
        parts.append(line.text)
        size += len(line.text)
        if size > _CHARACTERS * tokens:
            break
    text = "".join(parts)[: _CHARACTERS * tokens].strip()
    if not text:
        raise InputError(f"{path} holds no text", "A haystack is plain text with sentences.")
    return text


def _lines(path: Path | str) -> Iterator[Line]:
    try:
        with Path(path).open("rb") as file:
            for line in lines(file, str(path)):
                if line.problem is not None:
                    raise InputError(f"{path}:{line.number} {line.problem}", "Save the file as UTF-8 text.")
                yield line
    except OSError as error:
        raise cannot_read(str(path), error) from error


def _needle(where: str, line: str) -> Needle:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON ({first_line(error)})", HINT) from error
    if not isinstance(value, dict):
        raise InputError(f"{where} is no object", HINT)
    for name in FIELDS:
        if not isinstance(value.get(name), str) or not value[name].strip():
            raise InputError(f"{where} has no text as {name!r}", HINT)
    return Needle(*(value[name].strip() for name in FIELDS))


# ------------------------------------------------------------------ tokens
@dataclass(frozen=True)
class Pieces:
    """All that prompts are made of, as token ids.

    Attributes:
        start: Special tokens that the tokenizer puts before a text.
        haystack: The text's.
        sentences: Where its sentences begin, 0 first.
        needles: Each needle's.
        cues: What follows the haystack, by needle; without the needle's first tokens.
        numbers: Each needle's number among those that were given.
    """

    start: tuple[int, ...]
    haystack: tuple[int, ...]
    sentences: tuple[int, ...]
    needles: tuple[tuple[int, ...], ...]
    cues: tuple[tuple[int, ...], ...]
    numbers: tuple[int, ...]

    def around(self, needle: int) -> int:
        """Tokens of a trial with this needle that are no haystack: the needle is there, and is said once more."""
        return len(self.start) + len(self.cues[needle]) + 2 * len(self.needles[needle])

    @property
    def shortest(self) -> int:
        """The least length of a trial."""
        return max(self.around(i) for i in range(len(self.needles))) + _LEAST

    @property
    def longest(self) -> int:
        """The greatest length of a trial, of which the haystack has enough tokens."""
        return min(self.around(i) for i in range(len(self.needles))) + len(self.haystack)


def tokenized(
    loaded: LoadedModel, haystack: str, needles: Sequence[Needle], cue: str, given: int
) -> tuple[Pieces, list[str]]:
    """Everything as token ids, and notes.

    Needles with tokens that the tokenizer does not know, or with fewer than `given` + 2 tokens, are left out.

    Raises:
        InputError: The haystack already has a needle.
        ModelError: There is no tokenizer, no needle is left, or which tokens are a needle's cannot be told.
    """
    start, text, notes = _after_stop(loaded, haystack)
    assert loaded.tokenizer is not None
    pieces = TokenReader(loaded.tokenizer).pieces(text)
    ends = [i + 1 for i, p in enumerate(pieces[:-1]) if p.text.rstrip(_CLOSING).endswith(_ENDS)]
    unknown = loaded.tokenizer.unk_token_id
    kept: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    for number, needle in enumerate(needles):
        ids = _after_stop(loaded, needle.needle)[1]
        if unknown in ids or len(ids) < given + 2:
            continue
        if find(text, ids):
            raise InputError(f"the haystack already has the needle {needle.needle[:60]!r}", "Give another haystack.")
        kept.append((number, ids, _plain(loaded, cue.replace("{question}", needle.question))[1]))
    lost = len(needles) - len(kept)
    if not kept:
        raise ModelError(
            f"the tokenizer of {loaded.name} knows none of the needles",
            "Give needles of words that it knows, of more than a few tokens.",
        )
    if lost:
        notes = [*notes, f"{lost} of {len(needles)} needles left out: too short, or the tokenizer does not know them"]
    numbers, tokens, cues = zip(*kept, strict=True)
    return Pieces(start, text, (0, *ends), tokens, cues, numbers), notes


def find(ids: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where `part` begins in `ids`, all places."""
    wanted, first = tuple(part), part[0]
    return [i for i, n in enumerate(ids) if n == first and tuple(ids[i : i + len(wanted)]) == wanted]


def _plain(loaded: LoadedModel, text: str) -> tuple[tuple[int, ...], tuple[int, ...], list[str]]:
    """The special tokens before a text, and its own tokens; warnings."""
    sequences, warnings = text_sequences(loaded, [text])
    ids, special = sequences[0].ids, sequences[0].special
    own = [i for i, s in enumerate(special) if not s]
    return ids[: own[0]], ids[own[0] : own[-1] + 1], warnings


def _after_stop(loaded: LoadedModel, text: str) -> tuple[tuple[int, ...], tuple[int, ...], list[str]]:
    """The same, with a text's tokens as they are after the end of a sentence."""
    _, before, _ = _plain(loaded, ".")
    start, whole, warnings = _plain(loaded, f". {text}")
    if whole[: len(before)] != before or len(whole) == len(before):
        raise ModelError(
            f"which tokens are those of {text[:40]!r} cannot be told: the tokenizer of {loaded.name} joins them with "
            "what stands before",
            "Retrieval needs a tokenizer that keeps sentences apart.",
        )
    return start, whole[len(before) :], warnings


# ------------------------------------------------------------------ prompts
@dataclass(frozen=True)
class Prompt:
    """A prompt and what should follow it.

    Attributes:
        ids: What the model reads, the cue's beginning of the needle included.
        positions: Of the needle's tokens that the cue does not give, in the order of the text.
        needle: The needle's number in its file.
        length: Tokens of the prompt and of what should follow.
        depth: 0 where the needle stands before the haystack, 1 after it.
    """

    ids: tuple[int, ...]
    positions: range
    needle: int
    length: int
    depth: float

    @property
    def wanted(self) -> tuple[int, ...]:
        """The tokens that should follow."""
        return self.ids[self.positions.start : self.positions.stop]


def build(pieces: Pieces, needle: int, length: int, depth: float, given: int, random: np.random.Generator) -> Prompt:
    """A prompt of exact length; the haystack begins at a random sentence.

    Raises:
        InputError: The needle does not stand there once.
    """
    ids, room = pieces.needles[needle], length - pieces.around(needle)
    begins = pieces.sentences[: bisect_right(pieces.sentences, len(pieces.haystack) - room)]
    first = int(random.choice(begins))
    inside = [s for s in pieces.sentences if first <= s <= first + room]
    place = min(inside, key=lambda s: abs(s - first - depth * room))
    before, after = pieces.haystack[first:place], pieces.haystack[place : first + room]
    prompt = (*pieces.start, *before, *ids, *after, *pieces.cues[needle], *ids[:given])
    at = len(pieces.start) + len(before)
    if find(prompt, ids) != [at]:
        raise InputError(
            f"needle {pieces.numbers[needle]} does not stand once in its prompt",
            "A needle must not be in the haystack, nor in the question.",
        )
    return Prompt(prompt, range(at + given, at + len(ids)), pieces.numbers[needle], length, depth)
