"""The partitions that wait for a worker; those of workers that were lost come first."""

from __future__ import annotations

from collections.abc import Iterator

from headscope.corpus.partition import Partition
from headscope.errors import ResourceError

# A partition that ended this many workers will end the next one.
MOST_ATTEMPTS = 3
MEMORY_HINT = "it may be memory: take fewer --workers or a smaller --max-length; --resume keeps what is finished"


class Queue:
    """Partitions, each handed out until a worker has lived through it.

    Args:
        partitions: Taken one by one, as they are asked for.
    """

    def __init__(self, partitions: Iterator[Partition]) -> None:
        self._partitions = partitions
        self._again: list[Partition] = []
        self._lost: dict[int, int] = {}

    def take(self) -> Partition | None:
        """The next one; None if there is none, or none until a worker is lost."""
        return self._again.pop() if self._again else next(self._partitions, None)

    def lost(self, partition: Partition, how: str, hint: str) -> None:
        """A worker was lost with a partition, which is to be done again.

        Args:
            how: What became of the worker.
            hint: What the user can do if it was the last attempt.

        Raises:
            ResourceError: It was.
        """
        lost = self._lost[partition.number] = self._lost.get(partition.number, 0) + 1
        if lost >= MOST_ATTEMPTS:
            first, last = partition.records[0].where, partition.records[-1].where
            raise ResourceError(f"{lost} workers died ({how}) on the texts from {first} to {last}", hint)
        self._again.append(partition)
