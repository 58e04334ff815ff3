"""Each single change that pruning makes, against NumPy, and what stops all of them before the first is made."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

import headscope
from fixtures.building import build_family
from headscope.errors import ModelError, ResourceError
from headscope.models.parts import NotPlain
from headscope.models.pruned import HeadState, head_numbers, pruned_state, set_pruned_state
from headscope.pruning.edits import Cut, Edits, Set, Slot, Zero


class Holder(nn.Module):
    """A module with one weight of any shape, and a buffer."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 1 + int(np.prod(shape))).reshape(shape))
        self.register_buffer("numbers", torch.arange(6.0))


# ------------------------------------------------------------------ cuts
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def kept_of(size: int) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(0, size - 1), min_size=1).map(sorted)


@given(shapes, st.data())
def test_a_cut_keeps_entries_of_its_axis(shape: tuple[int, ...], data) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    kept = data.draw(kept_of(shape[axis]))
    module = Holder(*shape)
    found = Cut(Slot(module, "weight"), axis, torch.tensor(kept)).result()
    assert np.array_equal(found.numpy(), np.take(module.weight.detach().numpy(), kept, axis=axis))
    assert found.is_contiguous() and not found.requires_grad
    found.zero_()
    assert bool((module.weight > 0).all()), "memory of its own"


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_flat_cut_counts_heads_and_widths_as_one_axis(features: int, heads: int, width: int, data) -> None:
    """(features, heads, width): whole heads leave, and the weight keeps its three axes."""
    kept = data.draw(kept_of(heads))
    module = Holder(features, heads, width)
    index = torch.tensor([h * width + i for h in kept for i in range(width)])
    found = Cut(Slot(module, "weight"), 1, index, flat=True).result()
    plain = module.weight.detach().numpy()
    assert np.array_equal(found.numpy(), plain[:, kept]) and found.is_contiguous() and not found.requires_grad
    rows = data.draw(kept_of(features))
    first = Cut(Slot(module, "weight"), 0, torch.tensor(rows), flat=True).result()
    assert np.array_equal(first.numpy(), plain[rows])


def test_a_cut_needs_no_values() -> None:
    module = nn.Linear(6, 4, device="meta")
    found = Cut(Slot(module, "weight"), 1, torch.tensor([0, 5])).result()
    assert found.device.type == "meta" and found.shape == (4, 2)


# ------------------------------------------------------------------ slots
@pytest.mark.parametrize("needs", [True, False])
def test_a_parameter_stays_one_and_needs_a_gradient_as_before(needs: bool) -> None:
    module = nn.Linear(3, 5).requires_grad_(needs)
    slot = Slot(module, "weight")
    assert slot.value is module.weight
    slot.replace(torch.ones(2, 3))
    assert isinstance(module.weight, nn.Parameter) and module.weight.requires_grad is needs
    assert [*module.state_dict()] == ["weight", "bias"] and slot.value is module.weight


def test_a_buffer_stays_one() -> None:
    module = Holder(2)
    slot, new = Slot(module, "numbers"), torch.zeros(2)
    assert slot.value is module.numbers
    slot.replace(new)
    assert module.numbers is new and [n for n, _ in module.named_buffers()] == ["numbers"]
    assert [n for n, _ in module.named_parameters()] == ["weight"]


def replaced(module: nn.Module, *shape: int) -> nn.Module:
    Slot(module, "weight").replace(torch.zeros(shape))
    return module


def test_modules_say_the_widths_of_their_new_weights() -> None:
    linear = replaced(nn.Linear(3, 5, bias=False), 2, 7)
    assert (linear.in_features, linear.out_features) == (7, 2)
    conv1d = replaced(Conv1D(5, 3), 7, 2)
    assert (conv1d.nx, conv1d.nf) == (7, 2)
    for conv in (replaced(nn.Conv1d(3, 5, 1), 2, 7, 1), replaced(nn.Conv2d(3, 5, 1), 2, 7, 1, 1)):
        assert (conv.in_channels, conv.out_channels) == (7, 2)
    table = replaced(nn.Embedding(3, 5), 7, 2)
    assert (table.num_embeddings, table.embedding_dim) == (7, 2)
    assert replaced(nn.LayerNorm(4), 2).normalized_shape == (4,), "a norm has no such words"
    assert linear(torch.ones(1, 7)).shape == (1, 2)


def test_a_bias_alone_says_nothing() -> None:
    module = nn.Linear(3, 5)
    module.weight = None
    Slot(module, "bias").replace(torch.zeros(2))
    assert (module.in_features, module.out_features) == (3, 5) and module.bias.shape == (2,)


# ------------------------------------------------------------------ zeros and numbers
@given(shapes.filter(lambda shape: len(shape) > 1), st.data())
def test_zeroing_writes_those_entries_and_no_others(shape: tuple[int, ...], data) -> None:
    axis = data.draw(st.integers(0, 1))
    module = Holder(*shape)
    weight, flat = module.weight, module.weight.detach().numpy().reshape(shape[0], -1).copy()
    index = data.draw(st.sets(st.integers(0, flat.shape[axis] - 1)).map(sorted))
    Zero(Slot(module, "weight"), axis, torch.tensor(index, dtype=torch.long)).apply()
    flat[(slice(None), index) if axis else index] = 0
    assert module.weight is weight and weight.requires_grad and weight.grad_fn is None
    assert np.array_equal(weight.detach().numpy().reshape(flat.shape), flat)


