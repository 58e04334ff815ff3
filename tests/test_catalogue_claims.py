"""Which types heads are said to have, against weights worked out in NumPy from what constructed heads are."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import headscope
from fixtures import constructed
from fixtures.circuits import (
    DELIMITERS,
    NUM_SPECIAL,
    TOKENS,
    ideal_weights,
    induction_model,
    offset_model,
    one_layer_model,
)
from headscope.heads.catalogue.repeated import repeated_ids
from headscope.heads.catalogue.repetition import LENGTHS, SEQUENCES
from headscope.heads.catalogue.text_types import TEXT_TYPES
from headscope.models.loading import wrap_model

BUILDERS = {"induction": induction_model, "one_layer": one_layer_model, "offset": offset_model}
OFFSETS = {"self_attend": 0, "previous_token": -1} | {f"offset-{k}": -k for k in range(2, 7)}
REPEATING = ("duplicate_token", "induction")
PUNCTUATION = [TOKENS.index(mark) for mark in ".,?!;:"]
CIRCUITS = tuple(BUILDERS)


@cache
def text(words=110, seed=1):
    """Few words, so that they come again, with marks between."""
    draw = np.random.default_rng(seed)
    names = [t for t in TOKENS[NUM_SPECIAL:] if t.isalpha()][:40]
    return " ".join(draw.choice(DELIMITERS) if draw.random() < 0.12 else draw.choice(names) for _ in range(words))


@cache
def analysis(name, dtype=torch.float32, seed=0, engine="auto"):
    circuit = BUILDERS[name](dtype=dtype)
    options = {"types": "positional,sink,entropy,repetition", "seed": seed, "engine": engine}
    return headscope.analyze(circuit.model, text(), tokenizer=circuit.tokenizer, **options), circuit


def claims(found):
    return {(h.layer, h.head): {t.type for t in h.types} for h in found.heads}


def record(found, place, name):
    (one,) = [t for t in found.head(*place).types if t.type == name]
    return one


# ------------------------------------------------------------------ what ideal weights justify
@cache
def weights_of(kind, ids):
    return ideal_weights(kind, ids)


@cache
def cells(name, ids):
    """The keys that count for each row, (n, n), and the rows that can show the type, (n,)."""
    tokens, here = np.array(ids), np.arange(len(ids))
    row, key = here[:, None], here[None, :]
    word, before = tokens >= NUM_SPECIAL, np.concatenate([[-1], tokens[:-1]])
    if name in OFFSETS:
        found = key == row + OFFSETS[name]
    else:
        found = {
            "first_token": (key == 0) & (row >= 0),
            "local_window": row - key <= 2,
            "delimiter": np.isin(tokens, PUNCTUATION)[None, :] & (row >= 0),
            "duplicate_token": (tokens[:, None] == tokens) & (key < row) & word[:, None],
            "induction": (tokens[:, None] == before) & (tokens[:, None] != tokens) & word[:, None] & word,
        }[name]
    found = found & (key <= row)
    count = found.sum(axis=1)
    # Where all that a row sees counts, there is no choice; offsets and the first token count from the second row on.
    rows = (count > 0) & ((count < here + 1) | ((name in OFFSETS or name == "first_token") & (here > 0)))
    return found, rows


def broadness(kind, ids):
    """Entropy over ln(visible keys), mean of rows from 1 on."""
    weights = weights_of(kind, ids)[1:]
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(axis=1)
    return float((entropy / np.log(np.arange(2, len(ids) + 1))).mean())


@cache
def share(kind, name, sequences):
    """(score, eligible, chance, share of rows whose largest weight is there) of a kind of head on some sequences."""
    total, rows, even, most = 0.0, 0, 0.0, 0
    for ids in sequences:
        weights, (found, able) = weights_of(kind, ids), cells(name, ids)
        largest = weights > weights.max(axis=1, keepdims=True) - 1e-6
        total += (weights * found).sum(axis=1)[able].sum()
        rows += int(able.sum())
        even += (found.sum(axis=1) / np.arange(1, len(ids) + 1))[able].sum()
        most += int(((largest & found).any(axis=1) & (largest.sum(axis=1) == 1))[able].sum())
    return total / rows, rows, even / rows, most / rows


def justified(kind, ids, repeated):
    """The types that a kind of head has on a text, those of repetition on random tokens."""
    found = set()
    for name in (*OFFSETS, "first_token", "local_window", "delimiter", *REPEATING):
        sequences = repeated if name in REPEATING else (ids,)
        score, _, even, most = share(kind, name, sequences)
        bar = {"first_token": 0.3, "local_window": 0.8, "delimiter": 0.6} | dict.fromkeys(REPEATING, 0.4)
        holds = score > bar.get(name, 0.5) or (name in OFFSETS and most >= 0.9)
        if name == "local_window":
            holds &= all(share(kind, k, (ids,))[0] < 0.6 * score for k in ("self_attend", "previous_token", "offset-2"))
        if name in ("delimiter", *REPEATING):
            trivial = [share(k, name, sequences)[0] for k in ("first_token", "previous_token", "itself")]
            holds &= score > max(trivial)
        found |= {name} if holds and score > even else set()
    broad = broadness(kind, ids)
    found |= {"broad"} if broad > 0.8 else set()
    return found | ({"focused"} if broad < 0.25 and not found else set())


@cache
def inputs_of(name, seed=0):
    """The text's ids, and the repeated sequences, as tuples."""
    circuit = BUILDERS[name]()
    loaded = wrap_model(circuit.model, circuit.tokenizer)
    drawn = [
        repeated_ids(loaded, sequences=SEQUENCES, length=length, seed=4 * seed + i).ids
        for i, length in enumerate(LENGTHS)
    ]
    return tuple(circuit.tokenizer(text())["input_ids"]), tuple(tuple(one) for several in drawn for one in several)


