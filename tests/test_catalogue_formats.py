"""The head catalogue in files and notebooks: the same numbers in every format, and text that stays text."""

from __future__ import annotations

import csv
import dataclasses
import html
import io
import json
import math
import re
from typing import Any

from hypothesis import given
from rich.cells import cell_len

from headscope.heads.catalogue.result import Catalogue, TypeInfo
from headscope.results import Analysis
from headscope.views.catalogue import catalogue_markdown, catalogue_tables
from headscope.views.notebook import analysis_html
from headscope.views.records import render
from headscope.views.tables import head_tables
from headscope.views.text import visible
from tests.catalogue_expected import expected, lines_at, squeezed
from tests.catalogue_samples import (
    ABLATION,
    BAD_TOKENS,
    COREFERENCE,
    RELATIONS,
    SUMMARY,
    catalogue,
    catalogued,
    example,
    type_record,
)
from tests.test_views_notebook import reader_of
from tests.test_views_records import strict_json
from tests.views_samples import FEW, analysis, hostile_text, model_heads

# ------------------------------------------------------------------ heads
NAMES = {
    "L0H1": "previous_token",
    "L1H0": "induction, redundant",
    "L1H2": "syntax, redundant",
    "L2H1": "induction, syntax",
    "L2H3": "induction",
}


def test_heads_tables_name_the_types_of_each_head_in_every_format() -> None:
    result = catalogued()
    lines = [line for line in lines_at(head_tables(result), 200) if re.match(r"L\dH\d", line)]
    for line, head in zip(lines, result.heads, strict=True):
        assert re.split(r"\s{2,}", line.strip())[-1] == NAMES.get(head.name, "-")
    rows = [line for line in render(result, "markdown").split("\n") if re.match(r"\| L\dH\d ", line)]
    assert [row.split("|")[-2].strip() for row in rows] == [NAMES.get(h.name, "") for h in result.heads]
    cells = re.findall(r"<tr><td[^>]*>(L\dH\d)</td>.*?<td[^>]*>([^<>]*)</td></tr>", analysis_html(result))
    assert dict(cells[: len(result.heads)]) == {h.name: NAMES.get(h.name, "–") for h in result.heads}


def test_there_is_no_column_of_types_where_no_head_has_one() -> None:
    plain = dataclasses.replace(analysis(model_heads(1, 3)), catalogue=catalogue(tuple(model_heads(1, 3))))
    assert "types" not in "\n".join(lines_at(head_tables(plain), 100))
    assert "| types |" not in render(plain, "markdown")
    assert ">types<" not in analysis_html(plain)


def test_csv_has_names_of_types_and_a_score_of_every_type_and_head() -> None:
    result = catalogued()
    assert result.catalogue is not None
    rows = list(csv.DictReader(io.StringIO(render(result, "csv"))))
    scores = result.catalogue.scores
    assert list(rows[0])[-len(scores) - 1 :] == ["types", *(f"{name}_score" for name in scores)]
    for place, (row, head) in enumerate(zip(rows, result.heads, strict=True)):
        assert row["types"] == NAMES.get(head.name, "").replace(",", "")
        for name, values in scores.items():
            value = values[place]
            missing = value is None or math.isnan(value)
            assert row[f"{name}_score"] == ("" if missing else repr(value))
    assert rows[0]["induction_score"] == ""
    before = render(dataclasses.replace(result, catalogue=None), "csv").splitlines()[0]
    assert "types" not in before and "induction" not in before


def test_json_holds_evidence_and_catalogue_and_null_for_what_is_no_number() -> None:
    result = catalogued()
    found: Any = strict_json(render(result, "json"))
    assert found["catalogue"]["scores"]["induction"][0] is None
    assert found["catalogue"]["summary"]["more"]["share"] is None
    assert found["catalogue"]["relations"][0] == RELATIONS[0]
    assert found["catalogue"]["ablation"] == ABLATION
    assert found["catalogue"]["similarity"]["distance"][0] == [0.0, 0.042, None]
    assert found["catalogue"]["summary"]["coreference"] == SUMMARY["coreference"]
    head = next(h for h in found["heads"] if (h["layer"], h["head"]) == (1, 2))
    assert [t["type"] for t in head["types"]] == ["syntax", "syntax", "redundant"]
    assert head["types"][1]["alternative"] == {"name": "offset -1", "score": 0.338}
    assert head["types"][1]["example"]["keys"] == [{"position": 0, "token": "cat", "weight": 0.777}]
    lines = [json.loads(line) for line in render(result, "jsonl").splitlines()]
    assert lines == found["heads"]


# ------------------------------------------------------------------ Markdown and HTML
def from_markdown(text: str) -> str:
    return html.unescape(re.sub(r"\\([^\w\s]|_)", r"\1", text))


