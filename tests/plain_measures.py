"""The measures of types row by row in plain NumPy, on whole matrices of one text at a time."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

import numpy as np
import torch

from headscope.capture.evaluation import eager_evaluation

OFFSETS = range(-6, 7)
CLUSTERS = 32


@dataclass
class Text:
    """One text's attention in one layer.

    Attributes:
        weights: (head, n, n).
        seen: bool, (n, n).
        ids: A token each, or a tuple of tokens, a word.
        special: Whether it is a special token.
        labels: Its text.
        counts: bool, (head, n): rows that count.
    """

    weights: np.ndarray
    seen: np.ndarray
    ids: list
    special: list
    labels: list
    counts: np.ndarray


def texts_of(loaded, tokens, window=None, causal=True):
    """One `Text` a layer, from the model's own output, given `TokenSequence`."""
    with torch.no_grad(), eager_evaluation(loaded.model):
        out = loaded.model(input_ids=torch.tensor([tokens.ids]), output_attentions=True)
    n = len(tokens)
    away = np.arange(n)[:, None] - np.arange(n)
    seen = (away >= 0) if causal else np.ones((n, n), dtype=bool)
    seen = seen & (away < window) if window else seen
    layers = [layer[0].double().numpy() for layer in out.attentions]
    everything = np.ones((len(layers[0]), n), dtype=bool)
    facts = (seen, list(tokens.ids), list(tokens.special), list(tokens.labels))
    return [Text(weights, *facts, everything) for weights in layers]


def grouped(text, tokens, words, exclude_special):
    """Pieces of words merged, rows averaged and columns summed; without special tokens rows are scaled to one."""
    groups = {}
    for place, special in enumerate(tokens.special):
        if not (exclude_special and special):
            groups.setdefault(tokens.words[place] if words else place, []).append(place)
    places = list(groups.values())
    rows = np.stack([text.weights[:, p].mean(axis=1) for p in places], axis=1)
    weights = np.stack([rows[:, :, p].sum(axis=2) for p in places], axis=2)
    seen = np.array([[text.seen[np.ix_(p, q)].any() for q in places] for p in places])
    counts = np.ones(weights.shape[:2], dtype=bool)
    if exclude_special:
        left = weights.sum(axis=2, keepdims=True)
        # Below float32's normal numbers nothing is known of what is left.
        counts = left[..., 0] >= np.finfo(np.float32).tiny
        weights = np.where(counts[..., None], weights / np.where(counts[..., None], left, 1), 0)
    ids = [tuple(tokens.ids[i] for i in p) for p in places]
    special = [any(tokens.special[i] for i in p) for p in places]
    # A word is punctuation where all of its pieces are.
    labels = ["." if all(is_mark(tokens.labels[i]) for i in p) else "a" for p in places]
    return Text(weights, seen, ids, special, labels, counts)


def is_mark(label):
    return all(unicodedata.category(c)[0] == "P" for c in label)


def targets_of(text):
    """By measure that sums weights on keys of a kind or in a relation: the keys of each row that are meant."""
    ids, special, n = text.ids, text.special, len(text.ids)
    found = {name: [set() for _ in range(n)] for name in ("other_special", "punctuation", "repeats", "successors")}
    for i in range(n):
        for j in range(n):
            if special[j] and j > 0:
                found["other_special"][i].add(j)
            if is_mark(text.labels[j]) and not special[j]:
                found["punctuation"][i].add(j)
            if j < i and ids[j] == ids[i] and not special[i]:
                found["repeats"][i].add(j)
                if ids[j + 1] != ids[i] and not special[j + 1]:
                    found["successors"][i].add(j + 1)
    return {name: [{j for j in keys if text.seen[i, j]} for i, keys in enumerate(rows)] for name, rows in found.items()}


