"""What each command takes on the packaged model, whole processes, against a bare script of one forward pass.

    python benchmarks/commands.py [--rounds 5]

The bare script imports torch and transformers, loads the model with eager attention, and runs one text with
`output_attentions=True`. All run in fresh processes, in turns. Goals: `analyze` at most 1.15 times the bare script's
wall time, `verify` under twice `analyze`. Processor time is steadier than wall time on a busy machine. Memory is the
peak of the process; Linux and macOS only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure, ratio, table
from benchmarks.models import model_path

ROOT = Path(__file__).parents[1]
TEXT = "The cat sat on the mat because it was tired."
BARE = """
import sys

import torch
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModel.from_pretrained(sys.argv[1], attn_implementation="eager").eval()
with torch.inference_mode():
    attentions = model(**tokenizer(sys.argv[2], return_tensors="pt"), output_attentions=True).attentions
print(len(attentions), tuple(attentions[0].shape))
"""
# `{out}` is a folder of the run's own, `{data}` a file of 64 short texts.
COMMANDS = {
    "analyze": ["analyze", TEXT],
    "analyze --types": ["analyze", TEXT, "--types", "positional,sink,entropy"],
    "analyze --data": ["analyze", "--data", "{data}", "-o", "{out}/heads.json"],
    "heatmap": ["heatmap", TEXT, "--layer", "5", "--head", "3", "-o", "{out}/head.png"],
    "verify": ["verify"],
    "importance": ["importance", "--data", "{data}", "-o", "{out}/scores.json"],
    "prune": ["prune", "--heads", "5:0,3", "--no-latency", "-o", "{out}/smaller"],
    "compare": ["compare", "{model}", "{model}", "--data", "{data}", "-o", "{out}/compared.json"],
    "report": ["report", TEXT, "-o", "{out}/report.html"],
    "size": ["size"],
}


@dataclass(frozen=True)
class Taken:
    """What one process took: seconds and MiB."""

    wall: float
    processor: float
    memory: float


def run(command: list[str], folder: str) -> Taken:
    """One run of `command`, which must succeed, with an empty folder for what it writes."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        nowhere = subprocess.DEVNULL
        start = time.perf_counter()
        process = subprocess.Popen(
            [part.replace("{out}", out) for part in command],
            cwd=ROOT,
            env=environment,
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[2:])} failed with exit code {process.returncode}")
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return Taken(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / unit)


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Run all in turns, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args(arguments).rounds
    model = model_path("packaged")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "texts.txt"
        data.write_text("".join(f"The cat sat on mat number {i}, because it was tired.\n" for i in range(64)))
        commands = {"bare script": [sys.executable, "-c", BARE, model, TEXT]}
        for name, words in COMMANDS.items():
            filled = [word.replace("{data}", str(data)).replace("{model}", model) for word in words]
            commands[name] = [sys.executable, "-m", "headscope", *filled, "--quiet"]
        for command in commands.values():
            run(command, folder)
        taken: dict[str, list[Taken]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                taken[name].append(run(command, folder))
    for name, runs in taken.items():
        wall, processor = (statistics.median(getattr(r, what) for r in runs) for what in ("wall", "processor"))
        print(f"{name:16} {wall:6.2f} s, processor {processor:6.2f} s, {max(r.memory for r in runs):6.0f} MiB")
    return figures_of(taken)


def figures_of(taken: dict[str, list[Taken]]) -> list[Figure]:
    """The ratios, wall time and memory."""
    base = taken["bare script"]
    figures = []
    for name in COMMANDS:
        for what, goal in (("wall", 1.15 if name == "analyze" else None), ("processor", None), ("memory", None)):
            this, other = ([getattr(r, what) for r in runs] for runs in (taken[name], base))
            figures.append(ratio(f"{name} / bare script, {what}", this, other, goal))
    verify, analyze = ([r.wall for r in taken[name]] for name in ("verify", "analyze"))
    return [*figures, ratio("verify / analyze, wall", verify, analyze, 2)]


if __name__ == "__main__":
    print(table(main()))
