"""Every row of the layout table that fuses projections, and rare separate ones, against models that have them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from transformers import XLNetConfig, XLNetModel
from transformers.models.evolla.modeling_evolla import EvollaSequenceCompressorAttention
from transformers.models.layoutlmv2.modeling_layoutlmv2 import LayoutLMv2SelfAttention
from weight_cases import CASES, build, site_of
from weight_proof import TOLERANCE, agreements, expected, observe, projected, scramble

from headscope.models.layouts import LAYOUTS
from headscope.models.sites import find_sites
from headscope.models.weights import read_weights, write_weights


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.layout} {c.model_class}")
def test_a_layout_reads_what_its_model_computes(case):
    model = build(case)
    seen_sites = [seen for seen in observe(model, case.inputs) if seen.found.layout.name == case.layout]
    assert seen_sites
    for seen in seen_sites:
        assert seen.found.shape == case.shape
        wanted = {role: expected(seen, role) for role in ("query", "key", "value")}
        results = agreements(seen, wanted)
        assert results["value"] == "same"
        assert {results["query"], results["key"]} <= set(case.between), results
        torch.testing.assert_close(projected(seen), seen.output, **TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.layout} {c.model_class}")
def test_a_layout_is_written_as_it_is_read(case):
    model = build(case)
    before = deepcopy(model.state_dict())
    for site in find_sites(model):
        weights = read_weights(site, model=model).clone()
        other = scramble(weights)
        write_weights(site, other, model=model)
        same(read_weights(site, model=model), other)
        write_weights(site, weights, model=model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def same(one, other):
    for name in (f.name for f in fields(one)):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), name


# ------------------------------------------------------------------ modules by themselves
def heads(x, weight, bias=None):
    """(batch, heads, n, width): what per-head weights make of inputs (batch, n, features)."""
    y = torch.einsum("bni,hdi->bhnd", x, weight)
    return y if bias is None else y + bias[:, None]


def test_keys_and_values_fused_beside_a_separate_query():
    torch.manual_seed(0)
    module = EvollaSequenceCompressorAttention(dim=20, dim_head=6, heads=3)
    media, latents = torch.randn(2, 5, 20), torch.randn(2, 4, 20)
    with torch.no_grad():
        wanted = module(media, latents, torch.ones(2, 9))
    weights = read_weights(site_of(module))
    queries_from = module.norm_latents(latents)
    keys_from = torch.cat((module.norm_media(media), queries_from), dim=1)
    query, key, value = (
        heads(queries_from, weights.query),
        heads(keys_from, weights.key),
        heads(keys_from, weights.value),
    )
    context = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(torch.einsum("bhnd,hdo->bno", context, weights.output), wanted, **TOLERANCE)


def test_biases_that_are_parameters_of_the_module():
    torch.manual_seed(0)
    config = SimpleNamespace(
        hidden_size=24,
        num_attention_heads=3,
        fast_qkv=True,
        has_relative_attention_bias=False,
        has_spatial_attention_bias=False,
        attention_probs_dropout_prob=0.0,
    )
    module = LayoutLMv2SelfAttention(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    x = torch.randn(2, 5, 24)
    with torch.no_grad():
        wanted = module(x, torch.zeros(2, 1, 1, 5))[0]
    weights = read_weights(site_of(module))
    assert weights.key_bias is None and weights.output is None
    context = torch.nn.functional.scaled_dot_product_attention(
        heads(x, weights.query, weights.query_bias), heads(x, weights.key), heads(x, weights.value, weights.value_bias)
    )
    torch.testing.assert_close(context.transpose(1, 2).flatten(2), wanted, **TOLERANCE)


def test_heads_as_axes_of_a_parameter():
    """XLNet's weights have axes for heads; its own einsum says which."""
    torch.manual_seed(0)
    module = XLNetModel(XLNetConfig(vocab_size=9, d_model=20, n_layer=1, n_head=4, d_inner=8)).layer[0].rel_attn
    weights = read_weights(site_of(module))
    x = torch.randn(2, 3, 20)
    for own, weight in ((module.q, weights.query), (module.k, weights.key), (module.v, weights.value)):
        torch.testing.assert_close(heads(x, weight), torch.einsum("bih,hnd->bnid", x, own))
    context = torch.randn(2, 4, 3, 5)
    mixed = torch.einsum("bhnd,hdo->bno", context, weights.output)
    torch.testing.assert_close(mixed, torch.einsum("bnid,hnd->bih", context, module.o))


def test_every_fused_row_is_proved_on_a_model_or_a_module():
    alone = {"to_q/to_kv", "qkv_linear"}
    assert {row.name for row in LAYOUTS if row.fused} <= {c.layout for c in CASES} | alone
