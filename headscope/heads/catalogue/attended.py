"""The word that each word attends to most, head by head: what syntax and coreference heads are judged by.

Pieces of words are merged as by Clark et al. (2019, "What Does BERT Look At?", section 4.1): attention to a word is the
sum over its pieces, attention from a word the mean over its pieces. Special tokens are left out, and so is the word
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.capture.blocks import RowBlock, Rows
from headscope.capture.feed import Axis
from headscope.capture.session import Capture, Groups, SiteFacts
from headscope.errors import ModelError
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.words import WordBatches
from headscope.heads.statistics import Layer
from headscope.models.batches import Batch
from headscope.models.selection import ranges
from headscope.models.sites import Site

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Visible:
    """Which words each word of each sentence can see: an unbroken stretch, in all models that are known.

    Attributes:
        first, last: One int32 (word,) a sentence: the first and the last visible word; 0 and -1 where there is none.
    """

    first: tuple[Ints, ...]
    last: tuple[Ints, ...]

    def sees(self, sentence: int, query: NDArray[np.integer], key: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether words `query` of a sentence can see words `key`, which may lie outside of it; same shape as both."""
        seen: NDArray[np.bool_] = (self.first[sentence][query] <= key) & (key <= self.last[sentence][query])
        return seen

    def others(self, sentence: int) -> NDArray[np.int64]:
        """How many other words each word of a sentence can see, (word,)."""
        first, last = self.first[sentence].astype(np.int64), self.last[sentence].astype(np.int64)
        here = np.arange(len(first))
        return last - first + 1 - ((first <= here) & (here <= last))

    @property
    def causal(self) -> bool:
        """Whether no word of any sentence can see a later one."""
        return all(bool((last <= np.arange(len(last))).all()) for last in self.last)


@dataclass(frozen=True, eq=False)
class Attended:
    """Every layer's most attended words, for the sentences of `WordBatches`, in their order.

    Attributes:
        by_layer: int32 (head, word) a sentence: the word that each word attends to most, of those that it can see, the
            first of several alike; -1 where it can see no other word or gives none any weight. Heads in the order of
            the weights, as `Probing.places` numbers them.
        weights: float32, the same shapes: the attention that it gets; 0 where there is none.
        visible: What words can see; one object for all layers that see the same.
        facts: What each of these layers is.
        notes: Layers that are missing and why, one line each.
    """

    by_layer: Mapping[Layer, tuple[Ints, ...]]
    weights: Mapping[Layer, tuple[NDArray[np.float32], ...]]
    visible: Mapping[Layer, Visible]
    facts: Mapping[Layer, SiteFacts]
    notes: tuple[str, ...] = ()


def attended_words(probing: Probing, words: WordBatches) -> Attended:
    """Run the model over the sentences. Cross-attention is left out: its keys are another text's.

    Memory grows with words and heads, not with pairs of words.

    Raises:
        ModelError: The model fails, or none of its wanted layers has readable attention between words.
    """
    consumer = _MostAttended(len(words.kept))
    capture = probing.capture(consumer)
    wanted = capture.selected
    for batch in words.batches:
        capture.selected = between_words(wanted, batch)
        capture.groups = word_groups(batch)
        capture.batch(batch.inputs, {n: Axis(a.lengths, a.special) for n, a in batch.axes.items()}, len(batch.order))
        consumer.finish(batch)
    return consumer.attended(capture)


def between_words(wanted: Callable[[Site], bool], batch: Batch) -> Callable[[Site], bool]:
    """What reads no words, such as an image, has no axis in the batch."""
    return lambda site: wanted(site) and not site.cross and site.query_axis in batch.axes


def word_groups(batch: Batch) -> Groups:
    """Each token's word as its group."""

    def groups(name: str, axis: Axis) -> Tensor:
        result = torch.full(tuple(axis.special.shape), -1)
        for row, words in enumerate(batch.axes[name].words):
            result[row, : len(words)] = torch.tensor(words)
        return result

    return groups


@dataclass(frozen=True)
class _Part:
    """Some rows of one layer and batch: weights and words (batch, head, rows), visible words (batch, rows)."""

    word: Tensor
    weight: Tensor
    first: Tensor
    last: Tensor


