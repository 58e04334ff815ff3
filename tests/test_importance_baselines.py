"""Baselines against plain NumPy on the weights that models return and hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from single_head_cases import (
    assert_untouched,
    build,
    places,
    snapshot,
    task_of,
    texts,
)

from headscope.capture.outputs import find_outputs
from headscope.errors import InputError, ModelError
from headscope.importance.baselines import confidence, magnitude, random
from headscope.importance.method import METHODS, Task
from headscope.models.pruned import HeadState, set_pruned_state

IDS = texts()
STACKS = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}


# ------------------------------------------------------------------ confidence
def largest_alone(name: str, model) -> dict[str, np.ndarray]:
    """Mean over rows of the largest weight, (texts, heads), by `stack.layer`: one text at a time, without padding."""
    found: dict[str, list[np.ndarray]] = {}
    model.set_attn_implementation("eager")
    for row in IDS:
        inputs = {"input_ids": torch.tensor([row])}
        if name == "t5":
            inputs["decoder_input_ids"] = torch.tensor([row[2:]])
        with torch.no_grad():
            given = model(**inputs, output_attentions=True)
        for stack, field in STACKS.items() if name == "t5" else [("self", "attentions")]:
            for layer, weights in enumerate(getattr(given, field)):
                found.setdefault(f"{stack}.{layer}", []).append(weights[0].double().numpy().max(-1).mean(-1))
    return {layer: np.array(rows) for layer, rows in found.items()}


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "albert"])
def test_confidence_is_the_mean_of_row_maxima(name: str) -> None:
    alone = largest_alone(name, build(name))
    if name == "albert":  # one module serves all layers
        alone = {"self.0": np.mean([alone[f"self.{i}"] for i in range(3)], axis=0)}
    model = build(name)
    before = snapshot(model)
    for batch_size in (1, 3, 8):
        found = confidence(task_of(name, model, IDS, batch_size))
        assert {layer for _, layer in found} == set(places(name))
        for layer, (_, heads, size) in places(name).items():
            for unit, values in (
                ("head", alone[layer]),
                ("kv-group", alone[layer].reshape(-1, heads // size, size).mean(-1)),
            ):
                np.testing.assert_allclose(found[unit, layer].scores, values.mean(0), atol=1e-6)
                errors = values.std(0, ddof=1) / np.sqrt(len(IDS))
                np.testing.assert_allclose(found[unit, layer].errors, errors, atol=1e-6)
    assert_untouched(model, before)


def test_confidence_does_not_depend_on_the_order_of_texts() -> None:
    model = build("gpt2")
    scored, turned = (confidence(task_of("gpt2", model, ids)) for ids in (IDS, IDS[::-1]))
    for key, found in scored.items():
        np.testing.assert_allclose(turned[key].scores, found.scores, rtol=1e-6)


def test_confidence_needs_texts_that_reach_all_layers() -> None:
    model = build("gpt2")
    with pytest.raises(InputError, match="there are none"):
        confidence(Task(model, find_outputs(model), None))
    model.transformer.h[1].attn.forward = lambda *args, **kwargs: (torch.zeros_like(args[0]), None)
    with pytest.raises(ModelError, match=r"transformer\.h\.1\.attn"):
        confidence(task_of("gpt2", model, IDS))


# ------------------------------------------------------------------ magnitude
def test_magnitude_is_the_norm_of_what_a_head_does_to_its_input() -> None:
    model = build("llama")
    before = snapshot(model)
    found = magnitude(Task(model, find_outputs(model), None, ("head", "kv-group")))
    for layer, module in enumerate(model.model.layers):
        attention = module.self_attn
        value = attention.v_proj.weight.detach().double().numpy().reshape(2, 8, 32)
        output = attention.o_proj.weight.detach().double().numpy().reshape(32, 4, 8)
        maps = [output[:, h] @ value[h // 2] for h in range(4)]
        wanted = [np.linalg.norm(m) for m in maps]
        np.testing.assert_allclose(found["head", f"self.{layer}"].scores, wanted, rtol=1e-10)
        groups = [np.linalg.norm(np.concatenate(maps[2 * g : 2 * g + 2])) for g in range(2)]
        np.testing.assert_allclose(found["kv-group", f"self.{layer}"].scores, groups, rtol=1e-10)
    assert_untouched(model, before)


def test_magnitude_reads_fused_and_turned_weights() -> None:
    model = build("gpt2")
    found = magnitude(Task(model, find_outputs(model), None))
    attention = model.transformer.h[1].attn
    value = attention.c_attn.weight.detach().double().numpy()[:, 64:].reshape(32, 4, 8)
    output = attention.c_proj.weight.detach().double().numpy().reshape(4, 8, 32)
    wanted = [np.linalg.norm(value[:, h] @ output[h]) for h in range(4)]
    np.testing.assert_allclose(found["head", "self.1"].scores, wanted, rtol=1e-10)


def test_magnitude_of_a_head_grows_with_its_weights() -> None:
    model = build("t5")
    plain = magnitude(Task(model, find_outputs(model), None))
    with torch.no_grad():
        model.decoder.block[1].layer[1].EncDecAttention.o.weight[:, 8:16] *= 3
    found = magnitude(Task(model, find_outputs(model), None, normalise=False))
    factors = np.concatenate([found[key].scores / plain[key].scores for key in plain])
    assert np.isclose(factors, 1).sum() == len(factors) - 1
    np.testing.assert_allclose(found["head", "cross.1"].scores[1] / plain["head", "cross.1"].scores[1], 3, rtol=1e-6)


@pytest.mark.parametrize("method", [magnitude, confidence])
def test_normalised_layers_have_unit_length(method) -> None:
    model = build("llama")
    plain, unit = (method(task_of("llama", model, IDS, normalise=n)) for n in (False, True))
    for key, found in unit.items():
        norm = np.sqrt((plain[key].scores ** 2).sum())
        np.testing.assert_allclose(found.scores, plain[key].scores / norm, rtol=1e-12)


# ------------------------------------------------------------------ chance
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_is_the_same_for_the_same_seed_only(seed: int) -> None:
    outputs = find_outputs(_LLAMA)
    first, again, other = (random(Task(_LLAMA, outputs, None, ("head",), seed=s)) for s in (seed, seed, seed + 1))
    both = random(Task(_LLAMA, outputs[1:], None, ("kv-group", "head"), seed=seed))
    drawn = np.concatenate([layer.scores for layer in first.values()])
    assert len(set(drawn)) == 12 and drawn.min() >= 0 and drawn.max() < 1
    for key, found in first.items():
        assert found.errors is None
        assert found.scores.tolist() == again[key].scores.tolist() != other[key].scores.tolist()
        assert key == ("head", "self.0") or both[key].scores.tolist() == found.scores.tolist()


def test_random_heads_keep_their_numbers_when_others_are_gone() -> None:
    model = build("llama")
    whole = random(Task(model, find_outputs(model), None, ("head", "kv-group")))
    set_pruned_state(model.model.layers[1].self_attn, HeadState(4, 2, 8, 8, zeroed=(0, 1)))
    left = random(Task(model, find_outputs(model), None, ("head", "kv-group")))
    assert left["head", "self.1"].scores.tolist() == whole["head", "self.1"].scores[2:].tolist()
    assert left["kv-group", "self.1"].scores.tolist() == whole["kv-group", "self.1"].scores[1:].tolist()


def test_baselines_are_registered_with_what_they_need() -> None:
    assert METHODS["confidence"].needs_data
    assert not METHODS["magnitude"].needs_data and not METHODS["random"].needs_data
    assert not any(METHODS[name].for_repair for name in ("confidence", "magnitude", "random"))


_LLAMA = build("llama")
