"""Losses, pieces of text and output projections, against plain computations on the same models."""

from __future__ import annotations

import copy
import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

from fixtures.families import FAMILIES
from headscope.capture.outputs import find_outputs, frozen, watching
from headscope.errors import InputError, ModelError
from headscope.importance.examples import Examples
from headscope.importance.loss import Losses, loss_of, measure, parts_of
from headscope.importance.texts import Piece, Share, cut, deal, ready
from headscope.models.batches import mask_of
from headscope.models.loading import LoadedModel
from headscope.models.pruned import HeadState, set_pruned_state

TEXTS = (
    "the cat sat on the mat because it was tired and the dog was not",
    "a dog and a house and another house and a cat on a mat",
    "one house and another house and a cat and a dog and a mat, then a dog",
)


MODELS = {
    "llama": ("llama", LlamaForCausalLM),
    "bert": ("bert", BertModel),
    "bert_mlm": ("bert", BertForMaskedLM),
    "bert_classifier": ("bert", BertForSequenceClassification),
    "t5": ("t5", T5ForConditionalGeneration),
}


@pytest.fixture(scope="module")
def loaded(family_dir):
    @cache
    def of(name: str) -> LoadedModel:
        family, cls = MODELS[name]
        config = AutoConfig.from_pretrained(family_dir(family))
        torch.manual_seed(0)
        return LoadedModel(cls(config).eval(), name, AutoTokenizer.from_pretrained(family_dir(family)), None, [])

    return of


def pieces(texts=TEXTS):
    return [Piece(text, None, i, 16) for i, text in enumerate(texts)]


# ------------------------------------------------------------------ losses
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_causal_loss_is_that_of_each_text_alone(loaded, batch_size) -> None:
    llama = loaded("llama")
    data = ready(llama, pieces(), batch_size=batch_size)
    assert data.loss.kind == "causal"
    losses = measure(llama.model, data.batches, data.loss)
    for i, text in enumerate(TEXTS):
        ids = llama.tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = float(llama.model(input_ids=ids, labels=ids).loss)
        assert losses.count[i] == ids.shape[1] - 1
        assert losses.total[i] / losses.count[i] == pytest.approx(expected, abs=2e-6)


def test_a_masked_loss_is_that_of_one_part_of_the_tokens(loaded) -> None:
    bert = loaded("bert_mlm")
    data = ready(bert, pieces(), batch_size=3, seed=4)
    assert data.loss.kind == "masked"
    batch = data.batches[0]
    found = measure(bert.model, data.batches, data.loss)
    masked = parts_of(batch.axes["text"], batch.order, 4) == 0
    assert 0 < int(masked.sum()) < int(mask_of(batch.axes["text"]).sum()) / 3
    given_ids = batch.inputs["input_ids"].masked_fill(masked, bert.tokenizer.mask_token_id)
    with torch.no_grad():
        logits = bert.model(**(batch.inputs | {"input_ids": given_ids})).logits.double()
    losses = -functional.log_softmax(logits, -1).gather(-1, batch.inputs["input_ids"][..., None])[..., 0]
    for row, number in enumerate(batch.order):
        assert found.total[number] == pytest.approx(float(losses[row][masked[row]].sum()), abs=1e-4)


def test_a_distance_is_zero_at_the_original_and_grows(loaded) -> None:
    bert = loaded("bert")
    data = ready(bert, pieces())
    assert data.loss.kind == "output"
    data.loss.remember(bert.model, data.batches)
    assert abs(measure(bert.model, data.batches, data.loss).mean) < 1e-12
    output = find_outputs(bert.model)[0]
    with watching([output], lambda _, given: torch.zeros_like(given)):
        assert measure(bert.model, data.batches, data.loss).mean > 1e-5


def test_random_directions_have_the_mean_square_of_the_change(loaded) -> None:
    """Twice 1 - cosine is the square of what a token's unit vector moves, which random directions see in the mean."""
    bert = loaded("bert")
    data = ready(bert, pieces())
    data.loss.remember(bert.model, data.batches)
    output = find_outputs(bert.model)[0]
    squares = []
    for seed in range(400):
        loss = loss_of(bert, seed=seed)
        with torch.no_grad():
            before = [loss.to_derive(bert.model, batch) for batch in data.batches]
            with watching([output], lambda _, given: given * 0.5):
                after = [loss.to_derive(bert.model, batch) for batch in data.batches]
        squares.append(np.mean([float(((a - b) ** 2).mean()) for a, b in zip(after, before, strict=True)]))
    cosines = []
    for text in TEXTS:
        given = bert.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            before = bert.model(**given).last_hidden_state
            with watching([output], lambda _, given: given * 0.5):
                after = bert.model(**given).last_hidden_state
        cosines.append(float(functional.cosine_similarity(before.double(), after.double(), dim=-1).mean()))
    distance = 1 - np.mean(cosines)
    assert np.mean(squares) == pytest.approx(2 * distance, rel=0.25)


def test_a_decoder_predicts_what_it_reads(loaded) -> None:
    t5 = loaded("t5")
    data = ready(t5, pieces(), batch_size=1)
    assert data.loss.kind == "decoder"
    losses = measure(t5.model, data.batches, data.loss)
    for batch in data.batches:
        ids = batch.inputs["decoder_input_ids"]
        with torch.no_grad():
            logits = t5.model(**batch.inputs).logits
        expected = functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
        assert losses.total[batch.order[0]] == pytest.approx(float(expected), abs=1e-4)


