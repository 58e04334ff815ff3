"""Heads zeroed in a copy: what stays of the model, what the copy says of itself, and plans that change nothing."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from prune_cases import outputs, relative_difference, without_heads
from transformers import SwinConfig, SwinModel

import headscope
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from headscope.errors import InputError
from headscope.models.parts import NotPlain
from headscope.models.pruned import pruned_state
from headscope.models.sites import find_sites
from headscope.pruning import masking
from headscope.pruning.caches import fewer_kv_heads, fit_caches
from headscope.pruning.masking import mask_heads
from headscope.pruning.plan import current_plan, make_plan
from headscope.pruning.surgery import apply, prepare
from headscope.pruning.zeroing import as_heads, zeroed_copy


def same_weights(a, b) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(torch.equal(v, second[k]) for k, v in first.items())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_a_copy_without_heads_has_its_shapes_and_their_zeros(name: str) -> None:
    """Uneven groups and whole layers too: nothing leaves, so everything is legal."""
    original, inputs = build_family(name), example_inputs(FAMILIES[name])
    before, stack = copy.deepcopy(original), next(iter(FAMILIES[name].stacks))
    heads = {f"{stack}.0": (0,), f"{stack}.1": tuple(range(FAMILIES[name].stacks[stack].num_heads))}
    after, plan = zeroed_copy(original, heads)
    assert dict(plan.heads) == dict(plan.zeroed) == heads
    assert after.config.headscope["heads"] == after.config.headscope["zeroed"] == {n: list(h) for n, h in heads.items()}
    with without_heads(original, heads):
        assert relative_difference(outputs(original, inputs), outputs(after, inputs)) <= 1e-6
    assert same_weights(original, before) and not hasattr(original.config, "headscope")
    assert all(pruned_state(module) is None for module in original.modules())
    changed = {k for k, v in after.state_dict().items() if not torch.equal(v, before.state_dict()[k])}
    assert len(changed) == 2, "the output projections of two layers"


def test_heads_that_were_removed_before_come_back_as_zeros() -> None:
    original, inputs = build_family("llama"), example_inputs(FAMILIES["llama"])
    pruned = copy.deepcopy(original)
    headscope.prune_heads(pruned, "0:0-3;1:1,6")
    before = copy.deepcopy(pruned)
    after, plan = zeroed_copy(pruned, {"self.1": [2]})
    heads = {"self.0": (0, 1, 2, 3), "self.1": (1, 2, 6)}
    assert dict(plan.heads) == heads and dict(plan.zeroed) == {"self.1": (2,)}
    assert dict(current_plan(after).zeroed) == heads
    assert {k: v.shape for k, v in after.state_dict().items()} == {k: v.shape for k, v in original.state_dict().items()}
    with without_heads(original, heads):
        assert relative_difference(outputs(original, inputs), outputs(after, inputs)) <= 1e-6
    assert same_weights(pruned, before) and pruned.config.headscope == before.config.headscope


def test_layers_that_lose_no_head_are_left_out() -> None:
    assert as_heads({"self.0": (2, 0), "self.1": (), "cross.0": [1]}) == {"self.0": [2, 0], "cross.0": [1]}


# ------------------------------------------------------------------ masking
def test_masking_leaves_all_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = build_family("llama"), build_family("llama")
    mask_heads(model, {"self.0": [7], "self.2": []})
    name = "model.layers.0.self_attn.o_proj.weight"
    for key, value in model.state_dict().items():
        kept = original.state_dict()[key].clone()
        if key == name:
            kept[:, 56:64] = 0
        assert torch.equal(value, kept), key
    for heads, message in (
        ({"self.0": [-1]}, "layer 0 of self has no head -1: 0-7"),
        ({"self.0": [0, 8]}, "layer 0 of self has no head 8: 0-7"),
        ({"self.9": [0], "cross.1": [0]}, r"the model has no layer cross\.1, self\.9"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            mask_heads(model, heads)
        assert caught.value.hint


def test_without_an_output_projection_nothing_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several layers none is, whichever lacks it."""

    def unknown(site, make=masking.projections, **options):
        found = make(site, **options)
        return replace(found, output=None) if site.layer == 1 else found

    monkeypatch.setattr(masking, "projections", unknown)
    model = build_family("bert")
    with pytest.raises(NotPlain, match=r"layer\.1\..* has no output projection that is known, so its heads cannot be"):
        mask_heads(model, {"self.0": [0], "self.1": [0]})
    assert same_weights(model, build_family("bert"))


# ------------------------------------------------------------------ plans
def test_a_plan_lists_the_modules_that_change_and_no_others() -> None:
    model = build_family("bert")
    assert [part.names for part in make_plan(model, "0:1;2:0").modules] == [("self.0",), ("self.2",)]
    headscope.prune_heads(model, "0:1")
    again = make_plan(model, "0:1;2:0")
    assert [part.names for part in again.modules] == [("self.2",)]
    assert again.heads == {"self.0": (1,), "self.2": (0,)} and again.zeroed == {}
    assert again.original == {"self.0": (4, 4), "self.2": (4, 4)}
    now = current_plan(model)
    assert (now.modules, now.heads, now.zeroed, now.notes) == ((), {"self.0": (1,)}, {}, ())
    assert current_plan(build_family("bert")).heads == {}


def test_one_of_two_stacks_has_to_be_named() -> None:
    with pytest.raises(InputError, match="layer 0 could be in any of the stacks") as caught:
        make_plan(build_family("clip"), {0: [1]})
    assert "Write for example " in caught.value.hint and ".0:0. Valid: " in caught.value.hint