@pytest.mark.parametrize("name", CIRCUITS)
def test_heads_have_the_types_that_their_ideal_weights_justify_and_no_others(name):
    found, circuit = analysis(name)
    ids, repeated = inputs_of(name)
    assert set(found.catalogue.scores) >= TEXT_TYPES.keys()
    for place, kind in circuit.heads.items():
        own = claims(found)[place] & TEXT_TYPES.keys()
        assert own == justified(kind, ids, repeated), (place, kind)


@pytest.mark.parametrize("name", CIRCUITS)
def test_scores_chance_and_eligible_rows_are_those_of_the_ideal_weights(name):
    found, circuit = analysis(name)
    ids, repeated = inputs_of(name)
    checked = 0
    for number, head in enumerate(found.heads):
        kind = circuit.heads[head.layer, head.head]
        for type_name in (*OFFSETS, "first_token", "local_window", "delimiter", *REPEATING):
            score, eligible, even, _ = share(kind, type_name, repeated if type_name in REPEATING else (ids,))
            assert found.catalogue.scores[type_name][number] == pytest.approx(score, abs=1e-4)
            for one in (t for t in head.types if t.type == type_name):
                assert (one.eligible, one.chance) == (eligible, pytest.approx(even, abs=1e-6))
                assert one.low - 1e-9 <= one.score <= one.high + 1e-9
                assert 0 <= one.p < 0.05 and one.criteria
                checked += 1
    assert checked >= 3


PLANTED = (
    ("induction", (1, 3), "induction"),
    ("induction", (1, 1), "duplicate_token"),
    ("induction", (0, 1), "previous_token"),
    ("offset", (0, 1), "delimiter"),
    ("offset", (1, 3), "delimiter"),
    ("offset", (0, 0), "offset-2"),
    ("offset", (1, 2), "offset-2"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "place", "type_name"), PLANTED)
def test_planted_heads_are_found_with_an_example(name, place, type_name, dtype):
    found, circuit = analysis(name, dtype)
    one = record(found, place, type_name)
    ids, repeated = inputs_of(name)
    kind = circuit.heads[place]
    score, *_ = share(kind, type_name, repeated if type_name in REPEATING else (ids,))
    assert one.score == pytest.approx(score, abs=1e-3 if dtype is torch.float32 else 2e-2) and one.score > 0.9
    # The row of the example and the keys that it names, in the text or in one of the repeated sequences.
    row, top = one.example.position, one.example.keys[0]
    sequences = (ids,) if type_name not in REPEATING else [s for s in repeated if TOKENS[s[row]] == one.example.token]
    sequences = [
        s for s in sequences if " ".join(TOKENS[i] for i in s[max(0, row - 12) : row + 13]) == one.example.text
    ]
    (sequence,) = sequences
    weights = weights_of(kind, sequence)[row]
    assert weights[top.position] == weights.max() == pytest.approx(top.weight, abs=1e-2)
    for key in one.example.keys:
        assert key.token == TOKENS[sequence[key.position]]
    assert cells(type_name, sequence)[0][row, top.position]


def test_repetition_names_the_best_trivial_head_and_what_the_text_shows():
    found, _ = analysis("induction")
    ids, repeated = inputs_of("induction")
    one = record(found, (1, 3), "induction")
    trivial = {
        name: share(kind, "induction", repeated)[0]
        for name, kind in (
            ("first_token", "first_token"),
            ("previous_token", "previous_token"),
            ("own_token", "itself"),
        )
    }
    assert one.alternative[1] == pytest.approx(max(trivial.values()), abs=1e-9)
    score, eligible, even, _ = share("induction", "induction", (ids,))
    natural = one.details["natural"]
    assert (natural["eligible"], natural["score"]) == (eligible, pytest.approx(score, abs=1e-4))
    assert natural["chance"] == pytest.approx(even, abs=1e-6)


def test_the_induction_heads_partner_is_the_previous_token_head_and_nobody_else():
    found, _ = analysis("induction")
    partners = record(found, (1, 3), "induction").details["partners"]
    assert [(p["stack"], p["layer"], p["head"]) for p in partners] == [("self", 0, 1)]
    assert partners[0]["drop"] == pytest.approx(1, abs=1e-3)
    assert not [t for h in found.heads for t in h.types if t.type != "induction" and "partners" in t.details]


def test_one_layer_has_no_induction():
    found, _ = analysis("one_layer")
    assert not [h.name for h in found.heads if "induction" in {t.type for t in h.types}]
    assert max(found.catalogue.scores["induction"]) < 0.1


def test_seeds_engines_and_dtypes_claim_the_same():
    expected = claims(analysis("induction")[0])
    for options in ({"seed": 1}, {"seed": 2}, {"dtype": torch.bfloat16}, {"engine": "full"}):
        found = analysis("induction", **options)[0]
        assert claims(found) == expected, options
    assert found.engine == "full"


@pytest.mark.parametrize("build", [constructed.build_bert, constructed.build_gpt2])
def test_other_constructed_heads_are_found(build):
    model = build()
    kinds = constructed.BERT_KINDS if build is constructed.build_bert else constructed.GPT2_KINDS
    names = {"itself": "self_attend", "alike": "broad", "first_and_previous": "first_token"}
    names |= {"content_token": "column_sink"}
    found = headscope.analyze(
        model,
        constructed.sample_text(60),
        tokenizer=constructed.build_tokenizer(kinds),
        types="sink,positional,entropy",
    )
    for place, kind in constructed.head_kinds(kinds).items():
        own = claims(found)[place] - {"redundant", "copying"}
        assert own == {names.get(kind, kind)}, (place, kind)
