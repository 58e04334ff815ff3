"""What sets of heads cost after the best repair: against definitions written down once more, over all subsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression
from torch import nn

from headscope.capture.outputs import find_outputs
from headscope.errors import InputError, ModelError
from headscope.importance.elimination import eliminate, rising
from headscope.importance.method import METHODS
from headscope.importance.surgeon import RIDGE, reconstruction, surgeon
from headscope.models.pruned import HeadState, set_pruned_state
from tests.single_head_cases import (
    MODELS,
    WIDTH,
    assert_untouched,
    build,
    loss_alone,
    places,
    ranked,
    snapshot,
    task_of,
    texts,
    two_heads_matter,
)

NAMES = tuple(MODELS)


# ------------------------------------------------------------------ definitions, once more
def to_derive(name: str, model, row, number: int) -> tuple[torch.Tensor, int]:
    """The summed loss of one text without padding; or the part of its tokens' output in random directions."""
    if name != "distilbert":
        loss, count = loss_alone(name, model, row, number)
        return loss * count, count
    output = model(input_ids=torch.tensor([row])).last_hidden_state[0]
    random = np.random.default_rng((0, number)).standard_normal(output.shape)
    directions = output / output.norm(dim=-1, keepdim=True)
    return (directions * torch.tensor(random, dtype=output.dtype)).sum() / len(row) ** 0.5, 1


def alone(name: str, model, ids) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """What goes into each output projection, (tokens, in), the derivative by what comes out, and all predictions."""
    given: dict[str, list[np.ndarray]] = {layer: [] for layer in places(name)}
    slopes: dict[str, list[np.ndarray]] = {layer: [] for layer in places(name)}
    predictions = 0
    for number, row in enumerate(ids):
        seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        handles = [
            model.get_submodule(path).register_forward_hook(
                lambda _, args, out, layer=layer, seen=seen: seen.append((layer, args[0], out))
            )
            for layer, (path, _, _) in places(name).items()
        ]
        loss, count = to_derive(name, model, row, number)
        predictions += count
        for (layer, context, _), slope in zip(seen, torch.autograd.grad(loss, [o for *_, o in seen]), strict=True):
            given[layer].append(context.detach()[0].double().numpy())
            slopes[layer].append(slope[0].double().numpy())
        for handle in handles:
            handle.remove()
    return (
        {k: np.concatenate(v) for k, v in given.items()},
        {k: np.concatenate(v) for k, v in slopes.items()},
        predictions,
    )


def weight_of(model, path: str) -> np.ndarray:
    """(out, in)."""
    module = model.get_submodule(path)
    weight = module.weight.detach().double().numpy()
    return weight if isinstance(module, nn.Linear) else weight.T


def subsets(covariance: np.ndarray, fisher: np.ndarray, weight: np.ndarray, blocks: list[list[int]]):
    """The cost of every set of blocks: tr(G W_r (C_rr - C_rk C_kk⁻¹ C_kr) W_rᵀ), by the set of their numbers."""
    everything = [c for block in blocks for c in block]
    c = covariance + RIDGE * covariance[np.ix_(everything, everything)].diagonal().mean() * np.eye(len(covariance))
    costs = {}
    for size in range(len(blocks) + 1):
        for chosen in combinations(range(len(blocks)), size):
            r = [i for b in chosen for i in blocks[b]]
            k = [i for i in everything if i not in r]
            left = c[np.ix_(r, r)] - c[np.ix_(r, k)] @ np.linalg.solve(c[np.ix_(k, k)], c[np.ix_(k, r)])
            costs[frozenset(chosen)] = float(np.trace(fisher @ weight[:, r] @ left @ weight[:, r].T))
    return costs


def greedily(costs: dict[frozenset[int], float], count: int) -> tuple[tuple[int, ...], list[float]]:
    """From nothing, always the block that adds least."""
    order: tuple[int, ...] = ()
    for _ in range(count):
        order += (min((b for b in range(count) if b not in order), key=lambda b: costs[frozenset((*order, b))]),)
    return order, [costs[frozenset(order[:k])] for k in range(count + 1)]


