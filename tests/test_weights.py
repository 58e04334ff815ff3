"""Per-head weights against what models compute: shapes prove nothing, so every comparison is of numbers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from weight_proof import (
    TOLERANCE,
    agreements,
    expected,
    forward,
    observe,
    projected,
    scramble,
    without_context,
)

from fixtures.families import FAMILIES
from headscope.models.sites import find_sites
from headscope.models.weights import projections, read_weights, write_weights

NAMES = [name for name, family in FAMILIES.items() if family.stacks]
# What stands between projection and scores, where it is more than a rotation.
NORMS = {"query": "q_norm", "key": "k_norm"}
# Types whose queries and keys are not only turned but stretched, all alike.
STRETCHED = {"gpt_oss", "whisper", "opt", "deberta_v2"}


@pytest.fixture(scope="module")
def observed(family_model):
    """`observed(name)` gives what the sites of a family computed, made once."""
    seen = {}

    def get(name):
        if name not in seen:
            model, inputs, _ = family_model(name)
            seen[name] = observe(model, inputs)
        return seen[name]

    return get


@pytest.mark.parametrize("name", NAMES)
def test_weights_make_the_queries_keys_and_values_that_attention_is_computed_from(name, observed):
    allowed = {"same", "turned"} | ({"scaled"} if name in STRETCHED else set())
    for seen in observed(name):
        wanted = {role: expected(seen, role) for role in ("query", "key", "value")}
        for role, norm in NORMS.items():
            wanted[role] = getattr(seen.site.module, norm, torch.nn.Identity())(wanted[role])
        results = agreements(seen, wanted)
        assert results["value"] == "same", seen.site.path
        assert {results["query"], results["key"]} <= allowed, (seen.site.path, results)


@pytest.mark.parametrize("name", NAMES)
def test_heads_add_up_to_the_output(name, observed):
    for seen in observed(name):
        torch.testing.assert_close(projected(seen), seen.output, **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_writing_back_restores_every_bit(name, family_model):
    model = deepcopy(family_model(name)[0])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sites = [s for s in find_sites(model) if s.call == 0]
    read = [read_weights(s, model=model).clone() for s in sites]
    for site, weights in zip(sites, read, strict=True):
        own = {f"{p.path}.{p.name}" for part in projections(site, model=model) for p in (part.weight, part.bias) if p}
        write_weights(site, scramble(weights), model=model)
        after = model.state_dict()
        tied = {k for k, v in after.items() if any(v.data_ptr() == after[o].data_ptr() for o in own)}
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert own <= changed <= tied
        write_weights(site, weights, model=model)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_a_head_without_output_weights_is_a_head_without_context(name, family_model):
    model, inputs, _ = family_model(name)
    model = deepcopy(model)
    sites = {s.stack: s for s in find_sites(model) if s.call == 0}
    for site in sites.values():
        weights = read_weights(site, model=model).clone()
        head = weights.shape.num_heads - 2
        with without_context(model, site, head):
            wanted = forward(model, inputs)
        whole = forward(model, inputs)
        output = weights.output.clone()
        output[head] = 0
        write_weights(site, replace(weights, output=output), model=model)
        given = forward(model, inputs)
        write_weights(site, weights, model=model)
        for a, b in zip(given, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert any(not torch.allclose(a, b, atol=1e-3) for a, b in zip(whole, wanted, strict=True))
