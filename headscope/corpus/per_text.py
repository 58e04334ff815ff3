"""Each text's values as a Parquet file that appears whole or not at all."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from headscope.corpus.part import Table
from headscope.errors import InputError
from headscope.files.links import own_place
from headscope.files.placing import place_file
from headscope.files.together import finish
from headscope.files.unfinished import part_of


class PerText:
    """A Parquet file, written part by part; it takes its name in `finish` only.

    Args:
        path: Ends with `.parquet`.
        force: Overwrite a file that is there.

    Raises:
        InputError: Another suffix, the file exists or is a link, its directory does not or takes no file, or pyarrow is
            not installed.
    """

    def __init__(self, path: Path, force: bool) -> None:
        if path.suffix != ".parquet":
            raise InputError(f"values of each text go to a .parquet file, not {path.name!r}", "name a .parquet file")
        if path.is_dir() or (path.exists() and not force):
            raise InputError(f"{path} exists", "use --force to overwrite it, or another name")
        self._path = own_place(path)
        if not self._path.parent.is_dir():
            raise InputError(f"no such directory: {self._path.parent}", "create it first")
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise InputError(
                "values of each text go to a Parquet file, which needs pyarrow", 'pip install "headscope[parquet]"'
            ) from error
        self._arrow: Any = pyarrow
        self._writer: Any = None
        self._force, self._opened = force, ExitStack()
        try:
            self._part = self._opened.enter_context(part_of(self._path))
        except OSError as error:
            raise InputError(
                f"cannot write to {self._path.parent}: {error.strerror}", "check its permissions or write elsewhere"
            ) from error

    def add(self, table: Table | None) -> None:
        """Append rows."""
        if table is None:
            return
        columns = self._arrow.table({name: self._arrow.array(column) for name, column in table.items()})
        if self._writer is None:
            self._writer = self._arrow.parquet.ParquetWriter(self._part.path, columns.schema)
        self._writer.write_table(columns)

    def finish(self) -> None:
        """Close the file and give it its name, with the others if they are written together."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            os.fsync(self._part.number)
            finish(partial(place_file, self._part.path, self._path, force=self._force), self._opened)

    def __enter__(self) -> PerText:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Without `finish`, nothing remains."""
        with self._opened:
            if self._writer is not None:
                self._writer.close()
