"""Layers, heads and stacks as nobody should write them: what names nothing is refused, the rest is what it says."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.sweep import Room, examples

LAYERS, HEADS = 2, 4
# Neither layers nor heads, in any command.
UNREADABLE = (
    "", "  ", ",", "0,", ",0", "0,,1", "ALL", "all,1", "one", "1.0", "1e0", "nan", "0x1", "+1", "--1", "-", "--", "0-",
    "-1-0", "1-0", "0:1", "0;1", "0 1", "L0", "[0]", "*", "٣", "²", "0\0", "\u200b0", "9" * 30, "0" * 12, "a" * 5000,
    "🙂",
)  # fmt: skip
ABSENT = ("4", "-5", "0-4", "99", "999999999", "-999999999", "0,7")
NO_STACKS = (
    "decoder",
    "SELF",
    "*",
    ".",
    "..",
    "encoder.",
    "encoder.layer.0.attention.self.query.weight",
    "\0",
    "a" * 3000,
)
NO_HEADS = (
    "", ":", "0:", ":0", "0", ";", "0:0;", ";0:0", "0:0;;1:0", "0:4", "2:0", "0:0-4", "0:1-0", "0:-1", "-1:0", "0:1-",
    "0:,0", "0:0,", "0:0,,1", "0:٣", "L0H", "LH", "l0h0", "L0H9", "L٣H0", "L0H0,1", "decoder.0:0", ".0:0", "self.:0",
    "self..0:0", "0:0:0", "0:ALL", "0:all,1", "all:0", "0,1:0", "0-1:0", "0:1e1", "0:0.5", "0:nan", "0:+1", "0:[0]",
    "9999999999:0", "0:9999999999", "0:0/1", "🙂", "0:0\0", "0:all;1:all", "a" * 5000 + ":0",
)  # fmt: skip
NO_HEAD = (
    "",
    "L0",
    "H0",
    "L0H",
    "L0H4",
    "L2H0",
    "L-1H0",
    "L0H-1",
    "L0H0,1",
    "L٣H0",
    "decoder.L0H0",
    "0:0;1:0",
    "all",
    "🙂",
)
RANDOM = 150


def analyze(room: Room, option: str, value: str) -> tuple[str, ...]:
    return ("analyze", "-m", room.bert, "--ids", "2 5 6 3", "--metrics", "sink", "-f", "json", f"{option}={value}")


COMMANDS = {
    "analyze": lambda room: ("analyze", "-m", room.bert, "--ids", "2 5 3"),
    "heatmap": lambda room: ("heatmap", "-m", room.bert, "--ids", "2 5 3", "-o", room.out("h.png")),
    "report": lambda room: ("report", "-m", room.bert, "--ids", "2 5 3", "-o", room.out("r.html")),
    "importance": lambda room: ("importance", "-m", room.bert, "--method", "random"),
    "compare": lambda room: ("compare", room.bert, room.bert, "--ids", "2 5 3"),
    "verify": lambda room: ("verify", "-m", room.bert),
}
OPTIONS = tuple(
    (name, option) for name in COMMANDS for option in ("--layer", "--head") if (name, option) != ("verify", "--head")
)


@pytest.mark.parametrize("value", UNREADABLE)
def test_what_cannot_be_read_is_refused_by_every_command(value: str, room: Room) -> None:
    for name, option in OPTIONS:
        said = room.refused(*COMMANDS[name](room), f"{option}={value}")
        assert f"cannot read {option}" in said or "null byte" in said or "UTF-8" in said


@pytest.mark.parametrize("value", ABSENT)
@pytest.mark.parametrize("option", ["--layer", "--head"])
def test_numbers_that_do_not_exist_name_those_that_do(option: str, value: str, room: Room) -> None:
    said = room.refused(*analyze(room, option, value))
    assert (
        "does not exist in" in said
        and f"Valid {option[2:]}s: 0-{(LAYERS if option == '--layer' else HEADS) - 1}" in said
    )


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("value", NO_STACKS)
def test_stacks_that_do_not_exist(name: str, value: str, room: Room) -> None:
    assert "stack" in room.refused(*COMMANDS[name](room), f"--stack={value}")


@pytest.mark.parametrize("value", NO_HEADS)
def test_heads_that_cannot_be_removed(value: str, room: Room) -> None:
    for output in ((), ("-o", room.out("pruned"))):
        room.refused("prune", "-m", room.bert, f"--heads={value}", "--no-latency", *output)


@pytest.mark.parametrize("value", NO_HEAD)
def test_heads_that_cannot_be_explained(value: str, room: Room) -> None:
    room.refused("verify", "-m", room.bert, f"--explain={value}")


def named(text: str, count: int) -> set[int] | None:
    """The numbers that a selection means, by the letter of the manual; None where it is wrong."""
    if text.strip() == "all":
        return set(range(count))
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(-?[0-9]{1,9})|([0-9]{1,9})\s*-\s*([0-9]{1,9}))\s*", part)
        if match is None:
            return None
        low, high = (int(match[1]),) * 2 if match[1] else (int(match[2]), int(match[3]))
        low, high = (n + count if match[1] and match[1].startswith("-") and n else n for n in (low, high))
        if not 0 <= low <= high < count:
            return None
        found |= set(range(low, high + 1))
    return found


@examples(RANDOM)
@given(option=st.sampled_from(["--layer", "--head"]), value=st.text("0123-, al٣", max_size=5))
@example(option="--head", value="-4--1")
@example(option="--layer", value=" all ")
def test_any_selection_is_what_the_manual_says_or_refused(option: str, value: str, room: Room) -> None:
    wanted = named(value, LAYERS if option == "--layer" else HEADS)
    outcome = room.judged(*analyze(room, option, value))
    assert outcome.code == (2 if wanted is None else 0)
    if wanted is not None:
        assert {head[option[2:]] for head in json.loads(outcome.out)["heads"]} == wanted


@examples(RANDOM)
@given(value=st.text("0123:;,-LHal. ", max_size=8))
def test_any_heads_to_remove_keep_to_the_contract(value: str, room: Room) -> None:
    assert room.judged("prune", "-m", room.bert, f"--heads={value}", "--no-latency", "-f", "json").code in (0, 2)


CASES = (
    len(UNREADABLE) * len(OPTIONS) + 2 * len(ABSENT) + len(NO_STACKS) * len(COMMANDS) + 2 * len(NO_HEADS) + len(NO_HEAD)
    + 2 * RANDOM
)  # fmt: skip
