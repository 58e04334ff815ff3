"""Sentences with their dependencies, from a CoNLL-U file (universaldependencies.org/format.html)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

from headscope.errors import InputError
from headscope.reading.libraries import first_line, library
from headscope.reading.whole import read_whole

# They are no relations between words: the root has no head, and marks are attached by convention.
LEFT_OUT = ("root", "punct")


@dataclass(frozen=True)
class Arc:
    """Word `dependent` depends on word `head`, both counted from 0, by `relation` with its subtype (`nsubj:pass`)."""

    dependent: int
    head: int
    relation: str


@dataclass(frozen=True)
class Parsed:
    """One sentence.

    Attributes:
        words: Words and marks as they are written.
        spaces: Whether a space follows each.
        arcs: Dependencies but those of roots and punctuation.
    """

    words: tuple[str, ...]
    spaces: tuple[bool, ...]
    arcs: tuple[Arc, ...]


def read_treebank(path: str | PathLike[str]) -> tuple[Parsed, ...]:
    """All sentences of a file. Empty nodes are left out.

    The syntactic words of a multiword token stay apart where they are written in it one after another (`do` + `n't`);
    where they are not (`du` for `de` + `le`) they are the one word that is written, with the dependencies of all.

    Raises:
        InputError: The file is missing, is not CoNLL-U, or has no dependencies; or the package conllu is missing.
    """
    name = str(path)
    conllu = library("conllu", "conllu", f"reading {name}")
    sentences: list[Parsed] = []
    try:
        file = io.StringIO(read_whole(path).decode("utf-8-sig"), newline=None)
        for tokens in conllu.parse_incr(file):
            sentences.append(_parsed(list(tokens), f"{name}: sentence {len(sentences)}"))
    # Numbers with thousands of digits and bytes that are no text are a ValueError.
    except (conllu.exceptions.ParseException, ValueError) as error:
        message = f"{name}: sentence {len(sentences)} is not CoNLL-U ({first_line(error)})"
        raise InputError(message, "Give ten columns separated by tabs, an empty line after each sentence.") from error
    if not any(s.arcs for s in sentences):
        raise InputError(
            f"{name} has no dependencies", "Columns 7 and 8 of CoNLL-U hold each word's head and relation."
        )
    return tuple(sentences)


@dataclass(frozen=True)
class _Written:
    """A stretch of text without spaces inside, and the numbers of the syntactic words that it stands for."""

    form: str
    numbers: tuple[int, ...]
    space: bool


def _parsed(tokens: list[Any], where: str) -> Parsed:
    if any(not token.get("form") for token in tokens):
        raise InputError(f"{where} has a word without a form", "the second column of CoNLL-U is the word")
    written = list(_written(tokens))
    place = {number: i for i, one in enumerate(written) for number in one.numbers}
    arcs = []
    for token in tokens:
        head, relation = token.get("head"), token.get("deprel")
        if token["id"] not in place or not head or relation is None or relation.partition(":")[0] in LEFT_OUT:
            continue
        if head not in place:
            raise InputError(
                f"{where} has no word {head}, the head of word {token['id']}",
                "the seventh column of CoNLL-U is the number of a word of the sentence, or 0",
            )
        if place[head] != place[token["id"]]:
            arcs.append(Arc(place[token["id"]], place[head], relation))
    return Parsed(tuple(w.form for w in written), tuple(w.space for w in written), tuple(arcs))


def _written(tokens: list[Any]) -> Iterator[_Written]:
    """The words in the order of the text. A range's number is (first, "-", last), an empty node's (before, ".", n)."""
    single = {t["id"]: t for t in tokens if isinstance(t["id"], int)}
    covered = 0
    for token in tokens:
        number = token["id"]
        if isinstance(number, int) and number > covered:
            yield _Written(token["form"], (number,), _space(token))
        elif isinstance(number, tuple) and number[1] == "-":
            covered = number[2]
            inside = tuple(n for n in range(number[0], number[2] + 1) if n in single)
            forms = [single[n]["form"] for n in inside]
            if "".join(forms) != token["form"]:
                yield _Written(token["form"], inside, _space(token))
                continue
            for n, form in zip(inside, forms, strict=True):
                yield _Written(form, (n,), _space(token) and n == inside[-1])


def _space(token: Any) -> bool:
    return (token.get("misc") or {}).get("SpaceAfter") != "No"
