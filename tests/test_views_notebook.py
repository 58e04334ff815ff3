"""The notebook's HTML is well formed, complete, and inert; views load neither torch nor transformers."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given

from headscope.results import Analysis, Spread
from headscope.views.notebook import analysis_html
from headscope.views.text import visible
from tests.views_samples import FEW, analysis, hostile_analyses, model_heads, record

VIEWS = ("text", "labels", "sections", "records", "columns", "label_map", "tables", "heatmaps", "notebook")


class Reader(HTMLParser):
    """Collects text, and fails on a tag or an attribute that we never write, or that is closed out of turn."""

    allowed = frozenset(["div", "table", "caption", "tr", "th", "td", "bdi", "details", "summary", "span"])

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.allowed
        assert {name for name, _ in attrs} <= {"style", "title", "class"}
        self.open.append(tag)
        self.titles += [value for name, value in attrs if name == "title" and value is not None]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(result: Analysis) -> list[str]:
    return reader_of(result).words


def reader_of(result: Analysis) -> Reader:
    reader = Reader()
    reader.feed(analysis_html(result))
    reader.close()
    assert reader.open == []
    return reader


@FEW
@given(hostile_analyses())
def test_hostile_text_is_shown_and_not_obeyed(result: Analysis) -> None:
    words = read(result)
    for text in (result.model.name, result.heads[0].pattern, result.heads[0].stack):
        assert visible(text) in ["", *words]
    for head in result.heads:
        assert head.name in words
        for name, value in head.metrics.items():
            assert value is None or f"{value:.3f}" + ("~" if name in head.at_chance else "") in words


def test_a_whole_model_has_its_label_map_and_every_head() -> None:
    result = analysis(model_heads(4, 6), warnings=("one <word>",))
    words = read(result)
    patterns = [(h.pattern, h.rest_pattern) for h in result.heads]
    assert words.count("Sp") == patterns.count(("attention_sink", "prev_token")) > 0
    assert {h.name for h in result.heads} <= set(words)
    assert "warning: one <word>" in words
    assert result._repr_html_() == analysis_html(result)


def test_what_several_texts_say_of_labels_and_values_is_shown_and_nothing_of_it_for_one() -> None:
    spread = {"sink": Spread(0.3, 0.1, 0.5, 1200)}
    heads = [record(layer, 0, metrics={"sink": 0.15}, spread=spread, at_chance=("sink",)) for layer in range(3)]
    split = dataclasses.replace(heads[0], stability=0.666, second="focused", second_share=0.25)
    sure = dataclasses.replace(heads[1], stability=0.9)
    found = reader_of(analysis([split, sure, heads[2]]))
    assert {"66 %*", "focused 25 %", "90 %", "stable", "second", "0.150~", " ±0.200", "B*"} <= set(found.words)
    assert "* 1 of 2 labels is not stable: on more than 10 % of the texts this head has another" in found.words
    assert found.titles[:3] == [
        "L0H0: broad on 66 % of the texts, focused 25 %",
        "L1H0: broad on 90 % of the texts",
        "L2H0: broad",
    ]
    assert found.titles[3:] == ["0.100 to 0.500 over 1,200 texts"] * 3
    one = " ".join(read(analysis(model_heads(3, 4))))
    assert not any(word in one for word in ("stable", "second", "*", "±"))


@FEW
@given(hostile_analyses())
def test_hostile_second_labels_are_shown_and_not_obeyed(result: Analysis) -> None:
    second = result.heads[0].pattern
    heads = [dataclasses.replace(h, stability=0.5, second=second, second_share=0.5) for h in result.heads]
    words = read(dataclasses.replace(result, heads=tuple(heads)))
    assert words.count(f"{visible(second)} 50 %") == len(heads)


@pytest.mark.parametrize("module", VIEWS)
def test_views_load_neither_torch_nor_transformers_and_no_matplotlib_before_a_picture(module: str) -> None:
    code = (
        f"import sys, headscope.views.{module}\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_drawing_loads_neither_torch_nor_transformers_nor_pyplot() -> None:
    code = (
        "import sys\n"
        "from tests.views_samples import analysis, model_heads\n"
        "from headscope.views.heatmaps import model_picture\n"
        "assert model_picture(analysis(model_heads(2, 3)))[1:4] == b'PNG'\n"
        "print(sorted({'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
