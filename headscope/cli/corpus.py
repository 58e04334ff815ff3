"""`analyze --data`: the options of a corpus, and the run over one."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import headscope
from headscope.cli.errors import say
from headscope.cli.progress import console, progress
from headscope.errors import HeadscopeError, InputError, ResourceError

if TYPE_CHECKING:
    from headscope.corpus.progress import Progress
    from headscope.results import Analysis

_CORPUS = "Corpus"
# Between two lines of progress where there is no terminal.
_SECONDS = 30.0

Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="A corpus: .txt (a text a line), .jsonl, .csv, .parquet or .conllu, a directory or pattern of those, "
        "- for standard input, or a dataset.",
        rich_help_panel=_CORPUS,
    ),
]
TextColumn = Annotated[
    str | None,
    typer.Option("--text-column", metavar="NAME", help="Where texts are found; text.", rich_help_panel=_CORPUS),
]
Split = Annotated[
    str | None, typer.Option("--split", metavar="NAME", help="Which part of a dataset.", rich_help_panel=_CORPUS)
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Stop at the first text that cannot be read, do not skip it.", rich_help_panel=_CORPUS
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(
        "--sample", min=1, metavar="N", help="Only so many texts, drawn with --seed.", rich_help_panel=_CORPUS
    ),
]
Until = Annotated[
    float | None,
    typer.Option(
        "--until",
        metavar="WIDTH",
        help="Take texts in random order, and stop when every 95 % interval is at most so wide.",
        rich_help_panel=_CORPUS,
    ),
]
PerText = Annotated[
    Path | None,
    typer.Option(
        "--per-text",
        metavar="FILE.parquet",
        help="Also write each text's values, a row a text and head.",
        rich_help_panel="Output",
    ),
]
Runner = Annotated[
    Literal["local", "ray"] | None,
    typer.Option(
        "--runner", help="Processes of this machine (local), or the actors of a cluster.", rich_help_panel=_CORPUS
    ),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, metavar="N", help="Processes or actors; 1.", rich_help_panel=_CORPUS),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="A cluster that runs; without it one starts here.",
        rich_help_panel=_CORPUS,
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on where the same command was killed.", rich_help_panel=_CORPUS),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="Where finished parts are kept until the end; beside --output, else in the user's cache.",
        rich_help_panel=_CORPUS,
    ),
]


def check_options(data: str | None, others: Mapping[str, object], excluded: Mapping[str, object]) -> None:
    """Refuse options of a corpus without one, and with one those of single texts."""
    if data is None:
        for name in (name for name, value in others.items() if value not in (None, False)):
            raise InputError(f"--{name.replace('_', '-')} is for a corpus, and there is none", "add --data PATH")
    else:
        for name in (name for name, value in excluded.items() if value):
            raise InputError(f"--data and {name} exclude each other", "give one of them")


def decoder_text(texts: list[str] | None) -> str | None:
    """The one that all texts of a corpus share. Raises InputError for several."""
    if texts and len(texts) > 1:
        raise InputError(f"{len(texts)} --decoder-text for a corpus", "give one for all texts")
    return texts[0] if texts else None


def run(
    data: str,
    arguments: Mapping[str, Any],
    output: Path | None,
    write: Callable[[Analysis], None],
    quiet: bool,
    debug: bool,
) -> None:
    """Measure a corpus, with its progress on standard error; what is finished is kept for --resume until it is written.

    Args:
        arguments: More of `analyze_corpus`; None for what is not given.
        write: Puts the result where it belongs.
    """
    folder = arguments["checkpoint"] or _folder(data, str(arguments["model"]), output)
    writable = _writable(folder)
    if not writable and arguments["checkpoint"]:
        raise InputError(f"cannot keep a checkpoint in {folder}", "--checkpoint takes a directory that can be written")
    if not writable and arguments["resume"]:
        raise InputError(f"there is nothing to resume in {folder}", "give --checkpoint, the directory of that run")
    # What is not given has its default in `analyze_corpus`.
    given = {name: value for name, value in arguments.items() if value is not None}
    given["checkpoint"] = folder if writable else None
    measured = False
    try:
        with progress(None, quiet, debug), _shown(quiet) as (report, stop):

            def at_last(result: Analysis) -> None:
                nonlocal measured
                measured = True
                stop()
                write(result)

            headscope.analyze_corpus(data=data, report=report, write=at_last, **given)
    except (KeyboardInterrupt, OSError, HeadscopeError) as error:
        # Other errors of input are of the beginning, and speak of no run.
        lost = measured or not isinstance(error, HeadscopeError) or isinstance(error, ResourceError)
        if lost and writable and folder.is_dir():
            say("note", "what is finished is kept: the same command with --resume goes on")
        raise


def _folder(data: str, model: str, output: Path | None) -> Path:
    # Not beside a device or a pipe.
    if output is not None and (output.is_file() or not output.exists()):
        return output.with_name(f".{output.name[:200]}.parts")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = str(Path(data).resolve()) if Path(data).exists() else data
    name = hashlib.blake2b(f"{model}\n{place}".encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return cache / "headscope" / "corpus" / name


def _writable(folder: Path) -> bool:
    """Whether files can be made in it; it may have to be made itself."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        # Tried, since permissions alone lie.
        with TemporaryFile(dir=place):
            return True
    except OSError:
        return False


# ------------------------------------------------------------------ progress
@contextmanager
def _shown(quiet: bool) -> Iterator[tuple[Callable[[Progress], None], Callable[[], None]]]:
    """A line that changes on a terminal, and what ends it; elsewhere a line now and then."""
    if quiet:
        yield lambda done: None, lambda: None
    elif sys.stderr.isatty():
        with console().status("loading the model …") as status:
            yield lambda done: status.update(_line(done)), status.stop
    else:
        yield _now_and_then(), lambda: None


def _now_and_then() -> Callable[[Progress], None]:
    last = time.monotonic()

    def report(done: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS:
            last = time.monotonic()
            say("note", _line(done))

    return report


def _line(done: Progress) -> str:
    parts = [f"{done.texts:,} texts", f"{done.tokens:,} tokens"]
    if done.resumed:
        parts.append(f"{done.resumed:,} texts of an earlier run")
    if done.tokens_per_second:
        parts.append(f"{done.tokens_per_second:,.0f} tokens/s")
    if done.share is not None:
        parts.append(f"{done.share:.0%}")
    if done.seconds_left is not None:
        parts.append(f"{_duration(done.seconds_left)} left")
    return " · ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
