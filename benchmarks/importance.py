"""What scores and a repair cost, against bare passes over the same tokens of English text.

    python benchmarks/importance.py [--model packaged|smollm2|DIRECTORY] [--texts 64] [--length 256] [--rounds 3]
                                    [--repair-tokens 25000]

- gradient, surgeon: over the forward and backward passes that training would make, all parameters with gradients; goals
  at most 1.5 and 2 x;
- repair, a third of all heads zeroed by chance: over the forward pass of its own tokens; goal under 3 x.

Medians of ratios, in turns in one process.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import statistics
from collections.abc import Callable, Sequence

import torch

from benchmarks.figures import Figure, ratio, seconds, table
from benchmarks.models import model_path
from headscope.capture.evaluation import evaluating
from headscope.capture.outputs import find_outputs
from headscope.importance.allocate import allocate, count_of
from headscope.importance.examples import Examples
from headscope.importance.method import Task
from headscope.importance.methods import method_named
from headscope.importance.texts import Data, Share, cut, deal, ready
from headscope.models.loading import LoadedModel, load_model
from headscope.pruning.zeroing import zeroed_copy
from headscope.repair.repair import repair


def train(loaded: LoadedModel, data: Data) -> None:
    """Forward and backward passes as training makes them, gradients thrown away."""
    for batch in data.batches:
        with torch.enable_grad():
            data.loss.to_derive(loaded.model, batch).sum().backward()
        loaded.model.zero_grad(set_to_none=True)


def forward(loaded: LoadedModel, data: Data) -> None:
    """Bare forward passes, without a language-model head: what a repair runs ends before it."""
    inner = loaded.model.base_model
    with torch.no_grad():
        for batch in data.batches:
            inner(**batch.inputs)


def ratios(ways: dict[str, Callable[[], object]], rounds: int, goals: Sequence[float]) -> list[Figure]:
    """The time of all ways but the first over the first one's, round by round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, function in ways.items():
            times[name].append(seconds(function))
    for name, taken in times.items():
        print(f"  {name:<22} {statistics.median(taken):>8.2f} s", flush=True)
    (what, base), *others = times.items()
    return [ratio(f"{name} / {what}", taken, base, goal) for (name, taken), goal in zip(others, goals, strict=True)]


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="packaged")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repair-tokens", type=int, default=25_000)
    options = parser.parse_args(arguments)
    loaded = load_model(model_path(options.model), own_class=True)
    texts = tuple(pydoc_data.topics.topics.values())
    pieces = cut(loaded, Examples(texts, (None,) * len(texts)), options.length)
    whole = [p for p in pieces if p.tokens == options.length]
    scored = ready(loaded, whole[: options.texts], length=options.length)
    refit = ready(loaded, deal(whole, {"repair": Share(1, options.repair_tokens)})["repair"], length=options.length)
    with evaluating(loaded.model):
        scored.loss.remember(loaded.model, scored.batches)
        outputs = find_outputs(loaded.model)
        task = Task(loaded.model, outputs, scored, ("head",))
        print(f"{type(loaded.model).__name__}: scores on {scored.tokens:,} tokens")
        ways: dict[str, Callable[[], object]] = {"forward and backward": lambda: train(loaded, scored)}
        for name in ("gradient", "surgeon"):
            ways[name] = lambda name=name: method_named(name).score(task)  # type: ignore[misc]  # bound to this name
        figures = ratios(ways, options.rounds, (1.5, 2))
        random = {n: s for (_, n), s in method_named("random").score(task).items()}
        gone = allocate(outputs, random, count_of(outputs, "head", 1 / 3))
        print(f"repair on {refit.tokens:,} tokens")
        copies = [zeroed_copy(loaded.model, gone)[0] for _ in range(options.rounds)]
        figures += ratios(
            {
                "forward": lambda: forward(loaded, refit),
                "repair": lambda: repair(loaded.model, copies.pop(), refit.batches),
            },
            options.rounds,
            (3,),
        )
    return figures


if __name__ == "__main__":
    print(table(main()))
