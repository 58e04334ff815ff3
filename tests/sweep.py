"""Command lines that a stranger gets wrong, run in this process, and judged by what they say and leave behind."""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer.main
from hypothesis import HealthCheck, settings
from transformers import AutoModelForCausalLM

from headscope.cli import main as entry
from headscope.models.quiet import quiet
from tests.tiny_checkpoints import byte_bpe, save, tiny_config, unigram, wordpiece

# Of an exception that nobody translated: its class, and the advice to look at the traceback.
_UNFORESEEN = re.compile(r"^error: \w*(Error|Exception|Interrupt|Exit)\b|--debug for the traceback", re.MULTILINE)
_OTHER_LINES = re.compile(r"(warning|note): ")
_LONGEST_LINE = 2100
TEXT = "the cat sat on the mat"
# As it is before anything stands in its place.
_APP = entry.app


def examples(count: int) -> settings:
    """So many examples of hypothesis, the same ones in each run."""
    checks = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much)
    return settings(max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=checks)


@dataclass(frozen=True)
class Outcome:
    """What a command line gave.

    Attributes:
        left: Files that appeared, or vanished, in the folders for results, for temporary files and for caches.
    """

    code: int
    out: bytes
    err: str
    left: tuple[str, ...]


@dataclass(frozen=True)
class Room:
    """A folder with tiny models, files of texts, and places to write to, which stay empty."""

    root: Path

    @property
    def bert(self) -> str:
        return str(self.root / "bert")

    @property
    def llama(self) -> str:
        """A language model with its head."""
        return str(self.root / "llama")

    @property
    def t5(self) -> str:
        return str(self.root / "t5")

    @property
    def texts(self) -> str:
        return str(self.root / "texts.txt")

    def file(self, name: str, content: bytes | str = b"") -> str:
        """A file in a folder that may be written to."""
        path = self.root / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return str(path)

    def built(self, name: str) -> str:
        """The directory of a family of `fixtures`."""
        from fixtures import build

        if not (self.root / name).exists():
            with quiet():
                build.save(name, self.root / name)
        return str(self.root / name)

    def out(self, name: str) -> str:
        """A place in the folder for results."""
        return str(self.root / "out" / name)

    def run(self, *argv: str, stdin: bytes = b"") -> Outcome:
        """Run a command line; what it wrote is taken away again."""
        watched = [self.root / name for name in ("out", "tmp", "cache")]
        before = _listing(watched)
        with _streams(stdin) as (out, err), _places(self.root):
            with pytest.raises(SystemExit) as exited:
                entry.main(list(argv))
            said, complained = out.getvalue(), err.getvalue().decode()
        left = tuple(sorted(_listing(watched) ^ before))
        for path in sorted(_listing(watched) - before, reverse=True):
            Path(path).rmdir() if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        code = exited.value.code
        return Outcome(code if isinstance(code, int) else int(code or 0), said, complained, left)

    def judged(self, *argv: str, stdin: bytes = b"") -> Outcome:
        """Run a command line that may be right or wrong, and see that it keeps to the contract either way."""
        outcome = self.run(*argv, stdin=stdin)
        problems = list(_problems(outcome))
        assert not problems, f"{problems}\n{argv!r:.500}\n{outcome.err[-2000:]}"
        return outcome

    def refused(self, *argv: str, codes: tuple[int, ...] = (2,), stdin: bytes = b"") -> str:
        """Run a command line that is wrong; gives what it said."""
        outcome = self.judged(*argv, stdin=stdin)
        assert outcome.code in codes, f"exit code {outcome.code}: {argv!r:.500}\n{outcome.err[-2000:]}"
        return outcome.err


def furnished(root: Path) -> Room:
    """A folder with what a room has."""
    import matplotlib.font_manager  # noqa: F401  # it lists the system's fonts once, in a cache of its own

    for name in ("out", "tmp", "cache", "files"):
        (root / name).mkdir()
    save(root / "bert", "bert", wordpiece())
    save(root / "t5", "t5", unigram(), generating=True)
    torch.manual_seed(0)
    with quiet():
        AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(root / "llama")
        byte_bpe().save_pretrained(root / "llama")
    (root / "texts.txt").write_text("the cat sat on the mat\na dog, a house\nbecause it was tired\n" * 6)
    return Room(root)


def _problems(outcome: Outcome) -> Iterator[str]:
    """What is against the contract in an outcome."""
    lines = outcome.err.splitlines()
    kinds = [line.partition(": ")[0] for line in lines]
    if outcome.code not in (0, 1, 2, 3, 4):
        yield f"exit code {outcome.code}"
    if "Traceback" in outcome.err:
        yield "a traceback"
    if _UNFORESEEN.search(outcome.err):
        yield "an exception that was not foreseen"
    if max(map(len, lines), default=0) > _LONGEST_LINE:
        yield "a line that is too long"
    if outcome.code in (0, 1):
        yield from (f"{kind} though it went well" for kind in {"error", "hint"} & set(kinds))
        return
    if outcome.out:
        yield "something on standard output"
    if outcome.left:
        yield f"left behind: {outcome.left}"
    if kinds[-2:] != ["error", "hint"] or kinds.count("error") != 1 or kinds.count("hint") != 1:
        yield "not one error and one hint at the end"
    if any(not _OTHER_LINES.match(line) for line in lines[:-2]):
        yield "other lines"


# ------------------------------------------------------------------ the process
@cache
def _command() -> Callable[..., Any]:
    """The command line's parser; to build it takes longer than most of these command lines."""
    return typer.main.get_command(_APP)


def _app(args: Any, prog_name: str, standalone_mode: bool) -> Any:
    return _command()(args=args, prog_name=prog_name, standalone_mode=standalone_mode)


@contextmanager
def _streams(stdin: bytes) -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    out, err = io.BytesIO(), io.BytesIO()
    wrapped = partial(io.TextIOWrapper, encoding="utf-8", errors="backslashreplace", write_through=True)
    with (
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        mock.patch.object(sys, "stdout", wrapped(out)),
        mock.patch.object(sys, "stderr", wrapped(err)),
        mock.patch.object(entry, "app", _app),
    ):
        yield out, err


@contextmanager
def _places(root: Path) -> Iterator[None]:
    """Temporary files and caches lie where they can be counted."""
    with (
        mock.patch.dict(os.environ, {"TMPDIR": str(root / "tmp"), "XDG_CACHE_HOME": str(root / "cache")}),
        mock.patch.object(tempfile, "tempdir", str(root / "tmp")),
    ):
        yield


def _listing(folders: list[Path]) -> set[str]:
    """All that is there, but for the cache's own folder, and what is not ours: of torch's compiler, of matplotlib."""
    found = {str(path) for folder in folders for path in folder.rglob("*")}
    kept = re.compile(r"/torchinductor|/matplotlib|/cache/headscope(/corpus)?$")
    return {path for path in found if not kept.search(path)}
