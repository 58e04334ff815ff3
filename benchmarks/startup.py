"""How long `headscope --help` takes, against the `--help` of a Typer app that does nothing.

    python benchmarks/startup.py [--pairs 15]

Both run in fresh processes, in turns, so that a busy machine slows both alike. Goal: a ratio of at most 1.5.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRIVIAL = '''
import typer

app = typer.Typer()


@app.command()
def hello(name: str = "you") -> None:
    """Say hello."""
    print(f"hello {name}")


app()
'''


def seconds(command: list[str]) -> float:
    """Wall time of one run of `command`, which must succeed."""
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Time pairs of runs and print the medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        trivial = Path(folder) / "trivial.py"
        trivial.write_text(TRIVIAL, encoding="utf-8")
        commands = {
            "trivial --help": [sys.executable, str(trivial), "--help"],
            "headscope --help": [sys.executable, "-m", "headscope", "--help"],
            "headscope analyze --help": [sys.executable, "-m", "headscope", "analyze", "--help"],
        }
        for command in commands.values():
            seconds(command)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(pairs):
            for name, command in commands.items():
                times[name].append(seconds(command))
    base = times["trivial --help"]
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, base, strict=True))
        print(f"{name:26} {1000 * statistics.median(taken):6.0f} ms   ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
