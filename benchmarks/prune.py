"""What removing half of the packaged model's heads gains in time, against what counting operations promises.

    python benchmarks/prune.py [--threads 2] [--shapes 1x32,1x128,8x128,1x512] [--heads 6]

Every layer loses its first heads. Operations are the multiplications of all matrix products: projections, feed-forward,
and queries with keys and weights with values. `measured / ideal` is the time saved over the operations saved, each as a
share; above 1 is possible, since the softmax and its memory traffic count for nothing in operations.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

import headscope
from benchmarks.figures import Figure, single, table
from headscope.models.loading import load_model
from headscope.models.projections import projections
from headscope.models.sites import find_sites
from headscope.pruning.latency import SHAPES, measure_latency, parse_shapes


def operations(model: PreTrainedModel, batch: int, length: int) -> int:
    """Multiplications in the matrix products of one forward pass of an encoder without a head."""
    linear = sum(m.weight.numel() for name, m in model.named_modules() if is_in_a_layer(name, m))
    shapes = [projections(site).shape for site in find_sites(model)]
    attention = sum(s.num_heads * (s.head_dim + s.value_dim) for s in shapes)
    return batch * (length * linear + length**2 * attention)


def is_in_a_layer(name: str, module: nn.Module) -> bool:
    """The pooler reads one token only."""
    return isinstance(module, nn.Linear) and "pooler" not in name


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Measure and print one line a shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", type=parse_shapes, default=SHAPES)
    parser.add_argument("--heads", type=int, default=6, help="that each of the 6 layers loses, out of 12")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    before = load_model().model
    after = copy.deepcopy(before)
    report = headscope.prune_heads(after, {layer: range(options.heads) for layer in range(6)})
    share = 1 - report.params_after / report.params_before
    print(f"{report.params_before:,} parameters, {report.params_after:,} afterwards: {100 * share:.1f} % less")
    cells, conditions, _ = measure_latency(before, after, options.shapes)
    print(f"{conditions.attention} attention, {conditions.dtype}, {conditions.device}, {conditions.threads} threads")
    print("batch × length   before ms   after ms   time saved   operations saved   measured / ideal")
    figures = []
    for cell in cells:
        assert cell.length is not None
        counts = [operations(model, cell.batch, cell.length) for model in (before, after)]
        ideal, measured = 1 - counts[1] / counts[0], 1 - cell.ratio
        print(
            f"{cell.batch:>5} × {cell.length:<6} {cell.before_ms:11.1f} {cell.after_ms:10.1f} {100 * measured:10.1f} % "
            f"{100 * ideal:16.1f} % {measured / ideal:18.2f}{'   inside the noise' if cell.in_noise else ''}"
        )
        shape = f"{cell.batch} × {cell.length}"
        figures.append(single(f"half of the heads gone, {shape}: time after / before", cell.ratio, 1))
        figures.append(single(f"half of the heads gone, {shape}: time saved / operations saved", measured / ideal))
    return figures


if __name__ == "__main__":
    print(table(main()))
