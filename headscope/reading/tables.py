"""Datasets of the `datasets` library: those it saved, and those of the hub, which are streamed."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from headscope.errors import InputError
from headscope.reading.formats import labels_from, listed
from headscope.reading.inside import is_inside
from headscope.reading.libraries import first_line, library
from headscope.reading.records import Columns, Item, item_of

_SPLIT = "name one of them with --split"


class DatasetSource:
    """One split of a dataset.

    Args:
        name: What messages call it.
        place: What the place of a row begins with, its number following.
        dataset: A `Dataset` or an `IterableDataset`, with the columns.
    """

    def __init__(self, name: str, place: str, dataset: Any, columns: Columns) -> None:
        self._name, self._place, self._columns = name, place, columns
        if dataset.features is not None:
            labels = labels_from(columns, list(dataset.features), name)
            _check_texts(dataset.features[columns.text], name, columns)
            dataset = dataset.select_columns([columns.text] if labels is None else [columns.text, labels])
        self._dataset = dataset
        self.size: int | None = len(dataset) if hasattr(dataset, "__len__") else None
        self._done = 0

    def items(self) -> Generator[Item]:
        """An item a row.

        Raises:
            InputError: The rest of it cannot be read.
        """
        rows = iter(self._dataset)
        self._done = 0
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            # Every builder and file system of the library raises its own errors; they have no common class.
            except Exception as error:
                raise InputError(f"cannot read on in {self._name}: {first_line(error)}", "try again") from error
            yield item_of(f"{self._place}{self._done}", row, self._columns)
            self._done += 1

    def done(self) -> int:
        """Rows that were read."""
        return self._done


def is_saved(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote this directory."""
    there = {name: os.path.isfile(path / name) for name in ("dataset_dict.json", "state.json", "dataset_info.json")}
    return there["dataset_dict.json"] or (there["state.json"] and there["dataset_info.json"])


def saved_source(path: Path, split: str | None, columns: Columns) -> DatasetSource:
    """The source of a saved dataset; of several splits one must be named.

    Raises:
        InputError: It cannot be loaded, or has no such split or column.
    """
    datasets = library("datasets", "datasets", f"reading {path}")
    _check_names(path)
    try:
        loaded = datasets.load_from_disk(str(path))
    # What its files lack or have too much of makes the library stumble in many ways.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"cannot load {path}: {first_line(error)}", "save the dataset anew") from error
    if not isinstance(loaded, dict):
        if split is not None and split != str(loaded.split):
            raise InputError(f"{path} is one dataset, without a split {split!r}", "leave --split out")
        return DatasetSource(str(path), f"{path}:row ", loaded, columns)
    if split is None and len(loaded) != 1:
        raise InputError(f"{path} has the splits {listed(list(loaded))}", _SPLIT)
    chosen = next(iter(loaded)) if split is None else split
    if chosen not in loaded:
        raise InputError(f"{path} has no split {chosen!r}: there are {listed(list(loaded))}", _SPLIT)
    return DatasetSource(f"{path} {chosen}", f"{path} {chosen}:", loaded[chosen], columns)


def _check_names(path: Path) -> None:
    """Raise InputError if a saved dataset names files outside of its directory."""
    splits = _listed_in(path / "dataset_dict.json", "splits")
    inside = [name for name in splits if is_inside(name)]
    files = [
        entry.get("filename") if isinstance(entry, dict) else entry
        for folder in (path, *(path / name for name in inside))
        for entry in _listed_in(folder / "state.json", "_data_files")
    ]
    for name in (*splits, *files):
        if not is_inside(name):
            raise InputError(f"{path} names a file outside of it: {str(name)[:100]}", "do not trust this dataset")


def _listed_in(file: Path, key: str) -> list[Any]:
    """A list in a JSON file; empty where there is none, which the library says better."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, list) else []


def hub_source(name: str, split: str | None, columns: Columns) -> DatasetSource:
    """The source of a dataset on the hub; it is not downloaded but streamed.

    Raises:
        InputError: It cannot be reached, or has no such split or column.
    """
    datasets = library("datasets", "datasets", f"{name} is not a file; reading a dataset of the hub")
    chosen = split or "train"
    try:
        loaded = datasets.load_dataset(name, split=chosen, streaming=True)
    # Every builder and file system of the library raises its own errors; they have no common class.
    except Exception as error:
        message = f"{name} is not a file, and not a dataset that the hub gives ({first_line(error)})"
        raise InputError(message, "check the name, --split, the network, and HF_HUB_OFFLINE") from error
    return DatasetSource(f"{name} {chosen}", f"{name} {chosen}:", loaded, columns)


def _check_texts(feature: Any, name: str, columns: Columns) -> None:
    kind = getattr(feature, "dtype", None)
    if kind not in ("string", "large_string", "string_view"):
        raise InputError(
            f"{name} has {kind or type(feature).__name__} in column {listed([columns.text])}, not texts",
            "name the column of texts with --text-column",
        )
