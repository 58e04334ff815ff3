"""Which heads go: against all ways to share out removals over layers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.capture.outputs import find_outputs
from headscope.errors import InputError
from headscope.importance.allocate import allocate, cheapest, count_of, most_of, units_in
from headscope.importance.method import LayerScores
from headscope.models.pruned import HeadState, set_pruned_state
from tests.single_head_cases import build


def outputs_of(name: str = "llama", gone: tuple[int, ...] = ()):
    """Three layers of four heads, two to a group in a Llama; of the middle one some heads may be gone."""
    model = build(name)
    if gone:
        set_pruned_state(model.get_submodule("model.layers.1.self_attn"), HeadState(4, 2, 8, 8, zeroed=gone))
    return find_outputs(model)


LLAMA, GPT2, LEFT = outputs_of(), outputs_of("gpt2"), outputs_of(gone=(1,))


@st.composite
def curves(draw, units: int = 4, *, whole: bool = False, convex: bool = False) -> LayerScores:
    """What sets of units cost, and an order in which they go."""
    step = st.integers(0, 4).map(float) if whole else st.floats(0, 10)
    steps = draw(st.lists(step, min_size=units, max_size=units))
    losses = np.concatenate([[0.0], np.cumsum(sorted(steps) if convex else steps)])
    order = tuple(draw(st.permutations(range(units))))
    # Scores that say the opposite: where losses are known they do not matter.
    return LayerScores(-np.diff(losses), None, order, losses)


def least(layers, limits, count: int) -> float:
    """The least sum of losses over all ways to take `count` units."""
    ways = product(*(range(limit + 1) for limit in limits))
    return min(sum(s.losses[k] for s, k in zip(layers, way, strict=True)) for way in ways if sum(way) == count)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.integers(0, 3))
def test_losses_are_the_least_of_all_allocations(data, convex: bool, whole: bool, keep: int) -> None:
    layers = [data.draw(curves(whole=whole, convex=convex)) for _ in GPT2]
    limit = 4 - keep
    count = data.draw(st.integers(0, 3 * limit))
    chosen = allocate(GPT2, dict(zip((o.name for o in GPT2), layers, strict=True)), count, keep)
    numbers = [len(chosen.get(o.name, ())) for o in GPT2]
    assert sum(numbers) == count and max(numbers) <= limit and all(chosen.values())
    total = sum(s.losses[k] for s, k in zip(layers, numbers, strict=True))
    assert total == pytest.approx(least(layers, [limit] * 3, count), abs=1e-12)
    for output, scores, k in zip(GPT2, layers, numbers, strict=True):
        assert chosen.get(output.name, ()) == tuple(sorted(scores.order[:k]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=4), st.data())
def test_layers_of_any_size_share_a_number_out(lists, data) -> None:
    arrays = [np.array([0.0, *values]) for values in lists]
    count = data.draw(st.integers(0, sum(map(len, lists))))
    numbers = cheapest(arrays, count)
    assert sum(numbers) == count
    ways = product(*(range(len(a)) for a in arrays))
    least_sum = min(sum(a[k] for a, k in zip(arrays, way, strict=True)) for way in ways if sum(way) == count)
    assert sum(a[k] for a, k in zip(arrays, numbers, strict=True)) == least_sum


def test_a_step_that_is_dear_may_open_a_cheap_one() -> None:
    """Not convex: by single steps nobody would begin with the first layer."""
    first = LayerScores(np.zeros(4), None, (2, 0, 1, 3), np.array([0.0, 5, 5, 5, 9]))
    rest = LayerScores(np.zeros(4), None, (0, 1, 2, 3), np.array([0.0, 2, 4, 6, 8]))
    scored = {"self.0": first, "self.1": rest, "self.2": rest}
    # Equal sums: earlier layers lose more.
    assert allocate(GPT2, scored, 2) == {"self.1": (0, 1)}
    assert allocate(GPT2, scored, 3) == {"self.0": (0, 1, 2)}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=12, max_size=12), st.integers(0, 3), st.data())
def test_without_losses_the_least_scores_go_first(values, keep: int, data) -> None:
    scores = np.array(values, dtype=float).reshape(3, 4)
    count = data.draw(st.integers(0, 3 * (4 - keep)))
    # One layer that knows sets does not help where the others do not.
    layers = [LayerScores(s) for s in scores[:2]] + [LayerScores(scores[2], None, (3, 2, 1, 0), np.arange(5.0))]
    chosen = allocate(GPT2, dict(zip((o.name for o in GPT2), layers, strict=True)), count, keep)
    wanted: list[tuple[int, int]] = []
    for layer, head in sorted(product(range(3), range(4)), key=lambda p: (scores[p], p)):
        if len(wanted) < count and sum(a == layer for a, _ in wanted) < 4 - keep:
            wanted.append((layer, head))
    assert {(f"self.{a}", b) for a, b in wanted} == {(name, h) for name, heads in chosen.items() for h in heads}


@pytest.mark.parametrize("with_losses", [False, True])
def test_groups_go_with_all_of_their_heads(with_losses: bool) -> None:
    extra = (None, (1, 0), np.array([0.0, 1.0, 3.0])) if with_losses else (None, None, None)
    scored = {o.name: LayerScores(np.array([2.0, 1.0]), *extra) for o in LLAMA}
    assert allocate(LLAMA, scored, 3, unit="kv-group") == {f"self.{i}": (2, 3) for i in range(3)}
    first = allocate(LLAMA, scored, 4, 0, unit="kv-group")
    assert sorted(map(len, first.values())) == [2, 2, 4]


def test_heads_that_are_gone_keep_their_numbers() -> None:
    scored = {o.name: LayerScores(np.arange(len(o.units())) + 10.0 * i) for i, o in enumerate(LEFT)}
    scored["self.1"] = LayerScores(np.array([5.0, -2, -1]))
    assert allocate(LEFT, scored, 2) == {"self.1": (2, 3)}
    # It keeps one of the three that are left.
    assert allocate(LEFT, scored, 3) == {"self.0": (0,), "self.1": (2, 3)}
    groups = {o.name: LayerScores(np.array([1.0, 2.0]) * (3 if i else 1)) for i, o in enumerate(LEFT)}
    groups["self.1"] = LayerScores(np.array([0.5, 9.0]))
    assert allocate(LEFT, groups, 1, unit="kv-group") == {"self.1": (0,)}


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan"), float("inf")])
def test_a_share_lies_between_none_and_all(share: float) -> None:
    with pytest.raises(InputError, match="not above 0 and below 1"):
        count_of(LLAMA, "head", share)


def test_shares_are_rounded_down_but_not_by_dust() -> None:
    assert units_in(LLAMA, "head") == 12 and units_in(LLAMA, "kv-group") == 6
    assert units_in(LEFT, "head") == 11 and units_in(LEFT, "kv-group") == 6
    assert [count_of(LLAMA, "head", s) for s in (1 / 3, 0.25, 0.3, 0.999, 0.01)] == [4, 3, 3, 11, 0]
    assert count_of(LLAMA, "kv-group", 0.5) == 3 and count_of(LEFT, "head", 0.3) == 3

    class Many:
        def __init__(self, count: int) -> None:
            self.count = count

        def units(self, unit: str) -> range:
            return range(self.count)

    for units in range(1, 400):
        for wanted in range(1, units):
            assert count_of([Many(units)], "head", wanted / units) == wanted
    assert count_of([Many(100)], "head", 0.29) == 29 and count_of([Many(10)], "head", 0.3) == 3


def test_what_cannot_go_is_refused_with_the_most_that_can() -> None:
    scored = {o.name: LayerScores(np.zeros(len(o.units()))) for o in LEFT}
    assert [most_of(LEFT, "head", keep) for keep in (0, 1, 2, 4, 9)] == [11, 8, 5, 0, 0]
    assert sum(map(len, allocate(LEFT, scored, 8).values())) == 8
    with pytest.raises(InputError, match="9 heads cannot go where each layer keeps 1") as error:
        allocate(LEFT, scored, 9)
    assert error.value.hint == "at most 8 of 11 can"
    with pytest.raises(InputError, match="-1 heads cannot go"):
        allocate(LEFT, scored, -1)
    assert allocate(LEFT, scored, 0) == {}


def test_scores_of_other_units_are_refused() -> None:
    scored = {o.name: LayerScores(np.zeros(4)) for o in LLAMA}
    with pytest.raises(InputError, match=r"self\.0 has 2 kv-groups and 4 scores"):
        allocate(LLAMA, scored, 1, unit="kv-group")
    with pytest.raises(InputError, match=r"self\.2 has 4 heads and no scores"):
        allocate(LLAMA, {k: v for k, v in scored.items() if k != "self.2"}, 1)
    with pytest.raises(InputError, match=r"scores of self\.1 are not finite"):
        allocate(LLAMA, scored | {"self.1": LayerScores(np.array([1, 2, np.nan, 3]))}, 1)
