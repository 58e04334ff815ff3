"""Is every model type that transformers has measured right, or refused with a reason?

    python coverage/run.py --tiny-models DIR [--fast] [--only bert,llama] [--jobs 2] [--out types.tsv]

Each type runs as a tiny random model. All metrics of all its heads, as the streaming engine measures them, are compared
with plain NumPy in float64: on the attention weights that the model returns, and where it returns none, on the softmax
of the scores that it computes. Exit code 1 if any type is wrong or crashes, or fewer are equal than there should be.

`DIR` holds a module `tiny_models` (see `subjects.py`); the environment variable TINY_MODELS says the same.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
# The judge lies with the tests.
sys.path.insert(1, str(Path(__file__).parents[1]))

import torch

from fast import TYPES
from judgement import Verdict, examine
from report import CRASHED, NOT_RUN, Row, lines, passes, write_tsv
from subjects import load_library, modality_of, subject_of, tame

# At least as many types have to be equal: over all, and of the fast ones.
MINIMUM, FAST_MINIMUM = 630, 60

Result = TypeVar("Result")


def look_at(folder: Path, model_type: str) -> Row:
    """One type, from its tiny model to its verdict."""
    start, modality = time.perf_counter(), "not known"
    try:
        library = load_library(folder)
        model = tame(library.tiny_model(model_type))
        subject = subject_of(model, library.dummy_inputs(model_type, model))
    except Exception as error:  # what has no tiny model, or no input that fits it, cannot be judged
        verdict = Verdict(NOT_RUN, one_line(error))
    else:
        modality = modality_of(subject)
        try:
            verdict = examine(subject)
        except Exception as error:  # whatever it is, it must show as this type's fault
            verdict = Verdict(CRASHED, one_line(error))
    return Row(model_type, modality, verdict, time.perf_counter() - start)


def one_line(error: Exception) -> str:
    """Kind and text of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def on_all(look: Callable[[Path, str], Result], folder: Path, types: Sequence[str], jobs: int) -> list[Result]:
    """What `look` gives for all types in their order, on `jobs` processes of one thread each."""
    _quiet()
    if jobs == 1:
        return [look(folder, name) for name in types]
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=_quiet) as pool:
        return pool.starmap(look, [(folder, name) for name in types], chunksize=4)


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)


def arguments(about: str | None, *, fast: bool = False) -> argparse.Namespace:
    """The command line; `--fast` for scripts that know fast types."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny-models", type=Path, default=os.environ.get("TINY_MODELS"), metavar="DIR")
    if fast:
        parser.add_argument("--fast", action="store_true", help="only the types of fast.py")
    parser.add_argument("--only", help="types, separated by commas")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write a line for each type, separated by tabs")
    parsed = parser.parse_args()
    if parsed.tiny_models is None or not (Path(parsed.tiny_models) / "tiny_models.py").is_file():
        parser.error("--tiny-models or TINY_MODELS must name a folder with tiny_models.py")
    return parsed


def main() -> None:
    """Look at the types, print the report, say whether it is good enough."""
    wanted = arguments(__doc__, fast=True)
    folder = Path(wanted.tiny_models)
    types = wanted.only.split(",") if wanted.only else TYPES if wanted.fast else load_library(folder).iter_model_types()
    minimum = 0 if wanted.only else FAST_MINIMUM if wanted.fast else MINIMUM
    start = time.perf_counter()
    rows = on_all(look_at, folder, types, wanted.jobs)
    print(*lines(rows), sep="\n")
    equal = sum(row.equal for row in rows)
    print(f"{equal} types equal (at least {minimum}), {time.perf_counter() - start:.0f} s")
    if wanted.out:
        write_tsv(rows, wanted.out)
    if not passes(rows, minimum):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
