"""The helpers of transformers 4, with its meaning and without its faults."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

import headscope
from headscope.pruning.compat import (
    find_pruneable_heads_and_indices,
    prune_conv1d_layer,
    prune_layer,
    prune_linear_layer,
)


def test_is_a_public_name() -> None:
    assert headscope.find_pruneable_heads_and_indices is find_pruneable_heads_and_indices


@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_indices_are_of_original_heads_whatever_went_before(total: int, size: int, data) -> None:
    """Rows that carry their own number are followed through two prunings."""
    every = st.sets(st.integers(0, total - 1))
    first, second = data.draw(every), data.draw(every)
    rows = torch.arange(total * size)
    heads, index = find_pruneable_heads_and_indices(first, total, size, set())
    assert heads == first and index.dtype == torch.long
    rows = rows[index]
    heads, index = find_pruneable_heads_and_indices(list(second), total - len(first), size, first)
    assert heads == second - first
    rows = rows[index]
    assert rows.tolist() == [r for r in range(total * size) if r // size not in first | second]


def test_gives_what_version_4_gave() -> None:
    heads, index = find_pruneable_heads_and_indices([1, 2], 3, 2, {1})
    assert heads == {2} and index.tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize("head", [-1, 4])
def test_a_head_that_never_was_is_refused(head: int) -> None:
    with pytest.raises(IndexError, match="0-3, the layer's original heads"):
        find_pruneable_heads_and_indices({head}, 3, 2, {1})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("grad", [True, False])
def test_layers_keep_dtype_gradient_and_mode(bias: bool, dim: int, grad: bool) -> None:
    layer = nn.Linear(4, 6, bias=bias).to(torch.bfloat16).requires_grad_(grad).eval()
    index = torch.tensor([0, 3])
    new = prune_linear_layer(layer, index, dim)
    assert torch.equal(new.weight, layer.weight.index_select(dim, index))
    assert (new.out_features, new.in_features) == tuple(new.weight.shape)
    assert new.weight.dtype == torch.bfloat16 and new.weight.requires_grad is grad and not new.training
    if bias:
        assert torch.equal(new.bias, layer.bias[index] if dim == 0 else layer.bias)
        assert new.bias.data_ptr() != layer.bias.data_ptr()
    else:
        assert new.bias is None


@pytest.mark.parametrize("dim", [0, 1])
def test_layers_of_gpt2_are_the_transposed_linear_ones(dim: int) -> None:
    layer = Conv1D(6, 4)
    nn.init.normal_(layer.bias)
    linear = nn.Linear(4, 6)
    linear.weight, linear.bias = nn.Parameter(layer.weight.T.contiguous()), layer.bias
    index = torch.tensor([1, 2])
    new, twin = prune_conv1d_layer(layer, index, dim), prune_linear_layer(linear, index, 1 - dim)
    x = torch.randn(3, new.nx)
    assert torch.allclose(new(x), twin(x), atol=1e-6)
    assert (new.nx, new.nf) == tuple(new.weight.shape)


def test_chooses_by_the_layer() -> None:
    index = torch.tensor([0, 2])
    assert prune_layer(nn.Linear(4, 6), index).out_features == 2
    assert prune_layer(Conv1D(6, 4), index).nf == 2
    assert prune_layer(nn.Linear(4, 6), index, dim=1).in_features == 2
    with pytest.raises(TypeError, match="not Embedding"):
        prune_layer(nn.Embedding(3, 4), index)
