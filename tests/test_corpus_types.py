"""Types of heads over a corpus: the same sums whatever partitions and processes, and through a file and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headscope
from headscope.corpus.store import from_bytes, to_bytes
from headscope.corpus.worker import Worker
from headscope.heads.catalogue.layer_types import LayerTypes
from headscope.heads.catalogue.text_types import TEXT_TYPES
from headscope.heads.clusters import ClusterSums
from headscope.results import Analysis
from tests import corpus_samples as samples

# Texts that repeat words, with a full stop now and then; enough that each is a cluster.
ITEMS = [f"{text} . {text}" for text in samples.texts(40, seed=3, longest=12)]
NAMES = tuple(name for name in TEXT_TYPES if name not in ("induction", "duplicate_token"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples.model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples.write(tmp_path_factory.mktemp("data") / "texts.jsonl", ITEMS)


def over(model: Path, data: Path, **options: Any) -> Analysis:
    given: dict[str, Any] = {"types": ",".join(NAMES), "engine": "layerwise", "device": "cpu", **options}
    return headscope.analyze_corpus(model, data, **given)


def scores(analysis: Analysis) -> dict[str, tuple[float | None, ...]]:
    assert analysis.catalogue is not None
    return dict(analysis.catalogue.scores)


def test_partitions_and_one_call_agree(model: Path, data: Path) -> None:
    at_once = headscope.analyze(model, ITEMS, types=",".join(NAMES), engine="layerwise", device="cpu")
    # No partition has so few texts that it would be cut into stretches: then clusters are the same, too.
    parts = over(model, data, partition=(20, 100_000))
    whole = over(model, data)
    for found in (scores(parts), scores(whole)):
        for name, expected in scores(at_once).items():
            assert [v is None for v in found[name]] == [v is None for v in expected]
            known = [(a, b) for a, b in zip(found[name], expected, strict=True) if a is not None]
            assert np.allclose(*zip(*known, strict=True), atol=1e-6) if known else True
    assert any(value for values in scores(whole).values() for value in values)


def test_processes_give_the_same_bits(model: Path, data: Path) -> None:
    one, two = (over(model, data, partition=(10, 100_000), workers=n) for n in (1, 2))
    assert json.dumps(one.to_dict()["heads"]) == json.dumps(two.to_dict()["heads"])
    assert scores(one) == scores(two)


def test_types_that_bring_their_own_inputs_are_measured_once(model: Path, data: Path) -> None:
    own = over(model, data, types="duplicate_token,broad", partition=(20, 100_000))
    alone = headscope.analyze(model, ITEMS[0], types="duplicate_token", device="cpu", engine="layerwise")
    assert scores(own)["duplicate_token"] == pytest.approx(scores(alone)["duplicate_token"], abs=1e-6)
    assert own.catalogue is not None
    assert {t.name: t.seconds is not None for t in own.catalogue.types} == {"duplicate_token": True, "broad": False}


def test_heads_are_not_compared_on_a_corpus(model: Path, data: Path) -> None:
    with pytest.raises(headscope.HeadscopeError, match="not on a corpus"):
        over(model, data, types="redundant")


def test_a_part_in_a_file_comes_back_whole(model: Path, data: Path) -> None:
    from dataclasses import replace

    worker = Worker(replace(samples.job(model), types=NAMES))
    part = worker.measure(next(samples.cut(data, 15)))
    again = from_bytes(to_bytes(part))
    assert part.summary.types and again.summary.types.keys() == part.summary.types.keys()
    for layer, types in part.summary.types.items():
        assert_same(again.summary.types[layer], types)


def assert_same(a: LayerTypes, b: LayerTypes) -> None:
    assert a.measures.keys() == b.measures.keys()
    for name, sums in b.measures.items():
        for field in ClusterSums.__dataclass_fields__:
            assert np.array_equal(getattr(a.measures[name], field), getattr(sums, field))
    assert a.trivial == b.trivial
    assert a.examples == b.examples and any(e for found in b.examples.values() for e in found)
    assert a.above.keys() == b.above.keys()
    for name, pair in b.above.items():
        assert all(np.array_equal(x, y) for x, y in zip(a.above[name], pair, strict=True))
