"""The same tokens give the same numbers, however they are batched, padded, ordered or handed over."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headscope
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from headscope.errors import InputError, ModelError

# One text has a single token; no two have the same length.
ROWS = [[20, 21, 22, 23, 24, 25, 26], [30], [40, 41, 42]]
PADDED = ["bert", "roberta", "distilbert", "albert", "deberta_v2", "gpt2", "gpt_neox", "opt", "bloom", "falcon_mqa",
          "mpt", "llama", "mistral", "gpt_oss", "t5", "bart"]  # fmt: skip
TOLERANCE = 1e-5


def same(a, b, tolerance=TOLERANCE):
    """Heads agree in every metric, chance value, label and spread."""
    assert [(h.stack, h.name) for h in a] == [(h.stack, h.name) for h in b]
    for left, right in zip(a, b, strict=True):
        for ours, theirs in ((left.metrics, right.metrics), (left.chance, right.chance)):
            for name in ours:
                assert (ours[name] is None) == (theirs[name] is None), (left.name, name, ours[name], theirs[name])
                assert ours[name] is None or abs(ours[name] - theirs[name]) < tolerance, (left.name, name)
        assert (left.pattern, left.runner_up, left.rest_pattern) == (right.pattern, right.runner_up, right.rest_pattern)


def padded(rows, side, pad, extra=2):
    """The rows as tensors, `extra` columns wider than they need be."""
    width = max(map(len, rows)) + extra
    ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, where], mask[i, where] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def mean_of_singles(model, rows, **options):
    """Means over texts of what each text gives alone, as {(stack, name): {metric: (value, chance)}}."""
    alone = [headscope.analyze(model, ids=row, **options).heads for row in rows]
    result = {}
    for heads in zip(*alone, strict=True):
        values = {}
        for name in heads[0].metrics:
            found = [(h.metrics[name], h.chance[name]) for h in heads if h.metrics[name] is not None]
            values[name] = tuple(np.mean(found, axis=0)) if found else (None, None)
        result[heads[0].stack, heads[0].name] = values
    return result


@pytest.mark.parametrize("name", PADDED)
def test_padding_on_either_side_gives_what_single_texts_give(name):
    model, family = build_family(name), FAMILIES[name]
    pad = model.config.pad_token_id if model.config.pad_token_id is not None else 0
    options = {"metrics": "all"}
    extra = {}
    if family.modality == "seq2seq":
        start = torch.tensor([[0, 50, 51, 52], [0, 53, 54, 55], [0, 56, 57, 58]])
        extra = {"decoder_input_ids": start}
        alone = [
            headscope.analyze(model, inputs={"input_ids": torch.tensor([row]), "decoder_input_ids": start[i : i + 1]})
            for i, row in enumerate(ROWS)
        ]
        single = {}
        for heads in zip(*(a.heads for a in alone), strict=True):
            single[heads[0].stack, heads[0].name] = {
                n: mean_pairs([(h.metrics[n], h.chance[n]) for h in heads]) for n in heads[0].metrics
            }
        options = {}
    else:
        single = mean_of_singles(model, ROWS, **options)
    results = [
        headscope.analyze(model, inputs=padded(ROWS, side, pad, extra=6) | extra, **options)
        for side in ("left", "right")
    ]
    if not extra:
        results += [headscope.analyze(model, ids=ROWS, batch_size=size, **options) for size in (1, 3)]
    for result in results:
        assert result.inputs.texts == 3 and result.inputs.tokens == 11
        # Rows of padding may hold anything: far outside a window they are spread over all keys.
        assert not [line for line in result.warnings if "above the diagonal" in line]
        for head in result.heads:
            for metric, (value, chance) in single[head.stack, head.name].items():
                assert (head.metrics[metric] is None) == (value is None), (head.name, metric)
                if value is not None:
                    assert abs(head.metrics[metric] - value) < TOLERANCE, (head.name, metric)
                    assert abs(head.chance[metric] - chance) < TOLERANCE, (head.name, metric)
                assert head.spread[metric].texts <= 3 if metric in head.spread else value is None


def mean_pairs(pairs):
    found = [pair for pair in pairs if pair[0] is not None]
    return tuple(np.mean(found, axis=0)) if found else (None, None)


@pytest.mark.parametrize("side", ["left", "right"])
def test_segments_and_positions_move_with_their_tokens(side):
    model = build_family("bert")
    given = padded(ROWS, side, 0)
    mask = given["attention_mask"]
    given["token_type_ids"] = torch.arange(mask.shape[1]).remainder(2).expand_as(mask).contiguous()
    given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    result = headscope.analyze(model, inputs=given)
    alone = []
    for i, row in enumerate(ROWS):
        real = mask[i].bool()
        alone.append(headscope.analyze(model, inputs={
            "input_ids": torch.tensor([row]), "token_type_ids": given["token_type_ids"][i, real][None],
        }).heads)  # fmt: skip
    for head, *singles in zip(result.heads, *alone, strict=True):
        assert head.metrics["sink"] == pytest.approx(np.mean([h.metrics["sink"] for h in singles]), abs=TOLERANCE)


def test_padding_of_one_side_is_not_that_of_the_other():
    """Left padding in one, right padding in the other, and the other way round; both are equally wide."""
    for name in ("t5", "bart"):
        model = build_family(name)
        pad = model.config.pad_token_id
        decoder = [[2, 50, 51], [2, 53, 54, 55, 56], [2]]
        results = []
        for left, right in (("left", "right"), ("right", "left")):
            other = {f"decoder_{key}": value for key, value in padded(decoder, right, pad, extra=4).items()}
            results.append(headscope.analyze(model, inputs=padded(ROWS, left, pad) | other).heads)
        same(*results)
        expected = {
            "encoder": np.mean([1 / len(row) for row in ROWS]),
            "cross": np.mean([1 / len(row) for row in ROWS]),
            "decoder": np.mean([np.mean([1 / i for i in range(1, len(row) + 1)]) for row in decoder]),
        }
        for head in results[0]:
            assert head.chance["sink"] == pytest.approx(expected[head.stack]), head.stack
        for i in range(3):
            one = {"input_ids": torch.tensor([ROWS[i]]), "decoder_input_ids": torch.tensor([decoder[i]])}
            for head in headscope.analyze(model, inputs=one, stack="cross").heads:
                assert head.chance["sink"] == pytest.approx(1 / len(ROWS[i]))


MORE_ROWS = [*ROWS, [50, 51, 52, 53, 54]]


@cache
def in_one_batch(name):
    model = build_family(name)
    return model, headscope.analyze(model, ids=MORE_ROWS, batch_size=4)


@settings(max_examples=12, deadline=None)
@given(order=st.permutations(range(4)), size=st.integers(1, 4), name=st.sampled_from(["bert", "llama", "bloom"]))
def test_neither_order_nor_batches_matter(order, size, name):
    model, whole = in_one_batch(name)
    shuffled = headscope.analyze(model, ids=[MORE_ROWS[i] for i in order], batch_size=size)
    same(whole.heads, shuffled.heads)
    for a, b in zip(whole.heads, shuffled.heads, strict=True):
        for name_, spread in a.spread.items():
            assert spread.texts == b.spread[name_].texts
            assert (spread.sd is None) == (b.spread[name_].sd is None)
            assert spread.sd is None or abs(spread.sd - b.spread[name_].sd) < TOLERANCE


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_what_a_decoder_generates_does_not_depend_on_the_batch(name):
    model = build_family(name)
    results = [headscope.analyze(model, ids=MORE_ROWS, batch_size=size) for size in (1, 4)]
    same(results[0].heads, results[1].heads)
    assert results[0].warnings == results[1].warnings


@pytest.mark.parametrize("name", ["clip", "whisper"])
def test_towers_give_in_a_batch_what_they_give_alone(name):
    model, family = build_family(name), FAMILIES[name]
    both = example_inputs(family)
    together = headscope.analyze(model, inputs=both, metrics="all")
    alone = []
    for i in range(2):
        cut = {}
        for key, value in both.items():
            mask = both.get("decoder_attention_mask" if key.startswith("decoder_") else "attention_mask")
            text = mask is not None and value.ndim == 2
            cut[key] = value[i : i + 1, : int(mask[i].sum())] if text else value[i : i + 1]
        alone.append(headscope.analyze(model, inputs=cut, metrics="all").heads)
    for head, one, two in zip(together.heads, *alone, strict=True):
        for metric, value in head.metrics.items():
            expected, chance = mean_pairs([(h.metrics[metric], h.chance[metric]) for h in (one, two)])
            assert (value is None) == (expected is None)
            assert value is None or abs(value - expected) < TOLERANCE, (head.name, metric)
            assert value is None or abs(head.chance[metric] - chance) < TOLERANCE, (head.name, metric)


def test_texts_without_a_token_in_sight_of_a_metric_do_not_count():
    result = headscope.analyze(build_family("gpt2"), ids=ROWS, metrics="sink,next_token,special")
    for head in result.heads:
        assert head.spread["prev_token"].texts == 2 and head.spread["sink"].texts == 3
        assert head.metrics["next_token"] is None and head.spread["next_token"].texts == 0
        assert head.spread["next_token"].sd is None
    single = headscope.analyze(build_family("gpt2"), ids=ROWS[0])
    assert all(h.spread is None for h in single.heads)


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda row: torch.tensor([row]),
        lambda row: np.array([row]),
        lambda row: [np.array(row)],
        lambda row: (tuple(row),),
    ],
)
def test_ids_come_in_any_container(make):  # fmt: skip
    model = build_family("gpt2")
    expected = headscope.analyze(model, ids=ROWS[0])
    assert headscope.analyze(model, ids=make(ROWS[0])).to_dict() == expected.to_dict()


@pytest.mark.parametrize("ids", [[], [[]], [[5], []], [1.5], [[1, 1.5]], ["5"], [[["5"]]], [None], [True, False], 5,
                                 [10**9], [-1], np.zeros((2, 2, 2), int), [1, [2]]])  # fmt: skip
def test_ids_that_are_none_are_refused(ids):
    with pytest.raises(InputError) as error:
        headscope.analyze(build_family("gpt2"), ids=ids)
    assert "\n" not in str(error.value)


def test_nothing_to_measure_and_nothing_to_measure_it_with():
    model = build_family("gpt2")
    for arguments in ({}, {"texts": ""}, {"texts": []}, {"texts": ["a", " "]}):
        with pytest.raises((InputError, ModelError)):
            headscope.analyze(model, **arguments)
    with pytest.raises(InputError, match="inputs is a list, not a dict of tensors"):
        headscope.analyze(model, inputs=[torch.tensor([[5]])])
    with pytest.raises(InputError, match="unknown engine 'fast'"):
        headscope.analyze(model, ids=ROWS[0], engine="fast")
    for wrong in (5, object(), torch.nn.Linear(2, 2), b"bert"):
        with pytest.raises(InputError, match="model is a"):
            headscope.analyze(wrong, ids=ROWS[0])


def test_a_model_by_name_and_in_memory_give_the_same(family_dir):
    directory = family_dir("bert")
    model = build_family("bert")
    by_path, by_name = (headscope.analyze(place, ids=ROWS) for place in (directory, str(directory)))
    same(by_path.heads, headscope.analyze(model, ids=ROWS).heads)
    assert by_path.to_dict() == by_name.to_dict()
    loaded = headscope.load(str(directory))
    text = "the cat sat on the mat"
    same(headscope.analyze(loaded, text).heads, headscope.analyze(str(directory), text).heads)


@pytest.mark.parametrize("name", ["llama", "mistral", "jamba", "t5", "gpt_oss"])
def test_layers_and_heads_that_do_not_exist_name_those_that_do(name):
    model, family = build_family(name), FAMILIES[name]
    inputs = example_inputs(family)
    layers = sorted({n for spec in family.stacks.values() for n in spec.layers})
    for layer in (0, 1, 2, 3, 4, -1, -2, -4, "0-1", "0-9"):
        low, high = (int(n) for n in layer.split("-")) if isinstance(layer, str) else (layer, layer)
        depth = max(len(spec.layers) for spec in family.stacks.values())
        valid = -low <= depth if low < 0 else high <= layers[-1] and any(low <= n <= high for n in layers)
        if valid:
            headscope.analyze(model, inputs=inputs, layer=layer)
            continue
        with pytest.raises(InputError, match=f"layer {layer} does not exist in") as error:
            headscope.analyze(model, inputs=inputs, layer=layer)
        assert f"Valid layers: {short(layers)}" in error.value.hint
    heads = max(spec.num_heads for spec in family.stacks.values())
    for head in (heads, -heads - 1, f"0-{heads}"):
        with pytest.raises(InputError, match=f"head {head} does not exist in the selected layers") as error:
            headscope.analyze(model, inputs=inputs, head=head)
        assert f"Valid heads: 0-{heads - 1}" in error.value.hint


def short(numbers):
    runs = [list(g) for _, g in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{r[0][1]}-{r[-1][1]}" if len(r) > 1 else str(r[0][1]) for r in runs)
