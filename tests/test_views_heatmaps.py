"""Pictures: right pixels, readable labels, no half-written files, no noise on the terminal."""

from __future__ import annotations

import dataclasses
import errno
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.errors import InputError, ResourceError
from headscope.results import Analysis
from headscope.views import heatmaps
from headscope.views.attention_figures import grid_columns, head_figure, layer_figure
from headscope.views.figure_base import COLOR_MAP, figure_style
from headscope.views.figure_text import drawable, figure_label, tick_labels, tick_step
from headscope.views.heatmaps import file_stems, head_picture, layer_picture, model_picture, write_heatmaps
from headscope.views.map_figure import map_figure, metric_grid
from headscope.views.sections import by_stack
from tests.views_pictures import one_map, panel_box, pixels
from tests.views_samples import HOSTILE, TOKENS, analysis, causal_map, hostile_text, model_heads, record


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Every warning is an error: a glyph that is missing, text that does not fit."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(("size", "row", "column"), [(2, 0, 1), (5, 4, 0), (9, 2, 7), (30, 29, 13)])
def test_the_brightest_cell_is_where_the_weight_is(size: int, row: int, column: int) -> None:
    weights = np.full((1, size, size), 0.1)
    weights[0, row, column] = 0.9
    result, attention = one_map(weights)
    with figure_style():
        figure = head_figure(result, attention, 0)
        figure.set_dpi(100)
        panel = panel_box(figure, 0, pixels(head_picture(result, attention, 0, dpi=100)), 100)
    top = (255 * np.array(matplotlib.colormaps[COLOR_MAP](1.0)[:3])).round()
    rows, columns = np.nonzero(np.abs(panel - top).max(-1) <= 2)
    assert np.median(rows) * size // panel.shape[0] == row
    assert np.median(columns) * size // panel.shape[1] == column
    assert len(rows) >= 0.7 * panel.shape[0] * panel.shape[1] / size**2


