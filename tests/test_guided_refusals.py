"""What scoring, guided pruning and repair refuse, and that no text serves twice, in tiny models."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, BertForSequenceClassification, LlamaForCausalLM, ViTModel

import headscope
from headscope.errors import InputError, ModelError
from headscope.importance.examples import Examples
from headscope.importance.texts import Piece, Share, deal
from headscope.models.whole import whole_model
from headscope.pruning.guide import deal_roles, make_guide
from tests.test_prune_guided import texts


@pytest.fixture(scope="module")
def llama(family_dir):
    """A Llama with random weights, and its tokenizer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(family_dir("llama"))).eval()
    return model, AutoTokenizer.from_pretrained(family_dir("llama"))


@pytest.fixture(scope="module")
def classifier(family_dir):
    """A BERT that knows three labels, and its tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(family_dir("bert"), num_labels=3)
    return BertForSequenceClassification(config).eval(), AutoTokenizer.from_pretrained(family_dir("bert"))


# ------------------------------------------------------------------ what is refused
@pytest.mark.parametrize("way", [{"method": "gradient", "drop": 0.3, "data": texts()}, {"repair": texts()}])
def test_texts_need_a_tokenizer(llama, tmp_path, way) -> None:
    llama[0].save_pretrained(tmp_path)
    heads = None if "method" in way else {0: [0, 1, 2, 3]}
    with pytest.raises(ModelError, match="no tokenizer"):
        headscope.prune(tmp_path, heads, latency=False, **way)
    with pytest.raises(ModelError, match="no tokenizer"):
        headscope.head_importance(tmp_path, texts())


def test_models_of_images_are_not_scored_on_texts(family_dir) -> None:
    model = ViTModel.from_pretrained(family_dir("vit")).eval()
    with pytest.raises(ModelError, match="takes images, not text") as caught:
        headscope.head_importance(model, texts())
    assert "magnitude" in caught.value.hint


@pytest.mark.parametrize("length", [1, 2, 8])
def test_pieces_may_be_too_short(llama, length) -> None:
    with pytest.raises(InputError, match=f"pieces of {length} tokens") as caught:
        headscope.head_importance(llama[0], texts(), tokenizer=llama[1], max_length=length)
    assert caught.value.hint == "give --max-length 9 or more"
    assert headscope.head_importance(llama[0], texts(), tokenizer=llama[1], max_length=9).texts > 0


def test_one_token_is_one_piece(llama) -> None:
    assert headscope.head_importance(llama[0], texts(), tokenizer=llama[1], tokens=1).texts == 1


@pytest.mark.parametrize("label", [None, 7, "no such label"])
def test_a_wrong_label_is_named_by_its_place_among_the_texts(classifier, label) -> None:
    model, tokenizer = classifier
    data = [{"text": text, "label": i % 3} for i, text in enumerate(texts())]
    data[40]["label"] = label
    for call in (
        lambda: headscope.head_importance(model, data, tokenizer=tokenizer),
        lambda: headscope.prune(model, method="gradient", data=data, drop=0.3, tokenizer=tokenizer, latency=False),
    ):
        with pytest.raises(InputError, match="text 40 has"):
            call()


def test_what_each_layer_keeps_may_leave_nothing_to_go(llama) -> None:
    with pytest.raises(InputError, match="no kv-group can go where each layer keeps 99"):
        headscope.prune(
            llama[0], method="magnitude", data=texts(), until_drop="1%", min_per_layer=99, tokenizer=llama[1]
        )


def test_a_share_that_cannot_go_is_refused_before_anything_is_measured(llama) -> None:
    lines: list[str] = []
    with pytest.raises(InputError, match="12 heads cannot go where each layer keeps 5") as caught:
        headscope.prune_curve(
            llama[0], texts(), methods=["magnitude"], min_per_layer=5, tokenizer=llama[1], report=lines.append
        )
    assert not lines and caught.value.hint == "at most 9 of 24 can"


def test_a_curve_of_a_model_that_cannot_be_refitted_has_no_repair(family_dir) -> None:
    """Layers that share their weights."""
    curve = headscope.prune_curve(
        family_dir("albert"), texts(120), methods=["magnitude"], shares=[0.25, 0.5], repair=True
    )
    assert [(p.repaired, p.count) for p in curve.points] == [(False, 1), (False, 2)]
    assert any("without a repair: several layers run" in line for line in curve.warnings)


def test_a_model_that_cannot_be_refitted_is_refused_before_it_is_scored(family_dir) -> None:
    lines: list[str] = []
    with pytest.raises(ModelError, match="several layers run"):
        headscope.prune(
            family_dir("albert"),
            method="surgeon",
            data=texts(120),
            drop=0.3,
            repair=True,
            latency=False,
            report=lines.append,
        )
    assert not lines


# ------------------------------------------------------------------ who gets which texts
def pieces(words: list[str]) -> list[Piece]:
    return [Piece(word, None, i, 10) for i, word in enumerate(words)]


def test_what_is_said_twice_serves_one_role() -> None:
    dealt = deal(pieces([f"text {i % 20}" for i in range(200)]), {"a": Share(1), "b": Share(2), "c": Share(1)})
    said = [{p.text for p in found} for found in dealt.values()]
    assert all(said) and len(set.union(*said)) == sum(map(len, said))


def test_one_role_takes_what_is_said_twice() -> None:
    assert len(deal(pieces(["the same"] * 5), {"a": Share(1)})["a"]) == 5


def test_too_few_different_texts() -> None:
    with pytest.raises(InputError, match="2 different pieces of text cannot serve for a, b, c"):
        deal(pieces(["one", "another"] * 40), {"a": Share(1), "b": Share(1), "c": Share(1)})
    with pytest.raises(InputError, match="1 different piece of text cannot"):
        deal(pieces(["one"]), {"a": Share(1), "b": Share(1)})


def roles(llama, data, repair):
    loaded = whole_model(llama[0], llama[1], None, {})
    options = {"scores": None, "method": "gradient", "drop": 0.3, "until_drop": None, "unit": None, "min_per_layer": 1}
    options |= {"steps": 1, "repair": True, "repair_mlp": False, "repair_tokens": 32_768, "max_length": None}
    given = {"data": Examples(tuple(data), (None,) * len(data))}
    given["repair_data"] = Examples(tuple(repair), (None,) * len(repair))
    return deal_roles(loaded, make_guide(**options, **given, batch_size=None, seed=0))


def said(data) -> set[str]:
    """What the batches hold, as token numbers."""
    return {
        str(row[:length].tolist())
        for batch in data.batches
        for row, length in zip(batch.inputs["input_ids"], batch.axes["text"].lengths.tolist(), strict=True)
    }


@pytest.mark.parametrize("shared", [0, 30, 60])
def test_two_files_may_share_texts(llama, shared) -> None:
    """The same texts by another name are dealt out; of two files that share some, a repair takes the others."""
    data = texts(60)
    repair = data[:shared] + texts(60, seed=5)[shared:]
    found = [said(role) for role in vars(roles(llama, data, repair)).values()]
    assert all(found) and len(set.union(*found)) == sum(map(len, found))


def test_a_repair_needs_texts_that_judge_nothing(llama) -> None:
    data = texts(60)
    with pytest.raises(InputError, match="0 different pieces of text cannot serve for repair"):
        roles(llama, data, data[:30])


def test_repair_texts_need_no_labels(classifier) -> None:
    model, tokenizer = classifier
    data = [{"text": text, "label": i % 3} for i, text in enumerate(texts())]
    result = headscope.prune(
        model, {0: [0]}, data=data, repair=texts(80, seed=3), tokenizer=tokenizer, latency=False, save_as="masked"
    )
    assert result.passed and result.repair.texts == 80


# ------------------------------------------------------------------ what is said
def test_a_repair_warns_of_nothing_by_itself(classifier) -> None:
    """With a text a batch, most batches hold nothing back, and the others nothing else."""
    data = [{"text": text, "label": i % 3} for i, text in enumerate(texts(40))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = headscope.prune(
            classifier[0], {0: [0]}, repair=data, tokenizer=classifier[1], latency=False, batch_size=1
        )
    assert json.dumps(result.to_dict(), allow_nan=False)
