"""Scores and curves made by hand for the views' tests: no model is run."""

from __future__ import annotations

import numpy as np

from headscope.importance.result import GroupScore, HeadScore, Importance
from headscope.pruning.curve_result import Curve, Point
from headscope.results import ModelInfo, Stack


def model_info(name: str = "a/model", layers: int = 2, heads: int = 4, stack: str = "self") -> ModelInfo:
    numbers = tuple(range(layers))
    stacks = (Stack(stack, numbers, (heads,) * layers),)
    return ModelInfo(name, "llama", "LlamaForCausalLM", "float32", "cpu", layers, heads, heads, 8, 32, stacks)


def importance(
    num_layers: int, num_heads: int, *, group: int = 0, errors: bool = False, stack: str = "self", **changes
):
    """Scores of a few important heads and many others, as real ones are; with groups of `group` heads."""
    rng = np.random.default_rng(0)
    scores = np.exp(rng.normal(-7, 1.5, (num_layers, num_heads)))
    found = tuple(
        HeadScore(stack, i, j, float(scores[i, j]), float(scores[i, j] / (1 + j)) if errors else None)
        for i in range(num_layers)
        for j in range(num_heads)
    )
    groups = tuple(
        GroupScore(stack, i, j // group, tuple(range(j, j + group)), float(scores[i, j : j + group].sum()))
        for i in range(num_layers)
        for j in (range(0, num_heads, group) if group else ())
    )
    given = {
        "model": model_info(layers=num_layers, heads=num_heads, stack=stack),
        "method": "gradient",
        "replace": "zero",
        "normalised": False,
        "loss": "causal",
        "heads": found,
        "kv_groups": groups,
        "curves": (),
        "texts": 12,
        "tokens": 3072,
        "seed": 0,
        "versions": {"headscope": "0"},
    }
    return Importance(**given | changes)


# Added loss at 10, 20, 30 and 50 %, without and with repair.
COSTS = {
    "random": ((0.4, 1.1, 2.2, 5.1), (0.12, 0.35, 0.7, 1.5)),
    "gradient": ((0.058, 0.259, 0.715, 1.946), (0.028, 0.08, 0.2, 0.69)),
    "surgeon": (None, (0.008, 0.049, 0.076, 0.169)),
}


def curve(loss: str = "causal", scale: float = 1.0, unit: str = "head", **changes):
    """The curve of three methods; random is a band over five draws."""
    points = []
    for method, lines in COSTS.items():
        for repaired, line in enumerate(lines):
            for share, cost in zip((0.1, 0.2, 0.3, 0.5), line or (), strict=False):
                spread = 0.4 if method == "random" else 0.15
                low, added, high = (scale * cost * f for f in (1 - spread, 1, 1 + spread))
                seeds = 5 if method == "random" else 1
                points.append(Point(method, bool(repaired), share, round(270 * share), added, low, high, seeds))
    sizes = {"ranking": (24, 6120), "repair": (100, 25500), "selection": (16, 4080), "report": (16, 4080)}
    values = {
        "model": model_info(),
        "loss": loss,
        "unit": unit,
        "units": 270,
        "base": 2.9148,
        "points": tuple(points),
        "sizes": sizes,
        "seed": 0,
        "versions": {"headscope": "0"},
        "warnings": (),
    }
    return Curve(**values | changes)
