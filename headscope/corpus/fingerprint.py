"""What a run is: model, data and options in one text, and the differences between two of them in words."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headscope.corpus.job import Job
from headscope.heads.metrics import plugin_versions
from headscope.models.loading import LoadedModel
from headscope.models.source import resolve
from headscope.models.versions import versions

Identity = Mapping[str, Any]
"""JSON values by name."""

# Several options each, and what is called otherwise than its option.
_GROUPS = ("versions", "data", "loading")
_CALLED = {"names": "metrics", "tokenizer_files": "tokenizer", "name": "data", "headscope": "version of headscope"}
_CALLED |= {"transformers": "version of transformers", "torch": "version of torch", "python": "version of python"}

# Values of each weight that tell a model in memory from others.
_SAMPLE = 64


def identity(job: Job, loaded: LoadedModel | None, data: Mapping[str, Any]) -> Identity:
    """Everything that changes numbers: the model and its files, the data, and how it is measured.

    Args:
        loaded: A model or tokenizer in memory; None for the job's, by name.
        data: How the corpus is read and in which order; its texts are compared partition by partition.
    """
    measured = asdict(job)
    for name in ("model", "threads"):
        measured.pop(name)
    model = _files(job) if loaded is None else _held(loaded)
    # Through JSON, so that what was read from a file compares equal.
    tokenizer = {} if job.tokenizer is None else _facts(Path(os.path.expanduser(job.tokenizer)))
    of_all = versions() | plugin_versions(job.shown)
    found: Identity = json.loads(
        json.dumps(
            {"versions": of_all, "tokenizer_files": tokenizer, "model": model, "data": dict(data), **measured},
            default=str,
        )
    )
    return found


def fingerprint(identity: Identity) -> str:
    """16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()


def differences(a: Identity, b: Identity) -> list[str]:
    """What differs, by the names of options."""
    return list(dict.fromkeys(_differences(a, b)))


def _differences(a: Identity, b: Identity) -> Iterator[str]:
    for key in dict.fromkeys((*a, *b)):
        one, other = a.get(key), b.get(key)
        if key in _GROUPS and isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other)
        elif one != other:
            yield _CALLED.get(key, key)


def _files(job: Job) -> dict[str, Any]:
    """A local model's files by size and time of change; a hub model's name and revision."""
    name, source = resolve(job.model, job.loading.get("revision"))
    if not source.local:
        return {"name": name, "revision": source.revision}
    return {"name": str(Path(source.path).resolve()), "file": source.gguf_file, "files": _facts(Path(source.path))}


def _facts(directory: Path) -> dict[str, list[int]]:
    """Size and time of change of a directory's files; none where there is no directory."""
    if not directory.is_dir():
        return {}
    files = [path for path in sorted(directory.iterdir()) if path.is_file()]
    # A cache on the hub's side keeps files behind links: what they lead to counts.
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def _held(loaded: LoadedModel) -> dict[str, str]:
    return {"weights": _weights(loaded.model), "tokens": _tokens(loaded.tokenizer)}


def _tokens(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A tokenizer's vocabulary, and the steps of a fast one."""
    if tokenizer is None:
        return ""
    digest = hashlib.blake2b(type(tokenizer).__name__.encode(), digest_size=16)
    digest.update(json.dumps([tokenizer.get_vocab(), tokenizer.special_tokens_map], sort_keys=True).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update(b"" if backend is None else backend.to_str().encode())
    return digest.hexdigest()


def _weights(model: PreTrainedModel) -> str:
    digest = hashlib.blake2b(type(model).__name__.encode(), digest_size=16)
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // _SAMPLE)].to("cpu", torch.float64)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + some.numpy().tobytes())
    return digest.hexdigest()
