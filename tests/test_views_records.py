"""JSON, JSON Lines, CSV and Markdown hold what the analysis holds, whatever its text."""

from __future__ import annotations

import csv
import dataclasses
import html
import io
import json
import math
import re

import numpy as np
import pandas
import pytest
from hypothesis import given

from headscope.errors import InputError
from headscope.results import Analysis, Spread
from headscope.views.records import FORMATS, flat_records, format_for, output_format, render
from headscope.views.sections import metric_names
from headscope.views.text import csv_field, visible
from tests.views_samples import FEW, analysis, hostile_analyses, model_heads, record


def strict_json(text: str) -> object:
    """JSON without the NaN and Infinity that Python also reads."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


def over_texts(result: Analysis) -> Analysis:
    """The same heads over several texts: every second is stable, the others also have the first one's label."""
    second = result.heads[0].pattern
    heads = [
        dataclasses.replace(head, stability=2 / 3, second=second, second_share=1 / 3)
        if place % 2 == 0
        else dataclasses.replace(head, stability=0.95)
        for place, head in enumerate(result.heads)
    ]
    return dataclasses.replace(result, heads=tuple(heads))


@FEW
@given(hostile_analyses())
def test_json_reads_back_as_the_result(result: Analysis) -> None:
    assert strict_json(render(result, "json")) == result.to_dict()


@FEW
@given(hostile_analyses())
def test_jsonl_is_a_record_a_line(result: Analysis) -> None:
    lines = render(result, "jsonl").split("\n")
    assert lines.pop() == ""
    assert [strict_json(line) for line in lines] == result.to_dict()["heads"]


@FEW
@given(hostile_analyses())
def test_machine_formats_are_ascii_or_utf8_without_control_characters(result: Analysis) -> None:
    assert render(result, "json").isascii()
    for name in ("csv", "markdown", "table"):
        text = render(over_texts(result), name)
        text.encode("utf-8")
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", text)


@FEW
@given(hostile_analyses())
def test_csv_reads_back_as_the_flat_records(result: Analysis) -> None:
    result = over_texts(result)
    rows = list(csv.DictReader(io.StringIO(render(result, "csv"))))
    flat = flat_records(result)
    assert len(rows) == len(flat)
    for row, expected in zip(rows, flat, strict=True):
        assert list(row) == list(expected)
        for key, value in expected.items():
            if value is None:
                assert row[key] == ""
            elif isinstance(value, str):
                assert row[key] == csv_field(value)
            else:
                assert type(value)(row[key]) == value


@FEW
@given(hostile_analyses())
def test_csv_text_starts_no_formula_and_numbers_stay_numbers(result: Analysis) -> None:
    for row in csv.DictReader(io.StringIO(render(over_texts(result), "csv"))):
        for key, field in row.items():
            if key in ("stack", "pattern", "runner_up", "rest_pattern", "at_chance", "second"):
                assert not field.startswith(tuple("=+-@\t\r\n"))
            elif field:
                float(field)


def test_csv_columns_are_those_of_the_contract() -> None:
    header = render(analysis(model_heads(2, 2)), "csv").splitlines()[0]
    assert header.startswith(
        "stack,layer,head,kv_head,pattern,runner_up,sink,prev_token,self_attend,entropy,rest_pattern,at_chance,"
    )


def test_csv_has_columns_for_stability_where_there_are_several_texts() -> None:
    one = analysis([record(0, 0), record(0, 1)])
    assert not {"stability", "second", "second_share"} & set(flat_records(one)[0])
    several = over_texts(analysis([record(0, 0, "=1+1"), record(0, 1)]))
    first, second = csv.DictReader(io.StringIO(render(several, "csv")))
    assert (first["stability"], first["second"], first["second_share"]) == (repr(2 / 3), "'=1+1", repr(1 / 3))
    assert (second["stability"], second["second"], second["second_share"]) == ("0.95", "", "")


def test_flat_records_have_the_same_keys_where_heads_measure_different_things() -> None:
    spread = {"sink": Spread(0.05, 0.4, 0.6, 3)}
    heads = [
        record(0, 0, metrics={"sink": 0.5}, spread=spread, at_chance=("sink",)),
        record(0, 1, metrics={"entropy": 1.5}),
    ]
    first, second = flat_records(analysis(heads))
    assert list(first) == list(second)
    assert (first["sink"], first["sink_low"], first["sink_high"], first["sink_sd"]) == (0.5, 0.4, 0.6, 0.05)
    assert (second["sink"], second["sink_low"], second["entropy"]) == (None, None, 1.5)
    assert (first["at_chance"], first["sink_chance"]) == ("sink", 0.0769)


def test_what_is_not_finite_is_null_and_numpy_numbers_are_numbers() -> None:
    metrics = {"a": float("nan"), "b": math.inf, "c": np.float32(0.25), "d": np.float64(0.1), "e": None}
    result = analysis([record(np.int64(0), np.int64(1), metrics=metrics)])  # type: ignore[arg-type]  # on purpose
    found = strict_json(render(result, "json"))["heads"][0]  # type: ignore[index]  # an object with a list
    assert found["metrics"] == {"a": None, "b": None, "c": 0.25, "d": 0.1, "e": None}
    row = next(csv.DictReader(io.StringIO(render(result, "csv"))))
    assert [row[name] for name in "abcde"] == ["", "", "0.25", "0.1", ""]


