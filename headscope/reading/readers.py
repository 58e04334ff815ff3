"""One reader a format. A new one is a function here, decorated with its suffixes."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from headscope.errors import InputError
from headscope.reading.formats import Opened, labels_from, listed, reads
from headscope.reading.libraries import first_line, library
from headscope.reading.lines import LONGEST, TOO_LONG, Line, lines
from headscope.reading.records import Item, item_of

_WHOLE = re.compile(r"-?[0-9]{1,18}")
_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 1024


@reads(".txt")
def read_txt(file: Opened) -> Iterator[Item]:
    """A text a line; blank lines are no items."""
    for line in lines(file.binary, file.name):
        if line.problem is not None:
            yield Item(file.at(line.number), problem=line.problem)
        elif line.text.strip():
            yield Item(file.at(line.number), line.content)


@reads(".jsonl", ".ndjson")
def read_jsonl(file: Opened) -> Iterator[Item]:
    """An object with the columns, or a plain string, a line; blank lines are no items."""
    for line in lines(file.binary, file.name):
        where = file.at(line.number)
        if line.problem is not None:
            yield Item(where, problem=line.problem)
        elif line.text.strip():
            try:
                value = json.loads(line.text)
            # Beyond broken syntax: numbers with thousands of digits, and very deep nesting.
            except (ValueError, RecursionError) as error:
                yield Item(where, problem=f"is not JSON ({first_line(error)})")
            else:
                yield item_of(where, value, file.columns)


@reads(".csv")
def read_csv(file: Opened) -> Iterator[Item]:
    """Rows under a header, in the dialect of spreadsheets; quoted fields may hold newlines."""
    return _table(file, ",")


@reads(".tsv")
def read_tsv(file: Opened) -> Iterator[Item]:
    """As .csv, with tabs between fields."""
    return _table(file, "\t")


def _table(file: Opened, delimiter: str) -> Iterator[Item]:
    rows = _rows(file, delimiter)
    where, header, problem = next(rows, (file.name, None, None))
    if header is None:
        return
    if problem is not None:
        raise InputError(f"the header {where} {problem}", "the first line names the columns")
    labels = labels_from(file.columns, header, file.name)
    text, label = header.index(file.columns.text), None if labels is None else header.index(labels)
    for where, row, problem in rows:
        if problem is None and len(row) != len(header):
            problem = f"has {len(row)} field{'s' * (len(row) != 1)} instead of {len(header)}"
        if problem is not None:
            yield Item(where, problem=problem)
        else:
            yield Item(where, row[text], None if label is None else _label(row[label]))


def _label(field: str) -> str | int | None:
    """Tables of text know no numbers: digits are one, and nothing is no label."""
    return int(field) if _WHOLE.fullmatch(field) else field or None


def _rows(file: Opened, delimiter: str) -> Iterator[tuple[str, list[str], str | None]]:
    """The place of each row, its fields, and what is wrong with it; blank lines are no rows."""
    problems: list[str] = []
    # Strict: a quote that is never closed would otherwise take the rest of the file into one text.
    rows = csv.reader(_texts(lines(file.binary, file.name), problems), delimiter=delimiter, strict=True)
    while True:
        problems.clear()
        where = file.at(rows.line_num + 1)
        # The limit holds for the whole process: it is raised for this row only.
        limit = csv.field_size_limit(LONGEST)
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            row = []
            problems.append(f"is not CSV ({error})")
        finally:
            csv.field_size_limit(limit)
        if row or problems:
            yield where, row, problems[0] if problems else None


def _texts(found: Iterable[Line], problems: list[str]) -> Iterator[str]:
    for line in found:
        if line.problem is not None:
            problems.append(line.problem)
        yield line.text


@reads(".conllu", ".conll")
def read_conllu(file: Opened) -> Iterator[Item]:
    """Sentences of a treebank: their `# text`, or their tokens with the spaces that stand between them."""
    conllu = library("conllu", "conllu", f"reading {file.name}")
    fields = None
    for first, block, problem in _blocks(file):
        declared = next((line for line in block if line.startswith("# global.columns =")), None)
        if declared is not None:
            fields = declared.partition("=")[2].lower().split()
        if problem is None and all(line.startswith("#") for line in block):
            continue
        if problem is not None:
            yield Item(file.at(first), problem=problem)
            continue
        try:
            (sentence,) = conllu.parse("\n".join(block), fields=fields)
        # Numbers with thousands of digits are a ValueError.
        except (conllu.exceptions.ParseException, ValueError) as error:
            yield Item(file.at(first), problem=f"is not CoNLL-U ({first_line(error)})")
        else:
            yield Item(file.at(first), sentence.metadata.get("text") or _surface(sentence))


def _blocks(file: Opened) -> Iterator[tuple[int, list[str], str | None]]:
    """Lines between blank ones: the number of the first, the lines, and what is wrong with one of them."""
    first, size, problem = 0, 0, None
    block: list[str] = []
    for line in lines(file.binary, file.name):
        if line.problem is None and not line.text.strip():
            if block:
                yield first, block, problem
            block, size, problem = [], 0, None
            continue
        first = first if block else line.number
        size += len(line.text)
        problem = problem or line.problem or (TOO_LONG if size > LONGEST else None)
        if not block or problem != TOO_LONG:
            block.append(line.content)
    if block:
        yield first, block, problem


def _surface(sentence: Iterable[Any]) -> str:
    """The tokens as they were written: a contraction, not its words, and no empty nodes."""
    pieces, covered = [], 0
    for token in sentence:
        number = token.get("id")
        if isinstance(number, tuple) and number[1] == ".":
            continue
        if isinstance(number, int) and number <= covered:
            continue
        covered = number[2] if isinstance(number, tuple) else covered
        tight = (token.get("misc") or {}).get("SpaceAfter") == "No"
        pieces.append(token.get("form", "") + ("" if tight else " "))
    return "".join(pieces).rstrip(" ")


@reads(".parquet", gzip=False)
def read_parquet(file: Opened) -> Iterator[Item]:
    """Rows of a Parquet file; only the columns of texts and labels are read."""
    arrow, parquet = (library(m, "parquet", f"reading {file.name}") for m in ("pyarrow", "pyarrow.parquet"))
    try:
        # Column chunks, which may be as large as the file, are read in pages.
        table = parquet.ParquetFile(file.binary, buffer_size=1 << 16, pre_buffer=False)
        labels = labels_from(file.columns, table.schema_arrow.names, file.name)
        _check_texts(arrow.types, table.schema_arrow.field(file.columns.text), file)
        names = [file.columns.text] if labels is None else [file.columns.text, labels]
        number = 0
        for batch in table.iter_batches(_batch_rows(table.metadata), columns=names, use_threads=False):
            for row in range(batch.num_rows):
                yield _cell_item(f"{file.name}:row {number}", [batch.column(n)[row] for n in names])
                number += 1
    except arrow.ArrowException as error:
        raise InputError(f"{file.name} is not Parquet, or is damaged: {first_line(error)}", "write it anew") from error


def _check_texts(types: Any, field: Any, file: Opened) -> None:
    kind = field.type.value_type if types.is_dictionary(field.type) else field.type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise InputError(
            f"{file.name} has {field.type} in column {listed([field.name])}, not texts",
            "name the column of texts with --text-column",
        )


def _batch_rows(metadata: Any) -> int:
    """Rows of a batch of a few megabytes, where texts are long."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    bytes_a_row = max((g.total_byte_size / g.num_rows for g in groups if g.num_rows), default=1.0)
    return int(min(_BATCH_ROWS, max(1, _BATCH_BYTES / max(bytes_a_row, 1.0))))


def _cell_item(where: str, cells: list[Any]) -> Item:
    try:
        return Item(where, *(cell.as_py() for cell in cells))
    except UnicodeDecodeError as error:
        return Item(where, problem=f"is not UTF-8 (byte {error.start})")
