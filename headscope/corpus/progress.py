"""How far a run over a corpus is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headscope.corpus.part import Part
from headscope.corpus.per_text import PerText


@dataclass(frozen=True)
class Progress:
    """What is done so far.

    Attributes:
        texts, tokens: All that is measured; `resumed` of the texts were by an earlier run.
        seconds: Since this run began.
        tokens_per_second: Of this run; 0 before its first part.
        share: How much of the corpus is read, 0 to 1; None where that is not known.
    """

    texts: int
    resumed: int
    tokens: int
    seconds: float
    tokens_per_second: float
    share: float | None

    @property
    def seconds_left(self) -> float | None:
        """At this run's pace; None where it cannot be told."""
        if not self.share or not self.tokens_per_second:
            return None
        return self.tokens * (1 / self.share - 1) / self.tokens_per_second


@dataclass
class Watch:
    """Counts parts as they come, passes on their rows, and tells how far it is.

    Attributes:
        tell: Called after each part.
        share: Asked for how much of the corpus is read.
        table: Gets each part's rows; None for none.
    """

    tell: Callable[[Progress], None]
    share: Callable[[], float | None]
    table: PerText | None = None
    started: float = field(default_factory=time.monotonic)
    _texts: int = 0
    _resumed: int = 0
    _tokens: int = 0
    _new_tokens: int = 0

    def __call__(self, part: Part, new: bool) -> None:
        """One more part, measured now (`new`) or by an earlier run."""
        if self.table is not None:
            self.table.add(part.table)
        self._texts += part.summary.texts
        self._tokens += part.summary.tokens
        if new:
            self._new_tokens += part.summary.tokens
        else:
            self._resumed += part.summary.texts
        seconds = time.monotonic() - self.started
        speed = self._new_tokens / seconds if seconds > 0 else 0.0
        self.tell(Progress(self._texts, self._resumed, self._tokens, seconds, speed, self.share()))
