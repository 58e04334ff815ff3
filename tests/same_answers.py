"""Command lines whose results must be the same bytes wherever and whenever they run.

`python -m tests.same_answers DECODER ENCODER` runs them in the working directory, which gets all that they write.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from headscope.cli.main import main

TEXT = "The cat sat on the mat because it was tired, and the dog sat on the cat."
# Of each command what it writes, and what it prints as `NAME.out`.
COMMANDS = {
    "analyze": "analyze TEXT -m DECODER --metrics all -f json",
    "labels": "analyze --data texts.txt -m ENCODER --rules calibrated",
    "types": "analyze TEXT -m DECODER --types all --seed 7 -f json",
    "importance": "importance --data texts.txt -m DECODER -f json",
    "random": "importance --method random --seed 3 -m DECODER -f csv",
    "prune": "prune --heads 0:1 -m ENCODER --repair texts.txt --no-latency --seed 5 -f json -o smaller",
    "compare": "compare ENCODER smaller TEXT -f json",
    "report": "report TEXT -m DECODER -o page.html",
    "png": "heatmap TEXT -m ENCODER --layer 0 --head 1 -o head.png",
    "svg": "heatmap TEXT -m ENCODER --layer 1 -o layer.svg",
    "pdf": "heatmap TEXT -m ENCODER --layer 0 --head 0 -o head.pdf",
    "docs": "docs -o reference.md",
}


def run_all(decoder: str, encoder: str) -> dict[str, int]:
    """Exit codes by command; what is printed goes to files in the working directory."""
    Path("texts.txt").write_text("\n".join(" ".join(TEXT.split()[i:]) for i in range(12)), encoding="utf-8")
    values = {"TEXT": TEXT, "DECODER": decoder, "ENCODER": encoder}
    return {name: _run(name, [values.get(word, word) for word in line.split()]) for name, line in COMMANDS.items()}


def _run(name: str, argv: list[str]) -> int:
    sys.argv = ["headscope", *argv]  # the page shows it
    with open(f"{name}.out", "w", encoding="utf-8") as out, open(f"{name}.err", "w", encoding="utf-8") as err:
        try:
            with redirect_stdout(out), redirect_stderr(err):
                main(argv)
        except SystemExit as exc:
            return int(exc.code or 0)
    raise AssertionError("a command ends its process")


def written(folder: Path) -> dict[str, bytes]:
    """Everything in the folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


if __name__ == "__main__":
    failed = {name: code for name, code in run_all(*sys.argv[1:3]).items() if code}
    sys.exit(f"failed: {failed}" if failed else 0)
