"""What surgery keeps, how it goes on from an earlier one, and that weights of every arrangement are cut rightly."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prune_cases import outputs, relative_difference, without_heads
from torch import nn
from transformers import (
    ChameleonConfig,
    CodeGenConfig,
    CodeGenForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DebertaV2Config,
    DebertaV2Model,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MptConfig,
    MptForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    SwinConfig,
    SwinModel,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5EncoderModel,
    XLNetConfig,
    XLNetModel,
)
from transformers.models.chameleon.modeling_chameleon import ChameleonModel

import headscope
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from headscope.errors import InputError
from headscope.models.layouts import BLOCKS, BY_KV_HEAD
from headscope.models.pruned import HeadState
from headscope.models.rows import HeadShape, fused_rows
from headscope.models.sites import find_sites
from headscope.pruning.probes import probes
from headscope.pruning.proof import prove

IDS = {"input_ids": torch.tensor([[11, 25, 37, 42, 18, 29], [33, 12, 44, 21, 0, 0]])}
TEXT = IDS | {"attention_mask": torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])}
SIZE = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 48}
GROUPED = SIZE | {"num_key_value_heads": 4, "pad_token_id": 0}


def noisy(model):
    """Weights so large that attention is far from uniform, and biases that are not zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    model.set_attn_implementation("eager")
    return model.eval()


# ------------------------------------------------------------------ fused weights
def of_gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=64, n_layer=2, n_head=8, n_positions=32))


FUSED = {
    "blocks": (of_gpt2, 8),
    "a run for each head": (lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZE)), 8),
    "blocks, with biases by distance": (
        lambda: MptForCausalLM(MptConfig(vocab_size=60, d_model=64, n_layers=2, n_heads=8, max_seq_len=32)),
        8,
    ),
    "a run for each group": (
        lambda: FalconForCausalLM(FalconConfig(**SIZE, new_decoder_architecture=True, num_kv_heads=4)),
        4,
    ),
    "keys of all heads last": (lambda: FalconForCausalLM(FalconConfig(**SIZE, multi_query=True)), 1),
    "blocks of groups": (lambda: Phi3ForCausalLM(Phi3Config(**GROUPED)), 4),
    "four runs, values before keys": (
        lambda: CodeGenForCausalLM(
            CodeGenConfig(vocab_size=60, n_embd=64, n_layer=2, n_head=8, n_positions=32, n_ctx=32, rotary_dim=4)
        ),
        8,
    ),
}


@pytest.fixture(scope="module")
def fused():
    made: dict[str, nn.Module] = {}

    def get(name: str):
        if name not in made:
            torch.manual_seed(0)
            made[name] = noisy(FUSED[name][0]())
        return made[name], FUSED[name][1]

    return get


