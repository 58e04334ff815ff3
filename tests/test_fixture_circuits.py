"""The constructed circuits are what they say, by transformers' own attention weights and plain NumPy."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from fixtures import circuits

BUILDERS = {
    "induction": circuits.induction_model,
    "one layer": circuits.one_layer_model,
    "offset": circuits.offset_model,
}
TEXT = (
    "The cat sat on the mat, and the old king saw the cat. Then the king said to the queen, where is the cat now? "
    "She saw the cat on the mat, but the cat saw the bird; the bird was in the tree. The queen said the tree was old."
)
LENGTH = 40
few_tokens = st.lists(st.integers(0, 12), min_size=1, max_size=circuits.MAX_LENGTH)
any_tokens = st.lists(st.integers(0, circuits.VOCAB - 1), min_size=1, max_size=circuits.MAX_LENGTH)

build = cache(lambda name: BUILDERS[name]())


def run(model, ids, **inputs):
    """Layers' weights, each (head, query, key), and the logits (n, vocabulary), for one list of ids."""
    with torch.no_grad():
        found = model(torch.tensor(np.asarray(ids)[None]), output_attentions=True, **inputs)
    return [layer[0].double().numpy() for layer in found.attentions], found.logits[0].double().numpy()


def repeated_ids(seed, length=LENGTH, *, distinct=True):
    """<s>, then the same random ordinary tokens twice."""
    random = np.random.default_rng(seed)
    ordinary = np.arange(circuits.NUM_SPECIAL, circuits.VOCAB)
    drawn = random.choice(ordinary, length, replace=not distinct)
    return np.concatenate([[circuits.BOS_ID], drawn, drawn])


def copy_losses(model, ids):
    """Mean loss in nats on the tokens of the first copy and on those of the second, its first token left out."""
    _, logits = run(model, ids)
    logits = logits[:-1] - logits[:-1].max(axis=1, keepdims=True)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(ids) - 1), ids[1:]]
    length = (len(ids) - 1) // 2
    return losses[:length].mean(), losses[length + 1 :].mean()


def wanted_columns(kind, ids, row):
    """The columns that a head of `kind` should look at from one row, by the usual definitions."""
    earlier = [column for column in range(1, row) if ids[column] == ids[row]]
    return {
        "previous_token": [row - 1] if row else [],
        "two_before": [row - 2] if row > 1 else [],
        "duplicate_token": earlier,
        "induction": sorted({column + 1 for column in earlier}),
        "delimiter": [column for column in range(row + 1) if circuits.TOKENS[ids[column]] in (".", ",")],
        "local_window": list(range(max(row - 2, 0), row + 1)),
        "first_token": [0],
        "itself": [row],
    }[kind]


def shares(kind, weights, ids):
    """What goes to the wanted columns, of each row that has such columns."""
    columns = {row: found for row in range(len(ids)) if (found := wanted_columns(kind, ids, row))}
    return np.array([weights[row, found].sum() for row, found in columns.items()])


def text_ids(circuit):
    return circuit.tokenizer(TEXT).input_ids


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=25, deadline=None)
@given(ids=few_tokens | any_tokens)
def test_heads_attend_as_described_on_any_tokens(name, ids):
    circuit = build(name)
    found, _ = run(circuit.model, ids)
    for (layer, head), kind in circuit.heads.items():
        assert np.abs(found[layer][head] - circuits.ideal_weights(kind, ids)).max() < 1e-4, kind


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("source", ["distinct", "with repeats", "text"])
def test_heads_put_their_mass_where_the_definitions_say(name, source):
    circuit = build(name)
    for seed in range(5):
        ids = text_ids(circuit) if source == "text" else repeated_ids(seed, distinct=source == "distinct")
        found, _ = run(circuit.model, ids)
        for (layer, head), kind in circuit.heads.items():
            if kind not in ("alike", "lone_induction") and (kind != "delimiter" or source == "text"):
                found_shares = shares(kind, found[layer][head], ids)
                assert len(found_shares) > 10 and found_shares.min() > 0.999, kind


def test_only_the_induction_head_does_induction_and_only_with_two_layers():
    for name, circuit in ((name, build(name)) for name in BUILDERS):
        for seed in range(5):
            ids = repeated_ids(seed)
            found, _ = run(circuit.model, ids)
            for (layer, head), kind in circuit.heads.items():
                induction = shares("induction", found[layer][head], ids)
                duplicate = shares("duplicate_token", found[layer][head], ids)
                assert len(induction) == len(duplicate) == LENGTH, "the rows of the second copy"
                assert induction.min() > 0.999 if kind == "induction" else induction.mean() < 0.05, (name, kind)
                assert duplicate.min() > 0.999 if kind == "duplicate_token" else duplicate.mean() < 0.05, (name, kind)


def test_rows_without_a_match_look_at_position_0_and_predict_nothing():
    circuit = build("induction")
    ids = repeated_ids(0)
    found, logits = run(circuit.model, ids)
    for kind in ("induction", "duplicate_token"):
        ((layer, head),) = circuit.places(kind)
        assert (found[layer][head][: LENGTH + 1, 0] > 0.999).all()
    assert np.abs(logits[: LENGTH + 1]).max() < 1e-4


