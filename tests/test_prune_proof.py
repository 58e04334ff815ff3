"""The proof sees what is wrong, and tells rounding from it."""

from __future__ import annotations

import copy

import pytest
import torch

import headscope
from fixtures.building import build_family
from headscope.errors import InputError
from headscope.pruning.masking import mask_heads, masked_heads
from headscope.pruning.probes import Probe, probes
from headscope.pruning.proof import difference, prove
from headscope.pruning.running import TOKENS


@pytest.fixture
def pair():
    """A GPT-2, and the same without two heads."""
    original = build_family("gpt2")
    model = copy.deepcopy(original)
    headscope.prune_heads(model, "0:0;2:3")
    return original, model


def test_needs_inputs(pair) -> None:
    with pytest.raises(InputError, match="nothing to run"):
        prove(*pair, batches=())


def test_a_changed_weight_is_seen(pair) -> None:
    original, model = pair
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] += 0.1
    found = prove(original, model, batches=probes(original))
    assert not found.passed and found.relative > 1e-5
    assert found.to_dict()["passed"] is False


def test_a_forgotten_number_is_a_failure_not_an_error(pair) -> None:
    original, model = pair
    model.transformer.h[0].attn.split_size = 32
    found = prove(original, model, batches=probes(original)[:1], implementations=("eager",))
    assert not found.passed and "forward on padded right (eager): the pruned model fails" in found.failures[0]
    assert found.to_dict()["max_abs"] is None


def test_what_never_ran_is_not_proved() -> None:
    original = build_family("clip")
    model = copy.deepcopy(original)
    headscope.prune_heads(model, "text.0:0;vision.1:2")
    text = Probe("text", {k: v for k, v in probes(original)[0].inputs.items() if k != "pixel_values"})
    found = prove(original.text_model, model.text_model, {"self.0": (0,)}, batches=[text])
    assert found.passed
    found = prove(original.text_model, model.text_model, {"self.0": (0,), "self.1": ()}, batches=[text])
    assert found.passed
    bert = build_family("bert")
    twin = copy.deepcopy(bert)
    headscope.prune_heads(twin, "1:0")
    for model in (bert, twin):
        model.encoder.layer[1].forward = lambda hidden, *args, **kwargs: hidden
    found = prove(bert, twin, batches=probes(bert))
    assert not found.passed and found.failures == ("self.1 did not run on these inputs, so nothing is known of it",)


def test_rounding_is_told_from_a_fault(pair) -> None:
    """The same sums in another order: float32 differs by more than is allowed, float64 does not."""
    original, model = pair
    found = prove(original, model, batches=probes(original)[:1], tolerance=1e-9)
    assert found.passed
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mlp = model.transformer.h[1].mlp
        mlp.c_fc.weight.copy_(mlp.c_fc.weight[:, order])
        mlp.c_fc.bias.copy_(mlp.c_fc.bias[order])
        mlp.c_proj.weight.copy_(mlp.c_proj.weight[order])
    found = prove(original, model, batches=probes(original), tolerance=1e-9)
    assert found.passed and "float64" in {c.dtype for c in found.checks}
    assert "comparisons were made in float64: rounding in float32 came to" in found.notes[0]
    with torch.no_grad():
        mlp.c_fc.bias[0] += 1e-6
    assert not prove(original, model, batches=probes(original), tolerance=1e-9).passed


def test_everything_is_as_before_afterwards(pair) -> None:
    for model in pair:
        model.train()
        model.transformer.h[0].eval()
        model.set_attn_implementation("sdpa")
    state = [{k: v.clone() for k, v in m.state_dict().items()} for m in pair]
    random = torch.random.get_rng_state()
    assert prove(*pair, batches=probes(pair[0])).passed
    for model, before in zip(pair, state, strict=True):
        assert model.training and not model.transformer.h[0].training
        assert model.config._attn_implementation == "sdpa"
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert torch.equal(torch.random.get_rng_state(), random)


# ------------------------------------------------------------------ differences
def test_differences_are_of_real_tokens_relative_to_the_largest() -> None:
    wanted = torch.tensor([[[4.0], [2.0], [9.0]]])
    given = wanted + torch.tensor([[[0.0], [0.5], [100.0]]])
    mask = {"attention_mask": torch.tensor([[1, 1, 0]])}
    assert difference({"x": wanted}, {"x": given}, mask) == (0.5, 0.125)
    assert difference({"x": wanted}, {"x": given}, {}) == (100.0, 100 / 9)


@pytest.mark.parametrize(
    "given",
    [{}, {"x": torch.ones(2, 3)}, {"y": torch.ones(2, 2)}, {"x": torch.tensor([[1.0, float("nan")], [1, 1]])}],
)
def test_what_is_missing_or_no_number_differs_without_bound(given: dict) -> None:
    assert difference({"x": torch.ones(2, 2)}, given, {}) == (float("inf"), float("inf"))


def test_what_is_infinite_on_both_sides_is_the_same() -> None:
    row = torch.tensor([2.0, float("-inf"), float("nan")])
    assert difference({"x": row}, {"x": row.clone()}, {}) == (0.0, 0.0)
    assert difference({"x": row[1:]}, {"x": row[1:].clone()}, {}) == (float("inf"), float("inf"))


def test_generations_are_compared_until_a_tie_parts_them() -> None:
    steps = {f"step {i}": torch.tensor([[1.0, 1.0 + i]]) for i in range(3)}
    other = steps | {"step 2": torch.tensor([[9.0, 9.0]])}
    a = steps | {TOKENS: torch.tensor([[0, 1, 1]])}
    assert difference(a, other | {TOKENS: torch.tensor([[0, 0, 1]])}, {}) == (0.0, 0.0)
    assert difference(a, other | {TOKENS: torch.tensor([[0, 1, 0]])}, {})[0] == 8.0


# ------------------------------------------------------------------ masking
def test_masking_is_undone_to_the_last_bit(pair) -> None:
    original, pruned = pair
    before = {k: v.clone() for k, v in original.state_dict().items()}
    with pytest.raises(ValueError, match="within"), masked_heads(original, {"self.0": [0], "self.2": [3]}):
        assert not original.transformer.h[0].attn.c_proj.weight[:8].any()
        raise ValueError("within")
    assert all(torch.equal(v, before[k]) for k, v in original.state_dict().items())
    mask_heads(original, {"self.0": [0], "self.2": [3]})
    inputs = probes(original)[0].inputs
    with torch.no_grad():
        assert torch.allclose(original(**inputs).logits, pruned(**inputs).logits, atol=1e-4)


def test_masking_takes_original_numbers(pair) -> None:
    """Head 1 lies first in the pruned layer; head 0 is not there any more."""
    _, pruned = pair
    with masked_heads(pruned, {"self.0": [0, 1]}):
        weight = pruned.transformer.h[0].attn.c_proj.weight
        assert not weight[:8].any() and bool(weight[8:].all())
    with pytest.raises(InputError, match="layer 0 of self has no head 4: 0-3"), masked_heads(pruned, {"self.0": [4]}):
        pass
    with pytest.raises(InputError, match=r"the model has no layer self\.7"), masked_heads(pruned, {"self.7": [0]}):
        pass
