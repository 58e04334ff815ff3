"""`headscope heatmap` and `headscope.heatmap`: valid files of what was asked for, and plain refusals."""

from __future__ import annotations

import re
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import headscope
from headscope.cli.main import main
from headscope.errors import InputError
from headscope.results import Analysis
from headscope.views import attention_figures, map_figure
from headscope.views.drawn import Drawn
from headscope.views.figure_base import Look
from tests import views_samples as samples
from tests.views_pictures import one_map, pixels

TEXT = "The cat sat on the mat."


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["heatmap", *argv])
    return int(left.value.code or 0)


@pytest.fixture(scope="module")
def gpt2(family_dir: Any) -> str:
    return str(family_dir("gpt2"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `headscope.analyze` and `headscope.heatmap` are called with; neither runs."""
    found: dict[str, Any] = {}
    result = samples.analysis(samples.model_heads(6, 12), maps=(samples.causal_map(5, 12, samples.TOKENS),))

    def analyze(model: Any, **arguments: Any) -> Analysis:
        found["analyze"] = {"model": model, **arguments}
        return result

    def heatmap(analysis: Analysis, kind: str, **arguments: Any) -> bytes:
        found["heatmap"] = {"kind": kind, **arguments}
        return b"drawn"

    monkeypatch.setattr(headscope, "analyze", analyze)
    monkeypatch.setattr(headscope, "heatmap", heatmap)
    return found


@pytest.mark.parametrize(
    ("argv", "kind", "maps"),
    [
        ([], "map", False),
        (["--layer", "5"], "heads", "pooled"),
        (["--head", "3"], "heads", "pooled"),
        (["--kind", "heads"], "heads", "pooled"),
        (["--kind", "mean"], "mean", "pooled"),
        (["--kind", "rollout"], "rollout", "mean"),
        (["--kind", "map", "-l", "1"], "map", False),
        (["--kind", "similarity"], "similarity", False),
        (["--stack", "cross", "-l", "1"], "heads", True),
        (["--stack", "cross", "--kind", "mean"], "mean", "mean"),
    ],
)
def test_each_kind_keeps_what_it_needs(
    calls: dict[str, Any], tmp_path: Path, argv: list[str], kind: str, maps: object
) -> None:
    assert run(TEXT, "-o", str(tmp_path / "a.svg"), *argv) == 0
    assert calls["heatmap"]["kind"] == kind
    assert calls["heatmap"]["file_format"] == "svg"
    assert calls["analyze"]["types"] == ("redundant" if kind == "similarity" else None)
    assert calls["analyze"]["maps"] == maps and type(calls["analyze"]["maps"]) is type(maps)
    assert (tmp_path / "a.svg").read_bytes() == b"drawn"


def test_images_are_kept_whole(calls: dict[str, Any], tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "in.png")
    given = ("--image", str(tmp_path / "in.png"))
    assert run(*given, "-l", "0", "--query", "-1", "--matrix", "-o", str(tmp_path / "a.PNG")) == 0
    assert calls["analyze"]["maps"] is True and calls["analyze"]["images"] == [given[1]]
    assert (calls["heatmap"]["query"], calls["heatmap"]["matrix"], calls["heatmap"]["file_format"]) == (-1, True, "png")


def test_options_reach_the_python_functions(calls: dict[str, Any], tmp_path: Path) -> None:
    looks = ("--dpi", "90", "--cmap", "magma", "--vmax", "0.5", "--title", "Mine")
    options = ("-m", "some/model", "--head", "1", "--dtype", "bfloat16", "--words", "--max-length", "9", "--seed", "7")
    assert run(TEXT, "-l", "2", "-o", str(tmp_path / "a.pdf"), *looks, *options) == 0
    drawn, measured = calls["heatmap"], calls["analyze"]
    assert (drawn["dpi"], drawn["cmap"], drawn["vmax"], drawn["title"]) == (90, "magma", 0.5, "Mine")
    wanted = {"model": "some/model", "layer": "2", "head": "1", "dtype": "bfloat16", "words": True, "max_length": 9}
    assert {name: measured[name] for name in wanted} == wanted and measured["seed"] == 7


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([TEXT], "add -o picture.png"),
        ([TEXT, "-o", "a.jpg"], "draws .png, .svg, .pdf, not 'a.jpg'"),
        ([TEXT, "-o", "nowhere/a.png"], "no such directory"),
        ([TEXT, "-o", "old.png"], "use --force"),
        ([TEXT, "-o", "a.png", "--cmap", "viridos"], "viridis"),
        ([TEXT, "-o", "a.png", "--vmax", "0"], "vmax is 0"),
        ([TEXT, "-o", "a.png", "--vmax", "nan"], "vmax is nan"),
        ([TEXT, "-o", "a.png", "--dpi", "1"], "dpi is 1"),
        ([TEXT, "-o", "a.png", "--kind", "cake"], "cake"),
        ([TEXT, "-o", "a.png", "-l", "5", "--metric", "entropy"], "--metric is for --kind map"),
        ([TEXT, "-o", "a.png", "--query", "3"], "over an image"),
        ([TEXT, "-o", "a.png", "--kind", "similarity", "--vmax", "1"], "--vmax is for weights"),
        ([TEXT, "another", "-o", "a.png"], "one input, not 2"),
        (["-o", "a.png"], "nothing to measure"),
        ([TEXT, "-o", "a.png", "-l", "x"], "layer"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_is_loaded(
    calls: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.png").write_bytes(b"old")
    assert run(*argv) == 2
    assert said in capsys.readouterr().err
    assert calls == {}
    assert [path.name for path in tmp_path.iterdir()] == ["old.png"] and Path("old.png").read_bytes() == b"old"


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
@pytest.mark.parametrize("kind", ["heads", "mean", "rollout", "map"])
def test_files_are_what_their_suffix_says_and_the_terminal_stays_quiet(
    gpt2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, kind: str
) -> None:
    target = tmp_path / f"a.{suffix}"
    target.write_bytes(b"old")
    text = 'the 日本語 🙂 <script>alert("1")</script> $x_1$ & -->'
    title = "<script>alert(2)</script> -- 日本 🙂 $\\frac{"
    options = ("--words", "--force", "--title", title, "--quiet")
    assert run(text, "-m", gpt2, "--kind", kind, "-o", str(target), *options) == 0
    said = capsys.readouterr()
    assert said.out == "" and "arning" not in said.err and "lyph" not in said.err
    data = target.read_bytes()
    if suffix == "png":
        assert pixels(data).std() > 1
    elif suffix == "pdf":
        assert data.startswith(b"%PDF-") and data.rstrip().endswith(b"%%EOF")
    else:
        root = ElementTree.fromstring(data)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not [node.tag for node in root.iter() if "script" in node.tag.lower()]
        assert not re.search(rb"<script", re.sub(rb"<!--.*?-->", b"", data, flags=re.DOTALL), re.IGNORECASE)
    assert list(tmp_path.iterdir()) == [target]


def test_pictures_are_the_same_each_time(gpt2: str) -> None:
    result = headscope.analyze(gpt2, "the cat sat", maps=True, layer=0)
    for file_format in ("png", "svg", "pdf"):
        first, second = (headscope.heatmap(result, file_format=file_format) for _ in range(2))
        assert first == second
    assert pixels(headscope.heatmap(result, dpi=60)).shape[0] < pixels(headscope.heatmap(result, dpi=120)).shape[0]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[NDArray[np.float32], tuple[str, ...], str, Look]]:
    """The matrices, panel titles and titles that figures are drawn of."""
    found: list[tuple[NDArray[np.float32], tuple[str, ...], str, Look]] = []
    single, grid = attention_figures.matrix_figure, attention_figures.grid_figure

    def one(analysis: Analysis, attention: Any, title: str, **rest: Any) -> Any:
        found.append((attention.weights, (), title, rest["look"]))
        return single(analysis, attention, title, **rest)

    def several(analysis: Analysis, attention: Any, titles: Any, title: str, **rest: Any) -> Any:
        found.append((attention.weights, tuple(titles), title, rest["look"]))
        return grid(analysis, attention, titles, title, **rest)

    monkeypatch.setattr(attention_figures, "matrix_figure", one)
    monkeypatch.setattr(attention_figures, "grid_figure", several)
    return found


def test_each_kind_draws_its_numbers(family_model: Any, drawn: list[Any]) -> None:
    model, _, _ = family_model("bert")
    result = headscope.analyze(model, ids=[2, 5, 9, 11, 3], maps=True)
    whole = np.stack([one.weights for one in result.maps])
    headscope.heatmap(result, layer=1, head=2)
    np.testing.assert_array_equal(drawn[-1][0], whole[1, 2:3])
    assert drawn[-1][2].startswith("self L1H2: ")
    headscope.heatmap(result, layer=2)
    np.testing.assert_array_equal(drawn[-1][0], whole[2])
    assert [title.split()[0] for title in drawn[-1][1]] == ["H0", "H1", "H2", "H3"]
    headscope.heatmap(result)
    np.testing.assert_array_equal(drawn[-1][0], whole.reshape(12, 5, 5))
    assert [title.split()[0] for title in drawn[-1][1]][3:6] == ["L0H3", "L1H0", "L1H1"]
    headscope.heatmap(result, "mean")
    np.testing.assert_allclose(drawn[-1][0], whole.mean(1), atol=1e-7)
    assert drawn[-1][1:3] == (("layer 0", "layer 1", "layer 2"), "self layers 0-2: mean of 4 heads each")
    headscope.heatmap(result, "mean", layer=1)
    assert drawn[-1][2] == "self layer 1: mean of 4 heads"
    headscope.heatmap(result, "rollout", vmax=0.3)
    passed = [(one.mean(0) + np.eye(5)) / 2 for one in whole.astype(np.float64)]
    np.testing.assert_allclose(drawn[-1][0][0], passed[2] @ passed[1] @ passed[0], atol=1e-6)
    assert drawn[-1][2] == "self: attention rollout, layers 0-2, 4 heads each" and drawn[-1][3].vmax == 0.3


def test_long_texts_are_pooled(drawn: list[Any]) -> None:
    generator = np.random.default_rng(0)
    weights = generator.gamma(0.3, size=(2, 600, 600))
    result, attention = one_map(weights / weights.sum(-1, keepdims=True), tuple(f"t{i}" for i in range(600)))
    for kind, expected in (("heads", attention.weights[:1]), ("mean", attention.weights.mean(0, keepdims=True))):
        headscope.heatmap(result, kind, head=0 if kind == "heads" else None)
        tiles = expected.reshape(1, 300, 2, 300, 2).mean((2, 4))
        np.testing.assert_allclose(drawn[-1][0], tiles, atol=1e-6)


def test_a_decoders_few_rows_over_many_keys_stay_apart() -> None:
    weights = np.random.default_rng(0).gamma(0.2, size=(2, 7, 1501)).astype(np.float32)
    _, attention = one_map(weights.astype(np.float64))
    shown = Drawn.of(attention, False, 512)
    assert shown.tile == (1, 3) and shown.weights.shape == (2, 7, 501) and not shown.positions
    for column in (0, 250, 500):
        np.testing.assert_array_equal(shown.weights[:, :, column], weights[:, :, 3 * column : 3 * column + 3].max(-1))


def test_the_scale_ends_at_vmax_in_the_chosen_colours() -> None:
    result, attention = one_map(np.array([[[0.1, 0.2], [0.3, 0.4]]] * 2))
    for figure in (
        attention_figures.head_figure(result, attention, 0, look=Look("magma", 0.8)),
        attention_figures.layer_figure(result, attention, look=Look("magma", 0.8)),
    ):
        images = [image for axes in figure.axes for image in axes.images]
        assert {(image.norm.vmax, image.get_cmap().name) for image in images} == {(0.8, "magma")}
    figure = map_figure.map_figure(result, None, Look("magma", 0.9, "Mine"))
    assert {(i.norm.vmax, i.get_cmap().name) for axes in figure.axes[1:2] for i in axes.images} == {(0.9, "magma")}
    assert "Mine" in [text.get_text() for text in figure.texts]


def test_what_the_analysis_lacks_is_said() -> None:
    heads = samples.analysis(samples.model_heads(2, 2))
    square, other = samples.causal_map(0, 2, samples.TOKENS), samples.causal_map(1, 2, samples.TOKENS[:3])
    both = samples.analysis(samples.model_heads(2, 2), maps=(square, other))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pixels(headscope.heatmap(heads)).size, "without matrices, the map"
    for analysis, arguments, said in (
        (heads, {"kind": "heads"}, "kept no attention"),
        (both, {"kind": "heads"}, "different tokens"),
        (both, {"layer": 7}, "layer 7"),
        (both, {"layer": 0, "head": 9}, "head 9"),
        (both, {"kind": "map", "metric": "charm"}, "unknown metric 'charm'"),
        (both, {"layer": 0, "file_format": "gif"}, "unknown file format 'gif'"),
        (both, {"layer": 0, "dpi": 2400, "kind": "heads", "cmap": "nope"}, "unknown colour map"),
    ):
        with pytest.raises(InputError, match=said) as caught:
            headscope.heatmap(analysis, **arguments)  # type: ignore[arg-type]  # any combination
        assert caught.value.hint


def test_pictures_beyond_what_can_be_drawn_are_refused() -> None:
    result = samples.analysis(samples.model_heads(60, 64))
    with pytest.raises(InputError, match="pixels") as caught:
        headscope.heatmap(result, "map", dpi=2400)
    assert "dpi" in (caught.value.hint or "")
