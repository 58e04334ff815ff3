"""The texts of a small corpus, in memory: both models read the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from headscope.errors import InputError
from headscope.reading import Skipped, open_corpus
from headscope.reading.order import sample as drawn

Source = str | Path | Sequence[str | Mapping[str, Any]]

# Every value of every text is kept, since differences are taken text by text.
MOST_TEXTS = 2000


def small_corpus(
    data: Source, text_column: str, sample: int | None, seed: int, others: Mapping[str, object]
) -> tuple[list[str], list[str]]:
    """The texts and warnings.

    Args:
        data, text_column: As for `headscope.reading.open_corpus`.
        sample: How many to draw at most; None for all, up to `MOST_TEXTS`.
        others: Other inputs by name, of which only one text for all decoders may be given.

    Raises:
        InputError: The corpus cannot be read or has no text, or other input is given as well.
    """
    for name in ("texts", "ids", "images", "audio"):
        if others[name] is not None:
            raise InputError(f"data and {name} are both given", "give one of them")
    if sample is not None and sample > MOST_TEXTS:
        raise InputError(f"a sample of {sample:,} texts", f"at most {MOST_TEXTS:,} are compared")
    corpus, skipped = open_corpus(data, text_column=text_column), Skipped()
    size = MOST_TEXTS if sample is None else sample
    texts = [record.text for record in islice(corpus.records(skipped), size + 1)]
    if len(texts) <= size:
        return texts, list(skipped.lines())
    skipped = Skipped()
    texts = [record.text for record in drawn(corpus, size, seed, skipped)]
    more = [f"{size:,} of {skipped.items - skipped.count:,} texts were drawn"] if sample is None else []
    return texts, [*more, *skipped.lines()]
