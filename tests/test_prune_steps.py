"""Pruning in steps, emptied layers, and plans that are saved and applied to a new model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from prune_cases import outputs, relative_difference

import headscope
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from headscope.errors import ModelError
from headscope.models.sites import find_sites
from headscope.pruning.plan import make_plan
from headscope.pruning.probes import probes
from headscope.pruning.proof import prove
from headscope.pruning.saved import read_plan
from headscope.pruning.surgery import apply


# ------------------------------------------------------------------ in several steps
@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "llama", "phi3", "bloom", "t5", "falcon_gqa", "gpt_oss", "deberta_v2"]
)
def test_two_steps_are_one(name: str) -> None:
    family = FAMILIES[name]
    stack, spec = next(iter(family.stacks.items()))
    size = spec.num_heads // spec.num_kv_heads
    first = [0, 1] if size == 1 else [g * size for g in range(spec.num_kv_heads)]
    second = [2] if size == 1 else [g * size + size - 1 for g in range(spec.num_kv_heads)] if size > 2 else []
    second = second or list(range(size))
    once, twice = build_family(name), build_family(name)
    report = headscope.prune_heads(once, {f"{stack}.0": sorted({*first, *second})})
    headscope.prune_heads(twice, {f"{stack}.0": first})
    later = headscope.prune_heads(twice, {f"{stack}.0": second})
    assert later.heads == report.heads and twice.config.headscope == once.config.headscope
    a, b = once.state_dict(), twice.state_dict()
    assert list(a) == list(b) and all(torch.equal(v, b[k]) for k, v in a.items())
    inputs = example_inputs(family)
    assert relative_difference(outputs(once, inputs), outputs(twice, inputs)) == 0


def test_heads_that_are_gone_are_named_and_nothing_changes() -> None:
    model = build_family("bert")
    headscope.prune_heads(model, "0:1;1:2")
    state, saved = dict(model.state_dict()), copy.deepcopy(model.config.headscope)
    report = headscope.prune_heads(model, "0:1")
    assert report.notes == ("self.0: head 1 was removed already",)
    assert report.heads == {"self.0": (1,), "self.1": (2,)} and report.params_before == report.params_after
    assert model.config.headscope == saved
    assert all(v.data_ptr() == state[k].data_ptr() for k, v in model.state_dict().items())


def test_zeroed_heads_leave_once_they_can() -> None:
    model, original = build_family("llama"), build_family("llama")
    headscope.prune_heads(model, "0:0", ragged="mask")
    assert model.config.headscope["zeroed"] == {"self.0": [0]}
    report = headscope.prune_heads(model, "0:5")
    assert report.zeroed == {} and model.model.layers[0].self_attn.q_proj.weight.shape == (48, 32)
    assert prove(original, model, {"self.0": (0, 5)}, batches=probes(original)).passed


@pytest.mark.parametrize(("heads", "zeroed"), [("0:1,4,5", (4,)), ("0:0,1,2,4", (0, 1))])
def test_what_stays_zeroed_is_zeroed_where_it_lies(heads: str, zeroed: tuple[int, ...]) -> None:
    """Heads before it have left, so that it is not at its old place."""
    original = build_family("llama")
    model = copy.deepcopy(original)
    report = headscope.prune_heads(model, heads, ragged="mask")
    assert report.zeroed == {"self.0": zeroed}
    assert prove(original, model, report.heads, batches=probes(original)).passed


def test_the_last_head_of_an_emptied_layer_is_zeroed_where_it_lies() -> None:
    original = build_family("bert")
    model = copy.deepcopy(original)
    headscope.prune_heads(model, "0:0-1")
    report = headscope.prune_heads(model, "0:2-3", allow_empty=True)
    assert report.zeroed == {"self.0": (2,)}
    assert prove(original, model, report.heads, batches=probes(original)).passed


def test_another_model_with_the_same_config_is_whole() -> None:
    """The config only says what was done; a model that was built from it has all heads and can lose any."""
    model = build_family("bert")
    headscope.prune_heads(model, "0:1")
    other = type(model)(model.config)
    assert headscope.prune_heads(other, "0:0").heads == {"self.0": (0,)}


# ------------------------------------------------------------------ empty layers
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "falcon_mqa"])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_emptied_layer_keeps_its_cache(name: str, layer: int) -> None:
    original = build_family(name)
    model = copy.deepcopy(original)
    stack = "decoder" if name == "bart" else "self"
    report = headscope.prune_heads(model, f"{stack}.{layer}:all", allow_empty=True)
    assert report.zeroed == {f"{stack}.{layer}": (0,)}
    assert any("placeholder" in note for note in report.notes)
    found = prove(original, model, report.heads, batches=probes(original))
    assert found.passed and {c.mode for c in found.checks} == {"forward", "generate"}


# ------------------------------------------------------------------ on models without weights
@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.stacks])
def test_a_saved_plan_shapes_a_model_without_weights(name: str) -> None:
    family = FAMILIES[name]
    model = build_family(name)
    heads = {}
    for stack, spec in family.stacks.items():
        for layer in spec.layers[: 1 if name == "albert" else None]:
            heads[f"{stack}.{layer}"] = [0]
    headscope.prune_heads(model, heads, ragged="mask")
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
        apply(empty, read_plan(empty, model.config.headscope))
    assert {k: v.shape for k, v in empty.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert empty.config.headscope == model.config.headscope
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    assert [s.module.headscope_heads for s in find_sites(empty)] == [
        s.module.headscope_heads for s in find_sites(model)
    ]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "phi3", "t5", "bloom", "vit", "gpt_oss"])
def test_loads_with_a_subclass_that_shrinks(name: str, tmp_path) -> None:
    model, inputs = build_family(name), example_inputs(FAMILIES[name])
    stack, spec = next(iter(FAMILIES[name].stacks.items()))
    headscope.prune_heads(model, {f"{stack}.1": list(range(spec.num_heads // spec.num_kv_heads))})
    model.save_pretrained(tmp_path)
    kind = type(model)

    class Shrinking(kind):
        def __init__(self, config, *args, **kwargs):
            super().__init__(config, *args, **kwargs)
            apply(self, read_plan(self, config.headscope))

    Shrinking.__name__, Shrinking.__module__ = kind.__name__, kind.__module__
    loaded = Shrinking.from_pretrained(tmp_path, attn_implementation="eager")
    assert relative_difference(outputs(model, inputs), outputs(loaded, inputs)) == 0
    with pytest.raises(RuntimeError):
        kind.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"heads": {"self.9": [0]}}, "the model has no self.9"),
        ({"original": {"self.0": [12, 12]}}, "has 4 heads, the plan was made for 12"),
        ({"heads": {"self.0": [7]}}, "has no heads"),
        ({"heads": {"self.0": [0, 1, 2, 3]}}, "not be a rectangle"),
        ({"zeroed": {"self.0": [2]}}, "has no heads"),
    ],
)
def test_a_saved_plan_that_does_not_fit_is_refused(change: dict, message: str) -> None:
    model = build_family("bert")
    saved = {"version": 1, "heads": {"self.0": [0]}, "zeroed": {}, "original": {"self.0": [4, 4]}} | change
    with pytest.raises(ModelError, match=message):
        read_plan(model, saved)


def test_a_saved_plan_is_not_applied_twice() -> None:
    model = build_family("bert")
    headscope.prune_heads(model, "0:1")
    with pytest.raises(ModelError, match="removed from this model already"):
        read_plan(model, model.config.headscope)


def test_a_plan_is_only_read() -> None:
    model = build_family("bert")
    plan = make_plan(model, "0:1;2:0-1")
    assert plan.heads == {"self.0": (1,), "self.2": (0, 1)}
    assert replace(plan.modules[0].after, removed=()) == plan.modules[0].before
    assert model.encoder.layer[0].attention.self.query.weight.shape == (32, 32)
    assert not hasattr(model.config, "headscope")
