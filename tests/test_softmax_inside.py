"""Attention that modules compute and keep to themselves: read where it is one softmax over keys, else left alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from transformers import SamVisionConfig, SamVisionModel, SqueezeBertConfig, SqueezeBertModel, WavLMConfig, WavLMModel

import headscope
from fixtures.building import build_family
from headscope.capture.layerwise import run
from headscope.capture.softmax_inside import SoftmaxWatch, watching, weights_inside
from headscope.models.sites import find_sites

BATCH, HEADS, ROWS, KEYS, DIM = 2, 3, 5, 7, 4


def softmax(scores):
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


class Module(nn.Module):
    """Three heads around whatever a test computes."""

    def __init__(self, compute, heads=HEADS):
        super().__init__()
        self.compute = compute
        if heads is not None:
            self.num_heads = heads

    def forward(self, *tensors):
        return self.compute(*tensors)


def inside(compute, *tensors, heads=HEADS):
    module, seen = Module(compute, heads), []
    with watching(module, lambda: True, seen.extend):
        output = module(*tensors)
    expected = compute(*tensors)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(flat(output), flat(expected), strict=True))
    return weights_inside(module, seen, tensors)


def flat(output):
    return [t for t in (output if isinstance(output, tuple) else (output,)) if t is not None]


def problem(batch=BATCH, heads=HEADS, rows=ROWS, keys=KEYS):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(batch, heads, n, DIM, generator=generator) for n in (rows, keys, keys))


def expected(query, key):
    return softmax(query.double().numpy() @ key.double().mT.numpy() / 2)


def scores(query, key):
    return query @ key.mT / 2


# Every way in which modules write the same attention.
WAYS = {
    "matmul": lambda q, k, v: scores(q, k).softmax(-1) @ v,
    "torch.softmax": lambda q, k, v: torch.matmul(torch.softmax(scores(q, k), dim=-1), v),
    "module": lambda q, k, v: nn.Softmax(dim=-1)(scores(q, k)).matmul(v),
    "last axis by its number": lambda q, k, v: F.softmax(scores(q, k), dim=3) @ v,
    "dropout and dtype": lambda q, k, v: F.dropout(F.softmax(scores(q, k), -1), 0.5, False).to(v.dtype) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhqk,bhkd->bqhd", scores(q, k).softmax(-1), v),
    "einsum, values first": lambda q, k, v: torch.einsum("bhkd,bhqk->bhqd", v, scores(q, k).softmax(-1)),
    "swapped": lambda q, k, v: v.mT @ scores(q, k).softmax(-1).transpose(-1, -2),
    "sdpa": F.scaled_dot_product_attention,
    "heads beside each other": lambda q, k, v: torch.bmm(scores(q, k).flatten(0, 1).softmax(-1), v.flatten(0, 1)),
    "viewed": lambda q, k, v: torch.bmm(scores(q, k).softmax(-1).view(-1, ROWS, KEYS), v.reshape(-1, KEYS, DIM)),
    "with weights": lambda q, k, v: ((w := scores(q, k).flatten(0, 1).softmax(-1)) @ v.flatten(0, 1), w),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_attention_is_read(way):
    query, key, value = problem()
    found = inside(WAYS[way], query, key, value)
    np.testing.assert_allclose(found.weights.numpy(), expected(query, key), atol=1e-6)


def gates(q, k, v):
    """Softmaxes that are not over keys."""
    experts = q.flatten(1, 2)[..., :3].softmax(-1)
    return experts.argmax(-1), q.softmax(-1) * q, q.softmax(-2) @ v[..., :DIM, :]


# What is no attention between tokens, or does not say which of two things is.
OTHER = {
    "nothing": lambda q, k, v: q,
    "gates": gates,
    "gates with products along rows": lambda q, k, v: q.softmax(-1).mT @ q,
    "two softmaxes": lambda q, k, v: scores(q, k).softmax(-1) @ v + (2 * scores(q, k)).softmax(-1) @ v,
    "softmax and sdpa": lambda q, k, v: scores(q, k).softmax(-1) @ v + F.scaled_dot_product_attention(q, k, v),
    "changed afterwards": lambda q, k, v: (scores(q, k).softmax(-1) * 0.5) @ v,
    "heads mixed afterwards": lambda q, k, v: torch.einsum("bhqk,hg->bgqk", scores(q, k).softmax(-1), torch.eye(3)) @ v,
    "in chunks": lambda q, k, v: scores(q[:, :, None], k[:, :, None]).softmax(-1) @ v[:, :, None],
    "other heads": lambda q, k, v: scores(q[:, :2], k[:, :2]).softmax(-1) @ v[:, :2],
    "heads last": lambda q, k, v: torch.einsum("bqhk,bhkd->bqhd", torch.einsum("bhqd,bhkd->bqhk", q, k).softmax(-1), v),
    "over rows": lambda q, k, v: scores(k, q).softmax(-1).mT @ v,
    "not over the last axis": lambda q, k, v: scores(k, q).softmax(-2).mT @ v,
}


@pytest.mark.parametrize("way", OTHER)
def test_what_is_not_one_attention_is_not_taken(way):
    assert inside(OTHER[way], *problem()) is None


def test_a_router_beside_attention_does_not_count():
    def compute(q, k, v):
        return gates(q, k, v)[1] + scores(q, k).softmax(-1) @ v

    query, key, value = problem()
    np.testing.assert_allclose(inside(compute, query, key, value).weights.numpy(), expected(query, key), atol=1e-6)


def test_heads_of_three_axes_are_the_modules_own_number():
    query, key, value = (t.flatten(0, 1) for t in problem())
    plain = WAYS["matmul"]
    assert inside(plain, query, key, value).weights.shape == (BATCH, HEADS, ROWS, KEYS)
    assert inside(plain, query, key, value, heads=None).weights.shape == (BATCH * HEADS, 1, ROWS, KEYS)
    assert inside(plain, query, key, value, heads=4) is None
    assert inside(plain, *problem(), heads=None) is None, "four axes could be windows"


@given(causal=st.booleans(), boolean=st.booleans(), scale=st.sampled_from([None, 0.3]), shared=st.booleans())
def test_torchs_function_is_read_with_all_its_arguments(causal, boolean, scale, shared):
    query, key, value = problem(heads=4, rows=KEYS)
    if shared:
        key, value = key[:, :2], value[:, :2]
    opened = torch.rand(BATCH, 1, KEYS, KEYS, generator=torch.Generator().manual_seed(1)) > 0.4
    opened[..., 0] = True
    mask = None if causal else opened if boolean else torch.zeros(opened.shape).masked_fill(~opened, -1e9)

    def compute(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=shared)

    found = inside(compute, query, key, value, heads=4)
    keys = np.repeat(key.double().numpy(), 2 if shared else 1, axis=1)
    plain = query.double().numpy() @ np.swapaxes(keys, -1, -2) * (scale or DIM**-0.5)
    seen = np.tril(np.ones((KEYS, KEYS), bool)) if causal else opened.numpy()
    np.testing.assert_allclose(found.weights.numpy(), softmax(np.where(seen, plain, -np.inf)), atol=1e-6)
    assert len(found.masks) == 1 and found.masks[0].ndim == 4


@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize("averaged", [True, False])
def test_torchs_whole_layer_gives_each_head(needed, averaged):
    torch.manual_seed(0)
    layer, states = nn.MultiheadAttention(12, HEADS, batch_first=True).eval(), torch.randn(BATCH, ROWS, 12)
    hidden = torch.zeros(BATCH, ROWS, dtype=torch.bool)
    hidden[1, 3:] = True

    def compute(x):
        return layer(x, x, x, key_padding_mask=hidden, need_weights=needed, average_attn_weights=averaged)

    with torch.no_grad():
        found = inside(compute, states)
        each = layer(states, states, states, key_padding_mask=hidden, average_attn_weights=False)[1]
    torch.testing.assert_close(found.weights, each)
    assert (found.weights[1, ..., 3:] == 0).all() and found.masks[0].shape == (BATCH, 1, 1, ROWS)


def test_what_fills_a_block_is_cut_off():
    """Five tokens in a block of seven; the rest sees nothing but itself."""
    query, key, value = problem(rows=KEYS)
    mask = torch.full((KEYS, KEYS), torch.finfo(torch.float32).min)
    mask[:ROWS, :ROWS] = 0
    found = inside(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), query, key, value)
    np.testing.assert_allclose(found.weights.numpy(), expected(query[:, :, :ROWS], key[:, :, :ROWS]), atol=1e-6)
    mask[:, 0] = 0
    mask[2] = torch.finfo(torch.float32).min
    assert inside(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), query, key, value) is None


def test_windows_that_are_filled_up_are_not_taken():
    """An image of 2 x 2 tokens in a window of 3 x 3."""
    image = torch.randn(1, 3, 3, DIM)

    def compute(x):
        tokens = x.reshape(1, 9, DIM)
        return (tokens @ tokens.mT).softmax(-1) @ tokens

    assert inside(compute, image, heads=1) is not None
    image[:, 2] = image[:, :, 2] = 0
    assert inside(compute, image, heads=1) is None


def test_nothing_is_left_behind_after_an_error():
    def fails(q):
        q.softmax(-1)
        raise KeyboardInterrupt

    module = Module(fails)
    with pytest.raises(KeyboardInterrupt), watching(module, lambda: True, pytest.fail):
        module(torch.randn(1, 3, 3))
    assert not _get_current_function_mode_stack() and "forward" not in vars(module)
    replaced = module.forward = lambda q: q
    with watching(module, lambda: True, pytest.fail), pytest.raises(TypeError):
        module()
    assert module.forward is replaced


def test_only_modules_that_keep_their_weights_are_watched(monkeypatch):
    """Those that call the interface run as they are."""
    entered = []
    plain = SoftmaxWatch.__enter__
    monkeypatch.setattr(SoftmaxWatch, "__enter__", lambda self: entered.append(self) or plain(self))
    headscope.analyze(build_family("bert"), ids=[5, 6, 7])
    assert not entered
    result = headscope.analyze(build_family("bloom"), ids=[5, 6, 7])
    assert len(entered) == len(result.model.stacks[0].layers)


# ------------------------------------------------------------------ real models
def captured(model, inputs):
    """Weights of each site, and what each of its children gave."""
    model.eval()
    calls, outputs, handles = {}, {}, []
    sites = find_sites(model)
    for site in sites:
        for name, child in site.module.named_children():
            note = lambda _, args, output, key=(site.layer, name): outputs.__setitem__(key, output)  # noqa: E731
            handles.append(child.register_forward_hook(note))
    run(model, sites, inputs, lambda call: calls.__setitem__(call.site.layer, call.weights.clone()))
    for handle in handles:
        handle.remove()
    assert not _get_current_function_mode_stack()
    assert all("forward" not in vars(site.module) for site in sites)
    return calls, {key: value.double().numpy() for key, value in outputs.items() if isinstance(value, torch.Tensor)}


def test_squeezebert_returns_scores_and_is_read_after_the_softmax():
    torch.manual_seed(0)
    config = SqueezeBertConfig(
        vocab_size=60, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16,
        embedding_size=24, q_groups=1, k_groups=1, v_groups=1,
    )  # fmt: skip
    model, mask = SqueezeBertModel(config), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    calls, outputs = captured(model, {"input_ids": torch.randint(0, 60, (2, 6)), "attention_mask": mask})
    assert sorted(calls) == [0, 1]
    for layer, weights in calls.items():
        query, key = (outputs[layer, name].reshape(2, 3, 8, 6) for name in ("query", "key"))
        plain = np.swapaxes(query, 2, 3) @ key / np.sqrt(8)
        plain = np.where(mask.numpy()[:, None, None] == 1, plain, -np.inf)
        np.testing.assert_allclose(weights.numpy(), softmax(plain), atol=1e-6)


def test_sam_gives_its_global_layers_and_says_which_attend_in_windows():
    torch.manual_seed(0)
    config = SamVisionConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=8, window_size=2,
        global_attn_indexes=[1], mlp_dim=16, output_channels=8, use_rel_pos=False,
    )  # fmt: skip
    model, inputs = SamVisionModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}
    calls, outputs = captured(model, inputs)
    assert {layer: w.shape[0] for layer, w in calls.items()} == {0: 8, 1: 2, 2: 8}
    parts = outputs[1, "qkv"].reshape(2, 16, 3, 2, 8).transpose(2, 0, 3, 1, 4)
    expected = softmax(parts[0] @ np.swapaxes(parts[1], -1, -2) / np.sqrt(8))
    np.testing.assert_allclose(calls[1].numpy(), expected, atol=1e-6)
    result = headscope.analyze(model, inputs=inputs)
    assert result.model.stacks[0].layers == (1,)
    assert len(result.warnings) == 1 and "layers 0, 2 are left out" in result.warnings[0]
    for head in result.heads:
        assert head.metrics["sink"] == pytest.approx(expected[:, head.head, :, 0].mean(), abs=1e-5)


def test_wavlm_returns_means_over_heads_and_is_read_head_by_head():
    torch.manual_seed(0)
    config = WavLMConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, conv_dim=[16],
        conv_kernel=[8], conv_stride=[8], num_feat_extract_layers=1, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, num_buckets=8, max_bucket_distance=16,
    )  # fmt: skip
    model = WavLMModel(config)
    given: dict[int, dict] = {}
    for layer, block in enumerate(model.encoder.layers):
        block.attention.register_forward_hook(
            lambda _, args, kwargs, output, layer=layer: given.__setitem__(layer, (*args, *kwargs.values())[0]),
            with_kwargs=True,
        )
    calls, outputs = captured(model, {"input_values": torch.randn(2, 80)})
    bias = None
    for layer, block in enumerate(model.encoder.layers):
        module, states = block.attention, given[layer].double().numpy()
        n = states.shape[1]
        if bias is None:
            with torch.no_grad():
                bias = module.compute_bias(n, n).double().numpy()
        gate = 1 / (1 + np.exp(-outputs[layer, "gru_rel_pos_linear"].reshape(2, 2, n, 2, 4).sum(-1)))
        constant = module.gru_rel_pos_const.detach().double().numpy()[..., 0]
        strength = gate[..., 0] * (gate[..., 1] * constant - 1) + 2
        query, key = (
            (states @ p.weight.detach().double().numpy().T + p.bias.detach().double().numpy())
            .reshape(2, n, 2, 8)
            .transpose(0, 2, 1, 3)
            for p in (module.q_proj, module.k_proj)
        )
        plain = query @ np.swapaxes(key, -1, -2) / np.sqrt(8) + strength[..., None] * bias
        np.testing.assert_allclose(calls[layer].numpy(), softmax(plain), atol=1e-5)
    assert sorted(calls) == [0, 1]
