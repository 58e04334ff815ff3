"""A corpus of texts, read one by one as often as needed, never held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

# The readers enter themselves into the table of formats.
import headscope.reading.readers  # noqa: F401
from headscope.errors import InputError
from headscope.reading.finding import find_files
from headscope.reading.records import Columns, Record, Skipped, checked
from headscope.reading.sources import ExamplesSource, Source, file_source, stdin_source
from headscope.reading.tables import hub_source, is_saved, saved_source

Data = str | Path | Iterable[str | Mapping[str, Any]]
_HINT = 'a .txt file has one text a line, a .jsonl file lines such as {"text": "…", "label": 0}'


class Corpus:
    """Texts of files, of a dataset, or of memory.

    Args:
        name: What to call it.
        sources: Its parts, in order.
        strict: Raise at the first item that cannot be read, instead of skipping it.
    """

    def __init__(self, name: str, sources: Sequence[Source], strict: bool) -> None:
        self.name = name
        self.strict = strict
        self._sources = tuple(sources)
        sizes = [s.size for s in sources]
        self._sizes = None if None in sizes else [s or 0 for s in sizes]
        self._current: int | None = None

    def records(self, skipped: Skipped | None = None) -> Iterator[Record]:
        """The texts in order, the same ones each time; memory is that of one text.

        Args:
            skipped: Counts and names what is left out.

        Raises:
            InputError: A file cannot be read on; there was no text at all (raised at the end); or, where the corpus is
                strict, an item cannot be read (the message has its place).
        """
        tally = Skipped() if skipped is None else skipped
        number = good = 0
        for current, source in enumerate(self._sources):
            self._current = current
            for item in source.items():
                tally.items += 1
                record = checked(item, number)
                number += 1
                if isinstance(record, Record):
                    good += 1
                    yield record
                elif self.strict:
                    raise InputError(f"{item.where} {record}", _HINT)
                else:
                    tally.add(item.where, record)
        self._current = len(self._sources)
        if not good:
            raise InputError(f"there is no text in {self.name}", "; ".join(tally.lines()) or _HINT)

    def share(self) -> float | None:
        """How much of it the newest iteration has read, 0 to 1, by bytes, rows or examples; None where that is unknown.

        Once it is all read, this is 1.
        """
        if self._sizes is None:
            return None
        if self._current is None or self._current == len(self._sources):
            return 0.0 if self._current is None else 1.0
        done = sum(self._sizes[: self._current]) + self._sources[self._current].done()
        return min(1.0, done / max(1, sum(self._sizes)))


def open_corpus(
    data: Data,
    *,
    text_column: str = "text",
    label_column: str = "label",
    strict: bool = False,
    split: str | None = None,
) -> Corpus:
    """A corpus, checked as far as its beginning tells: the first item of every file is read.

    Args:
        data: A path (a file, a directory that is read with those below it, or a pattern such as `data/*.jsonl`), `-`
            for standard input, a directory that `datasets` saved, the id of a dataset on the hub; or texts, and
            mappings with the columns.
        text_column: Where texts are found.
        label_column: Where labels are found: names or whole numbers. Only `label` may be missing.
        strict: Raise at the first item that cannot be read, instead of skipping it.
        split: Of a dataset, where it has several; of one on the hub `train` if it is not given.

    Raises:
        InputError: A path does not exist or cannot be read, a suffix or what a file holds is not known, there is no
            file, a column is missing, or a library that is needed (the hint has the command).
        ResourceError: There is no room on disk for standard input.
    """
    name, sources = _sources(data, Columns(text_column, label_column), split)
    for source in sources:
        with closing(source.items()) as items:
            next(items, None)
    return Corpus(name, sources, strict)


def _sources(data: Data, columns: Columns, split: str | None) -> tuple[str, Sequence[Source]]:
    if not isinstance(data, str | Path):
        _no_split(split, "texts in memory")
        return "the given texts", [ExamplesSource(data, columns)]
    if not str(data).strip():
        raise InputError("the corpus has an empty name", "give a file, a directory (. is this one), or - for a pipe")
    if str(data) == "-":
        _no_split(split, "standard input")
        return "standard input", [stdin_source(columns)]
    path = Path(data)
    if is_saved(path):
        return str(data), [saved_source(path, split, columns)]
    files = find_files(path)
    if files is None:
        return str(data), [hub_source(path.as_posix(), split, columns)]
    _no_split(split, str(data))
    return str(data), [file_source(file, columns) for file in files]


def _no_split(split: str | None, name: str) -> None:
    if split is not None:
        raise InputError(f"{name} has no splits, so there is no {split!r}", "--split is for datasets")