def blocks_of(heads: int, size: int, gone: tuple[int, ...] = ()) -> list[list[int]]:
    """Columns of each group of `size` heads; those of heads that are gone left out, and groups without any."""
    width = WIDTH // heads
    found = [
        [h * width + i for h in range(g * size, (g + 1) * size) if h not in gone for i in range(width)]
        for g in range(heads // size)
    ]
    return [block for block in found if block]


def expected(name: str, model, ids, *, fisher: bool, gone=()) -> Iterator[tuple[tuple[str, str], tuple, np.ndarray]]:
    """Key, order and losses of every layer and kind of unit."""
    given, slopes, predictions = alone(name, model, ids)
    for layer, (path, heads, size) in places(name).items():
        weight = weight_of(model, path)
        covariance = given[layer].T @ given[layer] / len(given[layer])
        if fisher:
            metric = slopes[layer].T @ slopes[layer] / predictions * (0.5 if name == "distilbert" else 1)
        else:
            kept = [c for block in blocks_of(heads, 1, gone) for c in block]
            size_of = np.trace(weight[:, kept] @ covariance[np.ix_(kept, kept)] @ weight[:, kept].T)
            metric = np.eye(len(weight)) / size_of
        for unit, of in (("head", 1), ("kv-group", size)):
            blocks = blocks_of(heads, of, gone)
            yield (unit, layer), *greedily(subsets(covariance, metric, weight, blocks), len(blocks))


def assert_expected(scored, wanted) -> None:
    wanted = list(wanted)
    assert set(scored) == {key for key, *_ in wanted}
    for key, order, losses in wanted:
        assert scored[key].order == order
        np.testing.assert_allclose(scored[key].losses, losses, rtol=2e-4, atol=1e-12)
        np.testing.assert_allclose(scored[key].scores[list(order)], isotonic_regression(np.diff(losses)).x, rtol=5e-4)
        assert losses[1] > 0 and scored[key].errors is None


# ------------------------------------------------------------------ the methods
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_losses_are_the_least_of_all_sets_whatever_the_batches(name: str, batch_size: int) -> None:
    model, ids = build(name), texts()
    assert_expected(surgeon(task_of(name, model, ids, batch_size)), expected(name, model, ids, fisher=True))


@pytest.mark.parametrize("name", NAMES)
def test_without_gradients_it_is_the_share_of_a_layers_output_that_is_lost(name: str) -> None:
    model, ids = build(name), texts()
    scored = reconstruction(task_of(name, model, ids, 3))
    assert_expected(scored, expected(name, model, ids, fisher=False))
    # The ridge takes part in what is lost.
    assert all(1 <= layer.losses[-1] < 1.02 for layer in scored.values())


@pytest.mark.parametrize("method", [surgeon, reconstruction])
def test_heads_that_are_gone_make_up_for_nothing(method) -> None:
    model, ids = build("llama"), texts()
    for layer, (path, heads, _) in places("llama").items():
        module = model.get_submodule(path.removesuffix(".o_proj"))
        set_pruned_state(module, HeadState(heads, 2, 8, 8, zeroed=(2,)))
        with torch.no_grad():
            module.o_proj.weight[:, 16:24] = 0
        assert layer in {o.name for o in find_outputs(model)}
    scored = method(task_of("llama", model, ids))
    assert_expected(scored, expected("llama", model, ids, fisher=method is surgeon, gone=(2,)))
    assert len(scored["head", "self.1"].scores) == 3 and len(scored["kv-group", "self.1"].scores) == 2


@pytest.mark.parametrize("method", [surgeon, reconstruction])
def test_of_two_heads_that_do_the_same_one_costs_nothing(method) -> None:
    model, ids = build("llama"), texts()
    for path, _, _ in places("llama").values():
        attention = model.get_submodule(path.removesuffix(".o_proj"))
        with torch.no_grad():
            attention.q_proj.weight[8:16] = attention.q_proj.weight[0:8]
    for (unit, _), layer in method(task_of("llama", model, ids)).items():
        if unit == "head":
            assert layer.order[0] in (0, 1)
            # What is left of the first is the ridge's doing; the other is as dear as any.
            assert layer.losses[1] < 0.2 * np.diff(layer.losses)[1:].min()
            assert layer.scores[1 - layer.order[0]] > 5 * layer.scores[layer.order[0]]


@pytest.mark.parametrize("method", [surgeon, reconstruction])
def test_two_heads_that_matter_are_found(method) -> None:
    heads = [(0, 1), (0, 2)] if method is reconstruction else [(0, 1), (2, 3)]
    scored = method(task_of("llama", two_heads_matter(heads), texts()))
    found = ranked({k: v for k, v in scored.items() if method is surgeon or k[1] == "self.0"})[:2]
    assert set(found) == {(f"self.{layer}", head) for layer, head in heads}


def test_half_the_squared_change_of_a_direction_is_what_a_cosine_loses() -> None:
    """Texts of one token: errors are independent between them, so what is expected is what comes about."""
    model, ids = build("distilbert"), [[i] for i in np.random.default_rng(0).integers(5, 60, 400).tolist()]
    weight = model.get_submodule(places("distilbert")["self.1"][0]).weight
    with torch.no_grad():
        weight[:, 0:8] *= 0.05
        # Heads that give nothing cannot make up for the one that is looked at.
        weight[:, 8:] = 0
    task = task_of("distilbert", model, ids, 400)
    set_pruned_state(model.get_submodule("transformer.layer.1.attention"), HeadState(4, 4, 8, 8, zeroed=(1, 2, 3)))
    task = replace(task, outputs=find_outputs(model)[1:])
    predicted = float(surgeon(task)["head", "self.1"].losses[1])
    with torch.no_grad():
        weight[:, 0:8] = 0
        measured = float(task.data.loss.of(model, task.data.batches[0]).mean.mean())
    assert predicted == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("method", [surgeon, reconstruction])
@pytest.mark.parametrize("name", ["llama", "t5", "albert"])
def test_the_model_is_left_as_it_was(name: str, method) -> None:
    model = build(name)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)
    kept = next(p for p in model.parameters() if p.requires_grad)
    kept.grad = torch.ones_like(kept)
    before = snapshot(model)
    method(task_of(name, model, texts()))
    assert_untouched(model, before)
    assert bool((kept.grad == 1).all())
    bad = task_of(name, model, texts())
    broken = replace(bad.data.batches[-1], axes={})
    with pytest.raises((KeyError, ModelError)):
        method(replace(bad, data=replace(bad.data, batches=(*bad.data.batches[:-1], broken))))
    assert_untouched(model, before)


