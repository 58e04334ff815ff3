"""Finished partitions on disk, so that a run goes on where it was killed."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from headscope.corpus.fingerprint import Identity, differences, fingerprint
from headscope.corpus.part import Part
from headscope.corpus.partition import Partition
from headscope.corpus.store import from_bytes, to_bytes
from headscope.errors import InputError
from headscope.files import held, passing
from headscope.files.links import own_place

_MANIFEST = "run.json"
_PART = re.compile(r"(\d{6,})\.npz")


class Checkpoint:
    """A folder with a file for each finished partition; every file appears whole or not at all.

    The parts of a run lie in a folder that is named by its fingerprint: those of another model, other data or other
    options can never get into it.

    Args:
        folder: Where the folders of runs lie; made when it is needed.
        identity: What this run is.
        resume: Take what such a run has finished; otherwise it is thrown away.

    Raises:
        InputError: There is something to resume, but of a run that was something else; a link is in its place; or
            another process is at it.
    """

    def __init__(self, folder: Path, identity: Identity, resume: bool) -> None:
        self.identity = identity
        self.folder = own_place(own_place(folder) / fingerprint(identity))
        # Held as long as this run is at it.
        self._held, self._is_held = ExitStack(), False
        if resume and not self._is_ours():
            self._refuse_others(folder)
        if self.folder.is_dir():
            self._hold()
        if not resume:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.close()
        # What could not be thrown away (behind a link, say) is not taken either.
        self._finished = {int(found[1]): path for path, found in self._parts()} if resume else {}

    def _hold(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._held.enter_context(held(self.folder)):
            self.close()
            raise InputError(
                f"another process is at this run, in {self.folder.parent}",
                "wait until it is done, or give --checkpoint another directory",
            )
        self._is_held = True

    def close(self) -> None:
        """Leave it to others; what is finished stays."""
        if self._is_held:
            with suppress(OSError):  # something is in it, or it is gone already
                self.folder.rmdir()
                self.folder.parent.rmdir()
        self._held.close()
        self._is_held = False

    def _is_ours(self) -> bool:
        return (self.folder / _MANIFEST).is_file()

    def _refuse_others(self, folder: Path) -> None:
        others = sorted(folder.glob(f"*/{_MANIFEST}"), key=lambda path: path.stat().st_mtime)
        if not others:
            return
        try:
            other = json.loads(others[-1].read_text("utf-8"))
        except (OSError, ValueError):
            return
        if not isinstance(other, dict):
            return
        raise InputError(
            f"the run to resume differs from this one in: {', '.join(differences(other, self.identity))}",
            "give the same model, data and options, or leave --resume out to start anew",
        )

    def _parts(self) -> list[tuple[Path, re.Match[str]]]:
        if not self.folder.is_dir():
            return []
        found = ((path, _PART.fullmatch(path.name)) for path in self.folder.iterdir())
        return sorted((path, match) for path, match in found if match is not None and path.is_file())

    def part(self, partition: Partition) -> Part | None:
        """What came of a partition, if it is finished; a file that cannot be read counts as none.

        Raises:
            InputError: Its texts are others now.
        """
        path = self._finished.pop(partition.number, None)
        if path is None:
            return None
        try:
            part = from_bytes(path.read_bytes())
        except Exception:  # whatever is in the file, it is no part: its texts are measured again
            return None
        if part.digest != partition.digest:
            raise self._changed(partition.records[0].where)
        return part

    def check_all_used(self) -> None:
        """Raise InputError if more partitions are finished than the data has now."""
        if self._finished:
            raise self._changed(f"partition {min(self._finished)}")

    def _changed(self, where: str) -> InputError:
        return InputError(
            f"the texts have changed since the run that is to be resumed, from {where} on",
            "leave --resume out to start anew",
        )

    def save(self, part: Part) -> None:
        """Keep a finished partition.

        Raises:
            OSError: It cannot be written; nothing half-written remains.
        """
        if not self._is_held:
            self._hold()
        if not self._is_ours():
            _write(self.folder / _MANIFEST, json.dumps(self.identity, indent=1).encode())
        _write(self.folder / f"{part.number:06}.npz", to_bytes(part))

    def remove(self) -> None:
        """The run is over: its parts go, and the folder of runs if no other is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.parent.rmdir()
        except OSError:  # another run's parts are in it, or it was never made
            return


def _write(path: Path, data: bytes) -> None:
    with passing(path.with_name(f".{path.name}.part")) as unfinished:
        # What a killed process left, or a link that somebody put there.
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
