"""The head catalogue in a terminal: each number is the object's, and nothing is lost at any width."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from rich.cells import cell_len

from headscope.heads.catalogue.result import Catalogue
from headscope.views.catalogue import catalogue_markdown, catalogue_tables
from headscope.views.columns import fitted
from headscope.views.tables import analysis_table, overview, table_text
from tests.catalogue_expected import check, expected, lines_at, parts_of
from tests.catalogue_samples import (
    ABLATION,
    COREFERENCE,
    RELATIONS,
    RETRIEVAL,
    catalogue,
    catalogued,
    similarity,
    type_record,
)
from tests.views_samples import analysis, model_heads

WIDTHS = (40, 57, 80, 100, 200)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_number_is_the_objects_and_none_is_lost_at_any_width(width: int) -> None:
    result = catalogued()
    lines = lines_at(catalogue_tables(result), width)
    assert max(map(cell_len, lines)) <= width
    sections = expected(result)
    parts = parts_of(lines, list(sections))
    assert list(parts) == list(sections)
    for title, (table, notes) in sections.items():
        check(parts[title], table, notes)


@pytest.mark.parametrize("width", WIDTHS)
def test_streams_without_unicode_get_ascii(width: int) -> None:
    result = catalogued()
    lines = lines_at(catalogue_tables(result), width, "ascii")
    assert max(map(len, lines)) <= width
    parts = parts_of(lines, list(expected(result)))
    for title, (table, notes) in expected(result).items():
        check(parts[title], table, [note.replace("±", "\\xb1") for note in notes])


def test_without_color_no_color_is_written_and_with_color_the_words_are_the_same() -> None:
    table = catalogue_tables(catalogued())
    plain = lines_at(table, 80)
    colored = lines_at(table, 80, TERM="xterm-256color")
    silent = lines_at(table, 80, TERM="xterm-256color", NO_COLOR="1")
    assert "\x1b" not in "".join(plain)
    assert any("\x1b[" in line for line in colored)
    assert not re.search(r"\x1b\[[\d;]*(3[0-8]|4[0-8]|9\d)", "".join(silent))
    for lines in (colored, silent):
        assert [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in lines] == [line.rstrip() for line in plain]


def test_the_overview_and_the_heads_tables_are_followed_by_the_catalogue_and_else_unchanged() -> None:
    result = catalogued()
    bare = dataclasses.replace(result, catalogue=None)
    untyped = analysis(model_heads(3, 4))
    shown, before = (lines_at(analysis_table(a), 100) for a in (result, bare))
    assert shown[: len(before) - 1] == before[:-1]
    assert shown[len(before) - 1 :] == ["", *lines_at(catalogue_tables(result), 100)]
    assert before == lines_at(overview(untyped), 100) == lines_at(analysis_table(untyped), 100)
    layer = dataclasses.replace(result, heads=result.heads[4:8])
    lines = lines_at(analysis_table(layer), 100)
    assert lines.index("head types") > next(i for i, line in enumerate(lines) if line.startswith("L1H3"))
    assert "head types" in table_text(result) and "head types" not in table_text(bare)


def test_nothing_is_shown_where_there_is_nothing_to_tell() -> None:
    heads = catalogued().heads
    empty = catalogue(heads, tables={"relations": ()}, summary={}, similarity=None, ablation=None)
    result = dataclasses.replace(catalogued(), catalogue=empty)
    text = "\n".join(lines_at(catalogue_tables(result), 100))
    for title in list(expected(result))[2:]:
        assert title not in text
    nothing = Catalogue((), {}, {}, {})
    assert catalogue_markdown(dataclasses.replace(result, catalogue=nothing)) == []
    assert not "".join(lines_at(catalogue_tables(dataclasses.replace(result, catalogue=nothing)), 80)).strip()


# ------------------------------------------------------------------ what need not be there
def test_several_stacks_are_named() -> None:
    heads = [*model_heads(1, 2, "encoder"), *model_heads(1, 2, "decoder")]
    heads[3] = dataclasses.replace(heads[3], types=(type_record("induction", 0.5),))
    rows = ({**RELATIONS[0], "stack": "encoder"},)
    retrieval = ({**RETRIEVAL[0], "stack": "decoder"},)
    made = catalogue(tuple(heads), tables={"relations": rows, "retrieval": retrieval}, ablation=None)
    text = "\n".join(
        lines_at(catalogue_tables(dataclasses.replace(analysis(heads), catalogue=made)), 200),
    )
    for name in ("decoder L0H1 0.500", "encoder L2H1", "decoder L2H1 0.337", "self L1H0 and self L2H2 0.042"):
        assert name in text


def test_the_closest_of_many_pairs_are_named_and_the_rest_counted() -> None:
    heads = catalogued().heads
    made = catalogue(heads, similarity=similarity(1013))
    lines = lines_at(catalogue_tables(dataclasses.replace(catalogued(), catalogue=made)), 400)
    line = next(line for line in lines if line.startswith("closest"))
    assert line.count(" L2H2 ") == 10 and line.rstrip().endswith("0.132 and 1,003 more")
    assert any("1,013 redundant pairs" in line for line in lines)


def test_an_ablation_check_of_one_head_without_others_says_so() -> None:
    nothing = dict.fromkeys(("mean", "sd", "min", "max", "ratio")) | {"missing": 1}
    found = {
        **ABLATION,
        "heads": ABLATION["heads"][:1],
        "draws": 1,
        "top": {**ABLATION["top"], "low": None, "high": None},
        "random": {**ABLATION["random"], "sd": None, "ratio": None},
        "same_layers": {**nothing, "first_copy": {"mean": None, "sd": None}},
    }
    made = catalogue(catalogued().heads, ablation=found)
    text = "\n".join(lines_at(catalogue_tables(dataclasses.replace(catalogued(), catalogue=made)), 300))
    assert "zeroing the strongest induction head adds 9.412 nats to a loss of 1.234" in text
    assert re.search(r"a random other head adds 1\.612 \(1 draw, 0\.911 to 2\.567\) *\n", text)
    assert "their layers have no others to compare with" in text
    assert re.search(r"the same heads add 0\.321 \[-0\.004, 0\.655\], random others 0\.211 ± 0\.052 *\n", text)


def test_a_coreference_table_without_a_gain_and_a_table_of_relations_that_are_all_rare() -> None:
    rare = tuple(r for r in RELATIONS if r["accuracy"] is None)
    tables = {"relations": rare, "coreference": COREFERENCE}
    made = catalogue(catalogued().heads, tables=tables, summary={})
    text = "\n".join(lines_at(catalogue_tables(dataclasses.replace(catalogued(), catalogue=made)), 200))
    assert "too rare to measure: 2 of 2" in text and "best offset" not in text
    assert "nearest mention, all" in text and " over " not in text.split("coreference:")[1].split("similarity")[0]


def test_numbers_that_round_to_zero_have_no_sign_and_those_that_are_none_are_dashes() -> None:
    row = {**RELATIONS[0], "difference": -0.0001, "diff_low": None, "chance": math.nan}
    made = catalogue(catalogued().heads, tables={"relations": (row,)})
    text = "\n".join(lines_at(catalogue_tables(dataclasses.replace(catalogued(), catalogue=made)), 200))
    line = next(line for line in text.split("\n") if line.startswith("det to head"))
    assert line.split()[-4:] == ["+0.000", "0.413", "1,234", "-"]


def test_columns_are_narrowed_where_two_do_not_fit_side_by_side() -> None:
    assert fitted([18, 4, 23], 60, 2) == [18, 4, 23]
    assert fitted([18, 4, 23], 40, 1) == [16, 4, 23]
    assert fitted([18, 4, 60], 40, 1) == [8, 4, 31]
    assert fitted([50], 40, 1) == [40]
