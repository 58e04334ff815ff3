"""The same numbers however a model is run, the same labels in half precision, the same bytes wherever it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headscope
from fixtures.texts import cut_texts
from headscope.attention import tiles
from headscope.models.loading import load_model
from tests import same_answers

ROOT = Path(__file__).parents[1]
IDS = [[5, 9, 17, 33, 4, 8, 21] * 9, [11, 3, 7], [8, 8, 19, 40, 2, 6, 35, 12, 9, 30, 31] * 3]
FAMILIES = ("bert", "gpt2", "llama")


@pytest.fixture
def threads():
    """`threads(n)` sets the number; it is put back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def packaged(packaged_model_name):
    """The packaged model in each precision."""
    return {name: load_model(packaged_model_name, dtype=name) for name in ("float32", "bfloat16", "float16")}


def assert_same(one, other, tolerance=1e-5):
    assert [(r.stack, r.name, r.pattern) for r in one.heads] == [(r.stack, r.name, r.pattern) for r in other.heads]
    for a, b in zip(one.heads, other.heads, strict=True):
        assert a.metrics.keys() == b.metrics.keys()
        for name, value in a.metrics.items():
            found = b.metrics[name]
            assert (value is None) == (found is None), (a.name, name)
            if value is not None:
                assert abs(value - found) <= tolerance * max(1.0, abs(value)), (a.name, name, value, found)


# ------------------------------------------------------------------ float32
WAYS = [(threads, size, engine) for engine in ("streaming", "layerwise", "full") for threads, size in ((2, 1), (4, 3))]


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_batches_and_engines_change_nothing(family, family_model, threads) -> None:
    model, _, _ = family_model(family)
    base = headscope.analyze(model, ids=IDS, metrics="all", engine="streaming", batch_size=1)
    for number, size, engine in WAYS:
        threads(number)
        assert_same(base, headscope.analyze(model, ids=IDS, metrics="all", engine=engine, batch_size=size))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(1, 64), (16, 1024), (64, 1 << 18)])
def test_tiles_change_nothing(family, size, family_model, monkeypatch) -> None:
    model, _, _ = family_model(family)
    base = headscope.analyze(model, ids=IDS, metrics="all", engine="streaming")
    monkeypatch.setattr(tiles, "TILE_ROWS", size[0])
    monkeypatch.setattr(tiles, "tile_cells", lambda device: size[1])
    assert_same(base, headscope.analyze(model, ids=IDS, metrics="all", engine="streaming"))


def test_nor_do_they_on_a_real_model(packaged, real_texts, threads) -> None:
    loaded, texts = packaged["float32"], real_texts[:4]

    def run(engine, size):
        return headscope.analyze(
            loaded.model, texts, tokenizer=loaded.tokenizer, metrics="all", engine=engine, batch_size=size
        )

    base = run("streaming", 1)
    for number, size, engine in WAYS[:4]:
        threads(number)
        assert_same(base, run(engine, size))


# ------------------------------------------------------------------ half precision
@pytest.mark.parametrize("rules", ["seed", "calibrated"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_labels_stay_in_half_precision(dtype, rules, packaged) -> None:
    """Of all heads of a real model, 98 %: only what is next to a threshold may fall on its other side."""
    tokenizer = packaged["float32"].tokenizer
    texts = cut_texts(lambda text: len(tokenizer(text)["input_ids"]), (12, 60))
    for text in texts:
        one, two = (
            [r.pattern for r in headscope.analyze(m.model, text, tokenizer=tokenizer, rules=rules).heads]
            for m in (packaged["float32"], packaged[dtype])
        )
        assert sum(a == b for a, b in zip(one, two, strict=True)) >= 0.98 * len(one)


# ------------------------------------------------------------------ the same bytes
@pytest.fixture(scope="module")
def here(tmp_path_factory, family_dir):
    """What the command lines write in this process."""
    folder = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [])
        codes = same_answers.run_all(str(family_dir("llama")), str(family_dir("bert")))
    assert codes == dict.fromkeys(same_answers.COMMANDS, 0)
    return lasting(folder)


def lasting(folder):
    """What was written, less what is of the run itself: where it wrote, and how many seconds a probe took."""
    return {
        name: re.sub(rb'"seconds": [0-9.]+', b"", content.replace(str(folder).encode(), b"HERE"))
        for name, content in same_answers.written(folder).items()
        if not name.endswith(".err")
    }


def test_a_second_run_in_another_world_gives_the_same_bytes(here, family_dir, tmp_path) -> None:
    """Another process, hash seed, language, time zone, directory and settings of libraries."""
    settings, folder = tmp_path / "settings", tmp_path / "elsewhere and farther"
    settings.mkdir()
    folder.mkdir()
    (settings / "matplotlibrc").write_text("font.size: 31\nsavefig.dpi: 20\nimage.cmap: jet\nsvg.hashsalt: mine\n")
    world = {
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "4711",
        "LC_ALL": "tr_TR.UTF-8",
        "LANGUAGE": "tr",
        "TZ": "Asia/Kathmandu",
        "MATPLOTLIBRC": str(settings / "matplotlibrc"),
        "MPLBACKEND": "svg",
        "SOURCE_DATE_EPOCH": "86400",
        "HF_HOME": str(settings / "hub"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "0",
        "TRANSFORMERS_VERBOSITY": "debug",
    }
    command = [sys.executable, "-m", "tests.same_answers", str(family_dir("llama")), str(family_dir("bert"))]
    # One thread, as here: more of them add in another order, which may change last digits.
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | world | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = lasting(folder)
    assert found.keys() == here.keys()
    assert [name for name, content in found.items() if content != here[name]] == []
    assert {"page.html", "head.png", "layer.svg", "head.pdf", "smaller/model.safetensors"} <= found.keys()
