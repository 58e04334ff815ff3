"""What heads score in one trial, what chance and trivial heads score there, and how unlikely many good needles are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headscope.heads.catalogue.retrieval_rows import Tops
from headscope.heads.catalogue.retrieval_trials import Trial

# From these scores on a head is a retrieval head, and a strong one.
ABOVE, STRONG = 0.1, 0.5
TRIVIAL = ("previous token", "first token", "itself")
Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


def copied(keys: Numbers, trial: Trial) -> NDArray[np.bool_]:
    """bool, (head, position): which of the needle's positions heads copy, from their top keys, (head, row)."""
    where, ids, said = trial.prompt.positions, np.array(trial.prompt.ids), np.array(trial.said)
    result = np.zeros((len(keys), len(where)), dtype=bool)
    inside = (keys >= where.start) & (keys < where.stop)
    hits = inside & (ids[np.where(inside, keys, 0)] == said)
    head, row = hits.nonzero()
    result[head, keys[head, row] - where.start] = True
    return result


def expected(tops: Tops, trial: Trial) -> float:
    """The mean score of a head whose top key is any of those that it sees, by chance."""
    wanted, said = np.array(trial.prompt.wanted), np.array(trial.said)
    matching = tops.seen & (wanted == said[:, None])
    missed = np.where(matching, 1 - 1 / np.maximum(tops.counts, 1)[:, None], 1.0)
    return float(1 - missed.prod(axis=0).mean())


def trivial(trial: Trial) -> Floats:
    """(4,): scores of heads that look at the previous token, the first, itself, and of an induction head: one that
    looks behind the latest earlier occurrence of the row's own token."""
    ids = (*trial.prompt.ids, *trial.said)
    rows = range(len(trial.prompt.ids) - 1, len(ids) - 1)
    latest = [next((j + 1 for j in range(r - 1, -1, -1) if ids[j] == ids[r]), -1) for r in rows]
    keys = np.array([[r - 1 for r in rows], [0] * len(rows), list(rows), latest])
    # What was said follows the prompt, and is no part of the needle.
    scores: Floats = copied(keys, trial).mean(axis=1)
    return scores


def p_of(scores: Floats, means: Floats) -> float:
    """P-value of so many needles with a score of at least 0.1, where their expected scores are `means`.

    A score is that large with a probability of at most mean / 0.1 (Markov); the number of needles that are is a sum of
    independent events, whose distribution is added up exactly.
    """
    count = int((scores >= ABOVE).sum())
    known = np.array([1.0])
    for chance in np.minimum(means / ABOVE, 1.0):
        known = np.convolve(known, [1 - chance, chance])
    return float(min(known[count:].sum(), 1.0))
