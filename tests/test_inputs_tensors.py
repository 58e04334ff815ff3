"""A caller's own tensors: padded on either side, never changed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BartConfig
from transformers.models.bart.modeling_bart import BartDecoder
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

import headscope
from fixtures.building import build_family
from headscope.errors import InputError
from headscope.models.inputs import prepare
from headscope.models.loading import LoadedModel, wrap_model
from headscope.models.ready_tensors import example_count, ready_axis
from tests.tiny_checkpoints import byte_bpe, tiny_model, wordpiece

LENGTHS = (6, 2, 4)
MODELS = {name: wrap_model(tiny_model(name), wordpiece() if name == "bert" else byte_bpe())
          for name in ("bert", "roberta", "gpt2", "llama", "t5", "bart")}  # fmt: skip


def padded(lengths: tuple[int, ...], side: str, pad: int, width: int | None = None) -> dict[str, Tensor]:
    """Random tokens; the caller's segment and position numbers are there as well."""
    torch.manual_seed(1)
    size = width or max(lengths)
    ids, mask = torch.full((len(lengths), size), pad), torch.zeros(len(lengths), size, dtype=torch.int64)
    for i, n in enumerate(lengths):
        where = slice(size - n, size) if side == "left" else slice(0, n)
        ids[i, where], mask[i, where] = torch.randint(20, 60, (n,)), 1
    return {"input_ids": ids, "attention_mask": mask}


def first_attentions(loaded: LoadedModel, inputs: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        result = loaded.model(**inputs, output_attentions=True)
    return list(result.get("attentions") or result["encoder_attentions"])


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_either_side_gives_what_single_rows_give(family: str, side: str) -> None:
    loaded = MODELS[family]
    pad = loaded.model.config.pad_token_id or 0
    tensors = padded(LENGTHS, side, pad, width=8)
    if family in ("t5", "bart"):
        tensors["decoder_input_ids"] = torch.tensor([[2, 30], [2, 31], [2, 32]])
    before = {name: value.clone() for name, value in tensors.items()}
    (batch,) = prepare(loaded, tensors=tensors).batches
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    assert all(batch.inputs[name].data_ptr() != tensors[name].data_ptr() for name in before)
    assert batch.axes["text"].lengths.tolist() == list(LENGTHS)
    got = first_attentions(loaded, batch.inputs)
    for row, n in enumerate(LENGTHS):
        own = before["input_ids"][row][before["attention_mask"][row].bool()][None]
        assert batch.inputs["input_ids"][row, :n].tolist() == own[0].tolist()
        alone = {"input_ids": own} | {k: v[row : row + 1] for k, v in before.items() if k.startswith("decoder_")}
        for a, b in zip(got, first_attentions(loaded, alone), strict=True):
            np.testing.assert_allclose(a[row, :, :n, :n], b[0], atol=1e-5)


def test_everything_along_the_sequence_moves_together() -> None:
    tensors = padded((2, 4), "left", 0)
    tensors["token_type_ids"] = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0]])
    tensors["position_ids"] = torch.tensor([[0, 0, 5, 6], [0, 1, 2, 3]])
    inputs = prepare(MODELS["bert"], tensors=tensors).batches[0].inputs
    assert inputs["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert inputs["token_type_ids"][0, :2].tolist() == [1, 0]
    assert inputs["position_ids"][0, :2].tolist() == [5, 6]
    assert inputs["position_ids"][1].tolist() == [0, 1, 2, 3]


def test_decoder_tensors_are_an_axis_of_their_own() -> None:
    tensors = padded((3, 3), "right", 1)
    tensors |= {f"decoder_{name}": value for name, value in padded((1, 4), "left", 1).items()}
    (batch,) = prepare(MODELS["bart"], tensors=tensors).batches
    assert batch.axes["text"].lengths.tolist() == [3, 3]
    assert batch.axes["decoder"].lengths.tolist() == [1, 4]
    assert batch.inputs["decoder_attention_mask"].tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]