def test_lightness_grows_with_the_weight() -> None:
    weights = np.linspace(0, 1, 8)[None, None, :]
    result, attention = one_map(weights)
    with figure_style():
        figure = head_figure(result, attention, 0)
        figure.set_dpi(100)
        panel = panel_box(figure, 0, pixels(head_picture(result, attention, 0, dpi=100)), 100)
    centres = ((np.arange(8) + 0.5) * panel.shape[1] / 8).astype(int)
    grey = panel[panel.shape[0] // 2, centres] @ np.array([0.299, 0.587, 0.114])
    assert (np.diff(grey) > 5).all()


@pytest.mark.parametrize("size", [1, 2, 13, 700])
def test_every_length_gives_a_picture_of_bounded_size(size: int) -> None:
    attention = causal_map(0, 2, [f"t{i}" for i in range(size)])
    result = analysis(model_heads(1, 2))
    for png in (head_picture(result, attention, 1), layer_picture(result, attention)):
        height, width, _ = pixels(png).shape
        assert 150 < width < 1500 and 150 < height < 1500


@pytest.mark.parametrize("shape", [(3, 400), (400, 3), (1, 7)])
def test_queries_and_keys_may_differ_in_number(shape: tuple[int, int]) -> None:
    result, attention = one_map(np.random.default_rng(0).random((3, *shape)))
    for png in (head_picture(result, attention, 2), layer_picture(result, attention)):
        assert max(pixels(png).shape) < 1500


@settings(max_examples=8, deadline=None)
@given(st.lists(hostile_text(), min_size=1, max_size=6))
def test_hostile_tokens_are_drawn_as_they_are(tokens: list[str]) -> None:
    result, attention = one_map(np.ones((1, len(tokens), len(tokens))), tuple(tokens))
    result = dataclasses.replace(result, model=dataclasses.replace(result.model, name="".join(tokens)))
    assert pixels(head_picture(result, attention, 0, dpi=50)).size
    with figure_style():
        labels = head_figure(result, attention, 0).axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == [figure_label(token) for token in tokens]
    assert not any(label.get_parse_math() for label in labels)


def test_all_samples_of_hostile_text_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    names = ("$x_1$", "[red]\n", "=1+1")
    heads = [record(0, i, name, stack="$\\frac{", rest_pattern=name) for i, name in enumerate(names)]
    attention = dataclasses.replace(causal_map(0, 3, HOSTILE), stack="$\\frac{")
    result = analysis(heads, name="$\\undefined_{", tokens=HOSTILE, maps=(attention,))
    for png in (head_picture(result, attention, 0), layer_picture(result, attention), model_picture(result)):
        assert pixels(png).size
    assert capfd.readouterr() == ("", "")


def test_a_users_settings_neither_matter_nor_change() -> None:
    result, attention = one_map(np.eye(3)[None])
    usual = head_picture(result, attention, 0)
    with matplotlib.rc_context({"text.usetex": True, "font.size": 40, "image.cmap": "jet", "savefig.dpi": 10}):
        before = dict(matplotlib.rcParams)
        assert head_picture(result, attention, 0) == usual
        assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(("file_format", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_formats(file_format: str, start: bytes) -> None:
    result, attention = one_map(np.eye(4)[None], HOSTILE[:4])
    assert head_picture(result, attention, 0, file_format=file_format).startswith(start)
    assert model_picture(result, file_format=file_format).startswith(start)


@given(st.integers(1, 30_000), st.integers(1, 60))
def test_ticks_never_exceed_their_room(count: int, room: int) -> None:
    step = tick_step(count, room)
    assert -(-count // step) <= room
    assert step == 1 or count > room


def test_thinned_labels_carry_their_position() -> None:
    assert tick_labels(["a", "b", "c"], 3) == ([0, 1, 2], ["a", "b", "c"])
    assert tick_labels(["a", "b", "c", "d"], 2) == ([0, 2], ["0: a", "2: c"])


def test_characters_without_a_glyph_are_spelled_out() -> None:
    assert drawable("naïve Ж") == "naïve Ж"
    assert drawable("\U0001f9ff\u1b05") == "\\U0001f9ff\\u1b05"


@given(st.integers(1, 200))
def test_grids_hold_all_heads_and_are_not_higher_than_wide(count: int) -> None:
    columns = grid_columns(count)
    rows = -(-count // columns)
    assert rows * columns >= count > (rows - 1) * columns
    assert rows <= columns


def test_titles_carry_model_layer_head_and_label() -> None:
    result, attention = analysis(model_heads(6, 4)), causal_map(5, 4, TOKENS)
    with figure_style():
        head, layer = head_figure(result, attention, 2), layer_figure(result, attention)
        whole = map_figure(result, "entropy")
    texts = [text.get_text() for text in head.texts]
    assert "sentence-transformers/all-MiniLM-L6-v2" in texts
    assert "self L5H2: attention_sink (rest: broad)" in texts
    assert "self layer 5" in [text.get_text() for text in layer.texts]
    assert [axes.get_title(loc="left").split("\n")[0] for axes in layer.axes[:4]] == [
        f"H{i} attention_sink" for i in range(4)
    ]
    assert [axes.get_title(loc="left") for axes in whole.axes[:2]] == ["self: label", "self: entropy"]


def test_the_map_shows_each_head_once() -> None:
    ragged = [head for head in model_heads(3, 6, "cross") if head.head < 2 + 2 * head.layer]
    heads = model_heads(2, 3, "encoder") + ragged
    heads[0] = record(0, 0, "unmeasurable", stack="encoder", metrics={"sink": None})
    result = analysis(heads)
    with figure_style():
        figure = map_figure(result)
    written = [text.get_text() for text in figure.axes[0].texts + figure.axes[2].texts]
    assert len(written) == len(heads)
    assert written[0] == "?"
    assert [text.get_text() for text in figure.axes[1].texts] == ["–"]
    grid = metric_grid(by_stack(result)["cross"], 6, "sink")
    assert np.isfinite(grid).sum(1).tolist() == [2, 4, 6]
    assert grid[1, 3] == result.head(1, 3, "cross").metrics["sink"]


def test_the_map_marks_labels_that_are_not_stable() -> None:
    heads = [replace(head, stability=0.5 if head.head else 1.0) for head in model_heads(1, 3)]
    for some, marks in ((heads, ["*" if head.head else "" for head in heads]), (heads[:1], [""])):
        with figure_style():
            figure = map_figure(analysis(some))
        assert [text.get_text()[-1:] == "*" for text in figure.axes[0].texts] == [mark == "*" for mark in marks]
        title = figure.legends[0].get_title().get_text()
        assert ("not stable" in title) == ("*" in marks)


def test_an_unknown_metric_names_those_measured() -> None:
    with pytest.raises(InputError, match="unknown metric 'magic'") as found:
        model_picture(analysis(model_heads(2, 2)), "magic")
    assert found.value.hint == "measured: sink, prev_token, self_attend, entropy"
    with pytest.raises(InputError, match="no metric"):
        model_picture(dataclasses.replace(analysis(model_heads(1, 1)), heads=()))


def small_analysis() -> Analysis:
    """Two layers of two heads, the first with its maps."""
    return analysis(model_heads(2, 2), maps=(causal_map(0, 2, TOKENS[:3]),))


NAMES = ["self.L0H0.png", "self.L0H1.png", "self.L0.png", "map.png"]


def test_a_directory_of_pictures(tmp_path: Path) -> None:
    written = write_heatmaps(small_analysis(), tmp_path / "deep" / "pictures")
    assert [path.name for path in written] == NAMES
    assert sorted(path.name for path in (tmp_path / "deep" / "pictures").iterdir()) == sorted(NAMES)
    for path in written:
        assert pixels(path.read_bytes()).size


def test_existing_files_are_kept_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "self.L0.png").write_text("mine")
    (tmp_path / "other.png").write_text("mine too")
    with pytest.raises(InputError, match="exists already") as found:
        write_heatmaps(small_analysis(), tmp_path)
    assert found.value.hint is not None and "--force" in found.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.png", "self.L0.png"]
    assert (tmp_path / "self.L0.png").read_text() == "mine"
    write_heatmaps(small_analysis(), tmp_path, force=True)
    assert (tmp_path / "self.L0.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "other.png").read_text() == "mine too"


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ResourceError),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), InputError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), MemoryError),
    ],
    ids=["full", "denied", "interrupted", "memory"],
)
@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, expected: type, exists: bool
) -> None:
    target = tmp_path / "pictures"
    if exists:
        target.mkdir()

    def fail(*_: object, **__: object) -> bytes:
        raise failure

    monkeypatch.setattr(heatmaps, "layer_picture", fail)
    with pytest.raises(expected):
        write_heatmaps(small_analysis(), target)
    assert target.exists() == exists
    assert list(tmp_path.rglob("*")) == ([target] if exists else [])


def test_a_disk_that_fills_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_write = Path.write_bytes

    def half_write(path: Path, data: bytes) -> int:
        if path.name == "self.L0H1.png":
            whole_write(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole_write(path, data)

    monkeypatch.setattr(Path, "write_bytes", half_write)
    with pytest.raises(ResourceError, match="no space left"):
        write_heatmaps(small_analysis(), tmp_path / "pictures")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_directorys_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="cannot write pictures") as found:
            write_heatmaps(small_analysis(), target)
        assert found.value.hint
    assert (tmp_path / "file").read_text() == "mine"


@given(st.lists(hostile_text() | st.sampled_from(["a/b", "a_b", "A_B", "../../etc", ".", "model.layers"]), max_size=6))
def test_stack_names_make_distinct_file_names_inside_the_directory(stacks: list[str]) -> None:
    stems = file_stems(stacks)
    assert set(stems) == set(stacks)
    assert len({stem.lower() for stem in stems.values()}) == len(stems)
    for stem in stems.values():
        assert stem.isascii() and not set(stem) & set('/\\:*?"<>|\0 ') and not stem.startswith(".")
