"""`analyze_corpus` gives what measuring each text by itself gives, whatever batches, order and partitions."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

import headscope
from fixtures.building import build_family
from fixtures.families import FAMILIES
from fixtures.tokenizers import WORDS, build_tokenizer
from headscope.corpus import command
from headscope.corpus.partition import partitions
from headscope.corpus.store import from_bytes, to_bytes
from headscope.corpus.summary import Summary
from headscope.corpus.worker import Worker
from headscope.errors import InputError, ModelError
from headscope.heads.interval import interval
from headscope.heads.moments import Moments
from headscope.reading import Record

TOLERANCE = 1e-5
FAMILY_NAMES = ("bert", "gpt2", "llama", "t5", "mistral")


def made_texts(count: int, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, size=draw.integers(1, 30))) for _ in range(count)]


TEXTS = made_texts(24)


@pytest.fixture(scope="module")
def bert() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return build_family("bert"), build_tokenizer(FAMILIES["bert"].tokenizer)


@pytest.fixture(scope="module")
def alone(bert: tuple[Any, Any]) -> list[Any]:
    """An analysis of each text by itself."""
    return [headscope.analyze(bert[0], text, tokenizer=bert[1]) for text in TEXTS]


def values_of(alone: list[Any], head: int, name: str) -> np.ndarray:
    return np.array([one.heads[head].metrics[name] for one in alone], dtype=float)


def assert_same(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    assert len(found.heads) == len(expected.heads)
    for a, b in zip(found.heads, expected.heads, strict=True):
        assert (a.name, a.stack, a.pattern, a.stability, a.second) == (
            b.name,
            b.stack,
            b.pattern,
            b.stability,
            b.second,
        )
        for name, value in b.metrics.items():
            assert a.metrics[name] == (None if value is None else pytest.approx(value, abs=tolerance))
            if b.spread is not None and name in b.spread:
                assert a.spread[name].texts == b.spread[name].texts
                assert a.spread[name].low == (
                    None if b.spread[name].low is None else pytest.approx(b.spread[name].low, abs=tolerance)
                )


# ------------------------------------------------------------------ numbers
def test_values_are_those_of_each_text_alone(bert: tuple[Any, Any], alone: list[Any]) -> None:
    found = headscope.analyze_corpus(bert[0], TEXTS, tokenizer=bert[1], partition=(7, 1 << 16))
    for place, record in enumerate(found.heads):
        labels = [one.heads[place].pattern for one in alone]
        assert record.stability == labels.count(record.pattern) / len(TEXTS)
        for name, value in record.metrics.items():
            each = values_of(alone, place, name)
            measured = each[~np.isnan(each)]
            assert value == pytest.approx(measured.mean(), abs=TOLERANCE)
            assert record.spread[name].texts == len(measured)
            assert record.spread[name].sd == pytest.approx(measured.std(ddof=1), abs=TOLERANCE)
            chance = np.array([one.heads[place].chance[name] for one in alone], dtype=float)
            assert record.chance[name] == pytest.approx(np.nanmean(chance), abs=TOLERANCE)
    assert found.inputs.texts == len(TEXTS)
    assert found.inputs.tokens == sum(one.inputs.tokens for one in alone)
    assert found.inputs.first_tokens == alone[0].inputs.first_tokens


def test_an_interval_is_near_students_where_texts_are_many() -> None:
    values = np.random.default_rng(0).normal(0.3, 0.1, size=(400, 1))
    low, high = interval(Moments.of(values))
    by_scipy = stats.t.interval(0.95, 399, values.mean(), stats.sem(values[:, 0]))
    assert (low[0], high[0]) == pytest.approx(by_scipy, abs=5e-4)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_families_agree_with_analyze_on_the_same_texts(family: str) -> None:
    model, tokenizer = build_family(family), build_tokenizer(FAMILIES[family].tokenizer)
    decoder = {"decoder_text": "the mat"} if family == "t5" else {}
    given_decoder = {"decoder_texts": "the mat"} if family == "t5" else {}
    found = headscope.analyze_corpus(
        model, TEXTS, tokenizer=tokenizer, metrics="all", rules="calibrated", partition=(5, 400), **decoder
    )
    expected = headscope.analyze(
        model, TEXTS, tokenizer=tokenizer, metrics="all", rules="calibrated", batch_size=1, **given_decoder
    )
    assert_same(found, expected)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(12)),
    batch=st.none() | st.integers(1, 13),
    cut=st.tuples(st.integers(1, 13), st.integers(1, 500)),
)
def test_batches_order_and_partitions_do_not_matter(
    bert: tuple[Any, Any], order: list[int], batch: int | None, cut: tuple[int, int]
) -> None:
    texts = TEXTS[:12]
    expected = headscope.analyze_corpus(bert[0], texts, tokenizer=bert[1])
    found = headscope.analyze_corpus(
        bert[0], [texts[i] for i in order], tokenizer=bert[1], batch_size=batch, partition=cut
    )
    assert_same(found, expected)
    assert found.inputs.tokens == expected.inputs.tokens


def test_the_same_call_gives_the_same_bits(bert: tuple[Any, Any]) -> None:
    first, second = (
        headscope.analyze_corpus(bert[0], TEXTS, tokenizer=bert[1], partition=(5, 400), sample=15, seed=3).to_dict()
        for _ in range(2)
    )
    assert json.dumps(first) == json.dumps(second)


def test_little_of_a_batch_is_padding(bert: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    forward = type(bert[0]).forward

    @functools.wraps(forward)
    def counted(self: Any, *args: Any, **keywords: Any) -> Any:
        mask = keywords["attention_mask"]
        seen.append((int(mask.sum()), mask.numel()))
        return forward(self, *args, **keywords)

    headscope.analyze_corpus(bert[0], TEXTS[:3], tokenizer=bert[1])
    monkeypatch.setattr(type(bert[0]), "forward", counted)
    texts = made_texts(300)
    headscope.analyze_corpus(bert[0], texts, tokenizer=bert[1])
    real, cells = (sum(each) for each in zip(*seen, strict=True))
    assert cells * 0.95 <= real <= cells
    assert len(seen) < len(texts) / 4


# ------------------------------------------------------------------ which texts
def test_a_sample_is_drawn_with_the_seed(bert: tuple[Any, Any], tmp_path: Path) -> None:
    drawn = []
    for seed in (0, 1):
        table = tmp_path / f"{seed}.parquet"
        found = headscope.analyze_corpus(
            bert[0], TEXTS, tokenizer=bert[1], sample=9, seed=seed, per_text=table, layer=0, head=0
        )
        numbers = pyarrow.parquet.read_table(table)["text"].to_pylist()
        assert found.inputs.texts == len(numbers) == len(set(numbers)) == 9
        drawn.append(numbers)
        expected = headscope.analyze(bert[0], [TEXTS[i] for i in numbers], tokenizer=bert[1], layer=0, head=0)
        assert found.heads[0].metrics["sink"] == pytest.approx(expected.heads[0].metrics["sink"], abs=TOLERANCE)
    assert drawn[0] != drawn[1]


def widths(found: Any) -> list[float]:
    return [s.high - s.low for record in found.heads for s in record.spread.values()]


def test_until_stops_at_the_first_partition_that_is_narrow_enough(bert: tuple[Any, Any]) -> None:
    texts = made_texts(120)
    options = {"tokenizer": bert[1], "partition": (10, 1 << 16), "seed": 2}
    whole = headscope.analyze_corpus(bert[0], texts, **options)
    until = 2 * max(widths(whole))
    found = headscope.analyze_corpus(bert[0], texts, until=until, **options)
    assert max(widths(found)) <= until
    assert found.corpus.reached and 20 <= found.inputs.texts < 120
    # One partition less was not enough, and what was measured is the beginning of the seeded order.
    before = headscope.analyze_corpus(bert[0], texts, sample=found.inputs.texts - 10, **options)
    assert max(widths(before)) > until
    same = headscope.analyze_corpus(bert[0], texts, sample=found.inputs.texts, **options)
    assert_same(found, same)


def test_until_says_where_the_texts_ended_too_soon(bert: tuple[Any, Any]) -> None:
    found = headscope.analyze_corpus(bert[0], TEXTS, tokenizer=bert[1], until=1e-6)
    assert not found.corpus.reached and found.inputs.texts == len(TEXTS)
    worst = max(widths(found))
    assert any(f"the widest is {worst:.4f}" in warning for warning in found.warnings)


def test_few_texts_give_rough_intervals(bert: tuple[Any, Any]) -> None:
    assert any("rough" in w for w in headscope.analyze_corpus(bert[0], TEXTS[:19], tokenizer=bert[1]).warnings)
    assert not any("rough" in w for w in headscope.analyze_corpus(bert[0], TEXTS[:20], tokenizer=bert[1]).warnings)


def test_texts_that_cannot_be_read_are_counted_and_named(bert: tuple[Any, Any], tmp_path: Path) -> None:
    data = tmp_path / "some.jsonl"
    lines = [json.dumps({"text": t}) for t in TEXTS[:6]]
    # The last one is fine for the reader, and nothing for the tokenizer.
    data.write_text("\n".join([*lines[:3], "{not json", '{"other": 1}', *lines[3:], json.dumps({"text": "\u200b"})]))
    found = headscope.analyze_corpus(bert[0], data, tokenizer=bert[1])
    assert_same(found, headscope.analyze_corpus(bert[0], TEXTS[:6], tokenizer=bert[1]))
    assert found.corpus.skipped == 3
    said = " ".join(found.warnings)
    assert "some.jsonl:4" in said and "some.jsonl:5" in said and "some.jsonl:9" in said
    with pytest.raises(InputError, match=r"some\.jsonl:4"):
        headscope.analyze_corpus(bert[0], data, tokenizer=bert[1], strict=True)
    data.write_text("\n".join([*lines, json.dumps({"text": "\u200b"})]))
    with pytest.raises(InputError, match=r"some\.jsonl:7"):
        headscope.analyze_corpus(bert[0], data, tokenizer=bert[1], strict=True)


def test_cut_and_unknown_texts_are_counted_over_the_corpus(bert: tuple[Any, Any]) -> None:
    texts = [*TEXTS[:10], "жжж ююю", "ёёё"]
    found = headscope.analyze_corpus(bert[0], texts, tokenizer=bert[1], max_length=8, partition=(4, 1 << 16))
    alone = [headscope.analyze(bert[0], t, tokenizer=bert[1]).inputs.tokens for t in texts[:10]]
    assert found.inputs.truncated == sum(n > 8 for n in alone)
    said = " ".join(found.warnings)
    assert f"{found.inputs.truncated} of 12 texts cut to 8 tokens (the longest has {max(alone)})" in said
    assert "half or more of 2 of 12 texts" in said
    with pytest.raises(ModelError, match="knows none"):
        headscope.analyze_corpus(bert[0], ["жжж", "ёёё"], tokenizer=bert[1])
    with pytest.raises(InputError, match="the limit is 8"):
        headscope.analyze_corpus(bert[0], texts, tokenizer=bert[1], max_length=8, strict_length=True)


# ------------------------------------------------------------------ each text's values
def test_each_texts_values_are_written(bert: tuple[Any, Any], alone: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "values.parquet"
    found = headscope.analyze_corpus(bert[0], TEXTS, tokenizer=bert[1], per_text=path, partition=(5, 400))
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert len(rows) == len(TEXTS) * len(found.heads)
    for row, (text, record) in zip(rows, ((i, r) for i, one in enumerate(alone) for r in one.heads), strict=True):
        assert (row["text"], row["where"]) == (text, f"example {text}")
        assert (row["stack"], row["layer"], row["head"]) == (record.stack, record.layer, record.head)
        assert (row["pattern"], row["tokens"]) == (record.pattern, alone[text].inputs.tokens)
        for name, value in record.metrics.items():
            assert (None if np.isnan(row[name]) else row[name]) == (
                None if value is None else pytest.approx(value, abs=TOLERANCE)
            )
    assert [p.name for p in tmp_path.iterdir()] == ["values.parquet"]


def test_values_of_a_run_that_fails_are_not_written(bert: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "values.parquet"
    path.write_bytes(b"old")
    with pytest.raises(InputError, match="exists"):
        headscope.analyze_corpus(bert[0], TEXTS, tokenizer=bert[1], per_text=path)

    def failing() -> Any:
        yield from TEXTS[:10]
        raise KeyboardInterrupt

    class Once:
        """Reads well when it is checked, and is interrupted the second time."""

        def __init__(self) -> None:
            self.times = 0

        def __iter__(self) -> Any:
            self.times += 1
            return iter(TEXTS) if self.times == 1 else failing()

    with pytest.raises(KeyboardInterrupt):
        headscope.analyze_corpus(bert[0], Once(), tokenizer=bert[1], per_text=path, force=True, partition=(3, 1 << 16))
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["values.parquet"]


# ------------------------------------------------------------------ parts
def parts_of(bert: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    measure = Worker.measure

    def kept(self: Worker, partition: Any) -> Any:
        found.append(measure(self, partition))
        return found[-1]

    monkeypatch.setattr(Worker, "measure", kept)
    headscope.analyze_corpus(bert[0], [*TEXTS, "\u200b"], tokenizer=bert[1], partition=(5, 1 << 16))
    return found


def same_arrays(a: Any, b: Any) -> bool:
    one, two = a.to_arrays(), b.to_arrays()
    return one.keys() == two.keys() and all(
        np.array_equal(one[k], two[k], equal_nan=one[k].dtype.kind == "f") for k in one
    )


def test_parts_survive_a_file_bit_for_bit(bert: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for part in parts_of(bert, monkeypatch):
        again = from_bytes(to_bytes(part))
        assert (again.number, again.digest, again.table) == (part.number, part.digest, part.table)
        for name in Summary.__dataclass_fields__:
            if name != "sums":
                assert getattr(again.summary, name) == getattr(part.summary, name), name
        assert all(same_arrays(again.summary.sums[k], v) for k, v in part.summary.sums.items())


@pytest.fixture(scope="module")
def summaries(bert: tuple[Any, Any]) -> list[Summary]:
    with pytest.MonkeyPatch.context() as patch:
        return [part.summary for part in parts_of(bert, patch)]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_summaries_merge_in_any_order(summaries: list[Summary], data: st.DataObject) -> None:
    expected = sum(summaries, Summary())
    rest = data.draw(st.permutations(summaries))
    while len(rest) > 1:
        at = data.draw(st.integers(0, len(rest) - 2))
        rest = [*rest[:at], rest[at] + rest[at + 1], *rest[at + 2 :]]
    for name in ("texts", "tokens", "truncated", "longest", "unknown", "skipped", "first_tokens", "first", "engines"):
        assert getattr(rest[0], name) == getattr(expected, name), name
    for layer, sums in expected.sums.items():
        for name, array in sums.to_arrays().items():
            other = rest[0].sums[layer].to_arrays()[name]
            if array.dtype.kind == "f":
                np.testing.assert_allclose(other, array, atol=1e-12, rtol=1e-9)
            else:
                np.testing.assert_array_equal(other, array)


def test_layers_keep_their_order_where_some_texts_lack_them(summaries: list[Summary]) -> None:
    whole = summaries[0]
    last = list(whole.facts)[-1]
    assert len(whole.facts) > 1
    for first in (0, 2):
        lacking = replace(whole, first=first, facts={last: whole.facts[last]}, sums={last: whole.sums[last]})
        both = replace(whole, first=1) + lacking
        assert list(both.facts) == list(both.sums) == list(whole.facts)
        assert both.sums[last].texts == 2 * whole.texts


@given(st.lists(st.text(min_size=1, max_size=20), max_size=40), st.integers(1, 9), st.integers(1, 60))
def test_partitions_hold_all_texts_in_order(texts: list[str], most: int, characters: int) -> None:
    records = [Record(number=i, text=t, label=None, where=str(i)) for i, t in enumerate(texts)]
    found = list(partitions(records, most, characters))
    assert [r for p in found for r in p.records] == records
    assert [p.number for p in found] == list(range(len(found)))
    for p in found:
        assert 1 <= len(p.records) <= most
        assert sum(len(r.text) for r in p.records[:-1]) < characters
    assert len({p.digest for p in found}) == len(found)


# ------------------------------------------------------------------ refusals, maps
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": None}, "no corpus"),
        ({"sample": 0}, "sample is 0"),
        ({"until": 0.0}, "until is 0"),
        ({"until": float("nan")}, "until is nan"),
        ({"workers": 0}, "workers is 0"),
        ({"workers": 2}, "in memory"),
        ({"runner": "ray"}, "in memory"),
        ({"runner": "slurm"}, "unknown runner"),
        ({"ray_address": "auto"}, "goes with the runner ray"),
        ({"resume": True}, "nothing to resume from"),
        ({"engine": "fast"}, "unknown engine"),
        ({"metrics": "nonsense"}, "nonsense"),
        ({"partition": (0, 5)}, "partition is"),
        ({"per_text": "values.csv"}, "parquet"),
        ({"per_text": "no/such/values.parquet"}, "no such directory"),
        ({"split": "train"}, "splits"),
        ({"layer": 9}, "9"),
        ({"data": "no_such_file.jsonl"}, "no_such_file"),
        ({"text_column": "body", "data": [{"text": "a"}]}, "no text"),
    ],
)
def test_bad_arguments_are_refused(bert: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        headscope.analyze_corpus(bert[0], **{"data": TEXTS, "tokenizer": bert[1], **options})
    assert error.value.hint is not None


def test_models_that_read_no_text_are_refused() -> None:
    with pytest.raises(InputError):
        headscope.analyze_corpus(build_family("vit"), TEXTS)


def test_maps_are_those_of_the_first_text(bert: tuple[Any, Any]) -> None:
    found = headscope.analyze_corpus(bert[0], TEXTS, tokenizer=bert[1], maps=True, layer=1)
    expected = headscope.analyze(bert[0], TEXTS[0], tokenizer=bert[1], maps=True, layer=1)
    assert len(found.maps) == len(expected.maps) == 1
    np.testing.assert_allclose(found.maps[0].weights, expected.maps[0].weights, atol=1e-6)


def test_progress_counts_texts(bert: tuple[Any, Any]) -> None:
    seen: list[Any] = []
    headscope.analyze_corpus(bert[0], TEXTS, tokenizer=bert[1], partition=(10, 1 << 16), report=seen.append)
    assert [p.texts for p in seen] == [10, 20, 24]
    assert all(p.tokens_per_second > 0 and p.resumed == 0 for p in seen)
    assert seen[-1].share in (None, 1.0)


def test_the_command_documents_every_option() -> None:
    import inspect

    doc = inspect.getdoc(command.analyze_corpus) or ""
    names = doc[doc.index("Args:") :]
    assert all(name in names for name in inspect.signature(command.analyze_corpus).parameters)
