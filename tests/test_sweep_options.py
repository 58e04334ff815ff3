"""Numbers out of range, choices that do not exist, options that mean nothing together: refused, with nothing made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

from headscope.cli import main as entry
from tests.sweep import TEXT, Room, examples

Line = Callable[[Room], tuple[str, ...]]

# One that works, for each way to call a command; results go to the folder for results.
LINES: dict[str, Line] = {
    "analyze": lambda r: ("analyze", "-m", r.bert, TEXT),
    "analyze a corpus": lambda r: ("analyze", "-m", r.bert, "--data", r.texts),
    "heatmap": lambda r: ("heatmap", "-m", r.bert, TEXT, "-o", r.out("h.png")),
    "report": lambda r: ("report", "-m", r.bert, TEXT, "-o", r.out("r.html")),
    "verify": lambda r: ("verify", "-m", r.bert),
    "importance": lambda r: ("importance", "-m", r.llama, "--data", r.texts),
    "prune": lambda r: ("prune", "-m", r.llama, "--heads", "0:0-1"),
    "prune by scores": lambda r: ("prune", "-m", r.llama, "--method", "gradient", "--data", r.texts, "--drop", "0.3"),
    "curve": lambda r: ("prune", "-m", r.llama, "--data", r.texts, "--curve", r.out("c.png")),
    "convert": lambda r: ("convert", r.bert, "-o", r.out("c")),
    "compare": lambda r: ("compare", r.bert, r.bert, TEXT),
    "size": lambda r: ("size", r.bert),
    "size of numbers": lambda r: ("size", "--hidden-size", "64", "--heads", "4", "--layers", "2"),
    "docs": lambda r: ("docs",),
}

# ------------------------------------------------------------------ numbers
WORDS = ("", " ", "x", "1e30", "nan", "inf", "1.5", "0x10", "--", "1 2", "²", "\0")
COUNTS = ("0", "-1", "-99999999999999999999")
PLACES = ("-1", "-99999999999999999999")
NO_SHARES = ("0", "1.5", "-0.5", "nan", "inf", "-inf", "1e30", "1e400", "", "x", "30%")
NUMBERS: dict[tuple[str, str], tuple[str, ...]] = {
    **{("analyze", o): COUNTS + WORDS for o in ("--max-length", "--batch-size", "--generate")},
    **{("analyze a corpus", o): COUNTS + WORDS for o in ("--sample", "--workers")},
    ("analyze a corpus", "--until"): ("0", "-1", "nan", "-inf", "", "x", "1%"),
    **{("heatmap", o): COUNTS + WORDS for o in ("--max-length", "--generate", "--dpi")},
    ("heatmap", "--query"): PLACES + WORDS,
    ("heatmap", "--vmax"): ("0", "-1", "nan", "inf", "-inf", "", "x"),
    **{("report", o): COUNTS + WORDS for o in ("--max-length", "--batch-size", "--generate")},
    ("verify", "--seed"): ("4294967296", *PLACES, *WORDS),
    ("analyze", "--seed"): ("4294967296", *PLACES, *WORDS),
    **{("importance", o): COUNTS + WORDS for o in ("--tokens", "--max-length", "--batch-size")},
    ("prune by scores", "--drop"): NO_SHARES,
    **{("prune by scores", o): COUNTS + WORDS for o in ("--min-per-layer", "--steps", "--max-length", "--batch-size")},
    **{("compare", o): COUNTS + WORDS for o in ("--max-length", "--batch-size")},
    **{("size", o): COUNTS + WORDS for o in ("--length", "--batch-size")},
    **{
        ("size of numbers", o): COUNTS + WORDS
        for o in (
            "--hidden-size",
            "--heads",
            "--layers",
            "--kv-heads",
            "--head-dim",
            "--intermediate-size",
            "--vocab-size",
        )
    },
}
TEXTS_OF_NUMBERS = {
    ("prune", "--shapes"): ("", " ", ",", "x", "1", "1x", "x1", "0x1", "1x0", "-1x1", "1x1x1", "1e1x1",
    "1.5x1", "1x99999999"),
    ("prune by loss", "--until-drop"): ("", "%", "0", "0%", "-1%", "nan", "nan%", "inf%", "1%%", "x", "1e400"),
}  # fmt: skip
LINES["prune by loss"] = lambda r: ("prune", "-m", r.llama, "--method", "random", "--data", r.texts)

# ------------------------------------------------------------------ choices
NAMES = ("", " ", "x", "ALL", "\0", "🙂", "a" * 3000, "--")
CHOICES: dict[tuple[str, str], tuple[str, ...]] = {
    **{
        (line, "--format"): NAMES for line in ("analyze", "verify", "importance", "prune", "convert", "compare", "size")
    },
    **{(line, "--rules"): NAMES for line in ("analyze", "heatmap", "report", "compare")},
    **{(line, "--metrics"): (*NAMES, "sink,x", "core,x") for line in ("analyze", "report", "compare")},
    **{(line, "--engine"): NAMES for line in ("analyze", "heatmap", "report", "compare")},
    **{(line, "--types"): (*NAMES, "sink,x") for line in ("analyze", "report")},
    **{(line, "--device"): ("", "x", "cuda:99", "cpu:x", "\0") for line in ("analyze", "verify", "prune", "compare")},
    **{(line, "--dtype"): ("", "x", "int8", "nn", "\0") for line in ("analyze", "verify", "prune", "size", "convert")},
    ("analyze a corpus", "--runner"): NAMES,
    ("heatmap", "--kind"): NAMES,
    ("heatmap", "--cmap"): ("", "x", "\0"),
    ("heatmap", "--metric"): ("", "x"),
    ("verify", "--backend"): NAMES,
    ("importance", "--method"): NAMES,
    ("importance", "--with"): NAMES,
    ("importance", "--unit"): NAMES,
    ("prune by scores", "--unit"): NAMES,
    ("prune", "--save-as"): NAMES,
    ("prune", "--ragged"): NAMES,
    ("curve", "--curve-methods"): ("", ",", "x", "random,x"),
    ("convert", "--save-as"): NAMES,
}

# ------------------------------------------------------------------ options against each other
TOGETHER: tuple[tuple[str, str], ...] = (
    *(("analyze", given) for given in (
        "--ids 1", "--chat --pair x", "--chat --pre-split", "--generate 2 --pair x", "--split train", "--sample 2",
        "--until 0.1",
        "--runner local", "--workers 2", "--resume", "--checkpoint ck", "--text-column text", "--strict",
        "--ray-address a:1",
        "--per-text {out}/t.parquet", "--conllu x.conllu", "--mentions x.jsonl", "--haystack x.txt",
        "--types syntax", "--types coreference", "--types retrieval", "--decoder-text x", "--image {texts}",
        "--audio {texts}",
        "--output {out}", "--output {out}/x/y.json", "--output {out}/a.npz -f csv --weights {out}/a.npz",
        "--html {out}/a.txt",
        "--weights {out}/a.json", "--heatmaps {texts}", "--output {texts}", "--strict-length --max-length 2", "--chat",
    )),
    *(("analyze a corpus", given) for given in (
        "x", "--file {texts}", "--ids 1", "--image {texts}", "--audio {texts}", "--split train", "--ray-address a:1",

        "--generate 2", "--chat", "--pair x", "--pre-split", "--text-column nope --data {jsonl}",
        "--decoder-text x --decoder-text y",
    )),
    *(("heatmap", given) for given in (
        "y", "--ids 1", "--kind map --query 1", "--kind map --vmax 1 --metric x", "--kind heads --metric sink",
        "--query 1 --layer 0",
        "--output {out}/h.txt", "--output {out}/h", "--output {texts}", "--output {out}/no/h.png",
    )),
    *(("report", given) for given in ("--ids 1", "--output {out}/r.txt", "--output {texts}", "--sample 2",
    "--types syntax")),
    *(("verify", given) for given in ("--explain L0H0 -f csv", "--text ''", "--output {out}/v.docx",
    "--explain L0H0,1")),
    *(("importance", given) for given in (
        "--with mean", "--method magnitude --with mean", "--method random --normalize",
        "--unit kv-group --head 0 --layer 7",
    )),
    *(("prune", given) for given in (
        "--drop 0.3", "--until-drop 1%", "--unit head", "--min-per-layer 2", "--steps 2", "--method gradient",
        "--scores x.json",
        "--data {texts}", "--repair-mlp", "--curve {out}/c.png", "--curve-methods random", "--shapes 1x8 --no-latency",
        "--save-as uniform", "--pad", "--output {texts}", "--eval {texts}x",
    )),
    *(("prune by scores", given) for given in (
        "--until-drop 1%", "--scores x.json", "--heads 0:0", "--repair-mlp", "--curve-methods random",
        "--method surgeon",
        "--method reconstruction", "--method x",
    )),
    *(("curve", given) for given in (
        "--drop 0.3", "--until-drop 1%", "--steps 2", "--output {out}/p", "--eval {texts}", "--shapes 1x8",
        "--dry-run", "--pad",
        "--allow-empty", "--heads 0:0", "--method random", "--curve {out}/c.txt", "--curve-methods x",
    )),
    *(("compare", given) for given in (
        "--ids 1", "--data {texts}", "--sample 2", "--text-column text", "--picture {out}/p.txt", "--picture {texts}",
        "--output {out}/a.csv --picture {out}/a.csv", "--layer 9",
    )),
    *(("size", given) for given in ("--hidden-size 64", "--name x", "--vocab-size 10", "--head-dim 3",
    "--output {out}/s.docx")),
    *(("size of numbers", given) for given in ("--kv-heads 3", "--hidden-size 63", "--intermediate-size 5 --heads 5")),
    *(("convert", given) for given in ("--output {texts}", "--pad --save-as masked")),
    *(("docs", given) for given in ("--output {out}", "--output {texts}", "--output {out}/no/x.md", "x", "--force x")),
)  # fmt: skip
MISSING = (
    "analyze", "heatmap x", "heatmap x -o h.txt", "report x", "importance", "prune", "prune --drop 0.3",
    "prune --method gradient",
    "prune --scores x.json", "convert", "convert x", "compare", "compare x", "compare {bert} {bert}", "size --heads 4",
    "analyze --decoder-text x", "analyze --file", "nope", "--nope", "analyze --nope x", "heatmap -o", "verify --layer",
)  # fmt: skip
RANDOM = 200

_ALL: tuple[tuple[str, tuple[str, ...]], ...] = tuple(
    (line, (f"{option}={value}",))
    for table in (NUMBERS, TEXTS_OF_NUMBERS, CHOICES)
    for (line, option), values in table.items()
    for value in values
)


def words(text: str, room: Room) -> list[str]:
    """The words of a command line as a shell would take them."""
    import shlex

    jsonl = room.file("one.jsonl", '{"text": "the cat"}')
    return shlex.split(text.format(out=room.out("").rstrip("/"), texts=room.texts, jsonl=jsonl, bert=room.bert))


@pytest.mark.parametrize("line", LINES)
def test_values_that_do_not_exist(line: str, room: Room) -> None:
    for own, options in _ALL:
        if own == line:
            room.refused(*LINES[line](room), *options)


@pytest.mark.parametrize(("line", "options"), TOGETHER)
def test_options_that_mean_nothing_together(line: str, options: str, room: Room) -> None:
    room.refused(*LINES[line](room), *words(options, room))


@pytest.mark.parametrize("line", MISSING)
def test_lines_that_lack_something(line: str, room: Room) -> None:
    room.refused(*words(line, room))


def numbers() -> set[tuple[str, str]]:
    """Command and option of all that take a number."""
    commands: Any = typer.main.get_command(entry.app)
    found = [(name, p) for name, command in commands.commands.items() for p in command.params]
    return {(name, p.opts[0]) for name, p in found if getattr(p.type_descriptor, "annotation", None) in (int, float)}


def test_every_number_of_every_command_is_swept() -> None:
    """A new option gets its row."""
    swept = {option for _, option in NUMBERS}
    assert len(numbers()) > 40
    assert not {option for _, option in numbers()} - swept


@examples(RANDOM)
@given(
    line=st.sampled_from(sorted(LINES)),
    options=st.lists(
        st.sampled_from(
            ["--layer", "--head", "--stack", "--format", "--seed", "--dtype", "--max-length", "--batch-size", "--data"]
        )
        | st.sampled_from(
            ["--force", "--quiet", "--pad", "--dry-run", "--words", "--chat", "--resume", "--normalize", "--matrix"]
        )
        | st.text("-09afx=, ", max_size=4),
        min_size=1,
        max_size=4,
    ),
)
def test_any_words_after_a_command_keep_to_the_contract(line: str, options: list[str], room: Room) -> None:
    room.judged(*LINES[line](room), "--nope", *options)


CASES = len(_ALL) + len(TOGETHER) + len(MISSING) + RANDOM
