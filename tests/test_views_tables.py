"""The terminal's tables: no number, label or head is lost at any width, and untrusted text stays text."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from hypothesis import given
from rich.cells import cell_len
from rich.console import Console, RenderableType

from headscope.results import Analysis, HeadRecord, Spread
from headscope.views.columns import blocks_of
from headscope.views.labels import ink_on, label_styles, labels_shown, luminance, strongest
from headscope.views.tables import analysis_table, head_tables, header_lines, overview, table_text, warning_lines
from headscope.views.text import visible
from tests.views_samples import FEW, LABELS, analysis, hostile_analyses, model_heads, record

WIDTHS = (60, 80, 200)


def lines_at(renderable: RenderableType, width: int, encoding: str = "utf-8", color: bool = False) -> list[str]:
    """What a console of this width and encoding prints, line by line."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(
        file=stream, width=width, force_terminal=color, color_system="truecolor" if color else None, _environ={}
    )
    console.print(renderable)
    stream.flush()
    return raw.getvalue().decode(encoding).splitlines()


def cells_of(lines: list[str]) -> dict[str, list[str]]:
    """All words that stand on lines starting with a head's or layer's name, over all blocks."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if match := re.match(r"(L\d+(?:H\d+)?)\s", line):
            found.setdefault(match[1], []).extend(line.split()[1:])
    return found


def expected_cells(head: HeadRecord) -> list[str]:
    cells = [head.pattern, head.runner_up or "-"]
    for name, value in head.metrics.items():
        mark = "~" if name in head.at_chance else ""
        spread = (head.spread or {}).get(name)
        if value is None:
            cells.append("-")
        elif spread is not None and spread.low is not None and spread.high is not None:
            cells += [f"{value:.3f}", f"±{(spread.high - spread.low) / 2:.3f}{mark}"]
        else:
            cells.append(f"{value:.3f}{mark}")
    return cells


def rich_sample() -> Analysis:
    """Heads with many metrics, intervals, missing values, marks and grouped keys."""
    heads = []
    for head in model_heads(2, 13):
        metrics = (
            dict(head.metrics) | {f"metric_number_{i}": head.metrics["sink"] for i in range(6)} | {"special": None}
        )
        spread = {"sink": Spread(0.1, 0.2, 0.25, 9), "entropy": Spread(None, None, None, 1)}
        heads.append(
            dataclasses.replace(head, metrics=metrics, spread=spread, kv_head=head.head // 4, at_chance=("sink",))
        )
    return analysis(heads)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("sample", [analysis(model_heads(3, 12)), rich_sample()], ids=["core", "many"])
def test_head_tables_show_every_label_and_number(sample: Analysis, width: int) -> None:
    lines = lines_at(head_tables(sample), width)
    assert max(map(cell_len, lines)) <= width
    cells = cells_of(lines)
    assert set(cells) == {head.name for head in sample.heads}
    for head in sample.heads:
        shown = cells[head.name]
        for cell in expected_cells(head):
            assert cell in shown
        assert shown.count(f"{head.metrics['sink']:.3f}") >= list(head.metrics.values()).count(head.metrics["sink"]) - 1
        if head.rest_pattern is not None:
            assert head.rest_pattern in shown
    assert "…" not in "".join(lines)


def test_the_core_table_is_one_block_of_eighty_columns() -> None:
    lines = lines_at(head_tables(analysis(model_heads(1, 12)), header=False), 80)
    assert sum(line.startswith("head") for line in lines) == 1


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", [(6, 12), (3, 40), (2, 64), (12, 1)])
def test_the_overview_shows_every_head_every_count_and_the_strongest(shape: tuple[int, int], width: int) -> None:
    sample = analysis(model_heads(*shape))
    lines = lines_at(overview(sample, header=False), width)
    assert max(map(cell_len, lines)) <= width
    styles = labels_shown(sample)
    for layer in range(shape[0]):
        records = [head for head in sample.heads if head.layer == layer]
        letters = ""
        for head in records:
            rest = "" if head.rest_pattern is None else styles[head.rest_pattern].letter.lower()
            letters += styles[head.pattern].letter + rest
        rows = [line for line in lines if re.match(rf"L{layer}\s", line)]
        is_map = [not re.search(r"\d\.\d", row) and re.search("[A-Z]", row[3:]) is not None for row in rows]
        assert "".join("".join(row.split()[1:]) for row, yes in zip(rows, is_map, strict=True) if yes) == letters
        summary = " ".join(" ".join(row.split()[1:]) for row, yes in zip(rows, is_map, strict=True) if not yes)
        for label in {head.pattern for head in records}:
            best = strongest(records, label)
            count = sum(head.pattern == label for head in records)
            assert best is not None
            assert f"{count} H{best[0].head} {best[1]:.3f}" in summary


def test_strongest_is_the_largest_value_or_the_lowest_entropy() -> None:
    heads = [record(0, i, "focused", metrics={"entropy": value}) for i, value in enumerate([0.4, 0.1, None, 0.3])]
    assert strongest(heads, "focused") == (heads[1], 0.1)
    sinks = [record(0, i, "attention_sink", metrics={"sink": value}) for i, value in enumerate([0.5, 0.9, 0.7])]
    assert strongest(sinks, "attention_sink") == (sinks[1], 0.9)
    assert strongest(sinks, "broad") is None and strongest(sinks, "a_label_of_my_own") is None


def test_layers_with_different_numbers_of_heads_and_stacks_have_their_own_maps() -> None:
    ragged = [head for head in model_heads(3, 6, "cross") if head.head < 2 + 2 * head.layer]
    sample = analysis(model_heads(2, 3, "encoder") + ragged)
    lines = lines_at(analysis_table(sample, header=False), 80)
    assert [line for line in lines if line in ("encoder", "cross")] == ["encoder", "cross"]
    rows = [line.split()[1:] for line in lines[lines.index("cross") :] if re.match(r"L\d .*[A-Z]", line)]
    assert [len(row) for row in rows if not any("." in cell for cell in row)] == [2, 4, 6]


def test_the_overview_is_for_whole_models() -> None:
    whole = analysis(model_heads(3, 4))
    layer = dataclasses.replace(whole, heads=tuple(h for h in whole.heads if h.layer == 1))
    one_head = dataclasses.replace(whole, heads=tuple(h for h in whole.heads if h.head == 1))
    single = analysis(model_heads(1, 4))
    shown = {name: "\n".join(lines_at(analysis_table(a), 80)) for name, a in [("w", whole), ("l", layer)]}
    assert "L2H3" not in shown["w"] and "S=attention_sink" in shown["w"]
    assert "L1H3" in shown["l"]
    assert "L2H1" in "\n".join(lines_at(analysis_table(one_head), 80))
    assert "L0H3" in "\n".join(lines_at(analysis_table(single), 80))


def test_the_header_says_what_was_measured() -> None:
    text = "\n".join(lines_at(header_lines(analysis(model_heads(2, 4), texts=3)), 200))
    for fact in ("all-MiniLM-L6-v2", "BertModel", "float32", "3 texts, 39 tokens", "'[CLS]'", "seed: sink 0.4"):
        assert fact in text
    assert "2 layers × 4 heads" in text


@FEW
@given(hostile_analyses())
def test_hostile_text_stays_text(sample: Analysis) -> None:
    for width in (60, 200):
        for table in (head_tables(sample), overview(sample)):
            lines = lines_at(table, width)
            assert max(map(cell_len, lines)) <= width
            assert not re.search(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", "".join(lines))
    # A line 10,000 cells wide folds nothing, so every text must be there as it is.
    wide = "\n".join(lines_at(head_tables(sample), 10_000))
    for text in (sample.model.name, sample.heads[0].stack, sample.heads[0].pattern):
        assert visible(text).strip() in wide


def test_markup_in_names_is_not_obeyed() -> None:
    sample = analysis([record(0, 0, "[red]x[/red]")], name="[bold]m", warnings=("[blink]!\nnext",))
    text = table_text(sample)
    assert "[red]x[/red]" in text and "[bold]m" in text
    assert warning_lines(sample)[0].plain == "warning: [blink]!⏎next"


@pytest.mark.parametrize("width", WIDTHS)
def test_streams_without_unicode_get_ascii(width: int) -> None:
    heads = [dataclasses.replace(h, spread={"sink": Spread(0.1, 0.2, 0.3, 4)}) for h in model_heads(2, 3)]
    sample = analysis(heads, name="猫/модель")
    for table in (overview(sample), head_tables(sample)):
        lines = lines_at(table, width, encoding="ascii")
        assert max(map(len, lines)) <= width
    assert "\\u732b/" in "\n".join(lines)


def test_without_color_no_escape_is_written_and_with_color_the_words_are_the_same() -> None:
    sample = analysis(model_heads(3, 12))
    plain = lines_at(overview(sample), 80)
    colored = lines_at(overview(sample), 80, color=True)
    assert "\x1b" not in "".join(plain)
    assert any("\x1b[" in line for line in colored)
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in colored] == plain


def test_blocks_hold_every_column_once_and_fit() -> None:
    widths = [5, 10, 20, 7, 7, 30, 3]
    for max_width in range(1, 90):
        blocks = list(blocks_of(widths, max_width, 2))
        assert [i for block in blocks for i in block[1:]] == list(range(1, len(widths)))
        for block in blocks:
            assert block[0] == 0 and len(block) > 1
            assert len(block) == 2 or sum(widths[i] for i in block) + 2 * (len(block) - 1) <= max_width


def test_labels_have_letters_of_their_own_and_readable_ink() -> None:
    styles = label_styles([*LABELS, "induction", "sharp", "sharper", "broad", "πρώτο"])
    assert len({style.letter for style in styles.values()}) == len(styles) == 11
    assert [styles[label].letter for label in LABELS] == list("SPIFBN?")
    for style in styles.values():
        low, high = sorted((luminance(style.fill), luminance(style.ink)))
        assert (high + 0.05) / (low + 0.05) >= 4.5
    assert (ink_on("#000000"), ink_on("#FFFFFF")) == ("#FFFFFF", "#000000")
    assert luminance("#FFFFFF") == pytest.approx(1.0) and luminance("#000000") == 0.0