def test_the_second_copy_is_predicted_and_the_first_is_not():
    for seed in range(5):
        for length in (5, LENGTH, 127):
            first, second = copy_losses(build("induction").model, repeated_ids(seed, length))
            assert second < 0.01 and abs(first - np.log(circuits.VOCAB)) < 1e-3
        first, second = copy_losses(build("induction").model, repeated_ids(seed, distinct=False))
        assert second < 2 and first > 5, "tokens drawn twice are predicted less well"
        first, second = copy_losses(build("one layer").model, repeated_ids(seed))
        assert min(first, second) > 3 and abs(first - second) < 3


@pytest.mark.parametrize("kind", ["induction", "previous_token"])
def test_without_a_head_of_the_circuit_nothing_is_predicted(kind):
    circuit = build("induction")
    model = circuit.without(*circuit.places(kind))
    for seed in range(5):
        ids = repeated_ids(seed)
        assert copy_losses(model, ids)[1] - copy_losses(circuit.model, ids)[1] > 5


def test_without_any_other_head_nothing_changes():
    circuit = build("induction")
    before = [parameter.clone() for parameter in circuit.model.parameters()]
    others = [place for place, kind in circuit.heads.items() if kind not in ("induction", "previous_token")]
    assert len(others) == 6
    for ids in (repeated_ids(0), repeated_ids(1, distinct=False), text_ids(circuit)):
        _, logits = run(circuit.model, ids)
        for places in ([place] for place in others):
            assert np.abs(run(circuit.without(*places), ids)[1] - logits).max() < 1e-5
        assert np.abs(run(circuit.without(*others), ids)[1] - logits).max() < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(before, circuit.model.parameters(), strict=True))


@pytest.mark.parametrize("name", BUILDERS)
def test_circuits_hold_in_bfloat16(name):
    circuit = BUILDERS[name](dtype=torch.bfloat16)
    exact = build(name).model.state_dict()
    for key, values in circuit.model.state_dict().items():
        assert values.dtype == torch.bfloat16 and torch.equal(values.float(), exact[key]), key
    for ids in (repeated_ids(0), repeated_ids(0, distinct=False), text_ids(circuit)):
        found, _ = run(circuit.model, ids)
        for (layer, head), kind in circuit.heads.items():
            assert np.abs(found[layer][head] - circuits.ideal_weights(kind, ids)).max() < 2**-9, kind
    ids = repeated_ids(0, 127)
    assert np.abs(run(circuit.model, ids)[1] - run(build(name).model, ids)[1]).max() < 1e-3


@pytest.mark.parametrize("name", BUILDERS)
def test_layer_normalisation_has_nothing_to_do_before_each_layer(name):
    circuit = build(name)
    for ids in (repeated_ids(0), repeated_ids(1, distinct=False), text_ids(circuit)):
        with torch.no_grad():
            streams = circuit.model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states[:-1]
        for stream in streams:
            assert (stream.abs() - 1).abs().max() < 1e-6 and stream.mean(dim=-1).abs().max() < 1e-6


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side):
    ids, blank = repeated_ids(0, 9).tolist(), [circuits.PAD_ID] * 5
    row = blank + ids if side == "left" else ids + blank
    real = slice(5, None) if side == "left" else slice(0, len(ids))
    mask = torch.zeros(1, len(row), dtype=torch.long)
    mask[:, real] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    alone, padded = (
        run(build(name).model, ids),
        run(build(name).model, row, attention_mask=mask, position_ids=positions),
    )
    for one, other in zip(alone[0], padded[0], strict=True):
        assert np.abs(one - other[:, real, real]).max() < 1e-5
    assert np.abs(alone[1] - padded[1][real]).max() < 1e-3


@pytest.mark.parametrize("name", BUILDERS)
def test_a_saved_circuit_loads_as_it_was_built(name, tmp_path):
    circuit = build(name)
    circuit.save(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(tmp_path)(TEXT).input_ids == text_ids(circuit)
    (weights, logits), (read, read_logits) = run(circuit.model, text_ids(circuit)), run(loaded, text_ids(circuit))
    assert np.array_equal(logits, read_logits) and all(map(np.array_equal, weights, read))


def test_the_tokenizer_knows_every_id_and_puts_the_first_token_before_a_text():
    tokenizer = circuits.build_tokenizer()
    assert len(tokenizer) == circuits.VOCAB == len(set(circuits.TOKENS))
    assert sorted(tokenizer.all_special_ids) == list(range(circuits.NUM_SPECIAL))
    ordinary = circuits.TOKENS[circuits.NUM_SPECIAL :]
    assert tokenizer(" ".join(ordinary)).input_ids == [
        tokenizer.bos_token_id,
        *range(circuits.NUM_SPECIAL, circuits.VOCAB),
    ]
    ids = tokenizer(TEXT).input_ids
    assert ids[0] == circuits.BOS_ID and tokenizer.unk_token_id not in ids
    assert [circuits.TOKENS[number] for number in circuits.DELIMITER_IDS] == [".", ","]


def test_building_is_the_same_at_every_call_and_leaves_the_random_state_alone():
    state = torch.random.get_rng_state()
    for make in BUILDERS.values():
        first, second = make().model.state_dict(), make().model.state_dict()
        assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(state, torch.random.get_rng_state())
