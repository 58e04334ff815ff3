"""How long `--help` of headscope and of each command takes, against the `--help` of a Typer app that does nothing.

    python benchmarks/startup.py [--pairs 9]

Both run in fresh processes, in turns, so that a busy machine slows both alike. Goal: a ratio of at most 1.5.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, ratio, seconds, table

ROOT = Path(__file__).parents[1]
GOAL = 1.5
COMMANDS = ("analyze", "heatmap", "verify", "importance", "prune", "convert", "compare", "report", "size", "docs")
TRIVIAL = '''
import typer

app = typer.Typer()


@app.command()
def hello(name: str = "you") -> None:
    """Say hello."""
    print(f"hello {name}")


app()
'''


def run(command: list[str]) -> None:
    """One run of `command`, which must succeed."""
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=True)


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Time pairs of runs and print the medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    pairs = parser.parse_args(arguments).pairs
    with tempfile.TemporaryDirectory() as folder:
        trivial = Path(folder) / "trivial.py"
        trivial.write_text(TRIVIAL, encoding="utf-8")
        commands = {
            "trivial --help": [sys.executable, str(trivial), "--help"],
            "headscope --help": [sys.executable, "-m", "headscope", "--help"],
        }
        for name in COMMANDS:
            commands[f"headscope {name} --help"] = [sys.executable, "-m", "headscope", name, "--help"]
        for command in commands.values():
            run(command)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(pairs):
            for name, command in commands.items():
                times[name].append(seconds(lambda command=command: run(command)))  # type: ignore[misc]  # bound
    base = times.pop("trivial --help")
    print(f"trivial --help: {1000 * statistics.median(base):.0f} ms")
    return [ratio(f"{name} / a trivial app's", taken, base, GOAL) for name, taken in times.items()]


if __name__ == "__main__":
    print(table(main()))
