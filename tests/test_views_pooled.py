"""Pictures of long texts: means and largest weights of tiles, to the pixel."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headscope.results import tile_labels
from headscope.views.attention_figures import head_figure, layer_figure
from headscope.views.figure_base import COLOR_MAP, decades, figure_style
from headscope.views.heatmaps import DPI, head_picture, layer_picture, write_heatmaps
from headscope.views.pooling import pooled
from tests.views_pictures import one_map, panel_box, pixels
from tests.views_samples import analysis, causal_map, model_heads


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_tiles_have_the_mean_and_the_largest_weight(rows: int, columns: int, cells: int, fewer: int) -> None:
    weights = np.random.default_rng((rows, columns, cells)).random((2, rows, columns), dtype=np.float32)
    _, attention = one_map(weights)
    for small in (pooled(attention, cells), pooled(pooled(attention, cells), fewer)):
        tile = small.tile
        assert max(small.weights.shape[1:]) <= cells
        assert small.weights.dtype == np.float32 and (small.peak is None) == (tile == 1) == (small is attention)
        assert len(small.queries) == small.weights.shape[1] and len(small.keys) == small.weights.shape[2]
        for head, i, j in np.ndindex(small.weights.shape):
            part = weights[head, i * tile : (i + 1) * tile, j * tile : (j + 1) * tile].astype(np.float64)
            assert abs(small.weights[head, i, j] - part.mean()) < 1e-6
            assert small.peak is None or small.peak[head, i, j] == part.max().astype(np.float32)


@pytest.mark.parametrize(
    ("count", "tile", "labels"), [(7, 3, ("0–2", "3–5", "6")), (4, 2, ("0–1", "2–3")), (1, 9, ("0",))]
)
def test_tiles_are_named_by_the_positions_that_they_stand_for(count: int, tile: int, labels: tuple[str, ...]) -> None:
    assert tile_labels(count, tile) == labels


@pytest.mark.parametrize(("size", "largest"), [(600, False), (1025, True), (2500, False)])
def test_a_sink_of_one_column_shows_in_a_pooled_picture(size: int, largest: bool) -> None:
    weights = np.tril(np.full((1, size, size), 1e-5))
    weights[0, :, 0] = 1 - weights[0].sum(-1)
    result, attention = one_map(weights)
    small = pooled(attention, 512)
    assert small.tile == -(-size // 512)
    with figure_style():
        figure = head_figure(result, small, 0, largest)
        figure.set_dpi(DPI)
        panel = panel_box(figure, 0, pixels(head_picture(result, small, 0, largest=largest)), DPI)
    top = (255 * np.array(matplotlib.colormaps[COLOR_MAP](1.0)[:3])).round()
    bright = (np.abs(panel - top).max(-1) <= 12)[5:-5]
    cells = small.weights.shape[1]
    whole = round(panel.shape[1] * small.tile / size)
    assert whole >= 2 and abs(panel.shape[0] - whole * size / small.tile) <= 1
    assert abs(bright[:, : 2 * whole].sum(1) - whole).max() <= 1, "the first cell's pixels are the sink's colour"
    assert not bright[:, 2 * whole :].any()
    assert cells * whole <= 1100


def test_pooled_pictures_say_what_a_cell_is() -> None:
    result, attention = one_map(np.tril(np.ones((3, 40, 40))) / np.arange(1, 41)[:, None])
    small = pooled(attention, 10)
    with figure_style():
        for largest, name, top in ((False, "mean", 0.4), (True, "largest", 1.0)):
            head, layer = head_figure(result, small, 1, largest), layer_figure(result, small, largest)
            assert head.texts[0].get_text().endswith(f" – {name} of 4 × 4 tokens")
            assert layer.texts[0].get_text() == f"self layer 0 – {name} of 4 × 4 tokens"
            for figure in (head, layer):
                assert figure.axes[-1].get_ylabel().split("\n")[-2:] == [
                    f"{name} of 4 × 4 tokens,",
                    "fourth-root scale",
                ]
            assert head.axes[0].get_xlabel() == "key position"
            ticks = head.axes[0].get_yticks().tolist()
            assert (
                ticks[0] == 0
                and ticks[-1] < 40
                and [t.get_text() for t in head.axes[0].get_yticklabels()] == [str(tick) for tick in ticks]
            )
            assert head.axes[0].images[0].get_array().max() == pytest.approx(top, abs=0.3)
            assert np.array_equal(head.axes[0].images[0].get_array(), (small.peak if largest else small.weights)[1])
        plain = head_figure(result, attention, 1)
    assert plain.texts[0].get_text() == "self L0H1: broad"
    assert plain.axes[-1].get_ylabel() == "attention weight,\nsquare-root scale"


def test_exact_maps_show_the_largest_weights_where_cells_are_too_many() -> None:
    result, attention = one_map(np.random.default_rng(0).random((1, 200, 200)))
    with figure_style():
        layer = layer_figure(result, attention)
    assert np.array_equal(layer.axes[0].images[0].get_array(), pooled(attention, 128).peak[0])
    assert "largest of 2 × 2 tokens" in layer.axes[-1].get_ylabel()
    assert layer.texts[0].get_text() == "self layer 0"


def test_long_maps_are_drawn_twice(tmp_path: Path) -> None:
    attention = causal_map(0, 1, [str(i) for i in range(530)])
    result = analysis(model_heads(1, 1), maps=(attention,))
    written = write_heatmaps(result, tmp_path)
    assert [path.name for path in written] == [*LONG_NAMES, "map.png"]
    small = pooled(attention, 512)
    for name, largest in (("self.L0H0.png", False), ("self.L0H0.max.png", True)):
        assert (tmp_path / name).read_bytes() == head_picture(result, small, 0, largest=largest)
    assert (tmp_path / "self.L0.max.png").read_bytes() == layer_picture(result, small, largest=True)
    assert (tmp_path / "self.L0.png").read_bytes() != (tmp_path / "self.L0.max.png").read_bytes()


LONG_NAMES = ["self.L0H0.png", "self.L0.png", "self.L0H0.max.png", "self.L0.max.png"]


def test_a_tile_of_few_tokens_does_not_set_the_scale() -> None:
    result, attention = one_map(np.eye(9)[None])
    with figure_style():
        (image,) = head_figure(result, pooled(attention, 3), 0).axes[0].images
        (partial,) = head_figure(result, pooled(attention, 5), 0).axes[0].images
        (thin,) = head_figure(result, pooled(one_map(np.ones((1, 9, 1)))[1], 5), 0).axes[0].images
    assert image.norm.vmax == pytest.approx(1 / 3)
    assert partial.get_array().max() == 1 and partial.norm.vmax == pytest.approx(1 / 2)
    assert thin.norm.vmax == 1


@given(st.floats(1e-6, 1.0))
def test_ticks_of_a_fourth_root_scale_do_not_touch(largest: float) -> None:
    ticks = decades(largest)
    assert ticks[0] == 0 and ticks[-1] == largest
    assert (np.diff(np.array(ticks) ** 0.25) > 0.06 * largest**0.25).all()
