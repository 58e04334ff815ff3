"""Small corpora and models, and runs over them in processes that can be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModel, AutoTokenizer

import headscope
from headscope.cli.main import main
from headscope.corpus.job import Job
from headscope.corpus.partition import Partition, partitions
from headscope.heads.metrics import chosen
from headscope.heads.rules import load_rules
from headscope.models.quiet import quiet
from headscope.models.selection import parse_selection
from headscope.reading import open_corpus
from headscope.results import Analysis
from tests.tiny_checkpoints import CORPUS, save, wordpiece

WORDS = sorted({word for line in CORPUS for word in line.split()})


def texts(number: int, seed: int = 0, longest: int = 20) -> list[str]:
    """Of 1 to `longest` words."""
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(WORDS, k=drawn.randint(1, longest))) for _ in range(number)]


def write(path: Path, items: Sequence[str]) -> Path:
    """A .jsonl file."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in items), "utf-8")
    return path


def model(directory: Path, **changes: Any) -> Path:
    """A tiny BERT with its tokenizer."""
    return save(directory, "bert", wordpiece(), **changes)


def job(model: Path | str) -> Job:
    """The usual measurement, on one thread."""
    everything = parse_selection("layer", "all"), parse_selection("head", "all")
    return Job(str(model), *everything, None, load_rules("seed"), chosen("core"), loading={"device": "cpu"}, threads=1)


def cut(data: Path, texts_each: int) -> Iterator[Partition]:
    """A corpus' partitions."""
    return partitions(open_corpus(data).records(), texts_each, 100_000)


def until(condition: Callable[[], Any], *, seconds: float = 180.0, every: float = 0.005) -> Any:
    """What `condition` gives, as soon as it is true of it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(every)
    return found


def parts(folder: Path) -> list[Path]:
    """The finished parts in a checkpoint folder."""
    return sorted(folder.glob("*/*.npz"))


def check_against_single_texts(found: Analysis, model: Path, items: Sequence[str]) -> None:
    """Means, spread and labels are those of `headscope.analyze`, called for one text after the other."""
    with quiet():
        loaded, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    singles = [headscope.analyze(loaded, text, tokenizer=tokenizer) for text in items]
    assert found.inputs.texts == len(items)
    assert found.inputs.tokens == sum(single.inputs.tokens for single in singles)
    for place, head in enumerate(found.heads):
        alone = [single.heads[place] for single in singles]
        assert {(one.stack, one.layer, one.head) for one in alone} == {(head.stack, head.layer, head.head)}
        assert head.stability == sum(one.pattern == head.pattern for one in alone) / len(alone)
        for name, value in head.metrics.items():
            values = np.array([one.metrics[name] for one in alone], dtype=float)
            values = values[~np.isnan(values)]
            spread = (head.spread or {})[name]
            assert spread.texts == len(values)
            np.testing.assert_allclose([value, spread.sd], [values.mean(), values.std(ddof=1)], atol=1e-5)


# ------------------------------------------------------------------ processes
def fork(work: Callable[[], Any]) -> BaseProcess:
    """A process of its own, in which nothing has to be imported again."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def command(*argv: str) -> BaseProcess:
    """`headscope analyze`, at work, with nothing on the terminal."""

    def work() -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        main(["analyze", *argv])

    return fork(work)


def children(pid: int | None) -> list[int]:
    """The processes that a process has started."""
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [line.split() for line in found.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only what is left of it until somebody asks."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(found.strip()) and not found.startswith("Z")
