"""Accuracies of heads against the best fixed offset: chosen on one half of the sentences, scored on the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headscope.heads.clusters import ClusterSums

Floats = NDArray[np.float64]

DRAWS = 5000
# Draws of sentences that are held at once.
_PORTION = 500


@dataclass(frozen=True, eq=False)
class Counts:
    """Right answers by sentence, of sentences that have an eligible word.

    Attributes:
        words: float64 (sentence,): eligible words.
        heads: float64 (head, sentence): words for which each head is right.
        offsets: float64 (offset, sentence): the same for each fixed offset.
        chance: float64 (sentence,): what even attention is right for.
    """

    words: Floats
    heads: Floats
    offsets: Floats
    chance: Floats

    def take(self, sentences: NDArray[np.bool_]) -> Counts:
        """Some of the sentences."""
        parts = (self.words, self.heads, self.offsets, self.chance)
        return Counts(*(part[..., sentences] for part in parts))


@dataclass(frozen=True, eq=False)
class Compared:
    """All heads on one question. Arrays are float64 (head,), of the scoring half if not said otherwise.

    Attributes:
        ahead: Difference from the best offset on the selection half.
        best: The head with the highest accuracy on the selection half.
        offset: Place among the offsets of the best one on the selection half.
        offset_accuracy, chance: Of the scoring half.
        eligible: Words of the scoring half.
        accuracy, low, high: With its 95 % interval over sentences.
        difference, difference_low, difference_high: From the offset's accuracy, with the bootstrap's 95 % interval.
        p: Of no more than the offset's accuracy, corrected for the number of heads.
    """

    ahead: Floats
    best: int
    offset: int
    offset_accuracy: float
    chance: float
    eligible: int
    accuracy: Floats
    low: Floats
    high: Floats
    difference: Floats
    difference_low: Floats
    difference_high: Floats
    p: Floats


def compare(selection: Counts, scoring: Counts, random: np.random.Generator, draws: int = DRAWS) -> Compared:
    """Choose the best head and offset on one half and score all heads on the other, each with two sentences or more."""
    chosen = selection.heads.sum(axis=1) / selection.words.sum()
    by_offset = selection.offsets.sum(axis=1) / selection.words.sum()
    offset = int(by_offset.argmax())
    other = scoring.offsets[offset]
    sums = ClusterSums.of(scoring.heads.T, other[:, None], scoring.words[:, None])
    low, high = sums.interval()
    return Compared(
        chosen - by_offset[offset],
        int(chosen.argmax()),
        offset,
        float(other.sum() / scoring.words.sum()),
        float(scoring.chance.sum() / scoring.words.sum()),
        int(scoring.words.sum()),
        sums.score,
        low.clip(0, 1),
        high.clip(0, 1),
        *paired_bootstrap(scoring.heads - other, scoring.words, random, draws),
    )


def paired_bootstrap(
    gain: Floats, words: Floats, random: np.random.Generator, draws: int = DRAWS
) -> tuple[Floats, Floats, Floats, Floats]:
    """Mean gain a word of every head, its 95 % interval, and its p-value with the best of all heads accounted for.

    Sentences are drawn with replacement. A head's p is the share of draws in which the largest of all heads' deviations
    from their own gains reaches its gain: single-step max-T (Westfall and Young, 1993, "Resampling-Based Multiple
    Testing", section 2.3.1), the observed gain counted as one draw more. Gains are in units of their spread over
    draws, or of the heads' median spread where that is more: a head that differs from the offset in a sentence or two
    would often deviate by many of its own spreads.

    Args:
        gain: (head, sentence): summed over a sentence's words.
        words: (sentence,): eligible words, at least one each.
    """
    count = len(words)
    mean = gain.sum(axis=1) / words.sum()
    drawn = np.empty((draws, len(gain)), np.float32)
    for start in range(0, draws, _PORTION):
        size = min(_PORTION, draws - start)
        picks = random.integers(count, size=(size, count)) + count * np.arange(size)[:, None]
        times = np.bincount(picks.ravel(), minlength=size * count).reshape(size, count).astype(np.float32)
        drawn[start : start + size] = (times @ gain.T.astype(np.float32)) / (times @ words.astype(np.float32))[:, None]
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0).astype(np.float64)
    spread = drawn.std(axis=0)
    scale = np.maximum(spread, np.median(spread)).clip(min=1e-6)
    largest = np.sort(((drawn - mean.astype(np.float32)) / scale).max(axis=1))
    # What rounding makes of equal numbers is no difference.
    reached = draws - np.searchsorted(largest, mean / scale - 1e-4)
    return mean, low, high, (1 + reached) / (1 + draws)


def by_sentence(values: NDArray[np.generic], sentence: NDArray[np.int64]) -> Floats:
    """Sums of (..., word) over each sentence that has a word, given each word's sentence, ascending."""
    starts = np.flatnonzero(np.diff(sentence, prepend=-1))
    return np.add.reduceat(values.astype(np.float64), starts, axis=-1)