def legal_heads(num_heads: int, num_kv_heads: int, runs: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Random heads that leave as many in every group that is left, or in every run."""
    size = num_heads // num_kv_heads

    def left(kept: int, groups: set[int], order: list[list[int]]) -> tuple[int, ...]:
        stay = {g * size + i for g in groups for i in order[g][:kept]}
        return tuple(h for h in range(num_heads) if h not in stay)

    if runs > 1:
        each = num_heads // runs
        orders = st.lists(st.permutations(range(each)), min_size=runs, max_size=runs)
        return st.builds(
            lambda kept, o: tuple(r * each + i for r in range(runs) for i in o[r][kept:]), st.integers(1, each), orders
        )
    orders = st.lists(st.permutations(range(size)), min_size=num_kv_heads, max_size=num_kv_heads)
    groups = st.sets(st.integers(0, num_kv_heads - 1), min_size=1)
    return st.builds(left, st.integers(1, size), groups, orders)


@pytest.mark.parametrize("name", FUSED)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_legal_plan_is_the_original_without_its_heads(fused, name: str, data) -> None:
    original, kv_heads = fused(name)
    strategy = legal_heads(8, kv_heads, 4 if name.startswith("four") else 1)
    heads = {f"self.{layer}": data.draw(strategy) for layer in (0, 1)}
    heads = {n: h for n, h in heads.items() if h}
    if not heads:
        return
    model = copy.deepcopy(original)
    headscope.prune_heads(model, heads)
    with without_heads(original, heads):
        wanted = outputs(original, TEXT)
    assert relative_difference(wanted, outputs(model, TEXT)) <= 1e-5


def test_uneven_runs_are_refused(fused) -> None:
    original, _ = fused("four runs, values before keys")
    with pytest.raises(InputError, match="runs of its fused weight would have unequally many query heads: 1, 2, 2, 2"):
        headscope.prune_heads(original, "0:0")
    with pytest.raises(InputError, match="1, 2, 2, 0"):
        headscope.prune_heads(original, "0:0,6,7")
    report = headscope.prune_heads(copy.deepcopy(original), "0:all", allow_empty=True)
    assert report.zeroed == {"self.0": (0, 2, 4, 6)}


@given(st.sampled_from([8, 4, 2]), st.data())
def test_what_is_left_of_rows_is_arranged_as_the_whole_was(kv_heads: int, data) -> None:
    """Ascending rows of the heads that stay are where a layer built with fewer heads looks for them."""
    heads = data.draw(legal_heads(8, kv_heads, 1))
    left = HeadState(8, kv_heads, 3, 3, removed=heads)
    whole, small = HeadShape(8, kv_heads, 3, 3), HeadShape(len(left.kept), len(left.kept_kv), 3, 3)
    for arrangement in (BLOCKS, BY_KV_HEAD):
        before, after = fused_rows(arrangement, whole), fused_rows(arrangement, small)
        kept = {"query": list(left.kept), "key": list(left.kept_kv), "value": list(left.kept_kv)}
        index = torch.cat([before[role].index_of(places) for role, places in kept.items()]).sort().values
        for role, places in kept.items():
            assert torch.equal(index[after[role].index()], before[role].index()[places])


def test_cutting_runs_like_blocks_is_seen(fused) -> None:
    """Shapes agree when GPT-NeoX is cut as GPT-2 is; the proof tells them apart."""
    original, _ = fused("a run for each head")
    model = copy.deepcopy(original)
    headscope.prune_heads(model, {0: [1]})
    rows = torch.tensor([h * 8 + i + 64 * part for part in range(3) for h in (0, *range(2, 8)) for i in range(8)])
    fused_layer = model.gpt_neox.layers[0].attention.query_key_value
    with torch.no_grad():
        fused_layer.weight.copy_(original.gpt_neox.layers[0].attention.query_key_value.weight[rows])
        fused_layer.bias.copy_(original.gpt_neox.layers[0].attention.query_key_value.bias[rows])
    found = prove(original, model, batches=probes(original)[:1])
    assert not found.passed and found.relative > 1e-2


# ------------------------------------------------------------------ what is per head outside of projections
T5 = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


def of_chameleon():
    return ChameleonModel(ChameleonConfig(**GROUPED, max_position_embeddings=64, vocabulary_map={"<image>": 5}))


def of_deberta():
    config = DebertaV2Config(
        vocab_size=60,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        intermediate_size=48,
        max_position_embeddings=32,
        relative_attention=True,
        share_att_key=False,
        pos_att_type=["p2c", "c2p"],
    )
    return DebertaV2Model(config)


OTHERS = {
    "a norm weight for each head": (
        lambda: CohereForCausalLM(CohereConfig(**GROUPED, use_qk_norm=True)),
        "0:0,2,4,6;1:2-5",
    ),
    "a norm for each head": (
        lambda: StableLmForCausalLM(StableLmConfig(**GROUPED, qk_layernorm=True)),
        "0:0,3,4,7;1:0-1",
    ),
    "norms with model-parallel weights": (of_chameleon, "layers.0:0,3,4,7;layers.1:0-1"),
    "linear biases in falcon": (
        lambda: FalconForCausalLM(FalconConfig(**SIZE, multi_query=False, alibi=True)),
        "0:0,3;1:7",
    ),
    "weights with an axis for heads": (
        lambda: XLNetModel(XLNetConfig(vocab_size=60, d_model=64, n_layer=2, n_head=8, d_inner=48)),
        "0:0,3;1:7",
    ),
    "projections of positions": (of_deberta, "0:0,3;1:7"),
    "a table in every layer": (lambda: UMT5EncoderModel(UMT5Config(**T5)), "0:0,3;1:2"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_is_per_head_follows(name: str) -> None:
    torch.manual_seed(0)
    build, heads = OTHERS[name]
    original = noisy(build())
    model = copy.deepcopy(original)
    report = headscope.prune_heads(model, heads)
    with without_heads(original, report.heads):
        wanted = outputs(original, TEXT)
    assert relative_difference(wanted, outputs(model, TEXT)) <= 1e-5
    assert prove(original, model, batches=probes(original)).passed


def test_tables_by_position_follow() -> None:
    torch.manual_seed(0)
    config = SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    original = noisy(SwinModel(config))
    model = copy.deepcopy(original)
    layers = [f"{s.stack}.{s.layer}" for s in find_sites(model)]
    report = headscope.prune_heads(model, {name: [1] for name in layers})
    assert prove(original, model, report.heads, batches=probes(original)).passed


def test_a_shared_table_serves_layers_with_other_heads() -> None:
    """As many heads everywhere, but others: cutting the table itself would raise nothing and be wrong."""
    torch.manual_seed(0)
    original = noisy(T5ForConditionalGeneration(T5Config(**T5, decoder_start_token_id=0)))
    model = copy.deepcopy(original)
    heads = {"encoder.0": [1, 3], "encoder.1": [0, 1], "decoder.0": [0, 2], "cross.0": [2, 3], "cross.1": [3, 0]}
    report = headscope.prune_heads(model, heads)
    inputs = TEXT | {"decoder_input_ids": IDS["input_ids"][:, :4]}
    for implementation in ("eager", "sdpa"):
        original.set_attn_implementation(implementation)
        model.set_attn_implementation(implementation)
        with without_heads(original, report.heads):
            wanted = outputs(original, inputs)
        assert relative_difference(wanted, outputs(model, inputs)) <= 1e-5
    assert model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.shape == (32, 4)


# ------------------------------------------------------------------ what stays
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "bloom"])
def test_keeps_dtype_gradient_and_memory_order(name: str) -> None:
    model = build_family(name).to(torch.bfloat16)
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad = i % 3 == 0
    wanted = {n: (p.dtype, p.device, p.requires_grad) for n, p in model.named_parameters()}
    stack, spec = next(iter(FAMILIES[name].stacks.items()))
    headscope.prune_heads(model, {f"{stack}.0": list(range(spec.num_heads // spec.num_kv_heads))})
    assert {n: (p.dtype, p.device, p.requires_grad) for n, p in model.named_parameters()} == wanted
    assert all(p.is_contiguous() for p in model.parameters())
    for output in outputs(model, example_inputs(FAMILIES[name])):
        assert output.dtype == torch.bfloat16 and bool(output.isfinite().all())


def test_half_precision_is_proved_in_float32() -> None:
    original = build_family("llama").to(torch.bfloat16)
    model = copy.deepcopy(original)
    headscope.prune_heads(model, "0:0-3")
    found = prove(original, model, batches=probes(original))
    assert found.passed and next(model.parameters()).dtype == torch.bfloat16


def test_a_pruned_model_can_be_trained() -> None:
    model = build_family("gpt2").train()
    headscope.prune_heads(model, "0:0,2;1:3")
    attention = model.transformer.h[0].attn
    assert attention.split_size == 16 and attention.num_heads == 2
    assert (attention.c_attn.nx, attention.c_attn.nf) == (32, 48)
    assert (attention.c_proj.nx, attention.c_proj.nf) == (16, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        loss = model(**TEXT, labels=IDS["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["t5", "phi3", "bloom", "falcon_mqa", "mpt"])
def test_copies_and_pickles_run_as_the_model_does(name: str) -> None:
    model, inputs = build_family(name), example_inputs(FAMILIES[name])
    headscope.prune_heads(model, {f"{next(iter(FAMILIES[name].stacks))}.1": [0, 1]})
    wanted = outputs(model, inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert relative_difference(wanted, outputs(twin, inputs)) == 0
        # A copy has its own config, numbers and hooks: pruning it further leaves the model alone.
        headscope.prune_heads(twin, {f"{next(iter(FAMILIES[name].stacks))}.0": [0, 1]})
        assert relative_difference(wanted, outputs(model, inputs)) == 0


@pytest.mark.parametrize("name", ["phi3", "t5"])
def test_follows_another_attention_implementation(name: str) -> None:
    """A module with a config of its own would stay with the old one."""
    model = build_family(name)
    headscope.prune_heads(model, {f"{next(iter(FAMILIES[name].stacks))}.0": [0, 1]})
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        configs = [m.config for m in model.modules() if hasattr(m, "config")]
        assert {c._attn_implementation for c in configs} == {implementation}
