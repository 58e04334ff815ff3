"""Every family pruned, with other heads in each layer, computes what it does with these heads zeroed."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from prune_cases import outputs, relative_difference, varied_heads, without_heads

from fixtures.families import FAMILIES
from headscope.models.sites import find_sites
from headscope.pruning.probes import probes
from headscope.pruning.proof import prove
from headscope.pruning.prune import prune_heads
from headscope.pruning.running import can_generate

# Layers of one module lose the same heads: what is asked of one leaves all.
NAMES = [name for name, family in FAMILIES.items() if family.stacks]
NO_SDPA = {"gpt_oss"}


@pytest.fixture(scope="module")
def pruned(family_model):
    """`pruned(name)`: (original, pruned, heads, inputs, family)."""
    made: dict[str, tuple] = {}

    def get(name: str) -> tuple:
        if name not in made:
            model, inputs, family = family_model(name)
            copy, heads = deepcopy(model), varied_heads(family)
            if name == "albert":
                heads = {"self.0": [0, 2]}
            report = prune_heads(copy, heads)
            made[name] = deepcopy(model), copy, dict(report.heads), inputs, family
        return made[name]

    return get


@pytest.mark.parametrize("name", NAMES)
def test_is_the_original_without_these_heads(pruned, name: str) -> None:
    """Against zeros put before the output projection by a hook of the test's own."""
    original, model, heads, inputs, _ = pruned(name)
    for implementation in ("eager", *(("sdpa",) if name not in NO_SDPA else ())):
        original.set_attn_implementation(implementation)
        model.set_attn_implementation(implementation)
        with without_heads(original, heads):
            wanted = outputs(original, inputs)
        assert relative_difference(wanted, outputs(model, inputs)) <= 1e-5
        assert relative_difference(wanted, outputs(original, inputs)) > 1e-2
    original.set_attn_implementation("eager")
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("name", NAMES)
def test_is_proved(pruned, name: str) -> None:
    """On batches padded on both sides, in every implementation, forward and generating."""
    original, model, _, _, family = pruned(name)
    before = {k: v.clone() for k, v in original.state_dict().items()}
    found = prove(original, model, batches=probes(original))
    assert found.passed and found.relative <= 1e-5, found
    assert min(c.effect for c in found.checks if c.mode == "forward") > 1e-2
    implementations = {"eager"} if name in NO_SDPA else {"eager", "sdpa"}
    assert {c.implementation for c in found.checks} == implementations
    modes = {"forward", "generate"} if can_generate(original) else {"forward"}
    assert {c.mode for c in found.checks} == modes
    if family.modality in ("text", "seq2seq"):
        assert {c.batch for c in found.checks} == {"padded right", "padded left"}
    assert all(torch.equal(v, before[k]) for k, v in original.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_the_proof_fails_for_other_heads(pruned, name: str) -> None:
    """One head wrong in one layer is enough, in any layer."""
    original, model, heads, _, family = pruned(name)
    batch = probes(original)[:1]
    layers = [n for n in heads if n != "self.0"] if len(heads) > 1 and name != "albert" else list(heads)
    layer = layers[len(layers) // 2]
    stack = family.stacks[layer.rpartition(".")[0]]
    other = next(h for h in range(stack.num_heads) if h not in heads[layer])
    wrong = {n: (*h[1:], other) if n == layer or name == "albert" else h for n, h in heads.items()}
    found = prove(original, model, wrong, batches=batch, implementations=("eager",), generate=False)
    assert not found.passed and found.relative > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_parameters_leave_and_classes_stay(pruned, name: str) -> None:
    original, model, heads, _, family = pruned(name)
    # Of a shared module heads leave once; what is per head is at most q, k, v, o and their biases.
    assert model.num_parameters() < original.num_parameters()
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    for site, twin in zip(find_sites(original), find_sites(model), strict=True):
        assert (site.path, site.stack, site.layer) == (twin.path, twin.stack, twin.layer)
    assert model.config.headscope["heads"] == {n: list(h) for n, h in heads.items()}
    assert {n: tuple(v) for n, v in model.config.headscope["original"].items()} == {
        f"{stack}.{layer}": (spec.num_heads, spec.num_kv_heads)
        for stack, spec in family.stacks.items()
        for layer in spec.layers
    }


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "gpt_oss", "opt", "bloom", "t5", "bart", "phi3"])
def test_generates_the_same_with_a_static_cache(pruned, name: str) -> None:
    original, model, heads, inputs, _ = pruned(name)
    given = {k: v for k, v in inputs.items() if not k.startswith("decoder_")}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    if name == "bloom":  # has no static cache
        options["num_beams"] = 3
    else:
        options["cache_implementation"] = "static"
    with without_heads(original, heads):
        wanted = original.generate(**given, **options)
    assert torch.equal(model.generate(**given, **options), wanted)
