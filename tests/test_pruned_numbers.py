"""Heads of a pruned model keep their original numbers: in records, selections, pictures and errors."""

from __future__ import annotations

import numpy as np
import pytest

import headscope
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from headscope.errors import HeadscopeError, InputError

PLANS = {"bert": {0: [1], 1: [0, 3], 2: [2]}, "llama": {0: [0, 1, 2, 3], 1: [3, 7], 2: [4, 5, 6, 7]}}


def removed(name):
    model = build_family(name)
    headscope.prune_heads(model, PLANS[name])
    return model


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("engine", ["streaming", "layerwise"])
def test_records_and_pictures_have_the_original_numbers(name, engine):
    inputs = example_inputs(FAMILIES[name])
    whole = headscope.analyze(build_family(name), inputs=inputs, maps=True, engine=engine)
    left = headscope.analyze(removed(name), inputs=inputs, maps=True, engine=engine)
    gone = {(layer, head) for layer, heads in PLANS[name].items() for head in heads}
    assert {(h.layer, h.head) for h in whole.heads} - {(h.layer, h.head) for h in left.heads} == gone
    assert {(h.layer, h.head): h.kv_head for h in left.heads}.items() <= {
        (h.layer, h.head): h.kv_head for h in whole.heads
    }.items()
    # The first layer reads what it read before, so that its heads are still the same ones.
    before = {h.head: h for h in whole.heads if h.layer == 0}
    for head in (h for h in left.heads if h.layer == 0):
        assert head.metrics == pytest.approx(before[head.head].metrics, abs=1e-5)
    old, new = whole.maps[0], left.maps[0]
    assert new.heads == tuple(h for h in old.heads if (0, h) not in gone)
    assert np.abs(new.weights - old.weights[list(new.heads)]).max() < 1e-5


@pytest.mark.parametrize("name", PLANS)
def test_heads_are_selected_by_their_original_numbers(name):
    model, inputs = removed(name), example_inputs(FAMILIES[name])
    everything = headscope.analyze(model, inputs=inputs).heads
    last = max(h.head for h in everything if h.layer == 1)
    (one,) = headscope.analyze(model, inputs=inputs, layer=1, head="-1").heads
    assert one.head == last and one == next(h for h in everything if (h.layer, h.head) == (1, last))
    kept = [h.head for h in everything if h.layer == 1]
    chosen = headscope.analyze(model, inputs=inputs, layer=1, head=f"{kept[0]}-{kept[1]}").heads
    assert [h.head for h in chosen] == kept[:2]
    with pytest.raises(InputError, match="head 3 does not exist") as error:
        headscope.analyze(model, inputs=inputs, layer=1, head=3)
    assert f"{kept[0]}" in error.value.hint


def first_groups(family):
    """The first key/value head's queries of each stack's first layer."""
    plan = {}
    for stack, spec in family.stacks.items():
        group = spec.num_heads // spec.num_kv_heads if spec.num_kv_heads > 1 else 1
        plan[f"{stack}.{spec.layers[0]}"] = list(range(group))
    return plan


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.stacks])
def test_what_is_left_of_a_model_is_rebuilt_from_its_weights(name):
    """Biases of position stay with the heads that they belong to."""
    model, inputs = build_family(name), example_inputs(FAMILIES[name])
    sites = len(headscope.verify(model, inputs=inputs).sites)
    try:
        headscope.prune_heads(model, first_groups(FAMILIES[name]))
    except HeadscopeError as error:
        pytest.fail(f"{name} is not prunable: {error}")
    left = headscope.verify(model, inputs=inputs)
    assert left.passed and not left.skipped and len(left.sites) == sites