@pytest.mark.parametrize(
    ("heads", "bad"), [({0: [0, 4]}, 4), ("0:0-9", 9), ("0:2;0:3-4", 4), ({0: [-1]}, -1), ({0: [3, -2]}, -2)]
)
def test_the_head_that_does_not_exist_is_named(heads, bad: int) -> None:
    with pytest.raises(InputError, match=f"head {bad} does not exist in layer 0 of self: its heads are 0-3"):
        make_plan(build_family("bert"), heads)


def test_heads_that_are_named_twice_are_noted_once_each() -> None:
    plan = make_plan(build_family("bert"), "0:1,1,2;0:2-3;1:0")
    assert plan.heads == {"self.0": (1, 2, 3), "self.1": (0,)}
    assert plan.notes == (
        "self.0: head 1 is named more than once and taken once",
        "self.0: head 2 is named more than once and taken once",
    )


def test_zeroing_all_removes_none() -> None:
    model = build_family("llama")
    plan = make_plan(model, "0:0,1,5;1:all", zero_all=True)
    assert plan.heads == plan.zeroed == {"self.0": (0, 1, 5), "self.1": tuple(range(8))}
    assert [part.after.removed for part in plan.modules] == [(), ()] and plan.notes == ()
    headscope.prune_heads(model, "0:0-3")
    plan = make_plan(model, "0:3,4", zero_all=True)
    assert plan.heads == {"self.0": (0, 1, 2, 3, 4)} and plan.zeroed == {"self.0": (4,)}


def test_the_hint_names_all_layers_and_heads() -> None:
    for name, valid in (
        ("bert", "Valid: layers 0-2, heads 0-3."),
        ("t5", "Valid: encoder: layers 0-2, heads 0-3; decoder: layers 0-1, heads 0-3; cross: layers 0-1, heads 0-3."),
        ("jamba", "Valid: layers 1,3, heads 0-3."),
    ):
        with pytest.raises(InputError) as caught:
            make_plan(build_family(name), "nothing.0:1")
        assert caught.value.hint == valid


def test_the_hint_names_no_heads_where_layers_have_unequally_many() -> None:
    config = SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    with pytest.raises(InputError) as caught:
        make_plan(SwinModel(config), "nothing.0:1")
    assert caught.value.hint == "Valid: layers 0-3."


# ------------------------------------------------------------------ what cannot be cut
def test_without_an_output_projection_nothing_is_cut() -> None:
    model = build_family("bert")
    plan = make_plan(model, "0:1")
    part = plan.modules[0]
    unknown = replace(plan, modules=(replace(part, found=replace(part.found, output=None)),))
    with pytest.raises(NotPlain, match="has no output projection that is known, so its heads cannot be removed"):
        apply(model, unknown)
    assert same_weights(model, build_family("bert")) and not hasattr(model.config, "headscope")


def test_a_plan_that_is_prepared_has_changed_nothing() -> None:
    model = build_family("llama")
    plan = make_plan(model, "0:0-3;1:0", ragged="mask")
    edits = prepare(model, plan)
    assert same_weights(model, build_family("llama"))
    assert [len(e.cuts) for e in edits] == [4, 0], "q, k, v and o; heads that only turn to zero cut nothing"
    assert [len(e.zeros) for e in edits] == [1, 1] and edits[1].sets == []
    assert edits[1].zeros[0].index.tolist() == list(range(8)) and len(edits[0].zeros[0].index) == 0
    (later,) = prepare(model, make_plan(model, "0:1,4,6", ragged="mask"))
    # Head 1 left, so heads 4 and 6 would be third and fifth; one of them stays.
    assert later.zeros[0].index.tolist() == list(range(24, 32))


@pytest.mark.parametrize(
    ("kind", "module", "reason"),
    [
        ("LEDEncoderSelfAttention", "transformers.models.led.modeling_led", "the width of its input"),
        ("Attention", "transformers.models.fsmt.modeling_fsmt", "heads together from its input"),
        ("AutoformerAttention", "somewhere.else", "delays by the mean over all heads"),
    ],
)
def test_kinds_that_cannot_be_cut_are_known_by_class_and_file(kind: str, module: str, reason: str) -> None:
    model = build_family("bert")
    own = model.encoder.layer[0].attention.self
    own.__class__ = type(kind, (type(own),), {"__module__": module})
    plan = make_plan(model, "0:1")
    with pytest.raises(NotPlain, match=reason) as caught:
        apply(model, plan)
    assert "--save-as masked" in caught.value.hint and kind in caught.value.message
    own.__class__ = type("Attention", (type(own),), {"__module__": "transformers.models.other.modeling_other"})
    apply(model, plan)
    assert own.query.weight.shape == (24, 32)


# ------------------------------------------------------------------ caches
def test_static_caches_are_fitted_where_keys_left_and_only_there() -> None:
    model = build_family("llama")
    names = ("_get_static_cache_init_shape", "init_continuous_batching")
    headscope.prune_heads(model, "0:0,4")
    assert fewer_kv_heads(model) == {} and not set(names) & set(vars(model))
    headscope.prune_heads(model, "1:0-3")
    assert fewer_kv_heads(model) == {find_sites(model)[1].path: 1} and set(names) <= set(vars(model))
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.init_continuous_batching()
    whole = build_family("llama")
    for name in names:
        setattr(whole, name, None)
    fit_caches(whole)
    assert not set(names) & set(vars(whole))
