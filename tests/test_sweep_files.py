"""Files that are not there, not readable, or not what their name says, for every option that reads one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sweep import TEXT, Room, examples

Line = Callable[[Room, str], tuple[str, ...]]


def made(kind: str, suffix: str, room: Room) -> str:
    """The path of something that cannot serve."""
    name = f"{kind.replace(' ', '_')}{suffix}"
    contents = {
        "an empty file": b"",
        "a blank file": b" \n\t\n",
        "binary": bytes(range(128, 256)) * 8,
        "half a bracket": b"[" * 20_000,
        "UTF-32": "the cat".encode("utf-32"),
    }
    if kind in contents:
        return room.file(name, contents[kind])
    if kind == "a directory":
        (room.root / "files" / name).mkdir(exist_ok=True)
    targets = {"a null device": os.devnull, "an unreadable file": "/proc/self/mem", "a loop": name, "a dead link": "no"}
    if kind in targets and not os.path.lexists(room.root / "files" / name):
        (room.root / "files" / name).symlink_to(targets[kind])
    if kind == "below a file":
        return room.file("file", b"x") + f"/x{suffix}"
    return str(room.root / "files" / ("n" * 300 + suffix if kind == "a long name" else name))


NOWHERE = ("missing", "a directory", "a loop", "a dead link", "below a file", "a long name", "an unreadable file")
WRONG = ("a null device", "an empty file", "a blank file", "binary", "half a bracket", "UTF-32")
OPENED: dict[str, tuple[str, Line]] = {
    "analyze --file": (".txt", lambda r, p: ("analyze", "-m", r.bert, "--file", p)),
    "heatmap --file": (".txt", lambda r, p: ("heatmap", "-m", r.bert, "--file", p, "-o", r.out("h.png"))),
    "report --file": (".txt", lambda r, p: ("report", "-m", r.bert, "--file", p, "-o", r.out("r.html"))),
    "compare --file": (".txt", lambda r, p: ("compare", r.bert, r.bert, "--file", p)),
    **{
        f"analyze --data {suffix}": (suffix, lambda r, p: ("analyze", "-m", r.bert, "--data", p))
        for suffix in (".jsonl", ".csv", ".tsv", ".parquet", ".conllu", ".jsonl.gz", ".xyz")
    },
    "report --data": (".jsonl", lambda r, p: ("report", "-m", r.bert, "--data", p, "-o", r.out("r.html"))),
    "compare --data": (".csv", lambda r, p: ("compare", r.bert, r.bert, "--data", p)),
    "importance --data": (".jsonl", lambda r, p: ("importance", "-m", r.llama, "--data", p)),
    "prune --data": (".csv", lambda r, p: ("prune", "-m", r.llama, "--method", "gradient", "--data", p, "--drop",
    "0.3")),
    "prune --repair": (".parquet", lambda r, p: ("prune", "-m", r.llama, "--heads", "0:0-1", "--repair", p)),
    "prune --eval": (".jsonl", lambda r, p: ("prune", "-m", r.llama, "--heads", "0:0-1", "--eval", p, "-o",
    r.out("p"))),
    "prune --scores": (".json", lambda r, p: ("prune", "-m", r.bert, "--scores", p, "--drop", "0.3", "-o",
    r.out("p"))),
    "report --importance": (".json", lambda r, p: ("report", "-m", r.bert, TEXT, "-o", r.out("r.html"),
    "--importance", p)),
    "report --curve": (".csv", lambda r, p: ("report", "-m", r.bert, TEXT, "-o", r.out("r.html"), "--curve", p)),
    "analyze --rules": (".toml", lambda r, p: ("analyze", "-m", r.bert, TEXT, "--rules", p)),
    "heatmap --rules": (".toml", lambda r, p: ("heatmap", "-m", r.bert, TEXT, "--rules", p, "-o", r.out("h.png"))),
    "--conllu": (".conllu", lambda r, p: ("analyze", "-m", r.bert, TEXT, "--types", "syntax", "--conllu", p)),
    "--mentions": (".jsonl", lambda r, p: ("analyze", "-m", r.bert, TEXT, "--types", "coreference", "--mentions", p)),
    "--mentions in columns": (
        ".conll", lambda r, p: ("analyze", "-m", r.bert, TEXT, "--types", "coreference", "--mentions", p)
    ),
    "--needles": (
        ".jsonl",
        lambda r, p: ("analyze", "-m", r.llama, TEXT, "--types", "retrieval", "--haystack", r.texts, "--needles", p),
    ),
    "--image": (".png", lambda r, p: ("analyze", "-m", r.built("vit"), "--image", p)),
    "heatmap --image": (".jpg", lambda r, p: ("heatmap", "-m", r.built("vit"), "--image", p, "-o", r.out("h.png"))),
    "--audio": (".wav", lambda r, p: ("analyze", "-m", r.built("whisper"), "--audio", p)),
    "--model": (".gguf", lambda r, p: ("analyze", "-m", p, TEXT)),
    "--tokenizer": ("", lambda r, p: ("analyze", "-m", r.bert, "--tokenizer", p, TEXT)),
    "--checkpoint": ("", lambda r, p: ("verify", "-m", r.bert, "--checkpoint", p)),
    "convert": ("", lambda r, p: ("convert", p, "-o", r.out("c"))),
    "size": (".gguf", lambda r, p: ("size", p)),
    "compare MODEL_B": ("", lambda r, p: ("compare", r.bert, p, TEXT)),
}  # fmt: skip
RANDOM = 80


@pytest.mark.parametrize("kind", NOWHERE + WRONG)
@pytest.mark.parametrize("option", OPENED)
def test_files_that_cannot_serve_are_refused(option: str, kind: str, room: Room) -> None:
    suffix, line = OPENED[option]
    room.refused(*line(room, made(kind, suffix, room)), codes=(2, 3))


def test_a_file_without_an_end_is_given_up(room: Room) -> None:
    endless = Path(room.root, "files", "endless.toml")
    endless.symlink_to("/dev/zero")
    for option in ("analyze --file", "prune --scores", "report --curve", "analyze --rules"):
        assert "longer than 64 MB" in room.refused(*OPENED[option][1](room, str(endless)))


# ------------------------------------------------------------------ files that are nearly right
SCORES: dict[str, Any] = {
    "schema": "headscope/importance@1",
    "method": "gradient",
    "heads": [{"stack": "self", "layer": n // 4, "head": n % 4, "score": n / 8, "error": None} for n in range(8)],
    "kv_groups": [],
    "curves": [{"stack": "self", "layer": 0, "unit": "head", "order": [0, 1, 2, 3], "losses": [0, 1, 2, 3, 4]}],
    "texts": 3,
    "warnings": ["x"],
    "model": {"name": "x", "stacks": [{"name": "self", "layers": [0, 1], "num_heads": [4, 4]}]},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=3,
)


def places(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in nested lists and objects something can be replaced."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [before, *(place for key, inner in inside for place in places(inner, (*before, key)))]


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """A copy with something else at a place."""
    if not place:
        return new
    copy = deepcopy(value)
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = new
    return copy


@examples(RANDOM)
@given(place=st.sampled_from(places(SCORES)), new=VALUES)
def test_scores_with_something_else_in_them(place: tuple[Any, ...], new: Any, room: Room) -> None:
    path = room.file("scores.json", json.dumps(changed(SCORES, place, new)))
    assert room.judged(*OPENED["prune --scores"][1](room, path)[:-2], "--no-latency").code in (0, 2)


RULES = 'name = "mine"\nchoose = "first"\notherwise = "other"\n[[rule]]\nlabel = "a"\nmetric = "sink"\nabove = 0.3\n'
PARTS = ('"mine"', '"first"', '"other"', "[[rule]]", '"a"', '"sink"', "0.3", "above", "label", "choose", "name", "\n")
ODD = (
    "nan", "inf", "-1", "1e400", "9" * 5000, '""', '"x"', '" "', "[1]", "{a = 1}", "true", "1979-05-27", "[rule]",
    "below",
    "[" * 3000, "largest", '"largest"', '"entropy"', '"sink_rest_rest"', '"a\\nb"', '"\\u001b[2J"', "\0", "# ",
    "a.b.c",
)  # fmt: skip
TOML = st.sampled_from(ODD) | st.text(max_size=3)


@examples(RANDOM)
@given(part=st.sampled_from(PARTS), new=TOML)
def test_rules_with_something_else_in_them(part: str, new: str, room: Room) -> None:
    path = room.file("rules.toml", RULES.replace(part, new, 1))
    line = ("analyze", "-m", room.bert, "--ids", "2 5 3", "--layer", "0", "-f", "json", "--rules", path)
    assert room.judged(*line).code in (0, 2)


CURVE = (
    "method,repaired,unit,share,count,added,low,high,seeds,perplexity_rise\n"
    "random,False,head,0.1,1,0.5,0.4,0.6,3,0.6\ngradient,False,head,0.1,1,0.2,,,1,0.3\n"
)
CONLLU = "# text = the cat\n1\tthe\tthe\tDET\t_\t_\t2\tdet\t_\t_\n2\tcat\tcat\tNOUN\t_\t_\t0\troot\t_\t_\n\n"
MENTIONS = '{"tokens": ["the", "cat", "sat", "it"], "sentences": [0, 2], "clusters": [[[0, 2, 1], [3, 4]]]}\n'
NEEDLES = '{"needle": "the cat sat on a mat", "question": "where?", "answer": "a mat"}\n'
NEARLY = {"report --curve": CURVE, "--conllu": CONLLU, "--mentions": MENTIONS, "--needles": NEEDLES}


@examples(RANDOM)
@given(
    option=st.sampled_from(sorted(NEARLY)), at=st.integers(0, 200), take=st.integers(0, 12),
    new=st.text(max_size=3) | st.sampled_from(["\t", "\n\n", "9" * 5000, "nan", '"', "[" * 3000, "\0", "\udcff", "-1"]),
)  # fmt: skip
def test_tables_and_lines_with_something_else_in_them(option: str, at: int, take: int, new: str, room: Room) -> None:
    suffix, line = OPENED[option]
    right = NEARLY[option]
    at %= len(right)
    path = room.file(f"nearly{suffix}", right[:at] + new + right[at + take :])
    # Of a layer that is not there: what is right is refused for that.
    room.refused(*line(room, path), "--layer", "7", codes=(2, 3))


CASES = len(OPENED) * len(NOWHERE + WRONG) + 4 + 3 * RANDOM
