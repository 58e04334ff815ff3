"""Text in pictures: fonts that have the characters, labels that fit, nothing read as mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

from headscope.views.text import escape_character, shorten, token_label, visible

# In order of preference; the first is matplotlib's own. Bitmap emoji fonts are left out: Agg cannot draw them.
_FAMILIES = (
    "DejaVu Sans",
    "Noto Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "PingFang SC",
    "Hiragino Sans",
    "Apple SD Gothic Neo",
    "Noto Sans Arabic",
    "Noto Sans Hebrew",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Noto Emoji",
    "Segoe UI Symbol",
    "Arial Unicode MS",
    "Unifont",
)
_NICE_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


@cache
def font_families() -> tuple[str, ...]:
    """The families to draw with: those of the list that are installed."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return tuple(family for family in _FAMILIES if family in installed)


@cache
def _characters(family: str) -> frozenset[int]:
    return frozenset(FT2Font(font_manager.findfont(family)).get_charmap())


def drawable(text: str) -> str:
    """`text` made visible, with each character that no installed font has spelled out, so that tokens stay apart."""
    return "".join(c if c == " " or _has_glyph(c) else escape_character(c) for c in visible(text))


def _has_glyph(character: str) -> bool:
    return any(ord(character) in _characters(family) for family in font_families())


def figure_label(token: str, width: int = 14) -> str:
    """A token as an axis label of at most `width` characters."""
    return shorten(drawable(token_label(token, width)), width)


def tick_step(count: int, room: int) -> int:
    """How many positions one tick stands for, so that at most `room` ticks are drawn: 1, 2, 5, 10, 20, …"""
    needed = -(-count // max(room, 1))
    return next((step for step in _NICE_STEPS if step >= needed), needed)


def tick_labels(tokens: Sequence[str], room: int) -> tuple[list[int], list[str]]:
    """Tick positions and labels for an axis with room for `room` of them; thinned labels carry their position."""
    step = tick_step(len(tokens), room)
    positions = list(range(0, len(tokens), step))
    labels = [figure_label(tokens[i]) for i in positions]
    if step > 1:
        labels = [f"{i}: {label}" for i, label in zip(positions, labels, strict=True)]
    return positions, labels
