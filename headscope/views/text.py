"""Untrusted text made safe to show: token strings, model and stack names, warnings.

Each function answers one question about one medium. `visible` comes first in all of them: it leaves letters of every
script alone and spells out what cannot be seen or what steers a terminal, a browser or a reader's eye.
"""

from __future__ import annotations

import html
import re
import unicodedata

from rich.cells import cell_len

ELLIPSIS = "…"
_SYMBOLS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
_UNSEEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Letters, marks and symbols by category that are nevertheless drawn as nothing.
_UNSEEN_CHARACTERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
_MARKS = frozenset({"Mn", "Me"})
_LONGEST_MARK_RUN = 3
_FORMULA_STARTS = frozenset("=+-@\t\r\n＝＋－＠")
_MARKDOWN_SPECIAL = re.compile(r"[\\`*\[\]{}|~$#!]|(?<![^\W_])_|_(?![^\W_])")


def escape_character(character: str) -> str:
    r"""One character as Python spells it: `\x1b`, `\u202e`, `\U0001f600`."""
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def visible(text: str) -> str:
    """`text` on one line, with everything unseen spelled out.

    Newline, tab and carriage return become symbols. Control and format characters (ANSI escapes, direction overrides,
    zero-width characters, byte-order marks), lone surrogates, unassigned characters and unusual spaces become escapes.
    A combining mark that would attach to whatever stands before the text gets a dotted circle, and no more than three
    marks in a row are kept as marks.
    """
    out = []
    marks = 0
    for character in text:
        category = unicodedata.category(character)
        marks = marks + 1 if category in _MARKS else 0
        if character in _SYMBOLS:
            out.append(_SYMBOLS[character])
        elif _unseen(character, category) or marks > _LONGEST_MARK_RUN:
            out.append(escape_character(character))
        elif marks and not out:
            out.append("◌" + character)
        else:
            out.append(character)
    return "".join(out)


def _unseen(character: str, category: str) -> bool:
    if category == "Zs":
        return character != " "
    return category in _UNSEEN_CATEGORIES or character in _UNSEEN_CHARACTERS


def token_label(token: str, width: int = 16) -> str:
    """A token as a label of at most `width` terminal cells; blanks are drawn as `␣` and the empty token as `∅`."""
    shown = visible(token)
    if not shown:
        return "∅"
    return shorten("␣" * len(shown) if shown.isspace() else shown, width)


def shorten(text: str, width: int) -> str:
    """`text` cut to at most `width` terminal cells, with an ellipsis where something is missing."""
    if cell_len(text) <= width:
        return text
    kept, used = [], 0
    for character in text:
        used += cell_len(character)
        if used > width - 1:
            break
        kept.append(character)
    return "".join(kept) + ELLIPSIS


def ascii_only(text: str) -> str:
    """`text` for a stream that cannot carry Unicode: every other character is spelled out."""
    return text.encode("ascii", "backslashreplace").decode("ascii")


def csv_field(text: str) -> str:
    """A text field that no spreadsheet takes for a formula: an apostrophe stands before `=`, `+`, `-`, `@`.

    Only for text. Numbers, negative ones too, are written as numbers.
    """
    start = text.lstrip(" ")[:1]
    return ("'" if text[:1] in _FORMULA_STARTS or start in _FORMULA_STARTS else "") + visible(text)


def html_text(text: str) -> str:
    """`text` for HTML content or a quoted attribute."""
    return html.escape(visible(text), quote=True)


def markdown_text(text: str) -> str:
    """`text` for a paragraph or a table cell of GitHub's Markdown; an underscore inside a word needs no escape."""
    escaped = _MARKDOWN_SPECIAL.sub(lambda found: "\\" + found.group(), visible(text))
    return html.escape(escaped, quote=False)
