"""What it costs to measure every head while a model runs: time and peak memory, against doing without.

    python benchmarks/capture.py [--model packaged|smollm2|DIRECTORY ...] [--lengths 512,1024,4096,8192] [--rounds 5]

For each model and length, in turns in one process on the same tokens of English text:

- forward: the model alone, with sdpa attention; the yardstick;
- analyze: `headscope.analyze`, core metrics, labels and all;
- one metric, core metrics: the streaming engine with a single metric and with all core ones, up to --short tokens;
- eager: `output_attentions=True` and the same core metrics in NumPy, up to as many (its memory grows with n²).

Times are medians of ratios within a round. Peak memory is the process' own, so Linux only. At the end, how time and
memory grow with length, fitted. Goals: analyze at most 1.25 x the forward pass on SmolLM2 at every length and 1.4 x on
MiniLM at 512, at most 1.3 x its memory; core metrics at most 1.15 x one; at least 2.2 x faster than eager at 1,024.
"""

from __future__ import annotations

import argparse
import gc
import os
import pydoc_data.topics
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import headscope
from benchmarks.figures import Figure, ratio, seconds, single, table
from benchmarks.models import model_path
from headscope.capture.feed import Axis
from headscope.capture.session import Capture
from headscope.heads.metrics import CORE, variant
from headscope.heads.statistics import HeadStatistics
from headscope.models.loading import LoadedModel, load_model
from headscope.models.sites import find_sites

MIB = 1 << 20


def text_ids(tokenizer: Any, length: int) -> list[int]:
    """The first tokens of Python's own documentation, special tokens and all."""
    text = "\n".join(pydoc_data.topics.topics.values())
    ids: list[int] = tokenizer(text[: 8 * length + 1000], truncation=False)["input_ids"]
    return ids[:length]


def peak(function: Callable[[], object]) -> float:
    """The process' peak memory while `function` runs, in MiB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    function()
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def plain(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """The model alone."""
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **_no_cache(model))


def eager(model: PreTrainedModel, ids: torch.Tensor) -> list[tuple[np.ndarray, ...]]:
    """All matrices, and the core metrics of each head in NumPy."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            output = model(
                input_ids=ids, attention_mask=torch.ones_like(ids), output_attentions=True, **_no_cache(model)
            )
    finally:
        model.set_attn_implementation(before)
    measured = []
    for layer in output.attentions:
        weights = layer[0].float().numpy()
        rows = np.arange(weights.shape[1])
        previous = weights[:, rows[1:], rows[:-1]].mean(axis=1) if len(rows) > 1 else weights[:, 0, 0]
        entropy = -(weights * np.log(weights + 1e-9)).sum(axis=-1, dtype=np.float64).mean(axis=-1)
        measured.append((weights[:, :, 0].mean(axis=1), previous, weights[:, rows, rows].mean(axis=1), entropy))
    return measured


def streamed(model: PreTrainedModel, ids: torch.Tensor, metrics: tuple[str, ...]) -> None:
    """The streaming engine with some metrics."""
    statistics_ = HeadStatistics(tuple(variant(name) for name in metrics))
    capture = Capture(model, find_sites(model), lambda site: True, (statistics_,), engine="streaming")
    axis = Axis(torch.tensor([ids.shape[1]]), torch.zeros(ids.shape, dtype=torch.bool))
    capture.batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {"text": axis}, 1)
    statistics_.finish()


def _no_cache(model: PreTrainedModel) -> dict[str, bool]:
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


def compare(
    loaded: LoadedModel, length: int, rounds: int, short: bool, found: dict[int, dict[str, tuple[float, float]]]
) -> list[Figure]:
    """Ratios of one length; seconds and peak memory of each way are printed and go into `found`."""
    model, ids = loaded.model, text_ids(loaded.tokenizer, length)
    tokens = torch.tensor([ids])
    ways: dict[str, Callable[[], object]] = {
        "forward": lambda: plain(model, tokens),
        "analyze": lambda: headscope.analyze(model, ids=ids, tokenizer=loaded.tokenizer),
    }
    if short:
        ways["one metric"] = lambda: streamed(model, tokens, ("sink",))
        ways["core metrics"] = lambda: streamed(model, tokens, CORE)
        ways["eager"] = lambda: eager(model, tokens)
    memory = {name: peak(function) for name, function in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, function in ways.items():
            times[name].append(seconds(function))
    for name in ways:
        took = statistics.median(times[name])
        print(f"  {length:>6}  {name:<13} {took:>8.2f} s   {memory[name]:>7.0f} MiB", flush=True)
    found[length] = {name: (statistics.median(times[name]), memory[name]) for name in ways}
    return figures_of(type(model).__name__, length, times, memory)


def figures_of(model: str, length: int, times: dict[str, list[float]], memory: dict[str, float]) -> list[Figure]:
    """The ratios that have goals."""
    where = f"{model}, {length} tokens"
    limit = 1.25 if model.startswith("Llama") else 1.4
    figures = [
        ratio(f"{where}: analyze / forward", times["analyze"], times["forward"], limit),
        single(f"{where}: analyze / forward, peak memory", memory["analyze"] / memory["forward"], 1.3),
    ]
    if "eager" in times:
        faster, leaner = (2.2, 3) if length == 1024 else (None, None)
        figures += [
            ratio(f"{where}: core metrics / one metric", times["core metrics"], times["one metric"], 1.15),
            ratio(f"{where}: eager and NumPy / analyze", times["eager"], times["analyze"], faster, at_least=True),
            single(
                f"{where}: eager and NumPy / analyze, peak memory",
                memory["eager"] / memory["analyze"],
                leaner,
                at_least=True,
            ),
        ]
    return figures


def growth(found: dict[int, dict[str, tuple[float, float]]]) -> None:
    """Fit time = a n + b n² and memory = c + d n, and print how much of each is which at the longest."""
    lengths = np.array(sorted(found), dtype=np.float64)
    for way in ("forward", "analyze"):
        time_taken, memory = (np.array([found[int(n)][way][i] for n in lengths]) for i in (0, 1))
        weight = 1 / time_taken[:, None]
        (a, b), *_ = np.linalg.lstsq(
            np.stack([lengths, lengths**2], axis=1) * weight, np.ones(len(lengths)), rcond=None
        )
        d, c = np.polyfit(lengths, memory, 1)
        power = np.polyfit(np.log(lengths), np.log(time_taken), 1)[0]
        print(
            f"  {way}: time {a * 1e3:.3f} ms n + {b * 1e6:.3f} us n² (power {power:.2f}); "
            f"memory {c:.0f} MiB + {d * 1024:.1f} KiB n, largest miss {abs(memory - c - d * lengths).max():.0f} MiB"
        )


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Compare models and lengths."""
    figures: list[Figure] = []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["packaged", "smollm2"])
    parser.add_argument("--lengths", default="512,1024,4096,8192")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", type=int, default=1024)
    options = parser.parse_args(arguments)
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in options.model:
        loaded = load_model(model_path(name))
        model = loaded.model
        model.set_attn_implementation("sdpa")
        limit = getattr(model.config, "max_position_embeddings", None) or 1 << 30
        print(f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")
        found: dict[int, dict[str, tuple[float, float]]] = {}
        for length in [int(n) for n in options.lengths.split(",") if int(n) <= limit]:
            rounds = options.rounds if length <= options.short else max(1, options.rounds // 2)
            figures += compare(loaded, length, rounds, length <= options.short, found)
        if len(found) > 2:
            growth(found)
    return figures


if __name__ == "__main__":
    print(table(main()))
