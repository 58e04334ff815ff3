"""Whether heads get the same numbers and labels however a model is run, and in half precision.

    python benchmarks/agreement.py [--model packaged|smollm2|DIRECTORY] [--lengths 12 40 150 512 1500] [--only PART ...]

Texts of Python's manual, of these lengths at most and none longer than the model reads. Three parts:

- `ways`: in float32 with 1, 2 and 4 threads, texts alone and together, tiles of other sizes, and each engine. Goal: no
  metric differs by more than 1e-5 from one thread, texts alone and the usual tiles (beyond 1 in relation to it: these
  are entropies and distances), and no label differs.
- `workers`: a corpus by one and by two processes. The same goal.
- `half`: bfloat16 and float16 against float32, each text on its own, with the seed and the calibrated rules. Goal: 98 %
  of all heads keep their label; those that do not are printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.figures import Figure, single, table
from benchmarks.models import model_path
from fixtures.texts import cut_texts
from headscope.attention import tiles
from headscope.corpus.command import analyze_corpus
from headscope.heads.analysis import analyze
from headscope.models.loading import LoadedModel, load_model
from headscope.results import Analysis, HeadRecord

MOST_DIFFERENCE, FEWEST_KEPT = 1e-5, 0.98
RULES = ("seed", "calibrated")


@dataclass(frozen=True)
class Way:
    """One way of running the same model on the same texts."""

    name: str
    threads: int = 1
    batch_size: int = 1
    engine: str = "streaming"
    tile: tuple[int, int] | None = None


BASE = Way("as a base")
WAYS = (
    Way("once more"),
    Way("2 threads", threads=2),
    Way("4 threads", threads=4),
    Way("all texts together", batch_size=64),
    Way("3 texts together, 2 threads", batch_size=3, threads=2),
    Way("tiles of 32 rows", tile=(32, 1 << 14)),
    Way("tiles of 300 rows", tile=(300, 1 << 17)),
    Way("the largest tiles", tile=(1024, 1 << 24)),
    Way("layer by layer", engine="layerwise"),
    Way("layer by layer, together, 2 threads", engine="layerwise", batch_size=64, threads=2),
    Way("all matrices at once", engine="full"),
)


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="packaged")
    parser.add_argument("--lengths", type=int, nargs="+", default=[12, 40, 150, 512, 1500])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    given = parser.parse_args(arguments)
    path = model_path(given.model)
    loaded = load_model(path, dtype="float32")
    texts = cut_texts(lambda text: len(loaded.tokenizer(text)["input_ids"]), given.lengths)
    return [figure for part in given.only for figure in PARTS[part](path, loaded, texts)]


# ------------------------------------------------------------------ in float32
def ways(_: str, loaded: LoadedModel, texts: list[str]) -> Iterator[Figure]:
    """One figure a way: the largest difference."""
    threads = torch.get_num_threads()
    base = run(loaded, texts, BASE)
    for way in WAYS:
        yield from differences(way.name, base, run(loaded, texts, way))
    torch.set_num_threads(threads)


def run(loaded: LoadedModel, texts: list[str], way: Way) -> Analysis:
    """All metrics of the texts, run this way."""
    torch.set_num_threads(way.threads)
    with tiles_of(way.tile):
        return analyze(
            loaded.model,
            texts,
            tokenizer=loaded.tokenizer,
            metrics="all",
            engine=way.engine,
            batch_size=way.batch_size,
        )


@contextmanager
def tiles_of(size: tuple[int, int] | None) -> Iterator[None]:
    """Within the block the streaming engine's tiles have so many rows and scores."""
    rows, cells = tiles.TILE_ROWS, tiles.tile_cells
    if size is not None:
        tiles.TILE_ROWS, tiles.tile_cells = size[0], lambda device: size[1]
    try:
        yield
    finally:
        tiles.TILE_ROWS, tiles.tile_cells = rows, cells


def workers(path: str, loaded: LoadedModel, texts: list[str]) -> Iterator[Figure]:
    """A corpus, by one process and by two."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "texts.jsonl"
        data.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
        one, two = (
            analyze_corpus(path, data=data, metrics="all", dtype="float32", workers=number) for number in (1, 2)
        )
    yield from differences("2 workers", one, two)
    yield from differences("a worker, texts at once", run(loaded, texts, BASE), one)


def differences(name: str, base: Analysis, other: Analysis) -> Iterator[Figure]:
    """The largest difference of a metric in millionths, and labels that differ."""
    pairs = list(zip(base.heads, other.heads, strict=True))
    worst = max(apart(a.metrics[name], b.metrics[name]) for a, b in pairs for name in a.metrics)
    labels = sum(a.pattern != b.pattern for a, b in pairs)
    yield single(f"float32, {name}: largest difference, millionths", 1e6 * worst, 1e6 * MOST_DIFFERENCE)
    yield single(f"float32, {name}: labels that differ of {len(pairs)}", labels, 0)


def apart(one: float | None, other: float | None) -> float:
    """Absolute up to 1, relative above; infinite where only one is measurable."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return abs(one - other) / max(1.0, abs(one))


# ------------------------------------------------------------------ in half precision
def half(path: str, loaded: LoadedModel, texts: list[str]) -> Iterator[Figure]:
    """Labels kept, over all texts, each on its own; every head that changes is printed."""
    for dtype in ("bfloat16", "float16"):
        rounded = load_model(path, dtype=dtype)
        for rules in RULES:
            kept, heads = 0, 0
            for text in texts:
                one, two = (
                    analyze(model.model, text, tokenizer=loaded.tokenizer, metrics="all", rules=rules)
                    for model in (loaded, rounded)
                )
                pairs = list(zip(one.heads, two.heads, strict=True))
                changed = [(a, b) for a, b in pairs if a.pattern != b.pattern]
                kept, heads = kept + len(pairs) - len(changed), heads + len(pairs)
                share = 1 - len(changed) / len(pairs)
                print(f"{dtype}, {rules}, {one.inputs.tokens} tokens, {two.engine}: {100 * share:.1f} % kept")
                for a, b in changed:
                    print(f"  {describe(a, b)}")
            what = f"{dtype}, {rules} rules: labels kept of {heads}, %"
            yield single(what, 100 * kept / heads, 100 * FEWEST_KEPT, at_least=True)


def describe(one: HeadRecord, other: HeadRecord) -> str:
    """A head whose label changes, and the metrics that changed most."""
    moved = sorted(one.metrics, key=lambda name: -apart(one.metrics[name], other.metrics[name]))[:4]
    values = ", ".join(f"{name} {one.metrics[name]:.4g} → {other.metrics[name]:.4g}" for name in moved)
    return f"{one.stack} {one.name}: {one.pattern} → {other.pattern} ({values})"


PARTS = {"ways": ways, "workers": workers, "half": half}


if __name__ == "__main__":
    print(table(main()))
