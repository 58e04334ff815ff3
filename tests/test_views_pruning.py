"""A pruning's views hold what was measured, whatever the numbers and names."""

from __future__ import annotations

import csv
import io
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headscope.errors import InputError
from headscope.pruning.report import Equivalence, EquivalenceCheck
from headscope.pruning.result import Change, Conditions, Latency, LayerHeads, Pass, PruneResult, Quality
from headscope.pruning.save_report import SaveReport
from headscope.pruning.spec import parse_heads
from headscope.results import ModelInfo, Stack
from headscope.views.pruning import (
    latency_line,
    latency_rows,
    layer_rows,
    pruning_table,
    render_pruning,
    size_rows,
    verdict,
)
from tests.views_samples import FEW, HOSTILE

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


def equivalence(relative: float = 1e-7, *, passed: bool = True) -> Equivalence:
    check = EquivalenceCheck("padded right", "eager", "forward", "float32", 2 * relative, relative, 0.3)
    failures = () if passed else ("forward on padded right (eager): the pruned model fails",)
    return Equivalence(2 * relative, relative, 1e-5, passed, (check,), ("no flash attention",), failures)


def latency(
    before: float = 20.0,
    after: float = 10.0,
    *,
    length: int | None = 32,
    in_noise: bool = False,
    kind: Pass = "forward",
) -> Latency:
    around = [(0.9 * value, 1.1 * value) for value in (before, after)]
    return Latency(1, length, before, after, around[0], around[1], 7, in_noise, kind)


def result(**changes) -> PruneResult:
    """Two layers of grouped heads: one group gone in the first, one head zeroed in the second."""
    stacks = (Stack("self", (0, 1), (8, 8)),)
    values = {
        "model": ModelInfo("a/model", "llama", "LlamaForCausalLM", "float32", "cpu", 2, 8, 2, 4, 32, stacks),
        "form": "structural",
        "layers": (
            LayerHeads("self", 0, 8, 2, 4, 1, (0, 1, 2, 3), ()),
            LayerHeads("self", 1, 8, 2, 8, 2, (5,), (5,)),
        ),
        "params": Change(1_000_000, 900_000),
        "attention_params": Change(250_000, 150_000),
        "bytes": Change(4_000_000, 3_600_000),
        "kv_cache": Change(2048, 1536),
        "equivalence": equivalence(),
        "chosen": None,
        "repair": None,
        "latency": (latency(), latency(10.0, 10.1, in_noise=True)),
        "conditions": Conditions("cpu", "float32", "sdpa", 2),
        "quality": Quality("perplexity", "lower", 12.5, 13.75, 3, 60, "of every token"),
        "saved": SaveReport("out", "structural", {"self.0": (0,)}, {}, 900_000, 3_700_000, equivalence(0.0)),
        "warnings": ("self.1: head 5 is zeroed",),
        "versions": {"headscope": "0"},
    }
    return PruneResult(**values | changes)


@st.composite
def results(draw) -> PruneResult:
    """Hostile names, and numbers that need not be finite."""
    names, floats = st.sampled_from(HOSTILE), st.floats(0.001, 1e9)
    stack, model, warning = draw(names), draw(names), draw(names)
    heads = draw(st.sets(st.integers(0, 7), min_size=1))
    zeroed = draw(st.sets(st.sampled_from(sorted(heads))))
    layer = LayerHeads(stack, 3, 8, 8, 8 - len(heads - zeroed), 8, tuple(sorted(heads)), tuple(sorted(zeroed)))
    passed = draw(st.booleans())
    measured = Quality("perplexity", "lower", draw(floats), draw(st.just(math.inf) | floats), 1, 2, model)
    stacks = (Stack(stack, (3,), (8,)),)
    return result(
        model=ModelInfo(model, "bert", "BertModel", "float32", "cpu", 1, 8, 8, 4, 32, stacks),
        layers=(layer,),
        equivalence=equivalence(draw(st.just(math.inf) | floats), passed=passed),
        latency=tuple(latency(draw(floats), draw(floats), length=draw(st.none() | st.integers(1, 9))) for _ in "ab"),
        quality=draw(st.none() | st.just(measured)),
        saved=None,
        warnings=(warning,),
    )


def strict_json(text: str) -> object:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


@FEW
@given(results())
def test_json_is_the_result_without_what_json_does_not_know(found) -> None:
    read = strict_json(render_pruning(found, "json"))
    assert read == found.to_dict()
    assert read["quality"] is None or (read["quality"]["after"] is None) == math.isinf(found.quality.after)
    assert (read["equivalence"]["relative"] is None) == math.isinf(found.equivalence.relative)
    (name,) = read["heads"]
    assert read["heads"][name] == list(found.layers[0].gone) and read["equivalence"]["passed"] is found.passed


