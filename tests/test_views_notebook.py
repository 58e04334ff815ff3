"""The notebook's HTML is well formed, complete, and inert; views load neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given

from headscope.results import Analysis
from headscope.views.notebook import analysis_html
from headscope.views.text import visible
from tests.views_samples import FEW, analysis, hostile_analyses, model_heads

VIEWS = ("text", "labels", "sections", "records", "columns", "label_map", "tables", "heatmaps", "notebook")


class Reader(HTMLParser):
    """Collects text, and fails on a tag or an attribute that we never write, or that is closed out of turn."""

    allowed = frozenset(["div", "table", "caption", "tr", "th", "td", "bdi", "details", "summary", "span"])

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.allowed
        assert {name for name, _ in attrs} <= {"style", "title", "class"}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(result: Analysis) -> list[str]:
    reader = Reader()
    reader.feed(analysis_html(result))
    reader.close()
    assert reader.open == []
    return reader.words


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
