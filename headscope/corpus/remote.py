"""A worker in another process, and what it raises on its way to the process that tells the user."""

from __future__ import annotations

import pickle
import traceback
import warnings
from dataclasses import dataclass

import headscope
from headscope.corpus.job import Job
from headscope.corpus.part import Part
from headscope.corpus.partition import Partition
from headscope.corpus.worker import Worker
from headscope.errors import lack


@dataclass(frozen=True)
class Failure:
    """What a worker raised, in a form that always arrives.

    Attributes:
        pickled: The exception; None where it cannot be pickled.
        text: Its kind and message.
        trace: Where it was raised.
    """

    pickled: bytes | None
    text: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The form of an exception."""
        text, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        try:
            return cls(pickle.dumps(error), text, trace)
        except Exception:  # whatever the exception's own code or what it holds makes of it
            return cls(None, text, trace)

    def error(self) -> Exception:
        """The exception itself, or a RuntimeError with its text where it does not survive the journey."""
        error: object = None
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except Exception:  # its class wants other arguments, or is not known here
                error = None
        found = error if isinstance(error, Exception) else RuntimeError(self.text)
        found.add_note(f"In a worker:\n{self.trace}")
        return found


class RemoteWorker:
    """A worker that loads its model when the first partition comes, and hands over what it raises.

    Args:
        job: What to measure.
    """

    def __init__(self, job: Job) -> None:
        # What the user should know is in the results, once.
        warnings.simplefilter("ignore")
        self.job = job
        self._worker: Worker | None = None

    def version(self) -> str:
        """Whose code this is, for somebody on another machine."""
        return headscope.__version__

    def measure(self, partition: Partition) -> Part | Failure:
        """The partition's part, or what loading or measuring raised."""
        try:
            if self._worker is None:
                self._worker = Worker(self.job)
            return self._worker.measure(partition)
        except Exception as error:  # whatever it is, the user's process has to hear of it
            # Of what an error came does not travel with it.
            return Failure.of(lack(error) or error)
