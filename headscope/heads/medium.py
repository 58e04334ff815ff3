"""What attention over an image or a sound lies on, for pictures. NumPy only: no torch, no transformers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Seen:
    """An image as the model saw it, and which tokens are its patches: row by row, from the upper left corner.

    Attributes:
        pixels: uint8, (height, width, 3).
        grid: Rows and columns of patches.
        before, after: Names of the tokens that come before and after the patches: `class`, `register 0`, …
        queries: Whether rows are these tokens as well: not so where a decoder's tokens look at the image.
    """

    pixels: NDArray[np.uint8]
    grid: tuple[int, int]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    queries: bool = True

    @property
    def tokens(self) -> int:
        """All tokens: patches and others."""
        return len(self.before) + self.grid[0] * self.grid[1] + len(self.after)

    def name(self, token: int) -> str:
        """What one token is: `class`, or `patch 3,5` (row, column)."""
        patch = token - len(self.before)
        if patch < 0:
            return self.before[token]
        count = self.grid[0] * self.grid[1]
        return f"patch {patch // self.grid[1]},{patch % self.grid[1]}" if patch < count else self.after[patch - count]


@dataclass(frozen=True)
class Heard:
    """A sound as the model heard it, and how its tokens follow each other in time.

    Attributes:
        spectrogram: float32, (band, frame): logarithms of power, low bands first.
        keys: How many tokens the frames are, one after another, evenly.
        queries: Whether a row is such a token as well: not so where a decoder's tokens look at the sound.
        seconds: How long all of it is; None where that is not known.
    """

    spectrogram: NDArray[np.float32]
    keys: int
    queries: bool
    seconds: float | None


Medium = Seen | Heard | str
"""What a stack's tokens lie on, or, as text, why that cannot be told."""
