"""Throughput over a corpus against a bare forward loop, and memory from 1,000 to 100,000 texts.

    python benchmarks/corpus.py [--model packaged|smollm2|DIRECTORY] [--texts 400] [--rounds 3]
    python benchmarks/corpus.py memory

Throughput: texts of mixed lengths (log-uniform from 8 to 512 tokens, cut from Python help texts), in rounds. Each runs
a bare loop (tokenizer, texts sorted by length in batches with little padding, sdpa attention, nothing kept), then
`analyze_corpus` on the same texts in the same process. The ratio is the median over rounds; the goal is 0.8 or more.

Memory: peak resident memory of a process that measures 1,000, 10,000 and 100,000 short generated texts with a tiny
model; Linux only.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import headscope
from benchmarks.figures import Figure, ratio, single, table
from benchmarks.models import model_path
from fixtures.building import build_family
from fixtures.tokenizers import build_tokenizer
from headscope.models.batches import group_by_length
from headscope.models.loading import load_model


def mixed_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of some 8 to 512 tokens, at four characters a token."""
    source = " ".join(" ".join(t.split()) for t in pydoc_data.topics.topics.values())
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        size = round(4 * math.exp(draw.uniform(math.log(8), math.log(512))))
        start = draw.randrange(len(source) - size)
        texts.append(source[start : start + size])
    return texts


def bare_loop(model: PreTrainedModel, tokenizer: Any, texts: Sequence[str]) -> int:
    """Forward passes over texts sorted by length, in the batches that a corpus is measured in; real tokens."""
    encoded = tokenizer(list(texts), truncation=True, max_length=512)["input_ids"]
    off = {"use_cache": False} if getattr(model.config, "use_cache", False) else {}
    with torch.inference_mode():
        for group in group_by_length([len(row) for row in encoded], max_padding=0.05, max_tokens=4096):
            rows = [encoded[i] for i in group]
            width = max(map(len, rows))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
            model(input_ids=ids, attention_mask=mask, **off)
    return sum(map(len, encoded))


def throughput(name: str, count: int, rounds: int) -> Figure:
    """The corpus' throughput over that of bare passes; prints both."""
    directory = model_path(name)
    bare = load_model(directory, attn_implementation="sdpa", dtype="float32", device="cpu")
    model = load_model(directory, dtype="float32", device="cpu")
    texts = mixed_texts(count)
    bare_took, corpus_took = [], []
    for number in range(rounds + 1):
        start = time.perf_counter()
        tokens = bare_loop(bare.model, bare.tokenizer, texts)
        middle = time.perf_counter()
        found = headscope.analyze_corpus(model.model, texts, tokenizer=model.tokenizer, max_length=512)
        end = time.perf_counter()
        assert found.inputs.tokens == tokens
        # The first round loads what is loaded once.
        if number:
            bare_took.append(middle - start)
            corpus_took.append(end - middle)
            print(
                f"  bare {tokens / (middle - start):,.0f} tokens/s, corpus {tokens / (end - middle):,.0f}", flush=True
            )
    return ratio(f"{name}: throughput over a corpus / bare passes", bare_took, corpus_took, 0.8, at_least=True)


def memory() -> Figure:
    """The peak of a process for most texts over that for fewest; prints each."""
    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        build_family("bert").save_pretrained(folder)
        build_tokenizer("wordpiece").save_pretrained(folder)
        for count in (1_000, 10_000, 100_000):
            data = Path(folder) / f"{count}.jsonl"
            with data.open("w") as file:
                for i in range(count):
                    file.write(json.dumps({"text": f"the cat sat on the mat {'again ' * (i % 7)}"}) + "\n")
            command = [sys.executable, __file__, "--measure", folder, str(data)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"{count:>7,} texts: {done.stdout.strip()}", flush=True)
            peaks.append(float(done.stdout.split()[0].replace(",", "")))
    return single("peak memory, 100,000 texts / 1,000", peaks[-1] / peaks[0], 1.1)


def measure(folder: str, data: str) -> None:
    """One run, in a process of its own."""
    start = time.perf_counter()
    found = headscope.analyze_corpus(folder, Path(data))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    taken = time.perf_counter() - start
    print(f"{peak:,.0f} MiB, {taken:.0f} s, {found.inputs.tokens:,} tokens")


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("throughput", "memory"), default="throughput")
    parser.add_argument("--model", default="packaged")
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        measure(*options.measure)
        return []
    if options.what == "memory":
        return [memory()]
    return [throughput(options.model, options.texts, options.rounds)]


if __name__ == "__main__":
    if found := main():
        print(table(found))
