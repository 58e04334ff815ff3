"""The seeded order: a permutation that neither windows nor bad lines change, and samples that are its beginning."""

from __future__ import annotations

import collections
import gc
import json
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headscope.errors import InputError
from headscope.reading import Corpus, Record, Skipped, open_corpus
from headscope.reading.order import key, sample, shuffled
from headscope.reading.records import Columns
from headscope.reading.sources import ExamplesSource

SEEDS = st.integers(-(2**70), 2**70)


def corpus_of(count: int, bad=()) -> Corpus:
    return open_corpus(["" if i in bad else f"text {i}" for i in range(count)])


def numbers(records) -> list[int]:
    return [r.number for r in records]


def expected_order(seed: int, there) -> list[int]:
    """All keys at once, sorted."""
    keys = {n: blake2b(b"%d:%d" % (seed, n), digest_size=8).hexdigest() for n in there}
    return sorted(there, key=lambda n: (keys[n], n))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), SEEDS, st.sets(st.integers(0, 699), max_size=30), st.integers(1, 800))
def test_the_order_is_that_of_the_keys(count, seed, bad, window) -> None:
    there = [n for n in range(count) if n not in bad]
    if not there:
        return
    found = list(shuffled(corpus_of(count, bad), seed, window=max(window, 5)))
    assert numbers(found) == expected_order(seed, there)
    assert all(r.text == f"text {r.number}" for r in found)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), SEEDS, st.integers(1, 500), st.sets(st.integers(1, 399), max_size=30))
def test_a_sample_is_the_beginning_of_the_order(count, seed, size, bad) -> None:
    corpus = corpus_of(count, bad)
    order = numbers(shuffled(corpus, seed))
    sampled = numbers(sample(corpus, size, seed))
    assert sampled == sorted(order[:size])
    assert numbers(shuffled(corpus, seed, sample=size)) == order[:size]
    assert numbers(corpus.records()) == sorted(order)


def test_windows_do_not_change_the_order() -> None:
    corpus = corpus_of(2_000)
    whole = numbers(shuffled(corpus, 3))
    assert whole != sorted(whole) == list(range(2_000))
    for window in (7, 256, 300, 2_000):
        assert numbers(shuffled(corpus, 3, window=window)) == whole


def test_bad_texts_move_no_other() -> None:
    whole = numbers(shuffled(corpus_of(500), 1))
    bad = set(whole[:3] + whole[40:50])
    assert numbers(shuffled(corpus_of(500, bad), 1)) == [n for n in whole if n not in bad]


def test_longer_corpora_keep_the_order_of_what_they_had() -> None:
    longer = numbers(shuffled(corpus_of(900), 5))
    assert [n for n in longer if n < 600] == numbers(shuffled(corpus_of(600), 5))


@pytest.mark.parametrize("take", [sample, shuffled])
def test_what_is_skipped_is_counted_once(take) -> None:
    corpus = corpus_of(1_000, bad=range(0, 1_000, 10))
    skipped = Skipped()
    found = take(corpus, 3, 0, skipped) if take is sample else take(corpus, 0, window=10, skipped=skipped)
    assert len(list(found)) == (3 if take is sample else 900)
    assert (skipped.count, skipped.items) == (100, 1_000)
    assert skipped.first[1] == ("example 10", "has no text")


class Watched(Corpus):
    """Counts how often it is read, and the most records that are alive meanwhile."""

    passes = alive = 0
    every = 250

    def records(self, skipped=None):
        self.passes += 1
        for record in super().records(skipped):
            if record.number % self.every == self.every - 1:
                self.alive = max(self.alive, sum(type(o) is Record for o in gc.get_objects()))
            yield record


def watched(count: int) -> Watched:
    return Watched("texts", [ExamplesSource([f"text {i}" for i in range(count)], Columns())], False)


def test_the_first_texts_come_after_one_pass() -> None:
    corpus = watched(5_000)
    corpus.every = 5_000
    found = shuffled(corpus, 0)
    for _ in range(256):
        next(found)
    assert corpus.passes == 1
    next(found)
    assert corpus.passes == 2
    # 256 + 512 + 1,024 + 2,048 = 3,840 texts take four passes, the rest a fifth.
    assert len(list(found)) == 5_000 - 257 and corpus.passes == 5
    assert len(list(shuffled(small := watched(256), 0))) == 256 and small.passes == 1


def test_no_more_texts_are_held_than_the_window() -> None:
    corpus = watched(1_000)
    # A few more: the one that is just read, and the one that was given out last.
    assert sum(1 for _ in shuffled(corpus, 0, window=300)) == 1_000 and 300 <= corpus.alive <= 304
    corpus = watched(1_000)
    assert sum(1 for _ in sample(corpus, 500, 0)) == 500 and corpus.alive <= 4


def test_every_text_is_as_likely_to_be_first() -> None:
    """Pearson's chi-square on 4,000 seeds: the first of 20 texts, and the place of the first text."""
    corpus = corpus_of(20)
    first, place = collections.Counter(), collections.Counter()
    for seed in range(4_000):
        order = numbers(shuffled(corpus, seed))
        first[order[0]] += 1
        place[order.index(0)] += 1
    for counts in (first, place):
        assert stats.chisquare([counts[i] for i in range(20)]).pvalue > 1e-3


def test_keys_are_fixed() -> None:
    """The order is part of what a result with a seed means: it must not change between versions."""
    assert [hex(key(0, n)) for n in (0, 1, 10**9)] == KEYS
    assert key(-1, 0) != key(1, 0) != key(0, 10) and 0 <= key(2**80, 1) < 2**64


KEYS = ["0xd56c9c7e6769d062", "0xf227960998e4764c", "0x30872056d2cb1f2"]


def test_equal_keys_are_put_in_the_order_of_the_corpus(monkeypatch) -> None:
    monkeypatch.setattr("headscope.reading.order.key", lambda seed, number: number % 2)
    corpus = corpus_of(9)
    assert numbers(shuffled(corpus, 0, window=2)) == [0, 2, 4, 6, 8, 1, 3, 5, 7]
    assert numbers(sample(corpus, 3, 0)) == [0, 2, 4]


def test_sizes_are_checked_before_reading() -> None:
    corpus = corpus_of(3)
    for call in (
        lambda: sample(corpus, 0, 1),
        lambda: shuffled(corpus, 1, sample=0),
        lambda: shuffled(corpus, 1, window=0),
    ):
        with pytest.raises(InputError, match=r"a sample of 0|a window of 0"):
            call()


def test_corpora_without_texts(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text("broken\n\n" + json.dumps({"title": "x"}))
    corpus = open_corpus(tmp_path / "a.jsonl")
    for found in (corpus.records(), sample(corpus, 3, 0), shuffled(corpus, 0)):
        with pytest.raises(InputError, match="there is no text in") as raised:
            list(found)
        assert "a.jsonl:1 is not JSON" in raised.value.hint and "['title']" in raised.value.hint
