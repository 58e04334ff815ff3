"""How sure an analysis over several texts is: marks, shares and counts are there at any width, and only then."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from rich.cells import cell_len
from rich.console import Console, RenderableType

from headscope.results import Analysis, CorpusInfo, HeadRecord, Spread
from headscope.views.label_map import LabelMap
from headscope.views.labels import labels_shown, strongest
from headscope.views.sections import by_stack, percent, stability_note
from headscope.views.tables import head_tables, header_lines, overview, table_text
from tests.views_samples import FEW, LABELS, analysis, hostile_analyses, model_heads, record

WIDTHS = (60, 80, 100)
SHARES = (1.0, 0.9, 0.8999, None, 0.5, 0.29)
CORPUS = CorpusInfo("corpus.jsonl", skipped=0, sample=None, until=None, reached=False, seed=0)


def lines_at(renderable: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, _environ={})
    with console.capture() as found:
        console.print(renderable)
    return found.get().splitlines()


def over_texts(heads: Sequence[HeadRecord]) -> list[HeadRecord]:
    """The same heads with every kind of stability in turn; some of those that are not stable split."""
    made = []
    for place, head in enumerate(heads):
        share = SHARES[place % len(SHARES)]
        second = LABELS[place % len(LABELS)] if share is not None and share < 0.6 else None
        made.append(
            dataclasses.replace(
                head, stability=share, second=second, second_share=None if second is None else 0.25 + place / 1000
            )
        )
    return made


def is_low(head: HeadRecord) -> bool:
    return head.stability in (0.8999, 0.5, 0.29)


def one_line(lines: Sequence[str]) -> str:
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("shape", [(6, 12), (4, 16), (3, 40), (2, 64), (12, 1)])
def test_the_map_marks_the_heads_whose_label_is_not_stable(shape: tuple[int, int], sinks: bool, width: int) -> None:
    sample = analysis(over_texts(model_heads(*shape, sinks=sinks)))
    styles = labels_shown(sample)
    lines = lines_at(LabelMap(by_stack(sample)["self"], styles), width)
    assert max(map(cell_len, lines)) <= width
    for layer in range(shape[0]):
        rows = [line.split(" ", 1)[1] for line in lines if line.startswith(f"L{layer} ")]
        letters = "".join(rows).replace(" ", "")
        cells = re.findall(r"[A-Z?][a-z]?\*?", letters)
        assert "".join(cells) == letters
        heads = [head for head in sample.heads if head.layer == layer]
        assert [cell.endswith("*") for cell in cells] == [is_low(head) for head in heads]
        assert [cell[0] for cell in cells] == [styles[head.pattern].letter for head in heads]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("heads", [model_heads(3, 12), over_texts(model_heads(3, 12)), over_texts(model_heads(2, 20))])
def test_a_number_stands_over_the_letter_of_its_head(heads: list[HeadRecord], width: int) -> None:
    sample = analysis(heads)
    numbers, *rows = lines_at(LabelMap(by_stack(sample)["self"], labels_shown(sample)), width)
    for found in re.finditer(r"\d+", numbers):
        assert all(row[found.start()].isupper() for row in rows[:2])
    assert {"0", "5"} <= set(numbers.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_overview_counts_and_explains_them_and_marks_the_strongest(width: int) -> None:
    sample = analysis(over_texts(model_heads(6, 12)))
    lines = lines_at(overview(sample), width)
    assert max(map(cell_len, lines)) <= width
    low, known = sum(map(is_low, sample.heads)), sum(head.stability is not None for head in sample.heads)
    sentence = f"* {low} of {known} labels are not stable: on more than 10 % of the texts these heads have another"
    assert sentence in one_line(lines)
    for layer in range(6):
        records = [head for head in sample.heads if head.layer == layer]
        summary = one_line([line for line in lines if re.match(rf"L{layer}\s.*\d\.\d", line)])
        for label in {head.pattern for head in records}:
            best = strongest(records, label)
            assert best is not None
            assert f"H{best[0].head}{'*' if is_low(best[0]) else ''} {best[1]:.3f}" in summary


@pytest.mark.parametrize("width", (*WIDTHS, 200))
def test_head_tables_show_how_stable_a_label_is_and_the_second_where_it_splits(width: int) -> None:
    sample = analysis(over_texts(model_heads(2, 12)))
    lines = lines_at(head_tables(sample, header=False), width)
    assert max(map(cell_len, lines)) <= width
    shown = {1.0: "100 %", 0.9: "90 %", 0.8999: "89 %*", 0.5: "50 %*", 0.29: "29 %*", None: "-"}
    for head in sample.heads:
        row = one_line([re.sub(r"^\S+", "", line) for line in lines if line.startswith(f"{head.name} ")])
        second = "-" if head.second_share is None else f"{head.second} {int(head.second_share * 100 + 1e-6)} %"
        assert row.startswith(f"{head.pattern} {shown[head.stability]} ")
        assert f" {second} " in row
    legend = one_line(lines)
    assert "stable: the share of texts" in legend and "second: the other label" in legend
    assert "* 12 of 20 labels are not stable" in legend


def test_nothing_of_it_is_said_of_one_text() -> None:
    text = table_text(analysis(model_heads(3, 12))) + table_text(analysis(model_heads(1, 12)))
    assert "stable" not in text and "second" not in text and "*" not in text and "texts" not in text


def test_what_is_counted_is_said_in_words_that_fit() -> None:
    def note(*shares: float | None) -> str:
        heads = [dataclasses.replace(record(0, place), stability=share) for place, share in enumerate(shares)]
        return stability_note(analysis(heads))

    assert note(None, None) == ""
    assert note(1.0, 0.9) == "every label is stable: 90 % of the texts or more give the head the same"
    assert note(0.8, 1.0, None) == "* 1 of 2 labels is not stable: on more than 10 % of the texts this head has another"
    assert note(*[0.5] * 1200).startswith("* 1,200 of 1,200 labels are not stable")
    text = table_text(analysis([dataclasses.replace(head, stability=0.95) for head in model_heads(2, 3)]))
    assert "every label is stable" in text and "*" not in text


def test_shares_are_rounded_down_whatever_their_binary_digits() -> None:
    assert [percent(n / 100) for n in range(101)] == [f"{n} %" for n in range(101)]
    assert [percent(share) for share in (0.8999, 0.99999, 2 / 3)] == ["89 %", "99 %", "66 %"]


def test_an_interval_that_is_not_symmetric_is_shown_by_half_its_width() -> None:
    head = record(0, 0, metrics={"sink": 0.15}, spread={"sink": Spread(0.3, 0.1, 0.5, 9)})
    assert "0.150 ±0.200" in table_text(analysis([head]))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "corpus.jsonl: 1,234 texts, 456,789 tokens, 1,012 cut short"),
        ({"skipped": 3000, "sample": 1234}, ", 1,012 cut short, 3,000 skipped; a sample of 1,234 (seed 0)"),
        ({"sample": 2000, "seed": 7}, "; a sample of at most 2,000 (seed 7)"),
        ({"until": 0.01, "reached": True}, "; stopped when every interval was at most 0.01 wide (seed 0)"),
        ({"until": 0.01}, "; not every interval is at most 0.01 wide (seed 0)"),
        ({"until": 0.5, "reached": True, "sample": 1234}, "; a sample of 1,234, stopped when every interval was at"),
        ({"name": "a\x1b[31m\nb"}, r"a\x1b[31m⏎b: 1,234 texts"),
    ],
)
def test_the_header_says_which_texts_of_a_corpus_were_measured(changes: dict[str, object], expected: str) -> None:
    sample = analysis(over_texts(model_heads(2, 2)))
    inputs = dataclasses.replace(sample.inputs, texts=1234, tokens=456_789, truncated=1012)
    corpus = dataclasses.replace(CORPUS, **changes)  # type: ignore[arg-type]  # the fields' own types
    text = "\n".join(lines_at(header_lines(dataclasses.replace(sample, inputs=inputs, corpus=corpus)), 300))
    assert re.search(r"^texts +\S", text, re.MULTILINE) and expected in text
    assert "input" not in text and "position 0" not in text


@FEW
@given(hostile_analyses())
def test_hostile_names_of_second_labels_stay_text(result: Analysis) -> None:
    heads = [
        dataclasses.replace(h, stability=0.5, second=result.heads[0].pattern, second_share=0.5) for h in result.heads
    ]
    sample = dataclasses.replace(result, heads=tuple(heads))
    for table in (head_tables(sample), overview(sample)):
        lines = lines_at(table, 60)
        assert max(map(cell_len, lines)) <= 60
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", "".join(lines))
