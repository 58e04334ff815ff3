"""What the types of heads cost that are measured on the given text, against the core metrics alone.

    python benchmarks/catalogue.py [--model packaged|smollm2|DIRECTORY] [--length 1024] [--rounds 5]

In rounds: the core metrics, then the core metrics with all types that need no inputs of their own, of one text of
Python's help, in the same process. The ratio is the median over rounds; the goal is at most 1.3 at 1,024 tokens.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from collections.abc import Sequence

from benchmarks.figures import Figure, ratio, seconds, table
from benchmarks.models import model_path
from headscope.capture.evaluation import eager_evaluation
from headscope.heads.catalogue.text_types import TEXT_TYPES
from headscope.heads.measuring import Measuring
from headscope.heads.metrics import CORE
from headscope.heads.rules import load_rules
from headscope.models.inputs import prepare
from headscope.models.loading import load_model
from headscope.models.selection import parse_selection
from headscope.models.sites import find_sites

GOAL = 1.3


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Print a line a round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    loaded = load_model(model_path(given.model))
    text = " ".join(" ".join(t.split()) for t in pydoc_data.topics.topics.values())[: 8 * given.length]
    with eager_evaluation(loaded.model):
        prepared = prepare(loaded, texts=[text], max_length=given.length)
    sites, heads = find_sites(loaded.model), parse_selection("head", "all")
    core, types = (
        Measuring(loaded, sites, sites, heads, load_rules("seed"), CORE, types=kinds)
        for kinds in ((), tuple(TEXT_TYPES.values()))
    )
    types.run(prepared)
    plain, with_types = [], []
    for _ in range(given.rounds):
        plain.append(seconds(lambda: core.run(prepared)))
        with_types.append(seconds(lambda: types.run(prepared)))
        print(f"{prepared.tokens} tokens: core {plain[-1]:.2f} s, with {len(TEXT_TYPES)} types {with_types[-1]:.2f} s")
    return [ratio(f"types of the text / core metrics, {prepared.tokens} tokens", with_types, plain, GOAL)]


if __name__ == "__main__":
    print(table(main()))
