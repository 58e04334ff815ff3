"""Untrusted text: nothing unseen, nothing that a terminal, spreadsheet, browser or Markdown reader would act on."""

from __future__ import annotations

import html
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from headscope.views.text import (
    ascii_only,
    csv_field,
    escape_character,
    html_text,
    markdown_text,
    shorten,
    token_label,
    visible,
)
from tests.views_samples import FEW, HOSTILE, hostile_text

UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@FEW
@given(hostile_text())
def test_visible_text_has_one_line_and_nothing_unseen(text: str) -> None:
    shown = visible(text)
    assert not {unicodedata.category(c) for c in shown} & UNSEEN
    assert not any(unicodedata.category(c) == "Zs" and c != " " for c in shown)
    assert len(shown.splitlines()) <= 1
    shown.encode("utf-8")


@FEW
@given(hostile_text())
def test_visible_text_is_visible_already(text: str) -> None:
    once = visible(text)
    assert visible(once) == once


@pytest.mark.parametrize(
    ("given_text", "shown"),
    [
        ("a\nb\tc\rd", "a⏎b⇥c␍d"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("a\u200bb\ufeff", "a\\u200bb\\ufeff"),
        ("\ud800", "\\ud800"),
        ("\xa0", "\\xa0"),
        ("\U000e0041", "\\U000e0041"),
        ("猫 שלום 🙂 é", "猫 שלום 🙂 é"),
        ("\u0301a", "◌\u0301a"),
        ("a" + "\u0301" * 5, "a\u0301\u0301\u0301\\u0301\\u0301"),
    ],
)
def test_visible_text_by_example(given_text: str, shown: str) -> None:
    assert visible(given_text) == shown


@FEW
@given(st.characters(exclude_categories=()))
def test_escapes_are_pythons_own(character: str) -> None:
    assert escape_character(character).encode("ascii").decode("unicode_escape") == character


@FEW
@given(hostile_text(), st.integers(1, 30))
def test_labels_are_no_wider_than_asked(text: str, width: int) -> None:
    label = token_label(text, width)
    assert 0 < cell_len(label) <= width
    assert label.strip()
    if cell_len(visible(text)) > width:
        assert label.endswith("…")


def test_blank_and_empty_tokens_can_be_seen() -> None:
    assert token_label("") == "∅"
    assert token_label("  ") == "␣␣"
    assert shorten("猫猫猫", 4) == "猫…"


@FEW
@given(hostile_text())
def test_ascii_text_is_ascii(text: str) -> None:
    assert ascii_only(visible(text)).isascii()


@FEW
@given(hostile_text())
def test_no_field_starts_a_formula(text: str) -> None:
    field = csv_field(text)
    assert field[:1] not in set("=+-@\t\r\n＝＋－＠")
    assert field.lstrip()[:1] not in set("=+-@")
    assert field.removeprefix("'") == visible(text).removeprefix("'")


@FEW
@given(hostile_text())
def test_html_reads_back_as_the_text_and_holds_no_tag(text: str) -> None:
    escaped = html_text(text)
    assert not re.search(r"[<>\"']", escaped)
    assert html.unescape(escaped) == visible(text)


@FEW
@given(hostile_text())
def test_markdown_reads_back_as_the_text_and_marks_nothing(text: str) -> None:
    escaped = markdown_text(text)
    assert "<" not in escaped and ">" not in escaped
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*\[\]$~]", re.sub(r"\\[^\w\s]", "", escaped))
    assert re.sub(r"\\([\\`*_\[\]{}|~$#!])", r"\1", html.unescape(escaped)) == visible(text)


def test_underscores_inside_a_label_stay_plain() -> None:
    assert markdown_text("attention_sink") == "attention_sink"
    assert markdown_text("_emphasis_") == "\\_emphasis\\_"


def test_hostile_samples_are_tame_everywhere() -> None:
    assert csv_field("=1+1") == "'=1+1"
    assert markdown_text("a|b") == "a\\|b"
    assert html_text("<b>") == "&lt;b&gt;"
    assert all(visible(token).isprintable() for token in HOSTILE)