@FEW
@given(results())
def test_nothing_steers_a_terminal(found) -> None:
    assert render_pruning(found, "json").isascii()
    for name in ("table", "csv", "markdown"):
        text = render_pruning(found, name)
        text.encode("utf-8")
        assert not CONTROL.search(text)


@FEW
@given(results())
def test_records_are_the_layers(found) -> None:
    lines = render_pruning(found, "jsonl").splitlines()
    assert [strict_json(line) for line in lines] == found.to_dict()["layers"]
    (row,) = csv.DictReader(io.StringIO(render_pruning(found, "csv")))
    layer = found.layers[0]
    assert row["gone"] == " ".join(map(str, layer.gone)) and row["zeroed"] == " ".join(map(str, layer.zeroed))
    assert int(row["left"]) == layer.left and int(row["num_heads"]) == 8


def test_the_layers_are_shown_as_they_are_asked_for() -> None:
    head, *rows = layer_rows(result())
    assert head == ("layer", "removed", "zeroed", "heads left", "kv left")
    assert rows == [("self.0", "0-3", "-", "4 of 8", "1 of 2"), ("self.1", "-", "5", "8 of 8", "2 of 2")]
    (request,) = parse_heads(f"{rows[0][0]}:{rows[0][1]}")
    assert request.heads == ((0, 3),)
    plain = result(layers=(LayerHeads("self", 0, 4, 4, 3, 3, (2,), ()),))
    assert layer_rows(plain) == [("layer", "removed", "heads left"), ("self.0", "2", "3 of 4")]


def test_sizes_and_what_is_saved() -> None:
    rows = {row[0]: row[1:] for row in size_rows(result())}
    assert rows["parameters"] == ("1,000,000", "900,000", "10.0 %")
    assert rows["of those, attention"] == ("250,000", "150,000", "40.0 %")
    assert rows["weights on disk"] == ("3.8 MiB", "3.4 MiB", "10.0 %")
    assert rows["KV cache a token"] == ("2 KiB", "1.5 KiB", "25.0 %")
    without = size_rows(result(kv_cache=Change(0, 0)))
    assert [row[0] for row in without] == ["", *list(rows)[1:4]]


def test_latency_says_what_is_inside_the_noise() -> None:
    _, first, second = latency_rows(result())
    assert first == ("1 × 32", "20.0 (18.0–22.0)", "10.0 (9.00–11.0)", "0.50", "")
    assert second[-2:] == ("1.01", "inside the noise")
    assert latency_rows(result(latency=(latency(length=None),)))[1][0] == "1"
    assert "sdpa attention in float32 on cpu, 2 threads" in render_pruning(result(), "markdown")


def test_steps_with_a_cache_are_told_from_whole_passes() -> None:
    found = result(latency=(latency(), latency(8.0, 6.0, length=128, kind="decode")))
    assert [row[0] for row in latency_rows(found)[1:]] == ["1 × 32", "1 × 1 after 128"]
    assert "with a cache of N" in latency_line(found) and "cache" not in latency_line(result())
    assert [cell["kind"] for cell in found.to_dict()["latency"]] == ["forward", "decode"]
    for name in ("table", "markdown"):
        assert "1 × 1 after 128" in render_pruning(found, name)


def test_the_verdict() -> None:
    assert verdict(result()).startswith("equal to the original with these heads zeroed: largest difference 2.0e-07")
    failed = result(equivalence=equivalence(math.inf, passed=False), latency=(), quality=None, saved=None)
    assert verdict(failed).startswith("NOT EQUAL") and "infinite" in verdict(failed)
    shown = render_pruning(failed, "table")
    assert "the pruned model fails" in shown and "nothing was written" in shown and "perplexity" not in shown


def test_everything_is_on_the_page() -> None:
    shown = render_pruning(result(), "table")
    flat = " ".join(shown.split())
    for part in ("perplexity: 12.5 before, 13.75 after (lower is better)", "3 texts, 60 tokens", "written to out"):
        assert part in flat
    assert "attention has 25.0 % of the parameters" in flat and "no flash attention" in flat
    page = render_pruning(result(), "markdown")
    assert "| self.0 | 0-3 | - | 4 of 8 | 1 of 2 |" in page and "- self.1: head 5 is zeroed" in page
    accuracy = Quality("accuracy", "higher", 0.9, 0.85, 20, 60, "")
    assert "accuracy: 90.0 % before, 85.0 % after" in render_pruning(result(quality=accuracy), "table")


@pytest.mark.parametrize("width", [30, 60, 120])
def test_no_column_is_lost_on_a_narrow_terminal(width) -> None:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(pruning_table(result()))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = out.getvalue()
    for part in ("heads left", "kv left", "after / before", "0.50", "1.5 KiB", "4 of 8"):
        assert part in text


def test_an_unknown_format() -> None:
    with pytest.raises(InputError, match="pdf"):
        render_pruning(result(), "pdf")