def test_classifiers_need_labels(loaded) -> None:
    with pytest.raises(InputError, match="labels"):
        ready(loaded("bert_classifier"), pieces())
    data = ready(loaded("bert_classifier"), pieces(), [0, 1, 0])
    assert (
        data.loss.kind == "classifier"
        and list(measure(loaded("bert_classifier").model, data.batches, data.loss).count) == [1] * 3
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.integers(1, 9)), min_size=2, max_size=12))
def test_what_was_added_is_a_ratio_with_its_error(rows) -> None:
    before = Losses(np.array([a * n for a, _, n in rows]), np.array([float(n) for *_, n in rows]))
    after = Losses(np.array([b * n for _, b, n in rows]), before.count)
    mean, error = after.added(before)
    assert mean == pytest.approx(after.mean - before.mean, abs=1e-9)
    # The ratio estimator's variance (Cochran 1977, section 2.11), written out.
    n = len(rows)
    residuals = [(b - a) * c - mean * c for a, b, c in rows]
    expected = math.sqrt(sum(r * r for r in residuals) / (n - 1) * n) / sum(c for *_, c in rows)
    assert error == pytest.approx(expected, abs=1e-12)


# ------------------------------------------------------------------ pieces
def test_long_texts_are_cut_between_tokens(loaded) -> None:
    llama = loaded("llama")
    text = " ".join(TEXTS) * 3
    found = cut(llama, Examples((text, TEXTS[0]), (None, None)), 20)
    assert "".join(p.text for p in found if p.source == 0) in text or len(found) > 3
    for piece in found:
        count = len(llama.tokenizer(piece.text)["input_ids"])
        assert count <= 22 and piece.tokens <= 20
        assert piece.text in (text if piece.source == 0 else TEXTS[0])
    covered = sum(len(p.text) for p in found if p.source == 0)
    assert covered > 0.9 * len(text)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(8, 40)), min_size=4, max_size=60),
    st.integers(0, 5),
    st.booleans(),
)
def test_dealing_gives_no_text_to_two_roles(sizes, seed, limited) -> None:
    given_pieces = [Piece(f"text {i}", None, source, tokens) for i, (source, tokens) in enumerate(sizes)]
    shares = {"ranking": Share(1, 60 if limited else None), "repair": Share(4), "report": Share(1)}
    try:
        dealt = deal(given_pieces, shares, seed)
    except InputError:
        assert len(given_pieces) < len(shares)
        return
    texts = [p.text for found in dealt.values() for p in found]
    assert len(texts) == len(set(texts))
    if not limited:
        assert len(texts) == len(given_pieces)
    else:
        assert sum(p.tokens for p in dealt["ranking"]) < 60 + 40
    if len({source for source, _ in sizes}) >= 8 * len(shares):
        by_role = [{p.source for p in found} for found in dealt.values()]
        assert not any(a & b for i, a in enumerate(by_role) for b in by_role[i + 1 :])
    assert dealt == deal(given_pieces, shares, seed)


def test_one_long_text_does_not_fill_a_role() -> None:
    long = [Piece(f"long {i}", None, 0, 250) for i in range(100)]
    short = [Piece(f"short {i}", None, 1 + i, 250) for i in range(40)]
    dealt = deal(long + short, {"ranking": Share(1, 4000), "report": Share(1, 4000)}, 0)
    for found in dealt.values():
        assert 4000 <= sum(p.tokens for p in found) < 4250
        assert sum(p.source == 0 for p in found) <= 2


# ------------------------------------------------------------------ output projections
@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.stacks])
def test_columns_are_those_of_the_heads(name, family_model) -> None:
    """Zeroing a unit's columns of the input is zeroing its rows of the weight, and all units are all columns."""
    model, _, family = family_model(name)
    try:
        outputs = find_outputs(model)
    except ModelError:
        assert name in {"t5_parameter"}
        return
    for output in outputs:
        for unit in ("head", "kv-group"):
            columns = torch.cat([u.columns for u in output.units(unit)])
            assert sorted(columns.tolist()) == list(range(output.weight.shape[0]))
            assert [h for u in output.units(unit) for h in u.heads] == list(range(output.state.num_heads))
        spec = family.stacks[output.sites[0].stack]
        assert len(output.units("head")) == spec.num_heads
        assert len(output.units("kv-group")) == spec.num_kv_heads


def test_heads_that_are_gone_are_no_units(family_model) -> None:
    model = copy.deepcopy(family_model("llama")[0])
    output = find_outputs(model)[0]
    state = output.state
    set_pruned_state(
        output.sites[0].module,
        HeadState(state.num_heads, state.num_kv_heads, state.head_dim, state.value_dim, zeroed=(1,)),
    )
    assert 1 not in [u.number for u in find_outputs(model)[0].units("head")]


def test_nothing_is_left_behind(family_model) -> None:
    model = family_model("bert")[0]
    before = [p.requires_grad for p in model.parameters()]
    outputs = find_outputs(model)
    with pytest.raises(RuntimeError, match="on purpose"), watching(outputs, lambda *_: None), frozen(model):
        assert not any(p.requires_grad for p in model.parameters())
        raise RuntimeError("on purpose")
    assert [p.requires_grad for p in model.parameters()] == before
    assert not any(o.module._forward_pre_hooks for o in outputs)