def test_floats_are_not_rounded() -> None:
    value = 0.1 + 0.2
    result = analysis([record(0, 0, metrics={"sink": value})])
    assert strict_json(render(result, "json"))["heads"][0]["metrics"]["sink"] == value  # type: ignore[index]
    assert f",{value!r}," in render(result, "csv")


def unescape_markdown(cell: str) -> str:
    return html.unescape(re.sub(r"\\([^\w\s]|_)", r"\1", cell))


@FEW
@given(hostile_analyses())
def test_markdown_tables_hold_every_label_and_number(result: Analysis) -> None:
    lines = [line for line in render(result, "markdown").split("\n") if line.startswith("| ")]
    names = metric_names(result)
    cells = [re.split(r"(?<!\\)(?:\\\\)*\|", line)[1:-1] for line in lines]
    assert {len(row) for row in cells} == {4 + len(names)}
    for row, head in zip(cells[2:], result.heads, strict=True):
        shown = [unescape_markdown(cell) for cell in row]
        assert shown[0].strip() == head.name
        for cell, label in zip(shown[1:4], (head.pattern, head.runner_up, head.rest_pattern), strict=True):
            assert cell == f" {visible(label or '')} "
        for cell, name in zip(shown[4:], names, strict=True):
            value = head.metrics.get(name)
            number = cell.strip().split(" ± ")[0].removesuffix("~")
            assert number == ("" if value is None else f"{value:.4f}")
            assert ("~" in cell) == (value is not None and name in head.at_chance)


@FEW
@given(hostile_analyses())
def test_markdown_shows_how_stable_labels_are_over_texts(result: Analysis) -> None:
    lines = render(over_texts(result), "markdown").split("\n")
    cells = [re.split(r"(?<!\\)(?:\\\\)*\|", line)[1:-1] for line in lines if line.startswith("| ")]
    assert {len(row) for row in cells} == {7 + len(metric_names(result))}
    second = visible(result.heads[0].pattern)
    for place, row in enumerate(cells[2:]):
        shown = [unescape_markdown(cell)[1:-1] for cell in row[4:7]]
        assert shown == (["66 %*", second, "33 %"] if place % 2 == 0 else ["95 %", "", ""])
    low, known = (len(result.heads) + 1) // 2, len(result.heads)
    assert any(line.startswith(rf"\* {low} of {known} label") for line in lines)


def test_markdown_says_what_stands_behind_values_only_where_something_does() -> None:
    assert "±" not in render(analysis([record(0, 0)]), "markdown")
    text = render(
        analysis([record(0, 0, metrics={"sink": 0.15}, spread={"sink": Spread(0.3, 0.1, 0.5, 9)})]), "markdown"
    )
    assert "0.1500 ± 0.2000" in text and "± half of a 95 % interval over texts" in text


def test_markdown_names_model_rules_and_warnings() -> None:
    result = analysis(model_heads(1, 2), warnings=("two | words",), name="a*b")
    text = render(result, "markdown")
    assert "- model: a\\*b" in text and "seed: sink 0.4" in text and "- two \\| words" in text


@pytest.mark.parametrize(
    ("path", "explicit", "expected"),
    [
        (None, None, "table"),
        ("out.JSON", None, "json"),
        ("a/b.jsonl", None, "jsonl"),
        ("out.csv", None, "csv"),
        ("out.md", None, "markdown"),
        ("out.txt", None, "table"),
        ("out.csv", "json", "json"),
        ("out", "markdown", "markdown"),
    ],
)
def test_the_suffix_chooses_unless_a_format_is_given(path: str | None, explicit: str | None, expected: str) -> None:
    assert format_for(path, explicit) == expected


def test_unknown_formats_are_refused_with_those_that_exist() -> None:
    with pytest.raises(InputError, match="unknown format 'yaml'") as found:
        format_for(None, "yaml")
    assert found.value.hint is not None and all(name in found.value.hint for name in FORMATS)
    with pytest.raises(InputError, match=r"'\.xlsx'") as found:
        format_for("out.xlsx")
    assert found.value.hint is not None and "--format" in found.value.hint


def test_a_new_format_is_one_decorated_function() -> None:
    try:
        output_format("count", suffixes=(".n",))(lambda result: f"{len(result.heads)}\n")
        assert render(analysis(model_heads(2, 3)), format_for("heads.n")) == "6\n"
    finally:
        del FORMATS["count"]


def test_an_analysis_without_heads_can_be_written() -> None:
    result = dataclasses.replace(analysis(model_heads(1, 1)), heads=())
    assert render(result, "csv").startswith("stack,layer,head,")
    assert render(result, "jsonl") == ""
    for name in ("json", "markdown", "table"):
        assert render(result, name)


def test_a_data_frame_has_the_flat_records() -> None:
    result = over_texts(analysis(model_heads(2, 3)))
    frame, records = result.to_dataframe(), flat_records(result)
    assert frame.shape == (6, len(records[0]))
    assert list(frame.columns) == list(records[0])
    for row, found in zip(records, frame.to_dict("records"), strict=True):
        for name, value in row.items():
            assert found[name] == value or (value is None and pandas.isna(found[name])), name
