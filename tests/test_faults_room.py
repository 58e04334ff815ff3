"""No memory, no room on the disk: exit code 4, two lines, what was there is whole, and nothing else is left."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headscope
from headscope.corpus.remote import RemoteWorker
from headscope.errors import InputError, ModelError, ResourceError, is_disk_full, is_out_of_memory, lack
from tests import corpus_samples as samples
from tests.faults import COMMANDS, Ended, Running, hidden

# Of a file, in the processes that may not write more.
BYTES = 300
FULL = ("analyze, everything", "corpus", "heatmap", "docs", "prune structural")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("room")
    samples.model(place / "model")
    samples.model(place / "other", num_attention_heads=2)
    samples.write(place / "many.jsonl", samples.texts(40, longest=6))
    (place / "out").mkdir()
    return place


def said(ended: Ended) -> list[str]:
    told = [line.rpartition("\x1b[?25h")[2].rpartition("\x1b[2K")[2] for line in ended.said.splitlines()]
    return [line for line in told if line.startswith(("error:", "hint:", "Traceback"))]


def limited(what: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (most, most))


# ------------------------------------------------------------------ the disk
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("force", [False, True])
def test_no_room_for_a_result(name: str, force: bool, place: Path) -> None:
    argv, outputs = COMMANDS[name]
    for old in outputs if force else ():
        if "." in old:
            (place / "out" / old).write_text("old")
    # A terminal for what it says: a file could not take it.
    ended = Running([*argv, *["--force"] * force], place, True, limited(resource.RLIMIT_FSIZE, BYTES)).wait(120)
    try:
        assert ended.code == 4, ended.said
        assert [line.partition(":")[0] for line in said(ended)] == ["error", "hint"]
        assert all((place / "out" / n).read_text() == "old" for n in os.listdir(place / "out"))
        assert len(os.listdir(place / "out")) == sum("." in old for old in outputs) * force
        assert hidden(os.listdir(place)) == []
    finally:
        shutil.rmtree(place / "out")
        (place / "out").mkdir()


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(28, "No space left on device"), True),
        (OSError(27, "File too large"), True),
        (Exception("No space left on device (os error 28)"), True),
        (OSError(13, "Permission denied"), False),
        (InputError("quota exceeded"), False),
    ],
)
def test_what_a_full_disk_is(error: Exception, full: bool) -> None:
    assert is_disk_full(error) is full
    assert (lack(error) is not None) is full


# ------------------------------------------------------------------ memory
def taken(kind: str) -> Any:
    many = 1 << 36
    return torch.empty(many, dtype=torch.uint8) if kind == "torch" else np.ones(many, np.uint8)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("where", ["in our code", "in the model", "in the tokenizer"])
def test_no_memory(kind: str, where: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*arguments: Any, **options: Any) -> Any:
        return taken(kind)

    if where == "in our code":
        monkeypatch.setitem(vars(headscope), "analyze", take)
    elif where == "in the model":
        monkeypatch.setattr("transformers.models.bert.modeling_bert.BertEmbeddings.forward", take)
    else:
        monkeypatch.setattr("transformers.PreTrainedTokenizerFast._batch_encode_plus", take, raising=False)
        monkeypatch.setattr("transformers.PreTrainedTokenizerFast.__call__", take)
    argv = COMMANDS["analyze"][0]
    ended = Running(argv, place, first=limited(resource.RLIMIT_AS, 1 << 35)).wait(120)
    assert ended.code == 4, ended.said
    assert [line.partition(":")[0] for line in said(ended)] == ["error", "hint"]
    assert "memory" in ended.said and os.listdir(place / "out") == []


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes differ"), False),
        (ModelError("a text on being out of memory"), False),
    ],
)
def test_what_a_lack_of_memory_is(error: Exception, short: bool) -> None:
    assert is_out_of_memory(error) is short
    try:
        raise ModelError("the model fails") from error
    except ModelError as wrapped:
        assert (lack(wrapped) is not None) is short


def test_a_worker_says_what_it_lacked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise ModelError("the tokenizer fails") from MemoryError()

    monkeypatch.setattr("headscope.corpus.remote.Worker", fail)
    failure: Any = RemoteWorker(samples.job("any")).measure(None)  # type: ignore[arg-type]
    assert isinstance(failure.error(), ResourceError)
