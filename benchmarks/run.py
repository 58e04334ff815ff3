"""All benchmarks, and one table of what they found against their goals.

    python benchmarks/run.py [--only NAME ...] [--output table.md]

Each runs in a process of its own, one after another, so leave the machine alone meanwhile: it takes about an hour on
two cores. Ratios are taken within a run; a busy machine widens their ranges.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.figures import Figure, table

# Name, module, arguments.
PLAN: tuple[tuple[str, str, list[str]], ...] = (
    ("startup", "startup", []),
    ("commands", "commands", []),
    ("capture", "capture", []),
    ("catalogue", "catalogue", []),
    ("corpus-packaged", "corpus", ["--model", "packaged"]),
    ("corpus-smollm2", "corpus", ["--model", "smollm2", "--texts", "100"]),
    ("corpus-memory", "corpus", ["memory"]),
    ("importance-packaged", "importance", ["--model", "packaged"]),
    ("importance-smollm2", "importance", ["--model", "smollm2", "--texts", "16", "--repair-tokens", "8192"]),
    ("prune", "prune", []),
    ("agreement-packaged", "agreement", ["--model", "packaged"]),
    ("agreement-smollm2", "agreement", ["--model", "smollm2", "--only", "half", "--lengths", "12", "40", "150", "512"]),
    ("repair", "repair", ["--repair", "57344"]),
    ("repair-groups", "repair", ["--repair", "57344", "--unit", "kv-group", "--shares", "0.3"]),
)


def figures_of(module: str, arguments: list[str]) -> list[Figure]:
    """Run one benchmark, here."""
    found: list[Figure] = importlib.import_module(f"benchmarks.{module}").main(arguments)
    return found


def main() -> None:
    """Run what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[name for name, _, _ in PLAN], metavar="NAME")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures: list[Figure] = []
    for name, module, arguments in PLAN:
        if options.only is None or name in options.only:
            print(f"== {name}", flush=True)
            # A fresh process: neither memory nor threads of one benchmark change the next.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                figures += pool.submit(figures_of, module, arguments).result()
            if options.output:
                options.output.write_text(table(figures) + "\n", encoding="utf-8")
    print(f"\n{table(figures)}")


if __name__ == "__main__":
    main()
