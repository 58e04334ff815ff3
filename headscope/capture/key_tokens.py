"""What the tokens of an axis are: the same as which others, and of which kind."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SIGNS_OF_BREAKS = "↵␍⇥"


# Up to this many tokens cells are found once for all layers; they take memory where a text repeats itself.
_REMEMBERED = 8192

REPEATS, SUCCESSORS = "repeats", "successors"


@dataclass(frozen=True, eq=False)
class KeyTokens:
    """The tokens of an axis, padded on the right.

    Attributes:
        ids: int64, (batch, n): equal where tokens are the same.
        special: bool, (batch, n).
        lengths: int64, (batch,).
        marks: Kinds of tokens by name, bool (batch, n) each.
    """

    ids: Tensor
    special: Tensor
    lengths: Tensor
    marks: Mapping[str, Tensor]
    _known: dict[tuple[object, ...], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def to(self, device: torch.device) -> KeyTokens:
        """The same on another device."""
        if device == self.ids.device:
            return self
        marks = {name: mark.to(device) for name, mark in self.marks.items()}
        return KeyTokens(self.ids.to(device), self.special.to(device), self.lengths.to(device), marks)

    def cells(self, name: str, rows: slice, keys: slice) -> Tensor:
        """bool, (batch, rows, keys): the keys of a row that stand in a relation to it; special tokens have none.

        - `repeats`: the earlier places of the row's own token.
        - `successors`: the tokens that came after those (Olsson et al. 2022). Not those that are the row's own token
          again: among "the the the" nothing tells what repeats from what follows.

        Raises:
            KeyError: There is no such relation.
        """
        ids, ordinary = self.ids, ~self.special
        row, key = (torch.arange(s.start, s.stop, device=ids.device) for s in (rows, keys))
        if name == REPEATS:
            same = ids[:, rows, None] == ids[:, None, keys]
            return same & (key < row[:, None]) & ordinary[:, rows, None]
        if name != SUCCESSORS:
            raise KeyError(name)
        before = (key - 1).clamp(min=0)
        same = ids[:, rows, None] == ids[:, None, before]
        other = ids[:, rows, None] != ids[:, None, keys]
        counted = ordinary[:, rows, None] & ordinary[:, None, keys] & (key > 0)
        return same & other & counted & (key <= row[:, None])

    def listed(self, name: str, rows: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor]:
        """The same cells as a list: example, row and key of each, int64 (cell,)."""
        place = (name, rows.start, rows.stop, keys.start, keys.stop)
        if place in self._known:
            return self._known[place]
        example, row, key = self.cells(name, rows, keys).nonzero(as_tuple=True)
        found = (example, row + rows.start, key + keys.start)
        if self.ids.shape[1] <= _REMEMBERED:
            self._known[place] = found
        return found


def merged(tokens: KeyTokens, groups: Tensor, lengths: Tensor, special: Tensor) -> KeyTokens:
    """Words in place of their pieces: the same where all pieces are, of a kind where all are of that kind.

    Args:
        groups: int64, (batch, n): each token's word, counted from 0; -1 leaves a token out.
        lengths, special: int64 (batch,) and bool (batch, word), of the words.
    """
    numbers: dict[tuple[int, ...], int] = {}
    ids = torch.full_like(special, -1, dtype=torch.int64)
    marks = {name: torch.zeros_like(special) for name in tokens.marks}
    for example, row in enumerate(groups.tolist()):
        pieces: dict[int, list[int]] = {}
        for place, group in enumerate(row):
            if group >= 0:
                pieces.setdefault(group, []).append(place)
        for group, places in pieces.items():
            word = tuple(tokens.ids[example, places].tolist())
            ids[example, group] = numbers.setdefault(word, len(numbers))
            for name, mark in tokens.marks.items():
                marks[name][example, group] = bool(mark[example, places].all())
    return KeyTokens(ids, special, lengths, marks)


def is_punctuation(label: str) -> bool:
    """Whether a token's text is punctuation, signs or a line's end and nothing else."""
    text = label.strip()
    return bool(text) and all(c in SIGNS_OF_BREAKS or unicodedata.category(c)[0] == "P" for c in text)


def punctuation(labels: Sequence[Sequence[str]], special: Tensor) -> Tensor:
    """bool, (batch, n): tokens that are punctuation and not special; False at padding."""
    result = torch.zeros_like(special)
    for example, row in enumerate(labels):
        found = torch.tensor([is_punctuation(label) for label in row], dtype=torch.bool)
        result[example, : len(row)] = found & ~special[example, : len(row)]
    return result
