"""What the tokens of an axis are: the same as which others, and of which kind."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

SIGNS_OF_BREAKS = "↵␍⇥"
# Up to this many cells in all are found once for all layers; a text that repeats itself a lot has far more.
_REMEMBERED = 1 << 22

REPEATS, SUCCESSORS = "repeats", "successors"


@dataclass(frozen=True, eq=False)
class KeyTokens:
    """The tokens of an axis, padded on the right.

    Attributes:
        ids: int64, (batch, n): equal where tokens are the same; not negative at real tokens.
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
        """bool, (batch, rows, keys): the keys of a row that stand in a relation to it.

        - `repeats`: the earlier places of the row's own token.
        - `successors`: the tokens that came after those (Olsson et al. 2022). Not those that are the row's own token
          again: among "the the the" nothing tells what repeats from what follows.

        Special tokens and padding stand in none, be they rows, keys, or what a key came after.

        Raises:
            KeyError: There is no such relation.
        """
        own = self._own
        row, key = (torch.arange(s.start, s.stop, device=own.device) for s in (rows, keys))
        if name == REPEATS:
            return (own[:, rows, None] == own[:, None, keys]) & (key < row[:, None])
        if name != SUCCESSORS:
            raise KeyError(name)
        same = own[:, rows, None] == own[:, None, (key - 1).clamp(min=0)]
        other = own[:, rows, None] != own[:, None, keys]
        # The first key came after none: it is compared with itself, and cannot be both the same and another.
        return same & other & (own[:, None, keys] >= 0) & (key <= row[:, None])

    @cached_property
    def _own(self) -> Tensor:
        """int64, (batch, n): the ids; below 0, and unlike any other, what is special or padding."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        return torch.where(self.special | (places >= self.lengths[:, None]), -1 - places, self.ids)

    def listed(self, name: str, rows: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor]:
        """The same cells as a list: example, row and key of each, int64 (cell,)."""
        place = (name, rows.start, rows.stop, keys.start, keys.stop)
        if place in self._known:
            return self._known[place]
        example, row, key = self.cells(name, rows, keys).nonzero(as_tuple=True)
        found = (example, row + rows.start, key + keys.start)
        if sum(len(cells) for cells, _, _ in self._known.values()) + len(example) <= _REMEMBERED:
            self._known[place] = found
        return found


def merged(tokens: KeyTokens, groups: Tensor, lengths: Tensor, special: Tensor) -> KeyTokens:
    """Words in place of their pieces: the same where all pieces are, of a kind where all are of that kind.

    Args:
        groups: int64, (batch, n): each token's word, counted from 0; -1 leaves a token out.
        lengths, special: int64 (batch,) and bool (batch, word), of the words.
    """
    numbers: dict[tuple[int, ...], int] = {}
    # On the CPU, for words are looked at one by one.
    names, ids = list(tokens.marks), torch.full(special.shape, -1)
    marks = {name: torch.zeros(special.shape, dtype=torch.bool) for name in names}
    all_marks = torch.stack([tokens.ids, *(tokens.marks[name].long() for name in names)]).tolist()
    for example, row in enumerate(groups.tolist()):
        pieces: dict[int, list[int]] = {}
        for place, group in enumerate(row):
            if group >= 0:
                pieces.setdefault(group, []).append(place)
        for group, places in pieces.items():
            word = tuple(all_marks[0][example][place] for place in places)
            ids[example, group] = numbers.setdefault(word, len(numbers))
            for name, mark in zip(names, all_marks[1:], strict=True):
                marks[name][example, group] = all(mark[example][place] for place in places)
    return KeyTokens(ids, special.cpu(), lengths.cpu(), marks).to(special.device)


def is_punctuation(label: str) -> bool:
    """Whether a token's text is punctuation (Unicode's categories P) or the sign of a line's end, and nothing else."""
    text = label.strip()
    return bool(text) and all(c in SIGNS_OF_BREAKS or unicodedata.category(c)[0] == "P" for c in text)


def punctuation(labels: Sequence[Sequence[str]], special: Tensor) -> Tensor:
    """bool, (batch, n): tokens that are punctuation and not special; False at padding."""
    result = torch.zeros_like(special)
    for example, row in enumerate(labels):
        found = torch.tensor([is_punctuation(label) for label in row], dtype=torch.bool)
        result[example, : len(row)] = found & ~special[example, : len(row)]
    return result
