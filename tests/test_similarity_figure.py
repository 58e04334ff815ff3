"""The picture of how alike heads are: its points, names, lines and order, for few heads and for a thousand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.collections import LineCollection

from headscope.errors import InputError
from headscope.heads.catalogue.clustering import average_linkage, classical_scaling
from headscope.heads.catalogue.result import Catalogue
from headscope.heads.catalogue.similarity_result import Similarity
from headscope.views.figure_base import figure_style
from headscope.views.heatmap import heatmap
from headscope.views.labels import label_styles
from headscope.views.similarity_figure import _SIDE, _free_places, similarity_figure
from tests.views_pictures import pixels
from tests.views_samples import HOSTILE, analysis, model_heads, record

THRESHOLD, CUT = 0.1, 0.3


def similarity_of(heads, groups=1, seed=0):
    """Heads at random places in space, in as many groups that do not compare as there are."""
    rng = np.random.default_rng(seed)
    count = len(heads)
    points = rng.normal(size=(count, 4)) * 0.1 + rng.normal(size=(4, 4))[rng.integers(4, size=count)] * 0.2
    distance = np.minimum(np.linalg.norm(points[:, None] - points[None], axis=-1), 1)
    group = np.arange(count) * groups // count
    position, clusters = np.zeros((count, 2)), np.zeros(count, dtype=int)
    for number in range(groups):
        own = np.flatnonzero(group == number)
        within = distance[np.ix_(own, own)]
        position[own] = classical_scaling(within)
        clusters[own] = np.array(average_linkage(within).cut(CUT)) + 1000 * number
    distance = np.where(group[:, None] == group, distance, np.nan)
    places = tuple((h.stack, h.layer, h.head) for h in heads)
    pairs = [(places[a], places[b], distance[a, b]) for a, b in np.argwhere(np.triu(distance < THRESHOLD, 1))]
    return Similarity(places, distance, tuple(clusters.tolist()), tuple(pairs), THRESHOLD, position, 99, CUT)


def analysed(heads, found=None, **options):
    found = similarity_of(heads) if found is None else found
    return replace(analysis(heads, **options), catalogue=Catalogue((), {}, {}, {}, similarity=found))


def drawn_figure(made):
    with figure_style():
        return similarity_figure(made)


def panels(figure):
    """Maps and matrices, top to bottom."""
    axes = [a for a in figure.axes if a.get_title(loc="left")]
    return axes[::2], axes[1::2]


def test_points_have_their_labels_colours_and_the_distances_of_the_map():
    heads = model_heads(3, 4)
    made = analysed(heads)
    found = made.catalogue.similarity
    (axes,), _ = panels(drawn_figure(made))
    dots = axes.collections[-1]
    drawn = np.asarray(dots.get_offsets())
    distance = [np.linalg.norm(p[:, None] - p[None], axis=-1) for p in (drawn, found.position)]
    # Heads of pairs are drawn last, so the order of points may differ: distances as a set say the same.
    shown, meant = (np.sort(d[np.triu_indices(12, 1)]) for d in distance)
    assert shown / shown[-1] == pytest.approx(meant / meant[-1])
    styles = label_styles(h.pattern for h in heads)
    wanted = sorted(styles[h.pattern].fill.lower() for h in heads)
    colors = ["#" + "".join(f"{round(255 * c):02x}" for c in rgba[:3]) for rgba in dots.get_facecolors()]
    assert sorted(colors) == wanted
    assert axes.get_xlim() == axes.get_ylim() == (0, _SIDE)


def test_a_point_is_where_its_name_says():
    heads = [record(0, 0, "broad"), record(3, 1, "focused"), record(5, 7, "prev_token")]
    position = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.5]])
    distance = np.linalg.norm(position[:, None] - position[None], axis=-1)
    places = tuple((h.stack, h.layer, h.head) for h in heads)
    found = Similarity(places, distance, (0, 1, 2), (), THRESHOLD, position, 5, CUT)
    (axes,), _ = panels(drawn_figure(analysed(heads, found)))
    names = {text.get_text(): np.array(text.get_position()) for text in axes.texts}
    assert set(names) == {"L0H0", "L3H1", "L5H7"}
    drawn = dict(zip(("L0H0", "L3H1", "L5H7"), np.asarray(axes.collections[-1].get_offsets()), strict=True))
    for name, at in names.items():
        assert np.linalg.norm(at - drawn[name]) < 0.2


def test_redundant_pairs_are_joined_and_counted():
    made = analysed(model_heads(4, 6))
    pairs = made.catalogue.similarity.redundant
    assert pairs
    figure = drawn_figure(made)
    (axes,), _ = panels(figure)
    (lines,) = [c for c in axes.collections if isinstance(c, LineCollection)]
    assert len(lines.get_segments()) == len(pairs)
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[-1].startswith(f"{len(pairs)} redundant pair") and texts[-1].endswith("nearer than 0.1")
    assert set(texts[:-1]) == {h.pattern for h in made.heads}
    heads = {head for a, b, _ in pairs for head in (a, b)}
    assert sum(width > 1 for width in axes.collections[-1].get_linewidths()) == len(heads)


def test_the_matrix_has_clusters_side_by_side_in_frames():
    made = analysed(model_heads(4, 6))
    found = made.catalogue.similarity
    _, (axes,) = panels(drawn_figure(made))
    names = [text.get_text() for text in axes.get_yticklabels()]
    index = {f"L{layer}H{head}": i for i, (_, layer, head) in enumerate(found.heads)}
    order = [index[name] for name in names]
    assert sorted(order) == list(range(24))
    assert np.asarray(axes.images[0].get_array()) == pytest.approx(found.distance[np.ix_(order, order)])
    clusters = [found.clusters[i] for i in order]
    assert sum(a != b for a, b in pairwise(clusters)) == len(set(clusters)) - 1
    sizes = [n for n in np.bincount(found.clusters) if n > 1]
    assert sorted(round(patch.get_width()) for patch in axes.patches) == sorted(sizes)
    for patch in axes.patches:
        start = round(patch.get_x() + 0.5)
        assert len(set(clusters[start : start + round(patch.get_width())])) == 1
    assert f"{len(set(clusters))} clusters at 0.3" in axes.get_title(loc="left")


def test_names_cover_nothing():
    rng = np.random.default_rng(1)
    points, radius = rng.random((200, 2)) * _SIDE, 0.03
    names = [f"L{i // 12}H{i % 12}" for i in range(200)]
    found = _free_places(points, names, radius, {7})
    assert 7 in found and 20 < len(found) < 200
    boxes = []
    for i, at in found.items():
        wide = 0.053 * len(names[i])
        left = at.x - {"left": 0, "center": wide / 2, "right": wide}[at.side]
        boxes.append((left, at.y - 0.05, left + wide, at.y + 0.05))
    for number, (left, low, right, high) in enumerate(boxes):
        assert min(left, low) >= 0 and max(right, high) <= _SIDE
        assert not ((points > (left, low)) & (points < (right, high))).all(axis=1).any()
        for other in boxes[:number]:
            assert left >= other[2] or right <= other[0] or low >= other[3] or high <= other[1]


def test_stacks_that_do_not_compare_have_panels_of_their_own():
    heads = [*model_heads(2, 4, stack="encoder"), *model_heads(2, 4, stack="decoder")]
    figure = drawn_figure(analysed(heads, similarity_of(heads, groups=2)))
    maps, matrices = panels(figure)
    assert [a.get_title(loc="left").split(":")[0] for a in (*maps, *matrices)] == ["encoder", "decoder"] * 2
    assert all(np.isfinite(np.asarray(a.images[0].get_array())).all() for a in matrices)


@pytest.mark.parametrize("shape", [(3, 4), (30, 9), (32, 32)])
def test_pictures_of_any_number_of_heads(shape):
    image = pixels(heatmap(analysed(model_heads(*shape)), "similarity"))
    height, width = image.shape[:2]
    assert 1500 < width < 2200 and 800 < height < 1200
    assert len(np.unique(image @ [65536, 256, 1])) > 50


@pytest.mark.parametrize(("file_format", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_formats(file_format, start):
    assert heatmap(analysed(model_heads(1, 3)), "similarity", file_format=file_format, dpi=50).startswith(start)


def test_names_and_labels_of_any_characters():
    heads = [record(0, h, text, stack=HOSTILE[0]) for h, text in enumerate(HOSTILE)]
    heads += [record(0, h, "broad", stack=HOSTILE[-3]) for h in range(len(HOSTILE))]
    made = analysed(heads, similarity_of(heads, groups=2), name="".join(HOSTILE))
    assert heatmap(made, "similarity", dpi=50).startswith(b"\x89PNG")


def test_heads_that_have_no_label_and_equal_heads_are_drawn():
    heads = model_heads(1, 3)
    found = similarity_of(heads)
    same = replace(found, distance=np.zeros((3, 3)), position=np.zeros((3, 2)), clusters=(0, 0, 0))
    assert heatmap(analysed(heads[:1], same), "similarity", dpi=50).startswith(b"\x89PNG")


@pytest.mark.parametrize("catalogue", [None, Catalogue((), {}, {}, {})])
def test_what_was_not_measured_is_not_drawn(catalogue):
    with pytest.raises(InputError, match="similarity was not measured"):
        similarity_figure(replace(analysis(model_heads(1, 2)), catalogue=catalogue))


def test_drawing_imports_no_torch():
    code = "import sys, headscope.views.similarity_figure; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