def test_only_one_of_them_needs_a_backward_pass() -> None:
    model, seen = build("llama"), []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.requires_grad))
    reconstruction(task_of("llama", model, texts()))
    surgeon(task_of("llama", model, texts()))
    assert seen == [False] * 2 + [True] * 2


def test_both_are_registered_as_of_use_with_a_repair_only() -> None:
    assert all(METHODS[name].for_repair and METHODS[name].needs_data for name in ("surgeon", "reconstruction"))
    assert METHODS["surgeon"].score is surgeon and METHODS["reconstruction"].score is reconstruction


def test_what_matrices_take_is_said() -> None:
    said: list[str] = []
    surgeon(replace(task_of("llama", build("llama", hidden_size=256), texts()), report=said.append))
    assert said == [f"covariances of 3 layers take {3 * 2 * 256**2 * 8 / 2**20:.0f} MiB"]


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize("method", [surgeon, reconstruction])
def test_what_cannot_be_scored_is_refused(method) -> None:
    task = task_of("llama", build("llama"), texts())
    with pytest.raises(InputError, match="cannot be normalised"):
        method(replace(task, normalise=True))
    with pytest.raises(InputError, match="there are no texts"):
        method(replace(task, data=None))
    other = find_outputs(build("llama"))
    with pytest.raises(ModelError, match="depends on none" if method is surgeon else "self.0 is not run"):
        method(replace(task, outputs=other))
    with torch.no_grad():
        task.model.get_submodule("model.layers.1.self_attn.v_proj").weight[3, 3] = float("nan")
    with pytest.raises(ModelError, match="at self.1 are not finite" if method is reconstruction else "not finite"):
        method(task)


# ------------------------------------------------------------------ elimination
@st.composite
def problems(draw) -> tuple[np.ndarray, np.ndarray, list[int]]:
    widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    n = sum(widths)
    points, cost = rng.standard_normal((2 * n, n)), rng.standard_normal((n, draw(st.integers(1, n))))
    return np.linalg.inv(points.T @ points / n + 0.1 * np.eye(n)), cost @ cost.T, widths


@settings(max_examples=60, deadline=None)
@given(problems())
def test_elimination_follows_the_direct_formula(problem) -> None:
    inverse, cost, widths = problem
    ends = np.cumsum(widths)
    blocks = [list(range(end - width, end)) for end, width in zip(ends, widths, strict=True)]

    def direct(chosen) -> float:
        r = [i for b in chosen for i in blocks[b]]
        return float(np.trace(cost[np.ix_(r, r)] @ np.linalg.inv(inverse[np.ix_(r, r)])))

    kept = inverse.copy(), cost.copy()
    order, losses = eliminate(torch.from_numpy(inverse), torch.from_numpy(cost), widths)
    assert sorted(order) == list(range(len(widths))) and losses[0] == 0 and (np.diff(losses) >= 0).all()
    np.testing.assert_allclose(losses, [direct(order[:k]) for k in range(len(order) + 1)], rtol=1e-8, atol=1e-9)
    for k, block in enumerate(order):
        others = [direct((*order[:k], b)) for b in range(len(widths)) if b not in order[:k]]
        assert direct((*order[:k], block)) == pytest.approx(min(others), rel=1e-8, abs=1e-9)
    assert (inverse == kept[0]).all() and (cost == kept[1]).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=12))
def test_steps_are_made_to_rise_as_an_isotonic_regression_does(steps) -> None:
    found = rising(np.array(steps))
    np.testing.assert_allclose(found, isotonic_regression(steps).x, rtol=1e-9, atol=1e-9)
    assert (np.diff(found) >= -1e-9).all()
