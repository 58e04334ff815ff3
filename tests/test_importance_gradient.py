"""Gradient scores against gates that are multiplied in, one text at a time."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from single_head_cases import (
    MODELS,
    assert_untouched,
    build,
    data_of,
    inputs_changed,
    loss_alone,
    places,
    ranked,
    snapshot,
    task_of,
    texts,
    two_heads_matter,
)
from torch import Tensor

import headscope
from headscope.capture.outputs import find_outputs, watching
from headscope.errors import InputError, ModelError
from headscope.importance.by_text import averaged
from headscope.importance.gradient import gradient, gradient_token
from headscope.models.pruned import HeadState, set_pruned_state

NAMES = ("bert", "gpt2", "llama", "t5", "albert")


def gates_alone(name: str, model, row, number: int, unit: str, per_token: bool) -> dict[str, np.ndarray]:
    """|dL / dgate| of one text by `stack.layer`: gates of ones that heads' results are multiplied with."""
    gates: dict[str, Tensor] = {}
    changes = {}
    for layer, (path, heads, size) in places(name).items():
        of_unit = 1 if unit == "head" else size

        def gate(context: Tensor, layer: str = layer, heads: int = heads, of_unit: int = of_unit) -> Tensor:
            shape = (context.shape[1] if per_token else 1, heads // of_unit)
            own = gates.setdefault(layer, torch.ones(shape, requires_grad=True))
            each = own.repeat_interleave(context.shape[-1] // own.shape[1], dim=-1)
            return context * each

        changes[path] = gate
    with inputs_changed(model, changes):
        loss, _ = loss_alone(name, model, row, number)
    found = torch.autograd.grad(loss, list(gates.values()))
    return {layer: g.abs().sum(0).double().numpy() for layer, g in zip(gates, found, strict=True)}


@pytest.mark.parametrize("unit", ["head", "kv-group"])
@pytest.mark.parametrize("per_token", [False, True], ids=["text", "token"])
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_gates_whatever_the_batches(name: str, per_token: bool, unit: str) -> None:
    model, ids = build(name), texts()
    alone = [gates_alone(name, model, row, i, unit, per_token) for i, row in enumerate(ids)]
    for batch_size in (1, 3, 8):
        task = task_of(name, model, ids, batch_size, units=(unit,))
        scored = (gradient_token if per_token else gradient)(task)
        assert set(scored) == {(unit, layer) for layer in places(name)}
        for (_, layer), found in scored.items():
            wanted = np.array([values[layer] for values in alone])
            np.testing.assert_allclose(found.scores, wanted.mean(0), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(found.errors, wanted.std(0, ddof=1) / np.sqrt(len(ids)), rtol=1e-5, atol=1e-6)
            assert found.scores.min() > 1e-4


def test_gradients_are_slopes_of_the_loss() -> None:
    """Finite differences, in double precision."""
    model, row, step = build("gpt2").double(), texts((9,))[0], 1e-4
    found = gradient(task_of("gpt2", model, [row]))

    def loss(path: str, head: int, factor: float) -> float:
        def scaled(context: Tensor) -> Tensor:
            blocks = context.unflatten(-1, (4, 8)).clone()
            blocks[..., head, :] *= factor
            return blocks.flatten(-2)

        with inputs_changed(model, {path: scaled}), torch.no_grad():
            return float(loss_alone("gpt2", model, row, 0)[0])

    for layer, (path, heads, _) in places("gpt2").items():
        slopes = [(loss(path, h, 1 + step) - loss(path, h, 1 - step)) / (2 * step) for h in range(heads)]
        np.testing.assert_allclose(found["head", layer].scores, np.abs(slopes), rtol=1e-4, atol=1e-6)


def test_distance_from_the_own_output_has_a_slope() -> None:
    model, ids = build("distilbert"), texts()
    one, all_at_once = (gradient(task_of("distilbert", model, ids, size)) for size in (1, 8))
    for key, found in one.items():
        np.testing.assert_allclose(all_at_once[key].scores, found.scores, rtol=1e-5)
        assert found.scores.min() > 1e-3


@pytest.mark.parametrize("method", [gradient, gradient_token])
def test_finds_the_two_heads_that_matter(method) -> None:
    heads = [(0, 2), (2, 1)]
    scored = method(task_of("llama", two_heads_matter(heads), texts()))
    assert set(ranked(scored)[:2]) == {(f"self.{layer}", head) for layer, head in heads}
    groups = ranked(scored, "kv-group")[:2]
    assert set(groups) == {(f"self.{layer}", head // 2) for layer, head in heads}


@pytest.mark.parametrize("method", [gradient, gradient_token])
def test_order_of_texts_does_not_matter(method) -> None:
    model, ids = build("gpt2"), texts()
    scored, turned = (method(task_of("gpt2", model, t)) for t in (ids, ids[::-1]))
    for key, found in scored.items():
        np.testing.assert_allclose(turned[key].scores, found.scores, rtol=1e-5)
        np.testing.assert_allclose(turned[key].errors, found.errors, rtol=1e-4)


def test_normalised_layers_have_unit_length() -> None:
    model, ids = build("gpt2"), texts()
    plain, unit = (gradient(task_of("gpt2", model, ids, normalise=n)) for n in (False, True))
    for key, found in unit.items():
        norm = np.sqrt((plain[key].scores ** 2).sum())
        np.testing.assert_allclose(found.scores, plain[key].scores / norm, rtol=1e-12)
        np.testing.assert_allclose(found.errors, plain[key].errors / norm, rtol=1e-12)


def test_a_layer_of_nothing_stays_nothing() -> None:
    assert averaged(np.zeros((3, 2)), normalise=True).scores.tolist() == [0, 0]


def test_one_text_has_no_standard_error() -> None:
    found = gradient(task_of("gpt2", build("gpt2"), texts((9,))))
    assert all(np.isnan(layer.errors).all() for layer in found.values())


@pytest.mark.parametrize("name", NAMES)
def test_model_is_left_as_it_was(name: str) -> None:
    model = build(name)
    next(model.parameters()).requires_grad_(False)
    before = snapshot(model)
    gradient(task_of(name, model, texts()))
    assert_untouched(model, before)


def test_model_is_left_as_it_was_after_an_error() -> None:
    model = build("llama")
    before = snapshot(model)
    task = task_of("llama", model, texts())
    spoilt = task.data.batches[-1]
    spoilt.inputs["input_ids"] = spoilt.inputs["input_ids"] + 1000
    with pytest.raises(IndexError):
        gradient(task)
    assert_untouched(model, before)


def test_memory_of_a_batch_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks hold what they need of a graph; nothing may hold the hooks when it is gone."""
    holders: list[weakref.ref] = []

    def noted(outputs, see):
        holders.append(weakref.ref(see.__self__))
        return watching(outputs, see)

    monkeypatch.setattr("headscope.importance.gradient.watching", noted)
    gc.disable()
    try:
        gradient(task_of("gpt2", build("gpt2"), texts()))
        assert len(holders) == 2
        assert [holder() for holder in holders] == [None, None]
    finally:
        gc.enable()


def test_zeroed_heads_are_not_scored() -> None:
    model = build("llama")
    set_pruned_state(model.model.layers[1].self_attn, HeadState(4, 2, 8, 8, zeroed=(1,)))
    found = gradient(task_of("llama", model, texts()))
    plain = gradient(task_of("llama", build("llama"), texts()))
    np.testing.assert_allclose(found["head", "self.1"].scores, plain["head", "self.1"].scores[[0, 2, 3]], rtol=1e-6)
    assert len(found["kv-group", "self.1"].scores) == 2


def test_removed_heads_count_as_zeros() -> None:
    """A pruned model scores what is left as the whole one does whose other heads give zero."""
    whole, pruned = build("llama"), build("llama")
    gone = {"self.0": [0, 1], "self.1": [1, 2]}
    headscope.prune_heads(pruned, {0: gone["self.0"], 1: gone["self.1"]})
    with torch.no_grad():
        for layer, heads in gone.items():
            for head in heads:
                whole.get_submodule(places("llama")[layer][0]).weight[:, 8 * head : 8 * head + 8] = 0
    wanted, found = (gradient(task_of("llama", model, texts(), units=("head",))) for model in (whole, pruned))
    for key, layer in found.items():
        left = [h for h in range(4) if h not in gone.get(key[1], [])]
        np.testing.assert_allclose(layer.scores, wanted[key].scores[left], rtol=1e-4, atol=1e-6)


def test_blocks_that_are_no_texts_are_refused() -> None:
    model = build("gpt2")
    task = task_of("gpt2", model, texts())
    with (
        inputs_changed(model, {"transformer.h.1.attn.c_proj": lambda context: context.flatten(0, 1)}),
        pytest.raises(ModelError, match=r"transformer\.h\.1\.attn .* \(48, 32\) for 4 texts"),
    ):
        gradient(task)


def test_modules_that_texts_do_not_reach_are_refused() -> None:
    idle = build("gpt2", n_layer=4)
    idle.transformer.h[3].attn.forward = lambda *args, **kwargs: (torch.zeros_like(args[0]), None)
    with pytest.raises(ModelError, match=r"transformer\.h\.3\.attn computes nothing"):
        gradient(task_of("gpt2", idle, texts()))


def test_loss_without_gradients_is_refused() -> None:
    model = build("gpt2")
    model.lm_head.register_forward_hook(lambda module, args, result: result.detach())
    with pytest.raises(ModelError, match="without gradients"):
        gradient(task_of("gpt2", model, texts()))


def test_no_texts_are_refused() -> None:
    model = build("gpt2")
    task = replace(task_of("gpt2", model, texts()), data=None)
    with pytest.raises(InputError, match="there are none"):
        gradient(task)


def test_cases_cover_every_projection() -> None:
    for name in MODELS:
        assert {o.name for o in find_outputs(build(name))} == set(places(name))
        assert data_of(name, texts()).texts == 8