def test_a_weight_that_loses_nothing_is_not_written() -> None:
    module = nn.Linear(6, 4)
    before = module.weight._version
    Zero(Slot(module, "weight"), 1, torch.tensor([], dtype=torch.long)).apply()
    assert module.weight._version == before


def test_zeroing_needs_no_values() -> None:
    module = nn.Linear(6, 4, device="meta")
    Zero(Slot(module, "weight"), 1, torch.tensor([0, 5])).apply()
    assert module.weight.device.type == "meta"


def test_a_plain_attribute_is_set() -> None:
    module = Holder(2)
    Set(module, "num_heads", 3).apply()
    assert module.num_heads == 3
    assert (Edits().cuts, Edits().zeros, Edits().sets) == ([], [], []) and Edits().cuts is not Edits().cuts


# ------------------------------------------------------------------ what is left
@given(st.sampled_from([(8, 8), (8, 4), (8, 2), (6, 3), (4, 1)]), st.data())
def test_what_is_left_follows_from_what_is_gone(counts: tuple[int, int], data) -> None:
    num_heads, num_kv_heads = counts
    removed = data.draw(st.sets(st.integers(0, num_heads - 1), max_size=num_heads - 1))
    left = [h for h in range(num_heads) if h not in removed]
    zeroed = data.draw(st.sets(st.sampled_from(left)))
    state = HeadState(num_heads, num_kv_heads, 3, 5, tuple(sorted(removed)), tuple(sorted(zeroed)))
    assert state.group * num_kv_heads == num_heads and list(state.kept) == left
    groups = np.arange(num_heads).reshape(num_kv_heads, -1)
    assert list(state.kept_kv) == [k for k in range(num_kv_heads) if not removed.issuperset(groups[k].tolist())]
    assert set(state.gone) == removed | zeroed and list(state.gone) == sorted(state.gone)
    assert state.places(state.kept) == list(range(len(left)))
    assert state.kv_places(state.kept_kv) == list(range(len(state.kept_kv)))
    for head in removed:
        with pytest.raises(ValueError, match="not in tuple"):
            state.places((head,))


def test_the_numbers_of_a_modules_heads() -> None:
    module, state = Holder(2), HeadState(4, 4, 2, 2, removed=(1,))
    assert pruned_state(module) is None and head_numbers(module, 4) == (0, 1, 2, 3)
    set_pruned_state(module, state)
    assert pruned_state(module) is state and pruned_state(copy.deepcopy(module)) == state
    assert head_numbers(module, 3) == (0, 2, 3)
    assert head_numbers(module, 4) == (0, 1, 2, 3), "a module with other heads than its state tells of"
    module.headscope_heads = "something of somebody else's"
    assert pruned_state(module) is None


# ------------------------------------------------------------------ what stops it
def unchanged_by(model: nn.Module, heads: str, error: type[Exception], match: str) -> None:
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    with pytest.raises(error, match=match):
        headscope.prune_heads(model, heads)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and not hasattr(model.config, "headscope")
    assert all(after[name] is p and torch.equal(p, values) for name, (p, values) in before.items())
    assert all(pruned_state(module) is None for module in model.modules())


def test_weights_that_lie_elsewhere_are_refused() -> None:
    model = build_family("bert")
    query = model.encoder.layer[1].attention.self.query
    query._hf_hook = SimpleNamespace(offload=True)
    unchanged_by(model, "0:1;1:0", ModelError, "weights of encoder.layer.1.attention.self are offloaded")
    query._hf_hook = SimpleNamespace(offload=False)
    headscope.prune_heads(model, "0:1;1:0")
    assert query.weight.shape == (24, 32)
    model = build_family("bert")
    model.encoder.layer[1].attention.self.query._hf_hook = object()
    headscope.prune_heads(model, "1:0")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["device", "processor", "python"],
)
def test_without_memory_nothing_changes(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Also where it is the last weight for which there is none."""
    results = []

    def result(self: Cut, make=Cut.result) -> torch.Tensor:
        results.append(self.slot.name)
        if len(results) == 12:
            raise error
        return make(self)

    monkeypatch.setattr(Cut, "result", result)
    unchanged_by(build_family("bert"), "0:1;1:0", ResourceError, "out of memory while heads are removed")
    assert len(results) == 12


def test_other_failures_of_a_cut_are_not_called_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def result(self: Cut) -> torch.Tensor:
        raise RuntimeError("index out of range")

    monkeypatch.setattr(Cut, "result", result)
    unchanged_by(build_family("bert"), "0:1", RuntimeError, "index out of range")


@pytest.mark.parametrize("name", ["is_kv_shared_layer", "store_full_length_kv"])
def test_keys_that_serve_several_layers_stay(name: str) -> None:
    model = build_family("bert")
    own = model.encoder.layer[0].attention.self
    setattr(own, name, True)
    unchanged_by(model, "0:1", NotPlain, "its keys and values serve several layers")
    setattr(own, name, False)
    headscope.prune_heads(model, "0:1")
    assert own.query.weight.shape == (24, 32)
