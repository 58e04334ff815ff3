"""Which heads work together, against whole matrices in NumPy and a bare loop over heads."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from circuit_cases import HEADS, SIZE, WIDTH, built, circuit, head_weights, norms, probing, repeated_ids
from scipy.stats import ortho_group

from fixtures import circuits
from headscope.errors import InputError, ModelError
from headscope.heads.catalogue.composition import composition, partners_by_zeroing

FIRST = [("self", 0, h) for h in range(HEADS)]
LAST = [("self", 2, h) for h in range(HEADS)]


NO_HEAD = r"there is no head L0H9|has no self-attention in layer"


def size(matrix):
    return np.linalg.norm(matrix)


def whole_matrices(model, reader, writer):
    """W_QK of one head and W_OV of another, SIZE x SIZE."""
    before = norms(model, reader[1])[0]
    query, key, _, _ = head_weights(model, *reader[1:])
    _, _, value, output = head_weights(model, *writer[1:])
    written, behind, _ = norms(model, writer[1])
    return (query @ before).T @ key @ before, behind @ output @ value @ written


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM", "BloomForCausalLM"])
def test_composition_is_that_of_the_whole_matrices(name):
    model = built(name)
    found = composition(probing(model), LAST, [*FIRST, ("self", 1, 2), *LAST])
    for reader in LAST:
        expected = {}
        for writer in (*FIRST, ("self", 1, 2)):
            qk, ov = whole_matrices(model, reader, writer)
            expected[writer] = size(qk @ ov) / (size(qk) * size(ov)) - 1 / np.sqrt(SIZE)
        assert dict(found[reader]) == pytest.approx(expected, abs=1e-5)
        scores = [score for _, score in found[reader]]
        assert scores == sorted(scores, reverse=True)


def test_the_baseline_is_that_of_matrices_turned_at_random():
    qk, ov = whole_matrices(built("GPT2LMHeadModel"), ("self", 2, 0), ("self", 0, 0))
    turned = ortho_group.rvs(SIZE, size=2000, random_state=0)
    squares = [(size(qk @ turn @ ov) / (size(qk) * size(ov))) ** 2 for turn in turned]
    assert np.sqrt(np.mean(squares)) == pytest.approx(1 / np.sqrt(SIZE), rel=0.02)


def test_the_induction_head_reads_what_the_previous_token_head_writes():
    readers = [("self", 1, h) for h in range(4)]
    found = composition(probing(circuit().model), readers, FIRST)
    assert found["self", 1, 3][0] == (("self", 0, 1), pytest.approx(0.18847, abs=1e-4))
    # The head that looks for duplicates reads none of it; the others look at all alike, and nothing else is written.
    assert found["self", 1, 1] == [(("self", 0, 1), pytest.approx(-1 / 16, abs=1e-6))]
    assert [len(found[reader]) for reader in readers] == [0, 1, 0, 1]


def test_post_norm_models_have_no_pairs():
    assert composition(probing(built("BertForMaskedLM")), LAST[:1], FIRST) == {LAST[0]: []}


# ------------------------------------------------------------------ zeroing
def prefix_matching(model, ids, layer, head):
    with torch.no_grad():
        weights = model(torch.tensor(ids), output_attentions=True).attentions[layer][:, head].double().numpy()
    period = len(ids[0]) // 2
    return np.mean([w[i, i - period + 1] for w in weights for i in range(period + 1, 2 * period + 1)])


@pytest.mark.parametrize("engine", ["streaming", "layerwise"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_drops_are_those_of_a_model_without_the_writer(name, engine):
    model, ids = built(name), repeated_ids(3, 9)
    readers, writers = [*LAST, ("self", 1, 0)], [("self", 0, 1), ("self", 1, 3)]
    found = partners_by_zeroing(probing(model, engine=engine, batch_size=2), readers, writers, ids)
    expected = {}
    for writer in writers:
        without = deepcopy(model)
        own = slice(writer[2] * WIDTH, (writer[2] + 1) * WIDTH)
        if name == "GPT2LMHeadModel":
            without.transformer.h[writer[1]].attn.c_proj.weight.data[own] = 0
        else:
            without.model.layers[writer[1]].self_attn.o_proj.weight.data[:, own] = 0
        for reader in (r for r in readers if r[1] > writer[1]):
            before, after = (prefix_matching(m, ids, *reader[1:]) for m in (model, without))
            expected[reader, writer] = before - after
    assert max(map(abs, expected.values())) > 1e-3
    assert found == pytest.approx(expected, abs=1e-6)


def test_only_the_previous_token_head_carries_the_circuit():
    readers = [("self", 1, h) for h in range(4)]
    ids = repeated_ids(4, 20, circuits.BOS_ID, circuits.NUM_SPECIAL, circuits.VOCAB)
    found = partners_by_zeroing(probing(circuit().model), readers, FIRST, ids)
    assert found[readers[3], FIRST[1]] == pytest.approx(1, abs=1e-5)
    del found[readers[3], FIRST[1]]
    assert len(found) == 15 and max(map(abs, found.values())) < 1e-6


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "no tokens"),
        ([[0, 5, 6, 5, 6], [0, 5, 6, 7, 5, 6, 7]], r"\[5, 7\] tokens"),
        ([[0, 5, 5]], "sequence 0 is not"),
        ([[0, 5, 6, 5, 6], [0, 5, 6, 5, 7]], "sequence 1 is not"),
        (repeated_ids(1, 40), "81 tokens are too long"),
    ],
)
def test_ids_that_do_not_repeat_are_refused(ids, message):
    with pytest.raises(InputError, match=message):
        partners_by_zeroing(probing(built("GPT2LMHeadModel")), LAST, FIRST, ids)


@pytest.mark.parametrize("wrong", [("self", 0, 9), ("self", 7, 0), ("other", 0, 0)])
def test_heads_that_do_not_exist_are_refused(wrong):
    some = probing(built("GPT2LMHeadModel"))
    for readers, writers in (([wrong], FIRST), (LAST, [wrong])):
        with pytest.raises(InputError, match=NO_HEAD):
            composition(some, readers, writers)
        with pytest.raises(InputError, match=NO_HEAD):
            partners_by_zeroing(some, readers, writers, repeated_ids(1, 4))


def test_weights_that_are_not_plain_have_no_composition():
    with pytest.raises(ModelError, match="what its output projection takes in"):
        composition(probing(built("BitNetForCausalLM")), LAST, FIRST)
