"""The order in which texts are looked at, drawn from a seed; the same on every machine and for every window.

A text's key is a hash of the seed and its number in the corpus, so that a sample needs no list of texts, and texts that
cannot be read move no other text. Ascending keys are a random permutation; its first k texts are a random sample
without replacement.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice

from headscope.errors import InputError
from headscope.reading.corpus import Corpus
from headscope.reading.records import Record, Skipped

_FIRST_WINDOW = 256


def key(seed: int, number: int) -> int:
    """The 64-bit key of a text: BLAKE2b (RFC 7693) of seed and number in decimal, with a colon between them."""
    return int.from_bytes(blake2b(f"{seed}:{number}".encode(), digest_size=8).digest(), "big")


def _rank(seed: int, number: int) -> int:
    """A key that no two texts share: where two keys are equal, the lower number comes first."""
    return key(seed, number) << 64 | number


def sample(corpus: Corpus, size: int, seed: int, skipped: Skipped | None = None) -> Iterator[Record]:
    """The `size` texts with the smallest keys, or all if there are fewer, in the order of the corpus.

    Reads the corpus twice: a first pass finds the largest key, with `size` numbers in memory.

    Raises:
        InputError: `size` is below 1, and as `Corpus.records` does.
    """
    if size < 1:
        raise InputError(f"a sample of {size} texts", "it needs 1 or more")
    return _sample(corpus, size, seed, skipped)


def _sample(corpus: Corpus, size: int, seed: int, skipped: Skipped | None) -> Iterator[Record]:
    # heapq keeps the smallest on top: of negative ranks, that is the largest.
    smallest: list[int] = []
    for record in corpus.records(skipped):
        _keep(smallest, -_rank(seed, record.number), size)
    largest = -smallest[0]
    del smallest
    for record in corpus.records():
        if _rank(seed, record.number) <= largest:
            yield record


def _keep(heap: list[int], entry: int, size: int) -> None:
    if len(heap) < size:
        heapq.heappush(heap, entry)
    elif entry > heap[0]:
        heapq.heapreplace(heap, entry)


def shuffled(
    corpus: Corpus, seed: int, sample: int | None = None, window: int = 65_536, skipped: Skipped | None = None
) -> Iterator[Record]:
    """The texts in ascending order of their keys: the first k of them are those of `sample(corpus, k, seed)`.

    Each pass over the corpus picks the texts that come next: 256, twice as many in each pass after, `window` at most.
    So the first texts come soon, and no more than `window` are ever in memory.

    Args:
        sample: Stop after so many.
        window: Texts in memory; it does not change the order.

    Raises:
        InputError: `sample` or `window` is below 1, and as `Corpus.records` does.
    """
    if window < 1 or (sample is not None and sample < 1):
        raise InputError(f"a window of {window} and a sample of {sample} texts", "each needs 1 or more")
    return islice(_shuffled(corpus, seed, window, skipped), sample)


def _shuffled(corpus: Corpus, seed: int, window: int, skipped: Skipped | None) -> Iterator[Record]:
    size, last = min(window, _FIRST_WINDOW), -1
    given, there = 0, None
    while there is None or given < there:
        batch, there = _next_texts(corpus.records(skipped if there is None else None), seed, last, size)
        # Only if the corpus has become shorter since.
        if not batch:
            return
        last = -batch[0][0]
        given += len(batch)
        while batch:
            yield batch.pop()[1]
        size = min(window, 2 * size)


def _next_texts(records: Iterator[Record], seed: int, last: int, size: int) -> tuple[list[tuple[int, Record]], int]:
    """The `size` texts with the smallest ranks above `last`, each with its negative rank, the largest rank first; and
    how many texts there are."""
    heap: list[tuple[int, Record]] = []
    there = 0
    for record in records:
        there += 1
        entry = (-_rank(seed, record.number), record)
        if entry[0] >= -last:
            continue
        if len(heap) < size:
            heapq.heappush(heap, entry)
        elif entry[0] > heap[0][0]:
            heapq.heapreplace(heap, entry)
    heap.sort(key=lambda found: found[0])
    return heap, there
