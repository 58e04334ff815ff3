"""The loop: partitions out, parts back, summed in the order of the partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from headscope.corpus.checkpoint import Checkpoint
from headscope.corpus.part import Part
from headscope.corpus.partition import Partition
from headscope.corpus.runners import Runner
from headscope.corpus.summary import Summary


@dataclass
class Total:
    """Sums of all parts up to the first that is missing; those beyond wait.

    Whoever finishes first, parts are added in the same order, so the same run gives the same bits.

    Attributes:
        enough: Whether these sums will do.
        each: Called with every part as it is added, and whether it was measured now.
        stopped: Whether they did.
    """

    enough: Callable[[Summary], bool]
    each: Callable[[Part, bool], None]
    summary: Summary = field(default_factory=Summary)
    stopped: bool = False
    _next: int = 0
    _waiting: dict[int, tuple[Part, bool]] = field(default_factory=dict)

    def take(self, part: Part, *, new: bool) -> None:
        """Add a part as soon as its turn comes."""
        self._waiting[part.number] = (part, new)
        while self._next in self._waiting and not self.stopped:
            part, new = self._waiting.pop(self._next)
            self._next += 1
            self.summary = self.summary + part.summary
            self.each(part, new)
            self.stopped = self.enough(self.summary)


def run(partitions: Iterator[Partition], runner: Runner, checkpoint: Checkpoint | None, total: Total) -> None:
    """Measure what is not finished yet, until all is or `total` has enough.

    Raises:
        HeadscopeError: What reading or measuring raised; what was finished until then is kept.
    """

    def unfinished() -> Iterator[Partition]:
        for partition in partitions:
            known = None if checkpoint is None else checkpoint.part(partition)
            if known is None:
                yield partition
            else:
                total.take(known, new=False)
            if total.stopped:
                return

    with closing(runner):
        for part in runner.run(unfinished()):
            if checkpoint is not None:
                checkpoint.save(part)
            total.take(part, new=True)
            if total.stopped:
                return
    if checkpoint is not None and not total.stopped:
        checkpoint.check_all_used()
