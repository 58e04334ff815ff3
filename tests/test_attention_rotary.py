"""Rotary positions against complex numbers, their own invariance, and transformers' frequencies and layouts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere import modeling_cohere
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.phi import modeling_phi
from transformers.models.phi.configuration_phi import PhiConfig

from headscope.attention.frequencies import default_frequencies, rotary_frequencies, yarn_mscale
from headscope.attention.rotary import apply_rotary, rotary_cos_sin
from headscope.attention.torch_attention import apply_rotary_torch

QUICK = settings(max_examples=60, deadline=None)
# float32 powers on their side: a few roundings of 6e-8, times ln(base) in the exponent.
FREQUENCY_TOLERANCE = 3e-6

THETA = st.sampled_from([1e4, 5e5, 1e6, 37.5])
FACTOR = st.floats(1.0, 40.0)
PARTIAL = st.sampled_from([None, 1.0, 0.5, 0.25])
HEAD_DIM = st.sampled_from([16, 48, 64, 80, 128])
OPTIONAL_FACTOR = st.none() | st.floats(0.5, 2.0)


@st.composite
def rope_parameters(draw):
    """Rope parameters of any type with a head width, the model's length and a text's length."""
    head_dim = draw(HEAD_DIM)
    rope_type = draw(st.sampled_from(sorted(ROPE_INIT_FUNCTIONS)))
    original = draw(st.sampled_from([256, 2048, 8192]))
    longest = original * draw(st.sampled_from([1, 4, 16]))
    parameters = {"rope_type": rope_type, "rope_theta": draw(THETA), "partial_rotary_factor": draw(PARTIAL)}
    partial = parameters["partial_rotary_factor"] or 1.0
    pairs = int(head_dim * partial) // 2
    if rope_type != "proportional" or draw(st.booleans()):
        parameters["factor"] = draw(FACTOR)
    if rope_type in ("yarn", "longrope", "llama3"):
        parameters["original_max_position_embeddings"] = original
    if rope_type == "llama3":
        parameters |= {"low_freq_factor": draw(st.sampled_from([1.0, 2.0])), "high_freq_factor": 4.0}
    if rope_type == "yarn":
        parameters |= {
            "beta_fast": draw(st.sampled_from([None, 32, 16])),
            "beta_slow": draw(st.sampled_from([None, 1, 2])),
            "mscale": draw(st.sampled_from([None, 0.7, 1.0])),
            "mscale_all_dim": draw(st.sampled_from([None, 0.5, 1.0])),
            "attention_factor": draw(OPTIONAL_FACTOR),
            "truncate": draw(st.booleans()),
        }
    if rope_type == "longrope":
        divisors = st.lists(st.floats(1.0, 60.0), min_size=pairs, max_size=pairs)
        parameters |= {"short_factor": draw(divisors), "long_factor": draw(divisors)}
        parameters |= {"attention_factor": draw(OPTIONAL_FACTOR), "factor": draw(st.none() | FACTOR)}
    if rope_type == "yarn" and draw(st.booleans()):
        parameters["factor"] = None
    return parameters, head_dim, longest, draw(st.sampled_from([None, 10, original, original + 1, 3 * longest]))


def transformers_frequencies(parameters, head_dim, longest, seq_len):
    theirs = {name: value for name, value in parameters.items() if value is not None}
    if parameters["rope_type"] in ("yarn", "longrope"):
        theirs.setdefault("factor", None)
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=longest
    )
    config.rope_parameters = theirs
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=seq_len)


@settings(max_examples=200, deadline=None)
@given(rope_parameters())
def test_frequencies_are_those_of_transformers(case):
    parameters, head_dim, longest, seq_len = case
    ours, our_factor = rotary_frequencies(parameters, head_dim, max_position_embeddings=longest, seq_len=seq_len)
    wanted, wanted_factor = transformers_frequencies(*case)
    np.testing.assert_allclose(ours, wanted.double().numpy(), rtol=FREQUENCY_TOLERANCE)
    assert our_factor == pytest.approx(wanted_factor, rel=1e-12)


@pytest.mark.parametrize("partial", [0.25, 0.5, 1.0])
def test_default_frequencies_are_those_of_phi(partial):
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": partial}
    config = PhiConfig(hidden_size=128, num_attention_heads=2, rope_parameters=parameters)
    wanted = modeling_phi.PhiRotaryEmbedding(config).inv_freq
    ours, factor = rotary_frequencies(parameters, 64)
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=FREQUENCY_TOLERANCE)
    assert factor == 1
    np.testing.assert_array_equal(ours, rotary_frequencies({**parameters, "rope_type": None}, 64)[0])


def test_llama3_leaves_fast_pairs_and_divides_slow_ones():
    parameters = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    plain = default_frequencies(5e5, 128)
    quotient = rotary_frequencies(parameters, 128)[0] / plain
    turns = 8192 * plain / (2 * math.pi)
    np.testing.assert_allclose(quotient[turns > 4], 1)
    np.testing.assert_allclose(quotient[turns < 1], 1 / 8)
    assert np.all(np.diff(quotient) <= 1e-15)
    between = quotient[(turns > 1) & (turns < 4)]
    assert len(between) > 0
    assert np.all((between > 1 / 8) & (between < 1))


def test_mscale_of_the_paper():
    assert yarn_mscale(1.0) == yarn_mscale(0.5) == 1
    assert yarn_mscale(math.e) == pytest.approx(1.1)
    assert yarn_mscale(math.e**2, 0.5) == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "axial", "rope_theta": 1e4}, "unknown rope_type 'axial'; known: default, linear"),
        ({}, "rope_type 'default' needs 'rope_theta'"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": None}, "rope_type 'linear' needs 'factor'"),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "needs 'max_position_embeddings'"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "needs 'original_max_position_embeddings'"),
    ],
)
def test_errors_name_what_is_missing(parameters, message):
    with pytest.raises(ValueError, match=message):
        rotary_frequencies(parameters, 64)


def pairs_as_complex(x, m, interleaved):
    return x[..., 0 : 2 * m : 2] + 1j * x[..., 1 : 2 * m : 2] if interleaved else x[..., :m] + 1j * x[..., m : 2 * m]


@QUICK
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 5), st.booleans(), st.booleans())
def test_a_rotation_multiplies_each_pair_by_a_complex_number(n, m, rest, interleaved, batched):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, n, 2 * m + rest))
    positions = rng.integers(0, 100, (2, n)) if batched else np.arange(n)
    inv_freq = default_frequencies(100.0, 2 * m)
    turned = apply_rotary(x, *rotary_cos_sin(positions, inv_freq), interleaved=interleaved)
    angles = np.broadcast_to(positions, (2, n))[:, None, :, None] * inv_freq
    wanted = pairs_as_complex(x, m, interleaved) * np.exp(1j * angles)
    np.testing.assert_allclose(pairs_as_complex(turned, m, interleaved), wanted, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(turned[..., 2 * m :], x[..., 2 * m :])


@QUICK
@given(st.integers(0, 500), st.booleans())
def test_scores_depend_on_the_distance_only(shift, interleaved):
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 1, 6, 10))
    inv_freq = default_frequencies(1e4, 8)

    def scores(start):
        turn = rotary_cos_sin(np.arange(start, start + 6), inv_freq)
        turned_q, turned_k = (apply_rotary(x, *turn, interleaved=interleaved) for x in (q, k))
        return turned_q @ turned_k.swapaxes(-1, -2)

    np.testing.assert_allclose(scores(shift), scores(0), rtol=1e-10, atol=1e-11)
    assert not np.allclose(scores(0), q @ k.swapaxes(-1, -2))


def test_half_split_is_llamas_and_interleaved_is_gptjs_and_coheres():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 7, 16, generator=generator)
    positions = torch.arange(7)[None] + 3
    inv_freq = default_frequencies(10000.0, 16).astype(np.float32)
    cos, sin = rotary_cos_sin(positions.numpy(), inv_freq)
    assert cos.dtype == np.float32
    half, neighbours = (apply_rotary(x.numpy(), cos, sin, interleaved=layout) for layout in (False, True))

    config = LlamaConfig(hidden_size=16, num_attention_heads=1)
    turn = modeling_llama.LlamaRotaryEmbedding(config)(x, positions)
    np.testing.assert_allclose(half, modeling_llama.apply_rotary_pos_emb(x, x, *turn)[0].numpy(), atol=2e-6)

    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    turn = modeling_cohere.CohereRotaryEmbedding(config)(x, positions)
    np.testing.assert_allclose(neighbours, modeling_cohere.apply_rotary_pos_emb(x, x, *turn)[0].numpy(), atol=2e-6)

    sincos = modeling_gptj.create_sinusoidal_positions(20, 16)[3:10]
    theirs = modeling_gptj.apply_rotary_pos_emb(x.transpose(1, 2), sincos[None, :, :8], sincos[None, :, 8:])
    np.testing.assert_allclose(neighbours, theirs.transpose(1, 2).numpy(), atol=2e-6)


@pytest.mark.parametrize("parameters", [
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
     "short_factor": [1.0] * 8, "long_factor": [1.0, 1.1, 1.3, 2.0, 3.0, 4.0, 5.0, 6.0]},
])  # fmt: skip
@pytest.mark.parametrize("n", [20, 100])
def test_cosines_at_a_texts_length_are_llamas(parameters, n):
    config = LlamaConfig(hidden_size=16, num_attention_heads=1, max_position_embeddings=64, rope_parameters=parameters)
    positions = torch.arange(n)[None]
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    inv_freq, factor = rotary_frequencies(parameters, 16, max_position_embeddings=64, seq_len=n)
    our_cos, our_sin = rotary_cos_sin(positions.numpy(), inv_freq, factor)
    np.testing.assert_allclose(our_cos, cos[..., :8].numpy(), atol=2e-5)
    np.testing.assert_allclose(our_sin, sin[..., :8].numpy(), atol=2e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_torch_turns_like_numpy_and_back(interleaved):
    x = torch.randn(2, 3, 5, 10, dtype=torch.float64, requires_grad=True)
    cos, sin = rotary_cos_sin(np.arange(5), default_frequencies(1e4, 8))
    turned = apply_rotary_torch(x, torch.tensor(cos), torch.tensor(sin), interleaved=interleaved)
    np.testing.assert_allclose(
        turned.detach().numpy(), apply_rotary(x.detach().numpy(), cos, sin, interleaved=interleaved), rtol=1e-14
    )
    (turned**2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())  # a rotation keeps lengths
    assert apply_rotary_torch(x.bfloat16(), torch.tensor(cos), torch.tensor(sin)).dtype == torch.bfloat16


def test_too_many_pairs_do_not_fit():
    cos, sin = rotary_cos_sin(np.arange(3), default_frequencies(1e4, 8))
    with pytest.raises(ValueError, match="4 pairs do not fit in a head of 6 dimensions"):
        apply_rotary(np.zeros((1, 3, 6)), cos, sin)
    with pytest.raises(ValueError, match="cos of shape"):
        apply_rotary(np.zeros((1, 2, 8)), cos, sin)
