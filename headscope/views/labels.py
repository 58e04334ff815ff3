"""How a label looks: a letter that works without colour, and a colour that works for colour-blind readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase, digits

from headscope.results import Analysis, HeadRecord
from headscope.views.sections import UNSTABLE_MARK, unstable


@dataclass(frozen=True)
class LabelStyle:
    """One label's cell: a capital letter, its background and its ink as `#rrggbb`."""

    letter: str
    fill: str
    ink: str


# The eight colours of Okabe and Ito (2008), "Color Universal Design"; grey and white for the labels that say least.
_KNOWN = {
    "attention_sink": ("S", "#0072B2"),
    "prev_token": ("P", "#E69F00"),
    "next_token": ("N", "#F0E442"),
    "self_attend": ("I", "#009E73"),
    "focused": ("F", "#D55E00"),
    "broad": ("B", "#CCCCCC"),
    "unmeasurable": ("?", "#FFFFFF"),
}
_SPARE_FILLS = ("#CC79A7", "#56B4E9", "#000000")

# The metric that says how much of its label a head is, and whether more of it (1) or less (-1) is stronger.
_STRENGTH = {
    "attention_sink": ("sink", 1),
    "prev_token": ("prev_token", 1),
    "next_token": ("next_token", 1),
    "self_attend": ("self_attend", 1),
    "focused": ("entropy", -1),
    "broad": ("entropy", 1),
}


def luminance(color: str) -> float:
    """Relative luminance of `#rrggbb`, 0 to 1 (WCAG 2.1, section "relative luminance")."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(fill: str) -> str:
    """Black or white, whichever has more contrast with `fill`."""
    return "#000000" if luminance(fill) > 0.179 else "#FFFFFF"


def label_styles(labels: Iterable[str]) -> dict[str, LabelStyle]:
    """A style for each of the distinct `labels`, in the order of the rules; labels of a user's own rules come last."""
    given = list(dict.fromkeys(labels))
    order = [name for name in _KNOWN if name in given] + [name for name in given if name not in _KNOWN]
    taken = {letter for letter, _ in _KNOWN.values()}
    styles: dict[str, LabelStyle] = {}
    for name in order:
        if name in _KNOWN:
            letter, fill = _KNOWN[name]
        else:
            letter = _free_letter(name, taken)
            fill = _SPARE_FILLS[sum(n not in _KNOWN for n in styles) % len(_SPARE_FILLS)]
        taken.add(letter)
        styles[name] = LabelStyle(letter, fill, ink_on(fill))
    return styles


def _free_letter(label: str, taken: set[str]) -> str:
    wanted = [c for c in label.upper() if c in ascii_uppercase]
    return next((c for c in [*wanted, *ascii_uppercase, *digits] if c not in taken), "#")


def labels_shown(analysis: Analysis) -> dict[str, LabelStyle]:
    """Styles of the labels and rest patterns that occur in `analysis`."""
    rests = [record.rest_pattern for record in analysis.heads if record.rest_pattern is not None]
    return label_styles([*(record.pattern for record in analysis.heads), *rests])


def cell_letters(record: HeadRecord, styles: Mapping[str, LabelStyle]) -> str:
    """A head in the label map: its label's letter, then, small, what it does apart from the sink."""
    rest = styles[record.rest_pattern].letter.lower() if record.rest_pattern is not None else ""
    return styles[record.pattern].letter + rest


def marked(letters: str, record: HeadRecord) -> str:
    """`letters` with a mark behind them where the head's label is not stable."""
    return letters + UNSTABLE_MARK if unstable(record) else letters


def strongest(records: Sequence[HeadRecord], label: str) -> tuple[HeadRecord, float] | None:
    """Of the heads labelled `label`, the one that is most so, and the value that says it.

    None where no head has the label, or where the label belongs to no metric that was measured.
    """
    if label not in _STRENGTH:
        return None
    metric, sign = _STRENGTH[label]
    measured = [(r, value) for r in records if r.pattern == label and (value := r.metrics.get(metric)) is not None]
    return max(measured, key=lambda pair: sign * pair[1], default=None)
