"""What a model is fed: batches padded on the right, and what is known of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_TEXTS = 32
MAX_CELLS = 4_000_000


@dataclass(frozen=True)
class TokenAxis:
    """One sequence axis of a batch, padded on the right. Tensors are on the CPU.

    Attributes:
        ids: int64, (batch, n), or None where the model was given embeddings.
        lengths: int64, (batch,): real tokens.
        special: bool, (batch, n): special tokens; False at padding.
        labels: A readable label a real token, per example.
        words: The number of the word that a real token belongs to, per example.
    """

    ids: Tensor | None
    lengths: Tensor
    special: Tensor
    labels: tuple[tuple[str, ...], ...]
    words: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Batch:
    """One forward pass.

    Attributes:
        inputs: Arguments of the model's forward, on the model's device.
        axes: `text` (the main text input, an encoder-decoder's encoder) and `decoder`; none for images and sounds.
        order: The examples' positions in the user's order.
    """

    inputs: dict[str, Tensor]
    axes: dict[str, TokenAxis]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Prepared:
    """All batches, and what the user should know about them.

    Attributes:
        batches: In any order; each knows its examples' positions.
        texts: Number of examples.
        tokens: Real tokens over all of them; of the decoder where the main input is no text.
        truncated: Examples cut to the length limit.
        first_tokens: Labels of the user's first example.
        warnings: One line each.
        decoder_texts: What the decoder reads, given or generated; None without a decoder.
    """

    batches: tuple[Batch, ...]
    texts: int
    tokens: int
    truncated: int
    first_tokens: tuple[str, ...]
    warnings: tuple[str, ...]
    decoder_texts: tuple[str, ...] | None


@dataclass(frozen=True)
class TokenSequence:
    """One example's tokens, before batching: lists of the same length.

    Attributes:
        type_ids: Segment numbers; may be None.
        parts: 0 at a token of the text itself, 1 of its pair, -1 at what was put around them; None where that is
            nothing but special tokens at both ends.
    """

    ids: tuple[int, ...]
    special: tuple[bool, ...]
    labels: tuple[str, ...]
    words: tuple[int, ...]
    type_ids: tuple[int, ...] | None = None
    parts: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, positions: Sequence[int]) -> TokenSequence:
        """The tokens at these positions."""
        return TokenSequence(
            tuple(self.ids[i] for i in positions),
            tuple(self.special[i] for i in positions),
            tuple(self.labels[i] for i in positions),
            tuple(self.words[i] for i in positions),
            None if self.type_ids is None else tuple(self.type_ids[i] for i in positions),
            None if self.parts is None else tuple(self.parts[i] for i in positions),
        )


def axis_of(sequences: Sequence[TokenSequence], padding: int) -> TokenAxis:
    """Pad on the right with the token `padding`."""
    return TokenAxis(
        ids=_padded([s.ids for s in sequences], padding),
        lengths=torch.tensor([len(s) for s in sequences], dtype=torch.int64),
        special=_padded([s.special for s in sequences], 0).bool(),
        labels=tuple(s.labels for s in sequences),
        words=tuple(s.words for s in sequences),
    )


def mask_of(axis: TokenAxis) -> Tensor:
    """int64, (batch, n): 1 at real tokens, 0 at padding."""
    return (torch.arange(axis.special.shape[1]) < axis.lengths[:, None]).long()


def type_ids_of(sequences: Sequence[TokenSequence]) -> Tensor:
    """int64, (batch, n): segment numbers, 0 where there are none and at padding."""
    return _padded([s.type_ids or (0,) * len(s) for s in sequences], 0)


def _padded(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], dtype=torch.int64)


def group_by_length(
    lengths: Sequence[int],
    batch_size: int | None = None,
    *,
    equal_only: bool = False,
    max_padding: float = 1.0,
    max_tokens: int | None = None,
) -> list[tuple[int, ...]]:
    """Which examples share a batch: neighbours by length, so that little padding is computed.

    Args:
        lengths: Tokens per example.
        batch_size: Examples a batch at most; None bounds it by `MAX_TEXTS` and by `MAX_CELLS` attention weights a head.
        equal_only: Put only examples of the same length together, for models that take no mask.
        max_padding: The share of a batch that may be padding.
        max_tokens: Without `batch_size`, bounds a batch instead of `MAX_TEXTS`, padding included.
    """
    groups: list[list[int]] = []
    real = 0
    for i in sorted(range(len(lengths)), key=lambda j: lengths[j]):
        size = len(groups[-1]) + 1 if groups else 0
        length = max(1, lengths[i])
        few = MAX_TEXTS if max_tokens is None else max_tokens // length
        most = batch_size or max(1, min(few, MAX_CELLS // length**2))
        cells = size * lengths[i]
        fits = cells - real - lengths[i] <= (0 if equal_only else max_padding * cells)
        if groups and size <= most and fits:
            groups[-1].append(i)
            real += lengths[i]
        else:
            groups.append([i])
            real = lengths[i]
    return [tuple(group) for group in groups]