def test_markdown_holds_the_same_tables_and_lines() -> None:
    result = catalogued()
    parts = "\n".join(catalogue_markdown(result)).split("\n## ")[1:]
    wanted = expected(result)
    assert [part.split("\n")[0].lower() for part in parts] == list(wanted)
    for part, (table, notes) in zip(parts, wanted.values(), strict=True):
        lines = part.split("\n")
        cells = [[from_markdown(c) for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line[:1] == "|"]
        columns = [squeezed("".join(column)) for column in zip(*cells[:1], *cells[2:], strict=True)]
        assert columns == [squeezed(name + "".join(column)) for name, column in table.items()]
        assert [from_markdown(line[2:]) for line in lines if line.startswith("- ")] == list(notes)
    text = render(dataclasses.replace(result, warnings=("a warning",)), "markdown")
    assert text.index("## self") < text.index("## Head types") < text.index("## Warnings")
    assert "\n\n\n" not in text


def test_the_notebook_holds_the_same_tables_and_lines_folded_but_for_the_types() -> None:
    result = catalogued()
    found = reader_of(result)
    words = [word for word in found.words if word.strip()]
    after = words[words.index("head types") :]
    wanted: list[str] = []
    for title, (table, notes) in expected(result).items():
        wanted += [title, *table, *(cell for row in zip(*table.values(), strict=True) for cell in row), *notes]
    assert [squeezed(word) for word in after] == [squeezed(word) for word in wanted]
    assert analysis_html(result).count("<summary>") == len(expected(result))
    bare = analysis_html(dataclasses.replace(result, catalogue=None))
    assert "head types" not in bare and bare.count("<summary>") == 1


# ------------------------------------------------------------------ text that is not ours
def hostile(*tokens: str) -> Analysis:
    """A type, a table, a relation, a summary and an example named after these."""
    name = tokens[0]
    record = type_record(
        name,
        0.5,
        example=example(tokens[-1], *((token, 0.25) for token in tokens), text=" ".join(tokens)),
        alternative=(tokens[-1], 0.1),
        details={"relation": tokens[-1], "direction": tokens[0]},
    )
    result = catalogued()
    heads = (dataclasses.replace(result.heads[0], types=(record,)), *result.heads[1:])
    tables = {
        tokens[-1]: ({name: 1.5, "other": tokens[-1]}, {name: None, "other": True}),
        "relations": ({**RELATIONS[0], "relation": name, "direction": tokens[-1]},),
        "coreference": ({**COREFERENCE[0], "name": name},),
    }
    made = Catalogue(
        (TypeInfo(name, "", "", 12, 1, None, None), TypeInfo("x", "", "", 0, 0, None, tokens[-1])),
        {name: (0.25,) * len(heads)},
        tables,
        {name: tokens[-1], "coreference": {**SUMMARY["coreference"], "head": name}},  # type: ignore[dict-item]
        ablation={**ABLATION, "type": name},
    )
    return dataclasses.replace(result, heads=heads, catalogue=made)


def test_markup_in_tokens_and_names_is_shown_and_not_obeyed() -> None:
    for first, last in (("[bold]", "|"), ("<script>alert(1)</script>", "[/red]"), ("| --- |", "`*_$")):
        result = hostile(first, last)
        text = "\n".join(lines_at(catalogue_tables(result), 400))
        wanted = (
            f"'{last}' looks at '{first}' 0.250, '{last}' 0.250, in: {first} {last} (score 0.500, {last} alone 0.100)"
        )
        if len(first) <= 16:
            assert wanted in text
        for word in (first, last):
            assert text.count(word) >= 6
        markdown = "\n".join(catalogue_markdown(result))
        assert "<script>" not in markdown
        rows = [line for line in markdown.split("\n") if line.startswith("| ")]
        assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {4, 5, 6, 10}
        assert from_markdown(markdown).count(first) >= 6
        words = reader_of(result).words
        assert first in words and last in words
        assert "<script>" not in analysis_html(result)


@FEW
@given(hostile_text(), hostile_text())
def test_any_text_at_all_is_harmless(first: str, last: str) -> None:
    result = hostile(first or "a", last)
    unseen = r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    for width in (40, 100):
        lines = lines_at(catalogue_tables(result), width)
        assert max(map(cell_len, lines)) <= width
        assert not re.search(unseen, "\n".join(lines))
    for name in ("table", "csv", "markdown"):
        assert not re.search(unseen, render(result, name))
    strict_json(render(result, "json"))
    assert visible(last) in ["", *reader_of(result).words]


def test_tokens_that_cannot_be_seen_are_spelled_out() -> None:
    text = "\n".join(lines_at(catalogue_tables(hostile(*BAD_TOKENS)), 1000))
    looks = ", ".join(f"'{t}' 0.250" for t in ("[bold]", "|", "<script>", "a⏎b", "\\x1b[31m", "猫", "␣", "∅", "*_`$"))
    assert f"'*_`$' looks at {looks}, in: " in text