def rows_of(text, weights):
    """By measure, the rows that could show it: (row, value of each head)."""
    seen, n = text.seen, len(text.ids)
    found, meant = {}, targets_of(text)
    for i in range(n):
        keys, row = np.flatnonzero(seen[i]), weights[:, i]
        near = {k: i + k for k in OFFSETS if 0 <= i + k < n and (k == 0 or seen[i, i + k])}
        top = np.array([largest(w, {*near.values(), 0}, seen[i]) for w in row])
        for k, j in near.items():
            if seen[i, j] and len(keys) >= 2:
                found.setdefault(f"at:{k}", []).append((i, row[:, j]))
                found.setdefault(f"most:{k}", []).append((i, 1.0 * (top == j)))
        window = [j for k, j in near.items() if abs(k) <= 2]
        if len(keys) > len(window):
            found.setdefault("window", []).append((i, row[:, window].sum(axis=1)))
        if i > 0 and seen[i, 0] and len(keys) >= 2:
            found.setdefault("first", []).append((i, row[:, 0]))
        for name, rows in meant.items():
            if rows[i] and len(keys) > len(rows[i]):
                found.setdefault(name, []).append((i, row[:, sorted(rows[i])].sum(axis=1)))
        if len(keys) >= 2:
            total = row.sum(axis=1, keepdims=True)
            share = row / np.where(total > 0, total, 1)
            entropy = -(share * np.log(share + 1e-9)).sum(axis=1) / np.log(len(keys))
            found.setdefault("broad", []).append((i, entropy))
            found.setdefault("sharp", []).append((i, 1 - entropy))
    return found


def largest(weights, looked_at, seen):
    """The key with a row's largest weight if it is looked at and no other of those has as much but for 0.1 %, or -1."""
    keys = [j for j in looked_at if seen[j]]
    best = max(weights[j] for j in keys) if keys else 0.0
    top = [j for j in keys if weights[j] >= best * 0.999]
    return top[0] if len(top) == 1 and best >= weights.max() * 0.999 else -1


def sums(texts, texts_in_all):
    """By measure: values, what even attention gives, and rows, of clusters of rows, (text, cluster, head) each."""
    stretches, heads = max(1, CLUSTERS // texts_in_all), len(texts[0].weights)
    found = {}
    for number, text in enumerate(texts):
        n, even = len(text.ids), text.seen / text.seen.sum(axis=1, keepdims=True)
        uniform = rows_of(text, even[None])
        for name, rows in rows_of(text, text.weights).items():
            into = found.setdefault(name, np.zeros((3, len(texts), stretches, heads)))
            for (i, value), (_, expected) in zip(rows, uniform[name], strict=True):
                counted = text.counts[:, i]
                for place, amount in enumerate((np.where(counted, value, 0), expected * counted, counted)):
                    into[place, number, i * stretches // n] += amount
    return found


def trivial(texts):
    """By measure and by what a head looks at: mean value over the rows that could show the measure."""
    found = {}
    for name in ("punctuation", "repeats", "successors"):
        hits, count = dict.fromkeys(("first_token", "previous_token", "own_token"), 0), 0
        for text in texts:
            for i, meant in enumerate(targets_of(text)[name]):
                if meant and text.seen[i].sum() > len(meant):
                    count += text.counts[:, i].sum() / len(text.counts)
                    for other, j in (("first_token", 0), ("previous_token", i - 1), ("own_token", i)):
                        hits[other] += (j in meant) * text.counts[:, i].sum() / len(text.counts)
        if count:
            found[name] = {other: hit / count for other, hit in hits.items()}
    return found


def column(text):
    """Of each head: mean weight, over other rows at odd positions, on the column that those at even ones prefer.

    And what even attention gives that column; None where no column is seen by eight rows of each half.
    """
    n, even = len(text.ids), text.seen / text.seen.sum(axis=1, keepdims=True)
    rows = {j: [[i for i in range(p, n, 2) if i != j and text.seen[i, j]] for p in (0, 1)] for j in range(1, n)}
    ordinary = [j for j in rows if not text.special[j] and not is_mark(text.labels[j]) and min(map(len, rows[j])) >= 8]
    if not ordinary:
        return None
    result = []
    for weights in text.weights:
        best = max(ordinary, key=lambda j, w=weights: w[rows[j][0], j].mean())
        result.append((weights[rows[best][1], best].mean(), even[rows[best][1], best].mean()))
    return np.array(result).T