def test_embeddings_have_numbered_tokens() -> None:
    tensors = {"inputs_embeds": torch.randn(2, 3, 32), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    (batch,) = prepare(MODELS["bert"], tensors=tensors).batches
    axis = batch.axes["text"]
    assert axis.ids is None
    assert axis.labels == (("0", "1"), ("0", "1", "2"))
    assert torch.equal(batch.inputs["inputs_embeds"][0, :2], tensors["inputs_embeds"][0, 1:])


def test_fractions_take_the_models_dtype() -> None:
    loaded = wrap_model(tiny_model("vit").to(torch.bfloat16))
    (batch,) = prepare(loaded, tensors={"pixel_values": torch.zeros(2, 3, 16, 16)}).batches
    assert batch.inputs["pixel_values"].dtype == torch.bfloat16
    assert batch.order == (0, 1)
    assert batch.axes == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "holes"),
        ({"attention_mask": torch.tensor([[0, 0, 0]])}, "no token"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "has shape"),
        ({"attention_mask": torch.ones(1, 4)}, "has shape"),
        ({"input_ids": torch.tensor([[1, 2, 400]])}, "400"),
        ({"input_ids": torch.tensor([[1, -2, 4]])}, "-2"),
        ({"input_ids": torch.tensor([1, 2, 4])}, "has shape"),
        ({"pixel_values": torch.zeros(1, 3, 16, 16)}, "takes no pixel_values"),
        ({"input_ids": [[1, 2, 3]]}, "not a tensor"),
    ],
)
def test_tensors_that_cannot_be_used(change: dict[str, Tensor], said: str) -> None:
    with pytest.raises(InputError, match=said):
        prepare(MODELS["bert"], tensors={"input_ids": torch.tensor([[5, 6, 7]])} | change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decoder_input_ids": torch.tensor([[5, 400]])}, "decoder_input_ids holds 5 to 400, BartModel has 0 to "),
        ({"decoder_input_ids": torch.tensor([5, 6])}, "decoder_input_ids has shape (2,), needs (batch, tokens)"),
        (
            {"decoder_inputs_embeds": torch.zeros(1, 32)},
            "decoder_inputs_embeds has shape (1, 32), needs (batch, tokens, features)",
        ),
        ({"decoder_inputs_embeds": torch.zeros(1, 0, 32)}, "decoder_inputs_embeds has shape (1, 0, 32): no token"),
    ],
)
def test_the_argument_that_is_wrong_is_named(change: dict[str, Tensor], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        prepare(MODELS["bart"], tensors={"input_ids": torch.tensor([[5, 6, 7]])} | change)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 3), st.sampled_from(["left", "right"]))
def test_shifting_loses_no_token(lengths: list[int], extra: int, side: str) -> None:
    tensors = padded(tuple(lengths), side, 0, width=max(lengths) + extra)
    (batch,) = prepare(MODELS["bert"], tensors=tensors).batches
    for row, n in enumerate(lengths):
        assert batch.inputs["attention_mask"][row].tolist() == [1] * n + [0] * (max(lengths) + extra - n)
        kept = tensors["input_ids"][row][tensors["attention_mask"][row].bool()]
        assert torch.equal(batch.inputs["input_ids"][row, :n], kept)
        assert len(batch.axes["text"].labels[row]) == n


@pytest.mark.parametrize("shape", [(0, 3), (1, 0)])
def test_tensors_without_a_token_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="no token"):
        prepare(MODELS["bert"], tensors={"input_ids": torch.zeros(shape, dtype=torch.int64)})


def test_a_picture_with_as_many_channels_as_the_text_has_tokens_stays_as_it_is() -> None:
    picture = torch.randn(2, 3, 4, 4)
    tensors = padded((2, 3), "left", 0, width=3) | {"pixel_values": picture}
    shifted, axis = ready_axis(MODELS["bert"], tensors)
    assert axis is not None and axis.lengths.tolist() == [2, 3]
    assert torch.equal(shifted["pixel_values"], picture)
    assert not torch.equal(shifted["input_ids"], tensors["input_ids"])


# ------------------------------------------------------------------ inputs that are not one row an example
def test_packed_patches_are_as_many_examples_as_grids():
    torch.manual_seed(0)
    config = Qwen2VLVisionConfig(depth=2, embed_dim=16, hidden_size=16, num_heads=2, mlp_ratio=2, patch_size=4)
    model = Qwen2VisionTransformerPretrainedModel._from_config(config).eval()
    patches = torch.randn(16, 3 * config.temporal_patch_size * 4 * 4)
    inputs = {"hidden_states": patches, "grid_thw": torch.tensor([[1, 4, 4]])}
    result = headscope.analyze(model, inputs=inputs)
    assert result.inputs.texts == 1 and len(result.heads) == 4 and not result.warnings
    assert result.heads[0].chance["sink"] == pytest.approx(1 / 16)


def test_packed_sounds_are_as_many_examples_as_lengths():
    packed = {"input_features": torch.zeros(128, 64), "feature_lens": torch.tensor([60, 68])}
    assert example_count(packed) == 2 and example_count({"input_features": torch.zeros(3, 64, 5)}) == 3


def test_switches_and_lists_of_tensors_are_handed_on():
    model = build_family("llama")
    ids = torch.tensor([[20, 21, 22, 23]])
    plain = headscope.analyze(model, inputs={"input_ids": ids})
    assert headscope.analyze(model, inputs={"input_ids": ids, "use_cache": False}).heads == plain.heads
    with pytest.raises(InputError, match="use_cache is a str, not a tensor"):
        headscope.analyze(model, inputs={"input_ids": ids, "use_cache": "yes"})
    with pytest.raises(InputError, match="use_cache is a bool, not a tensor"):
        headscope.analyze(model, inputs={"use_cache": True})


def test_a_decoder_by_itself_is_given_states_as_keys():
    torch.manual_seed(0)
    config = BartConfig(vocab_size=60, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=16)
    model = BartDecoder._from_config(config).eval()
    inputs = {"input_ids": torch.tensor([[0, 20, 21, 22]]), "encoder_hidden_states": torch.randn(1, 6, 16)}
    result = headscope.analyze(model, inputs=inputs)
    assert {(h.stack, h.layer) for h in result.heads} == {(s, i) for s in ("self", "cross") for i in range(2)}
    cross = [h for h in result.heads if h.stack == "cross"]
    assert all(h.chance["sink"] == pytest.approx(1 / 6) for h in cross) and not result.warnings
