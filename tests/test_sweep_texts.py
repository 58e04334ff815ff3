"""Texts and token ids that nobody thinks of: measured where there is something to measure, else refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headscope.errors import InputError
from headscope.heads.analysis import analyze
from tests.sweep import Room, examples

BLANK = ("", " ", "\n\t\r", "\u00a0\u2003", "\u2028\u2029", "\x1c\x1f", "\x85")
# Half a character, as a terminal that is not UTF-8 gives it.
BROKEN = ("\udce9", "cat \ud83d", "\udc80\udcff")
STRANGE = {
    "one token": "a", "a null": "a\0b", "only a null": "\0", "a long word": "x" * 3000, "marks": "e" + "\u0301" * 500,
    "right to left": "שלום \u202eabc\u202c مرحبا", "bidi marks": "\u2066\u2069\u202e",
    "zero width": "\u200b\u200d\ufeff",
    "special": "[CLS] [SEP] [PAD] [MASK]", "an end": "<|endoftext|>", "ends": "<|endoftext|><|endoftext|>",
    "pieces": "<pad></s><unk>",
    "a family": "👩\u200d👩\u200d👧", "control": "\x01\x1b[31m\x7f", "private": "\ue000\U0010ffff\ufffe",
    "lines": "a\r\n\r\nb\u2028c",
    "markup": "[bold red]x[/] [/nope]", "HTML": "<script>x</script>&amp;", "maths": "$\\frac{1}{0}$ $",
    "a formula": "=1+1",
    "an option": "--layer=5", "wide": "ｃａｔ", "jamo": "ᄒ" * 30, "astral": "𝓬𝓪𝓽", "digits": "9" * 400,
    "braces": "{0} {x!r} %s",
}  # fmt: skip
MANNERS = (
    (),
    ("--words",),
    ("--exclude-special",),
    ("--max-length", "1"),
    ("--pre-split",),
    ("--metrics", "all"),
    ("--engine", "full"),
)
LONG = "the cat sat on " * 25_000
NO_IDS = (
    "", " ", ",", "-1", "+1", "1.0", "1e3", "0x1", "nan", "True", "a", "[1]", "1;2", "1_0", "٣", "²", "1 -2",
    "2147483648",
    "99999999999999999999", "9" * 5000, "400", "5 401", "\0", "1\u200b",
)  # fmt: skip
RANDOM = 60


@pytest.mark.parametrize("text", [*BLANK, *BROKEN], ids=ascii)
def test_what_is_no_text_is_refused_by_every_command(text: str, room: Room) -> None:
    said = [
        room.refused("analyze", "-m", room.bert, "--", text),
        room.refused("analyze", "-m", room.bert, "--", "the cat", text),
        room.refused("heatmap", "-m", room.bert, "-o", room.out("h.png"), "--", text),
        room.refused("report", "-m", room.bert, "-o", room.out("r.html"), "--", text),
        room.refused("compare", room.bert, room.bert, "--", text),
        room.refused("verify", "-m", room.bert, f"--text={text}"),
        room.refused("verify", "-m", room.bert, "--explain", "L0H0", f"--text={text}"),
    ]
    assert all("empty" in line or "UTF-8" in line for line in said)


@pytest.mark.parametrize("manner", MANNERS, ids=" ".join)
@pytest.mark.parametrize("kind", STRANGE)
def test_strange_texts_are_measured(kind: str, manner: tuple[str, ...], room: Room) -> None:
    """By a model whose tokenizer has a token for each byte; of a special token alone nothing may be left."""
    outcome = room.judged("analyze", "-m", room.llama, "-f", "json", *manner, "--", STRANGE[kind])
    nothing_left = "--exclude-special" in manner and kind in ("an end", "ends")
    assert outcome.code == (2 if nothing_left else 0)
    if not outcome.code:
        assert len(json.loads(outcome.out)["heads"]) == 8


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_texts_with_a_small_vocabulary(kind: str, room: Room) -> None:
    """What the vocabulary does not have is code 3, what vanishes code 2."""
    for model in (room.bert, room.t5):
        assert room.judged("analyze", "-m", model, "-f", "json", "--", STRANGE[kind]).code in (0, 2, 3)
    assert room.judged("verify", "-m", room.bert, "-f", "json", f"--text={STRANGE[kind]}").code in (0, 2, 3)


def test_a_corpus_that_the_tokenizer_does_not_know_leaves_nothing_to_go_on_with(room: Room) -> None:
    unknown = room.file("unknown.txt", "qqq zzz\nxxx\n")
    for output in ((), ("-o", room.out("heads.csv"))):
        said = room.refused("analyze", "-m", room.bert, "--data", unknown, *output, codes=(3,))
        assert "knows none of the texts" in said and "--resume" not in said


@pytest.mark.parametrize("model", ["bert", "llama"])
def test_100_000_tokens_are_cut_and_said_so_or_refused(model: str, room: Room) -> None:
    file = room.file("long.txt", LONG)
    path = getattr(room, model)
    outcome = room.judged("analyze", "-m", path, "--file", file, "-f", "json")
    assert outcome.code == 0 and "cut to 40 tokens" in outcome.err
    assert json.loads(outcome.out)["inputs"]["tokens"] == 40
    assert "40" in room.refused("analyze", "-m", path, "--file", file, "--strict-length")
    room.refused("analyze", "-m", path, "--ids", "5 " * 100_000, "--strict-length")


@pytest.mark.parametrize("ids", NO_IDS, ids=lambda ids: ascii(ids)[:20])
def test_ids_that_are_none(ids: str, room: Room) -> None:
    room.refused("analyze", "-m", room.bert, f"--ids={ids}")
    room.refused("analyze", "-m", room.bert, "--ids=5 6", f"--ids={ids}")
    room.refused("compare", room.bert, room.bert, f"--ids={ids}")


@examples(RANDOM)
@given(text=st.text(st.characters(), max_size=12))
def test_any_text_is_measured_or_refused(text: str, room: Room) -> None:
    outcome = room.judged("analyze", "-m", room.llama, "-f", "json", "--metrics", "sink", "--", text)
    broken = any("\ud800" <= character <= "\udfff" for character in text)
    assert outcome.code == (2 if broken or not text.strip() else 0)


@examples(RANDOM // 3)
@given(data=st.binary(max_size=12) | st.text(max_size=8).map(str.encode))
def test_any_bytes_are_a_text_or_refused(data: bytes, room: Room) -> None:
    for option in ("--file", "--data"):
        outcome = room.judged("analyze", "-m", room.llama, "-f", "json", "--metrics", "sink", option, "-", stdin=data)
        assert outcome.code in (0, 2)


@examples(RANDOM)
@given(text=st.text(st.characters(codec="utf-8"), max_size=12))
def test_the_python_api_takes_the_same_texts(text: str, room: Room) -> None:
    if text.strip():
        assert len(analyze(room.llama, text, metrics="sink").heads) == 8
    else:
        with pytest.raises(InputError, match="empty"):
            analyze(room.llama, text)


CASES = (
    7 * len(BLANK + BROKEN) + len(STRANGE) * (len(MANNERS) + 3) + 8 + 3 * len(NO_IDS) + 2 * RANDOM + 2 * (RANDOM // 3)
)
