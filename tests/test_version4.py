"""The golden values of transformers 4's head pruning hold under this transformers, by means that prune nothing."""

from __future__ import annotations

import json
import math
import zlib

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from fixtures import version4
from fixtures.version4 import MODELS, closed_form, golden, union

STAGES = [(name, count) for name in MODELS for count in range(len(MODELS[name].plans) + 1)]
# Values are stored to eight decimals and were computed in float64; eager attention takes some softmaxes in float32.
TOLERANCE = {"sdpa": 5e-8, "eager": 2e-6}


def recorded(name, count):
    """What was recorded after the first `count` plans; shapes complete."""
    whole = golden()["models"][name]
    if count == 0:
        return whole
    step = whole["steps"][count - 1]
    return step | {"shapes": whole["shapes"] | step["shapes"]}


def load(name, directory, implementation):
    """The whole model under this transformers, in float64."""
    version4.save_version4(name, directory)
    model_class = getattr(transformers, MODELS[name].model_class)
    return model_class.from_pretrained(directory, attn_implementation=implementation, dtype=torch.float64).eval()


def silence(name, model, heads):
    """Zero what the output projections take from the heads: what is left is what pruning must give."""
    size = MODELS[name].head_dim
    for layer, gone in heads.items():
        weight = output_projection(model, layer)
        for head in gone:
            weight[:, head * size : (head + 1) * size] = 0


def output_projection(model, layer):
    """The weight, (output, input), that takes the heads' outputs, of a model of this transformers."""
    endings = ("attention.output.dense.weight", "attention.out_lin.weight", "attention.o_proj.weight")
    for key, value in model.named_parameters():
        if f".{layer}." in f".{key}" and key.endswith((*endings, "attn.c_proj.weight")):
            return value.data.T if key.endswith("c_proj.weight") else value.data
    raise AssertionError(f"no output projection in layer {layer}")


def places(heads):
    return {(layer, head) for layer in heads for head in heads[layer]}


@pytest.mark.parametrize("implementation", TOLERANCE)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_version_4(name, implementation, tmp_path):
    model = load(name, tmp_path, implementation)
    assert sum(parameter.numel() for parameter in model.parameters()) == recorded(name, 0)["parameters"]
    for count in range(len(MODELS[name].plans) + 1):
        silence(name, model, union(MODELS[name].plans[:count]))
        found = version4.summary(name, version4.last_hidden_state(name, model))
        assert np.shape(found["slice"]) == (2, *version4.SLICE)
        expected = recorded(name, count)["output"]
        assert np.abs(np.subtract(found["slice"], expected["slice"])).max() < TOLERANCE[implementation]
        assert found["sum"] == pytest.approx(expected["sum"], abs=100 * TOLERANCE[implementation])
        assert found["squares"] == pytest.approx(expected["squares"], abs=1000 * TOLERANCE[implementation])


@pytest.mark.parametrize("name", MODELS)
def test_every_pruned_head_moves_the_output(name, tmp_path):
    for count in range(len(MODELS[name].plans)):
        earlier, later = union(MODELS[name].plans[:count]), union(MODELS[name].plans[: count + 1])
        before, after = (np.array(recorded(name, step)["output"]["slice"]) for step in (count, count + 1))
        assert np.abs(after - before).max() > 0.05
        for layer, head in sorted(places(later) - places(earlier)):
            model = load(name, tmp_path, "sdpa")
            silence(name, model, {**later, layer: [other for other in later[layer] if other != head]})
            found = version4.summary(name, version4.last_hidden_state(name, model))
            assert np.abs(found["slice"] - after).max() > 0.01, (layer, head)


@pytest.mark.parametrize(("name", "count"), STAGES)
def test_legacy_directory_is_what_was_recorded(name, count, tmp_path):
    heads, expected = union(MODELS[name].plans[:count]), recorded(name, count)
    version4.save_version4(name, tmp_path, heads)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {key: list(value.shape) for key, value in tensors.items()} == expected["shapes"]
    assert version4.digest(tensors) == expected["digest"]
    assert sum(math.prod(shape) for shape in expected["shapes"].values()) == expected["parameters"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["transformers_version"] == golden()["transformers"] == "4.57.3"
    assert config.get("pruned_heads") == (expected["pruned_heads"] if count else None)
    assert list(config.get("pruned_heads", {})) == [str(layer) for layer in heads]


@pytest.mark.parametrize("name", MODELS)
def test_each_head_takes_four_slices_along(name):
    """Rows of query, key and value with their biases, and columns of the output projection."""
    spec, whole = MODELS[name], golden()["models"][name]
    width = spec.num_heads * spec.head_dim
    for count in range(1, len(spec.plans) + 1):
        heads = sum(map(len, union(spec.plans[:count]).values()))
        saved = heads * spec.head_dim * (4 * width + 3)
        assert whole["parameters"] - recorded(name, count)["parameters"] == saved


def test_indices_are_those_of_the_heads_left():
    """Numbers are the original ones: list the original heads left, and see which rows belong to none that goes."""
    cases = golden()["indices"]
    assert len(cases) >= 12 and sum("raises" in case for case in cases) == 1
    for case in cases:
        already, asked = set(case["already_pruned_heads"]), set(case["heads"])
        left = [head for head in range(case["n_heads"] + max(already, default=0) + 1) if head not in already]
        left = left[: case["n_heads"]]
        if "raises" in case:
            assert not asked - already <= set(left)
            continue
        rows = [head for head in left for _ in range(case["head_size"])]
        assert case["found"] == sorted(asked - already)
        assert case["index"] == [row for row, head in enumerate(rows) if head not in asked]


@given(st.text(max_size=30), st.integers(1, 3000))
def test_hash_is_that_of_plain_integers(name, count):
    found = version4.hashed(name, count)
    x = (count + (zlib.crc32(name.encode()) << 32)) % 2**64
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = ((x ^ (x >> 33)) * factor) % 2**64
    assert len(found) == count and int(found[-1]) == (x ^ (x >> 33)) >> 48


def test_weights_are_exact_and_heads_choose():
    weight = closed_form("a.weight", (200, 100))
    assert weight.dtype == torch.float32 and torch.equal((weight * 2**16).round(), weight * 2**16)
    assert weight.abs().max() <= 0.5 and abs(weight.mean()) < 0.01 and weight.std() == pytest.approx(12**-0.5, abs=0.01)
    assert not torch.equal(weight, closed_form("b.weight", (200, 100)))
    norm, bias = closed_form("norm.weight", (500,)), closed_form("norm.bias", (500,))
    assert norm.min() >= 0.75 and norm.max() <= 1.25 and bias.abs().max() <= 0.25