@dataclass
class _MostAttended:
    """The consumer. What it keeps of each sentence is found by layer and sentence."""

    sentences: int
    word: dict[Layer, dict[int, Ints]] = field(default_factory=dict)
    weight: dict[Layer, dict[int, NDArray[np.float32]]] = field(default_factory=dict)
    seen: dict[Layer, dict[int, tuple[Ints, Ints]]] = field(default_factory=dict)
    broken: set[Layer] = field(default_factory=set)
    _parts: dict[Layer, list[_Part]] = field(default_factory=dict)

    def rows(self, site: Site, rows: Rows) -> None:
        """Keep what rows of one layer attend to."""
        layer = (site.stack, site.layer)
        for block in rows.blocks():
            part = _part(block)
            if part is None:
                self.broken.add(layer)
            else:
                self._parts.setdefault(layer, []).append(part)

    def finish(self, batch: Batch) -> None:
        """Sort what was kept of a batch by sentence."""
        for layer, parts in self._parts.items():
            word, weight = (torch.cat([getattr(p, n) for p in parts], dim=2).cpu() for n in ("word", "weight"))
            first, last = (torch.cat([getattr(p, n) for p in parts], dim=1).cpu() for n in ("first", "last"))
            for row, sentence in enumerate(batch.order):
                # Every stack reads all words of a sentence.
                size = max(batch.axes["text"].words[row]) + 1
                self.word.setdefault(layer, {})[sentence] = word[row, :, :size].to(torch.int32).numpy().copy()
                self.weight.setdefault(layer, {})[sentence] = weight[row, :, :size].numpy().copy()
                ends = (t[row, :size].to(torch.int32).numpy().copy() for t in (first, last))
                self.seen.setdefault(layer, {})[sentence] = next(ends), next(ends)
        self._parts = {}

    def attended(self, capture: Capture) -> Attended:
        """All of it, in the order of the model's layers."""
        known = [(s.stack, s.layer) for s in capture.sites if (s.stack, s.layer) in self.word]
        layers = [k for k in known if k not in self.broken and k not in capture.unreadable]
        if not layers:
            raise _nothing(capture)
        order = range(self.sentences)
        return Attended(
            {k: tuple(self.word[k][i] for i in order) for k in layers},
            {k: tuple(self.weight[k][i] for i in order) for k in layers},
            _shared({k: [self.seen[k][i] for i in order] for k in layers}),
            {k: capture.facts[k] for k in layers},
            (*capture.findings.warnings(), *_left_out(capture, self.broken)),
        )


def _part(block: RowBlock) -> _Part | None:
    """None where a row sees words with gaps between."""
    weights, keys = block.weights, torch.arange(block.weights.shape[-1], device=block.weights.device)
    seen = block.visible[:, 0].expand(len(weights), -1, -1)
    hidden = ~seen | (keys == block.positions[:, None])
    weight, word = weights.masked_fill(hidden[:, None], -1.0).max(dim=-1)
    word = torch.where(weight > 0, word, -1)
    count = seen.sum(dim=-1)
    first = torch.where(count > 0, seen.int().argmax(dim=-1), 0)
    last = torch.where(count > 0, len(keys) - 1 - seen.flip(-1).int().argmax(dim=-1), -1)
    valid = block.valid.expand(len(weights), -1, -1)[:, 0]
    if bool(((last - first + 1 != count) & valid).any()):
        return None
    return _Part(word, weight.clamp(min=0), first, last)


def _shared(seen: Mapping[Layer, list[tuple[Ints, Ints]]]) -> dict[Layer, Visible]:
    """One object for layers that see the same."""
    known: dict[bytes, Visible] = {}
    result = {}
    for layer, pairs in seen.items():
        first, last = tuple(f for f, _ in pairs), tuple(e for _, e in pairs)
        key = np.concatenate([*first, *last]).tobytes()
        result[layer] = known.setdefault(key, Visible(first, last))
    return result


def _nothing(capture: Capture) -> ModelError:
    known = next(iter(capture.unreadable.values()), None)
    return known or ModelError("no wanted layer attends from words to words", "Choose other layers or stacks.")


def _left_out(capture: Capture, broken: set[Layer]) -> list[str]:
    """One line a stack and reason."""
    reasons = {key: str(reason) for key, reason in capture.unreadable.items()}
    reasons |= dict.fromkeys(broken, "words see others with gaps between them")
    grouped: dict[tuple[str, str], list[int]] = {}
    for (stack, layer), reason in sorted(reasons.items()):
        grouped.setdefault((stack, reason), []).append(layer)
    return [f"{stack}: layers {ranges(numbers)} left out: {reason}" for (stack, reason), numbers in grouped.items()]
