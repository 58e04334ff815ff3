"""Documents with the mentions of what they speak of: two file formats, checked before anything else happens.

JSON lines, a document a line; positions count its words from 0, ends are exclusive, sentences are where they begin:

    {"tokens": [word, ...], "sentences": [start, ...], "clusters": [[[start, end, head], ...], ...]}

`sentences` may be missing: the document is then one. A mention's `head`, the position of its head word, may be missing
too: it is then the mention's last word, which is right for names and bare noun phrases but not for *the mayor of Rome*.

Columns of CoNLL-2012 (Pradhan et al., 2012, "CoNLL-2012 Shared Task", section 4): between `#begin document (name);
part 000` and `#end document` a line a word, an empty line after each sentence; the word is the fourth column, and the
last one has the mentions that begin and end there: `(12)`, `(7|(12`, `7)`, `-` for none. Parts are documents of their
own, and heads are last words.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from headscope.errors import InputError
from headscope.reading.libraries import first_line
from headscope.reading.lines import Line, lines
from headscope.reading.sources import cannot_read

JSON_HINT = 'A line is {"tokens": [...], "sentences": [0, ...], "clusters": [[[start, end, head], ...], ...]}.'
CONLL_HINT = "Columns are those of CoNLL-2012: the fourth is the word, the last one has mentions such as (12)|(7 or 7)."
SUFFIXES_HINT = "Known ones are .jsonl and .conll (also _conll, as in .v4_gold_conll)."
_BEGIN = re.compile(r"#begin document \(?(?P<name>.*?)\)?(; *part *(?P<part>\d+))?")
_BRACKET = re.compile(r"(?P<open>\()?(?P<cluster>\w+)(?P<close>\))?")
_FEWEST_COLUMNS = 5


@dataclass(frozen=True, order=True)
class Mention:
    """One mention, by positions of words in its document.

    Attributes:
        head: Its head word.
        start, end: Its first word, and the one after its last.
        cluster: Number of what it means, from 0 in each document.
    """

    head: int
    start: int
    end: int
    cluster: int


@dataclass(frozen=True)
class Document:
    """A text with its mentions.

    Attributes:
        name: The place in the file, or the document's own name and part.
        words: At least one.
        sentences: Where sentences begin, ascending from 0.
        mentions: In the order of their head words.
    """

    name: str
    words: tuple[str, ...]
    sentences: tuple[int, ...]
    mentions: tuple[Mention, ...]


def read_mentions(path: Path | str) -> tuple[Document, ...]:
    """All documents of a file, whose name tells its format.

    A cluster has two mentions or more, none of them twice; mentions may lie inside each other and cross.

    Raises:
        InputError: The file cannot be read, is of neither format, or something in it is wrong; names file and line.
    """
    path = Path(path)
    if path.name.endswith(".jsonl"):
        reader = _json_lines
    elif path.name.endswith((".conll", "_conll")):
        reader = _conll
    else:
        raise InputError(f"{path} has no suffix of a file of mentions", SUFFIXES_HINT)
    try:
        with path.open("rb") as file:
            documents = tuple(reader(str(path), _text_lines(str(path), lines(file, str(path)))))
    except OSError as error:
        raise cannot_read(str(path), error) from error
    if not documents:
        raise InputError(f"{path} holds no document", JSON_HINT if reader is _json_lines else CONLL_HINT)
    return documents


def _text_lines(name: str, found: Iterable[Line]) -> Iterator[Line]:
    for line in found:
        if line.problem is not None:
            raise InputError(f"{name}:{line.number} {line.problem}", "Save the file as UTF-8 text.")
        yield line


def _document(where: str, name: str, words: Sequence[str], starts: Sequence[int], mentions: list[Mention]) -> Document:
    """A document whose clusters have been looked at.

    Raises:
        InputError: A cluster has one mention, or the same one twice.
    """
    spans: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for m in mentions:
        if (m.start, m.end) in spans[m.cluster]:
            raise InputError(
                f"{where}: a cluster has the words {m.start} to {m.end - 1} twice",
                "name each mention of a cluster once",
            )
        spans[m.cluster].add((m.start, m.end))
    for known in spans.values():
        if len(known) == 1:
            ((start, end),) = known
            text = " ".join(words[start:end])
            raise InputError(f"{where}: a cluster has one mention only, '{text}'", "Leave out what is mentioned once.")
    return Document(name, tuple(words), tuple(starts), tuple(sorted(mentions)))


# ------------------------------------------------------------------ JSON lines
def _json_lines(name: str, found: Iterable[Line]) -> Iterator[Document]:
    for line in found:
        if line.text.strip():
            yield _from_json(f"{name}:{line.number}", line.text)


def _from_json(where: str, text: str) -> Document:
    try:
        value = json.loads(text)
    # Beyond broken syntax: numbers with thousands of digits, and very deep nesting.
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON ({first_line(error)})", JSON_HINT) from error
    if not isinstance(value, dict) or not {"tokens", "clusters"} <= value.keys():
        raise InputError(f"{where} is no object with tokens and clusters", JSON_HINT)
    words = value["tokens"]
    if not _is_list(words) or not words or not all(isinstance(w, str) and w.strip() for w in words):
        raise InputError(f"{where}: tokens is no list of words", JSON_HINT)
    starts = value.get("sentences", [0])
    if not _is_list(starts) or not _ascending(starts, len(words)):
        raise InputError(f"{where}: sentences does not ascend from 0 to at most {len(words) - 1}", JSON_HINT)
    clusters = value["clusters"]
    if not _is_list(clusters) or not all(_is_list(c) and c for c in clusters):
        raise InputError(f"{where}: clusters is no list of lists of mentions", JSON_HINT)
    mentions = [_mention(where, m, len(words), n) for n, cluster in enumerate(clusters) for m in cluster]
    return _document(where, where, words, starts, mentions)


def _mention(where: str, value: Any, words: int, cluster: int) -> Mention:
    if not _is_list(value) or len(value) not in (2, 3) or not all(type(n) is int for n in value):
        raise InputError(f"{where}: {json.dumps(value)[:60]} is no mention", JSON_HINT)
    start, end, *head = value
    if not 0 <= start < end <= words:
        raise InputError(f"{where}: mention {value} is no span of {words} words", "Ends are exclusive.")
    if head and not start <= head[0] < end:
        raise InputError(f"{where}: the head of mention {value} lies outside of it", "Heads are words of the document.")
    return Mention(head[0] if head else end - 1, start, end, cluster)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _ascending(starts: list[Any], words: int) -> bool:
    if not all(type(n) is int for n in starts):
        return False
    return starts[:1] == [0] and starts[-1] < words and all(a < b for a, b in pairwise(starts))


# ------------------------------------------------------------------ CoNLL-2012
@dataclass
class _Part:
    """A part of a document while it is read.

    Attributes:
        where: The line that begins it.
        open: By cluster, where mentions began that have not ended, as (word, place in the file).
        numbers: Clusters' numbers by their names.
    """

    name: str
    where: str
    words: list[str]
    starts: list[int]
    mentions: list[Mention]
    open: dict[str, list[tuple[int, str]]]
    numbers: dict[str, int]
    new_sentence: bool = True

    def add(self, where: str, columns: list[str]) -> None:
        """Add a word and the mentions that begin or end there."""
        if len(columns) < _FEWEST_COLUMNS:
            raise InputError(f"{where} has {len(columns)} columns, needs {_FEWEST_COLUMNS} or more", CONLL_HINT)
        here = len(self.words)
        if self.new_sentence:
            self.starts.append(here)
            self.new_sentence = False
        self.words.append(columns[3])
        for text in columns[-1].split("|") if columns[-1] not in ("-", "_", "*") else ():
            self._bracket(where, text, here)

    def _bracket(self, where: str, text: str, here: int) -> None:
        match = _BRACKET.fullmatch(text)
        if match is None or not (match["open"] or match["close"]):
            raise InputError(f"{where}: '{text[:40]}' is no mention", CONLL_HINT)
        began = self.open.setdefault(match["cluster"], [])
        if match["open"]:
            began.append((here, where))
        if match["close"]:
            if not began:
                raise InputError(f"{where}: '{text}' ends a mention that never began", CONLL_HINT)
            number = self.numbers.setdefault(match["cluster"], len(self.numbers))
            self.mentions.append(Mention(here, began.pop()[0], here + 1, number))

    def document(self) -> Document:
        """The part, complete."""
        for cluster, began in self.open.items():
            if began:
                raise InputError(f"{began[-1][1]}: '({cluster}' begins a mention that never ends", CONLL_HINT)
        if not self.words:
            raise InputError(f"{self.where} begins a document without words", CONLL_HINT)
        return _document(self.where, self.name, self.words, self.starts, self.mentions)


def _conll(name: str, found: Iterable[Line]) -> Iterator[Document]:
    part: _Part | None = None
    for line in found:
        where, text = f"{name}:{line.number}", line.content.strip()
        begin = _BEGIN.fullmatch(text)
        if begin is not None:
            if part is not None:
                raise InputError(f"{where} begins a document before {part.where} has ended", CONLL_HINT)
            title = begin["name"] + (f" part {begin['part']}" if begin["part"] else "")
            part = _Part(title, where, [], [], [], {}, {})
        elif text.startswith("#end document"):
            if part is None:
                raise InputError(f"{where} ends a document that never began", CONLL_HINT)
            yield part.document()
            part = None
        elif part is not None and not text:
            part.new_sentence = True
        elif text and not text.startswith("#"):
            if part is None:
                raise InputError(f"{where} stands outside of a document", CONLL_HINT)
            part.add(where, text.split())
    if part is not None:
        raise InputError(f"{part.where} begins a document that never ends", CONLL_HINT)
