"""Fused weights of random sizes against the separate ones that they hold, and the way back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D
from weight_cases import CASES, build, site_of

from headscope.models.layouts import BLOCKS, BLOCKS_KV, BY_KV_HEAD
from headscope.models.rows import fused_rows
from headscope.models.sites import find_sites
from headscope.models.weights import HeadShape, head_shape, projections, read_weights, write_weights

WIDTHS = st.integers(1, 5)
GROUPED = st.builds(
    lambda kv, share, width: HeadShape(kv * share, kv, width, width), st.integers(1, 4), st.integers(1, 3), WIDTHS
)
IN_FOURS = st.builds(lambda heads, width: HeadShape(heads, heads, width, width), st.sampled_from([4, 8]), WIDTHS)


def linear(rows: torch.Tensor, conv: bool) -> nn.Module:
    """A Linear, or GPT-2's Conv1D, whose weight has these rows, (out, in), and a bias."""
    module = Conv1D(*rows.shape) if conv else nn.Linear(rows.shape[1], rows.shape[0])
    with torch.no_grad():
        module.weight.copy_(rows.T if conv else rows)
        module.bias.normal_()
    return module


def lay_out(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The rows of a fused weight, from (heads, dim, in) each, as the model's forward cuts them."""
    if name == "blocks":
        return torch.cat([query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)])
    if name == "key, value":
        return torch.cat([key.flatten(0, 1), value.flatten(0, 1)])
    if name == "four runs":
        return torch.cat(
            [t.flatten(0, 1) for run in zip(*(x.chunk(4) for x in (query, value, key)), strict=True) for t in run]
        )
    share = len(query) // len(key)
    rows = [
        row for head in range(len(key)) for row in (*query[head * share : (head + 1) * share], key[head], value[head])
    ]
    return torch.cat(rows)


FORMS: dict[str, tuple[str, Any]] = {
    "blocks": ("Wqkv", None),
    "key, value": ("q_attn", None),
    "by key-value head": ("query_key_value", None),
    "four runs": ("qkv_proj", SimpleNamespace(model_type="codegen")),
}
OUTPUTS = {"Wqkv": "Wo", "q_attn": "c_proj", "query_key_value": "dense", "qkv_proj": "out_proj"}


def fused_module(form: str, shape: HeadShape, conv: bool, weights: tuple[torch.Tensor, ...]) -> nn.Module:
    name, config = FORMS[form]
    module = nn.Module()
    module.head_dim, module.config = shape.head_dim, config
    fused = linear(lay_out(form, *weights), conv)
    if name == "q_attn":
        module.q_attn, module.c_attn = linear(weights[0].flatten(0, 1), conv), fused
    else:
        setattr(module, name, fused)
    width = shape.num_heads * shape.value_dim
    setattr(module, OUTPUTS[name], linear(torch.randn(7, width), conv))
    return module


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), conv=st.booleans())
def test_a_fused_weight_is_separate_ones_laid_out(form, data, conv):
    shape = data.draw(IN_FOURS if form == "four runs" else GROUPED)
    sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    first, second = (tuple(torch.randn(n, shape.head_dim, 6) for n in sizes) for _ in range(2))
    module = fused_module(form, shape, conv, first)
    site = site_of(module)
    assert head_shape(site) == shape
    read = read_weights(site)
    for given_rows, wanted in zip((read.query, read.key, read.value), first, strict=True):
        assert torch.equal(given_rows, wanted)
    write_weights(site, replace(read, query=second[0], key=second[1], value=second[2]))
    fused = projections(site).key.matrix()
    assert torch.equal(fused, lay_out(form, *second))
    # Biases lie as the rows do: what is laid out over a bias as a matrix of one column is that bias.
    biases = (read.query_bias, read.key_bias, read.value_bias)
    laid = lay_out(form, *(b[..., None] for b in biases))[:, 0]
    assert torch.equal(laid, projections(site).key.bias.tensor)


@settings(max_examples=25, deadline=None)
@given(shape=GROUPED, gated=st.booleans(), value_dim=st.integers(1, 5))
def test_separate_weights_and_a_gate_beside_each_query(shape, gated, value_dim):
    module = nn.Module()
    module.head_dim = shape.head_dim
    query, gate = (torch.randn(shape.num_heads, shape.head_dim, 6) for _ in range(2))
    key = torch.randn(shape.num_kv_heads, shape.head_dim, 6)
    value = torch.randn(shape.num_kv_heads, value_dim, 6)
    output = torch.randn(shape.num_heads, value_dim, 7)
    rows = torch.cat([query, gate], dim=1).flatten(0, 1) if gated else query.flatten(0, 1)
    module.q_proj, module.k_proj = linear(rows, False), linear(key.flatten(0, 1), False)
    module.v_proj, module.o_proj = linear(value.flatten(0, 1), False), linear(output.flatten(0, 1).T, False)
    read = read_weights(site_of(module))
    assert read.shape == replace(shape, value_dim=value_dim)
    assert torch.equal(read.query, query) and torch.equal(read.key, key) and torch.equal(read.value, value)
    assert torch.equal(read.output, output)
    assert torch.equal(read.gate, gate) if gated else read.gate is None


@settings(max_examples=25, deadline=None)
@given(shape=GROUPED, arrangement=st.sampled_from([BLOCKS, BLOCKS_KV, BY_KV_HEAD]))
def test_row_numbers_of_all_roles_fill_the_weight_once(shape, arrangement):
    rows = fused_rows(arrangement, shape)
    everything = torch.cat([own.index().flatten() for own in rows.values()])
    assert torch.equal(everything.sort().values, torch.arange(next(iter(rows.values())).total))


def test_shared_memory_where_the_layout_allows():
    model = build(next(c for c in CASES if c.layout == "qkv_proj/o_proj"))
    site = find_sites(model)[0]
    weights = read_weights(site)
    memory = site.module.qkv_proj.weight.untyped_storage().data_ptr()
    assert all(t.untyped_storage().data_ptr() == memory for t in (weights.query, weights.key, weights.value))
    assert not weights.query.requires_grad
    assert weights.clone().query.untyped_storage().data_ptr() != memory
