"""Retrieval heads: of a model that copies by induction, against transformers' own matrices and by definition."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertForMaskedLM, BertLMHeadModel, T5Config, T5ForConditionalGeneration

from fixtures import circuits
from headscope.errors import InputError, ModelError
from headscope.heads.catalogue import needles as needle_files
from headscope.heads.catalogue import retrieval as retrieval_module
from headscope.heads.catalogue.needles import Prompt, find, read_haystack, read_needles, tokenized
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.retrieval import CUE, retrieval
from headscope.heads.catalogue.retrieval_records import found_by
from headscope.heads.catalogue.retrieval_rows import Tops
from headscope.heads.catalogue.retrieval_scores import copied, expected, p_of, trivial
from headscope.heads.catalogue.retrieval_trials import Trial, recall
from headscope.models.loading import wrap_model
from headscope.models.selection import parse_selection
from headscope.models.sites import find_sites

# No word of a needle is anywhere else, so that an induction head follows it.
NEEDLES = (
    "moon star tree walk garden river.",
    "queen buy milk open window street bread.",
    "horse sleep table begin father song.",
    "doctor sing paper lose cow hand.",
    "bird drink red king eat fish sun.",
    "teacher write book foot blue cup voice.",
)
COMMON = """
the of and to in is that it was for on are as with his they at be this have or by one had not but what
"""
LENGTHS = (96, 160)
INDUCTION = ("self", 1, 3)
build_circuit = cache(circuits.induction_model)


@pytest.fixture
def files(tmp_path):
    """A haystack and a needle file."""
    return write_files(tmp_path, NEEDLES)


def write_files(folder, needles, question="what is it?"):
    random = np.random.default_rng(0)
    sentences = [" ".join(random.choice(COMMON.split(), random.integers(4, 9))) for _ in range(60)]
    haystack, path = folder / "haystack.txt", folder / "needles.jsonl"
    haystack.write_text(". ".join(sentences) + ".", encoding="utf-8")
    lines = [json.dumps({"needle": n, "question": question, "answer": "it"}) for n in needles]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return haystack, path


def probing(model=None, *, head="all", **options):
    """All heads of a model, of the induction circuit if none is given."""
    circuit = build_circuit()
    model = circuit.model if model is None else model
    sites = find_sites(model)
    loaded = wrap_model(model, circuit.tokenizer)
    return Probing(loaded, sites, sites, parse_selection("head", head), **options)


@pytest.fixture
def seen(monkeypatch):
    """What `retrieval` has run, newest last."""
    ran = []
    run = retrieval_module.run

    def watched(*args):
        ran.append(run(*args))
        return ran[-1]

    monkeypatch.setattr(retrieval_module, "run", watched)
    return ran


def matrices(model, trial):
    """Layers' weights, each (head, query, key), of one prompt and what was said."""
    with torch.no_grad():
        found = model(torch.tensor([[*trial.prompt.ids, *trial.said]]), output_attentions=True)
    return [layer[0].double().numpy() for layer in found.attentions]


def greedy(model, prompt, most):
    """What the model says, without a cache."""
    ids = list(prompt.ids)
    for _ in range(most):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == circuits.EOS_ID:
            break
    return ids[len(prompt.ids) :]


def score_of(head, trial):
    """One head's score by its definition, from its matrix."""
    ids = [*trial.prompt.ids, *trial.said]
    found = set()
    for row in range(len(trial.prompt.ids) - 1, len(ids) - 1):
        top = int(head[row].argmax())
        if top in trial.prompt.positions and ids[top] == ids[row + 1]:
            found.add(top)
    return len(found) / len(trial.prompt.positions)


# ------------------------------------------------------------------ the constructed model
def test_the_head_that_copies_is_found_and_no_other(files):
    found = retrieval(probing(), *files, lengths=LENGTHS, trials=12)
    records = {place: record for place, (record,) in found.evidence.items()}
    assert set(records) == {("self", layer, head) for layer in range(2) for head in range(4)}
    assert [place for place, record in records.items() if record.claimed] == [INDUCTION]
    best = records[INDUCTION]
    assert best.score == best.low == best.high == 1.0
    assert best.criteria == ("wu_2025", "wu_2025_strong")
    assert best.eligible == 12
    assert best.p < 1e-4
    assert best.alternative == ("previous token", 0.0)
    assert all(record.score == 0 and record.criteria == () for place, record in records.items() if place != INDUCTION)
    assert set(best.details["by_length"]) == {"96", "160"}
    assert set(best.details["by_depth"]) == {"0", "0.25", "0.5", "0.75", "1"}
    assert set(best.details["by_length"].values()) == set(best.details["by_depth"].values()) == {1.0}


def test_table_and_summary(files):
    found = retrieval(probing(), *files, lengths=LENGTHS, depths=2, trials=12)
    rows = found.tables["retrieval"]
    assert [(row["length"], row["depth"]) for row in rows] == list(product(LENGTHS, (0.0, 1.0)))
    for row in rows:
        assert (row["trials"], row["passed"], row["recall"]) == (3, 3, 1.0)
        assert (row["stack"], row["head"], row["score"]) == ("self", "L1H3", 1.0)
    summary = found.summary["retrieval"]
    assert summary == {
        "trials": 12,
        "passed": 12,
        "needles": 6,
        "recall": 1.0,
        "share_wu_2025": 1 / 8,
        "share_zero": 7 / 8,
        "latest_match": 1.0,
    }
    assert json.loads(json.dumps(found.evidence[INDUCTION][0].to_dict()))["type"] == "retrieval"


def test_the_example_is_a_token_that_was_copied(files, seen):
    example = retrieval(probing(), *files, lengths=[96], trials=6).evidence[INDUCTION][0].example
    (key,) = example.keys
    trial = next(t for t in seen[0].trials if key.position in t.prompt.positions and matches(t, example))
    ids = [*trial.prompt.ids, *trial.said]
    tokens = build_circuit().tokenizer.convert_ids_to_tokens(ids)
    assert tokens[example.position + 1] == key.token == tokens[key.position]
    assert key.weight == pytest.approx(matrices(build_circuit().model, trial)[1][3, example.position, key.position])
    assert key.token in example.text and example.text.endswith(example.token)


def matches(trial, example):
    ids = [*trial.prompt.ids, *trial.said]
    tokens = build_circuit().tokenizer.convert_ids_to_tokens(ids)
    return tokens[example.position] == example.token and tokens[example.keys[0].position] == example.keys[0].token


@pytest.mark.parametrize(
    ("engine", "batch_size"), [("streaming", None), ("streaming", 2), ("layerwise", None), ("full", 1)]
)
def test_scores_are_those_of_the_models_own_matrices(files, seen, engine, batch_size):
    model = mixed_model()
    subject = probing(model, engine=engine, batch_size=batch_size)
    found = retrieval(subject, *files, lengths=LENGTHS, trials=6)
    (ran,) = seen
    weights = [matrices(model, trial) for trial in ran.trials]
    nonzero = 0
    for (_, layer, head), (record,) in found.evidence.items():
        scores = [score_of(w[layer][head], t) for w, t in zip(weights, ran.trials, strict=True)]
        assert record.score == pytest.approx(np.mean(scores), abs=1e-12)
        nonzero += 0 < record.score < 1
        by_length = {
            str(n): [s for s, t in zip(scores, ran.trials, strict=True) if t.prompt.length == n] for n in LENGTHS
        }
        assert record.details["by_length"] == pytest.approx({n: np.mean(s) for n, s in by_length.items()})
    assert nonzero >= 1


@cache
def mixed_model():
    """The circuit with a second induction head whose queries are too noisy to always find the match."""
    model = deepcopy(build_circuit().model)
    attention = model.transformer.h[1].attn
    size, width = circuits.SIZE, circuits.HEAD_DIM
    with torch.no_grad():
        for part in range(2):
            to, since = (slice(part * size + head * width, part * size + (head + 1) * width) for head in (0, 3))
            attention.c_attn.weight[:, to] = attention.c_attn.weight[:, since]
            attention.c_attn.bias[to] = attention.c_attn.bias[since]
        noise = torch.randn(size, width, generator=torch.Generator().manual_seed(1))
        attention.c_attn.weight[:, :width] += 6.0 * noise
    return model


def test_trials_have_the_needle_where_they_say(files, seen):
    retrieval(probing(), *files, lengths=LENGTHS, depths=3, trials=12)
    tokenizer = build_circuit().tokenizer
    for trial in seen[0].trials:
        prompt = trial.prompt
        assert len(prompt.ids) + len(prompt.positions) == prompt.length
        assert tokenizer.decode(prompt.wanted) == tokenizer.decode(
            tokenizer(NEEDLES[prompt.needle], add_special_tokens=False).input_ids[2:]
        )
        assert prompt.ids[0] == circuits.BOS_ID and circuits.BOS_ID not in prompt.ids[1:]
        before = prompt.ids[prompt.positions.start - 3]
        assert before in (circuits.BOS_ID, circuits.TOKENS.index("."))
        place = prompt.positions.start / prompt.length
        assert place < 0.2 if prompt.depth == 0 else place > 0.5 if prompt.depth == 1 else 0.1 < place < 0.7
        assert trial.said == prompt.wanted
    assert {t.prompt.depth for t in seen[0].trials} == {0.0, 0.5, 1.0}
    assert {t.prompt.needle for t in seen[0].trials} == set(range(6))


def test_same_seed_same_result_and_the_model_stays_as_it_was(files, seen):
    model = deepcopy(build_circuit().model).train()
    model.transformer.h[0].attn.train(False)
    # transformers' own hooks stay where matrices were once asked for.
    model(torch.tensor([[1, 5]]), output_attentions=True)
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    before = {name: t.clone() for name, t in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    generation, state = model.generation_config, torch.random.get_rng_state()
    implementation = model.config._attn_implementation
    found = [retrieval(probing(model, seed=seed), *files, lengths=[96], trials=6) for seed in (3, 3, 4)]
    assert found[0] == found[1]
    prompts = [[t.prompt for t in ran.trials] for ran in seen]
    assert prompts[0] == prompts[1] != prompts[2]
    assert [m.training for m in model.modules()] == modes
    assert model.generation_config is generation and model.config._attn_implementation == implementation
    assert [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_only_the_heads_that_are_asked_for(files):
    found = retrieval(probing(head="1,3"), *files, lengths=[96], trials=6)
    assert set(found.evidence) == {("self", layer, head) for layer in range(2) for head in (1, 3)}
    subject = probing()
    found = retrieval(replace(subject, wanted=subject.sites[:1]), *files, lengths=[96], trials=6)
    assert {layer for _, layer, _ in found.evidence} == {0}
    assert not any("left out" in note for note in found.notes)


def test_cost_is_said_beforehand(files):
    said = []
    retrieval(probing(say=said.append), *files, lengths=LENGTHS, depths=1, trials=4)
    assert len(said) == 1 and "4 forward passes over 512 tokens" in said[0]


# ------------------------------------------------------------------ models that say something else
def test_a_model_that_loops_scores_at_most_one(tmp_path, seen):
    files = write_files(tmp_path, ["moon star moon star moon star tree."])
    found = retrieval(probing(), *files, lengths=[96], trials=2)
    model = build_circuit().model
    above = 0
    for trial in seen[0].trials:
        assert list(trial.said) == greedy(model, trial.prompt, len(trial.prompt.wanted) + 8)
        assert trial.said == (trial.said[:2]) * (len(trial.said) // 2)
        assert trial.recall == pytest.approx(4 / 6)
        head = matrices(model, trial)[1][3]
        ids = [*trial.prompt.ids, *trial.said]
        rows = range(len(trial.prompt.ids) - 1, len(ids) - 1)
        steps = sum(int(head[r].argmax()) in trial.prompt.positions for r in rows)
        above += steps > len(trial.prompt.positions)
    assert above, "counted step by step, the score would not exceed 1 either"
    record = found.evidence[INDUCTION][0]
    assert 0 < record.score <= 1
    scores = [score_of(matrices(model, t)[1][3], t) for t in seen[0].trials]
    assert record.score == pytest.approx(np.mean(scores))


def test_trials_that_do_not_pass_do_not_count(tmp_path, seen):
    wrong = "door chair door letter door pen door head door face."
    files = write_files(tmp_path, [*NEEDLES, wrong])
    found = retrieval(probing(), *files, lengths=[128], trials=14)
    lost = [t for t in seen[0].trials if not t.passed]
    assert {t.prompt.needle for t in lost} == {6} and len(lost) == 2
    assert all(not t.tops for t in lost)
    for trial in lost:
        assert list(trial.said) == greedy(build_circuit().model, trial.prompt, len(trial.prompt.wanted) + 8)
    assert found.evidence[INDUCTION][0].eligible == 12
    assert found.evidence[INDUCTION][0].score == 1
    assert "retrieval: 2 of 14 trials do not count: the model says too little of the needle" in found.notes
    assert found.summary["retrieval"]["passed"] == 12
    assert sum(row["trials"] for row in found.tables["retrieval"]) == 14
    assert sum(row["passed"] for row in found.tables["retrieval"]) == 12


def test_generation_follows_no_penalty_of_the_models_own(tmp_path, seen):
    files = write_files(tmp_path, ["moon star moon star moon star tree."] * 2)
    model = deepcopy(build_circuit().model)
    model.generation_config.repetition_penalty = 50.0
    model.generation_config.do_sample = True
    model.generation_config.temperature = 9.0
    retrieval(probing(model), *files, lengths=[96], trials=2)
    for trial in seen[0].trials:
        assert list(trial.said) == greedy(model, trial.prompt, len(trial.prompt.wanted) + 8)
    assert model.generation_config.repetition_penalty == 50.0


def test_a_model_that_repeats_nothing_is_not_measured(files):
    with pytest.raises(ModelError, match="cannot be measured: GPT2LMHeadModel says 0% of a needle's tokens") as caught:
        retrieval(probing(circuits.one_layer_model().model), *files, lengths=[96], trials=3)
    assert "shorter lengths" in caught.value.hint


def test_models_that_are_no_causal_language_models(files):
    small = {"vocab_size": circuits.VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertConfig(**small, intermediate_size=16)
    cases = {
        "has no language-model head": (BertForMaskedLM(bert), build_circuit().model.transformer),
        "looks at later tokens": (BertLMHeadModel(bert),),
        "encoder-decoder": (
            T5ForConditionalGeneration(
                T5Config(vocab_size=256, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
            ),
        ),
    }
    for message, models in cases.items():
        for model in models:
            with pytest.raises(ModelError, match=message) as caught:
                retrieval(probing(model), *files, lengths=[96], trials=2)
            assert "causal language models" in caught.value.hint


def test_a_head_that_was_not_in_the_checkpoint_is_refused(files):
    subject = probing()
    loaded = replace(subject.loaded, missing=("lm_head.weight",))
    with pytest.raises(ModelError, match="no trained language-model head"):
        retrieval(replace(subject, loaded=loaded), *files, lengths=[96])


def test_without_a_tokenizer(files):
    subject = probing()
    with pytest.raises(ModelError, match="tokenizer"):
        retrieval(replace(subject, loaded=replace(subject.loaded, tokenizer=None)), *files, lengths=[96])


def test_layers_that_do_not_see_the_needle_are_left_out(files, seen):
    subject = probing()
    retrieval(subject, *files, lengths=[96], trials=6)
    (ran,) = seen
    trials = []
    for trial in ran.trials:
        tops = dict(trial.tops)
        tops["self", 0] = replace(tops["self", 0], seen=np.zeros_like(tops["self", 0].seen))
        trials.append(replace(trial, tops=tops))
    found = found_by(subject, replace(ran, trials=tuple(trials)), ())
    assert {layer for _, layer, _ in found.evidence} == {1}
    assert "retrieval: self: layers 0 left out: their rows do not see the needles" in found.notes


# ------------------------------------------------------------------ files and arguments
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"needles.jsonl:2 is not JSON"),
        ("[1]", r"needles.jsonl:2 is no object"),
        ('{"needle": "a b", "answer": "b"}', r"needles.jsonl:2 has no text as 'question'"),
        ('{"needle": " ", "question": "x", "answer": "b"}', r"needles.jsonl:2 has no text as 'needle'"),
        ('{"needle": "a", "question": "x", "answer": 3}', r"needles.jsonl:2 has no text as 'answer'"),
        ("\udcff", r"needles.jsonl:2 is not UTF-8"),
    ],
)
def test_lines_that_are_no_needles(tmp_path, line, message):
    path = tmp_path / "needles.jsonl"
    good = '{"needle": "a b", "question": "x", "answer": "b"}'
    path.write_bytes(f"{good}\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=message) as caught:
        read_needles(path)
    assert caught.value.hint


def test_files_that_are_not_there_or_empty(tmp_path, files):
    for read in (read_needles, lambda path: read_haystack(path, 10)):
        with pytest.raises(InputError, match="cannot read"):
            read(tmp_path / "nothing")
        (tmp_path / "empty").write_text(" \n")
        with pytest.raises(InputError, match="holds no"):
            read(tmp_path / "empty")
    assert [n.needle for n in read_needles(files[1])] == list(NEEDLES)
    assert len(read_haystack(files[0], 3)) <= 96


def test_a_needle_that_cannot_be_located_is_an_error(tmp_path, monkeypatch):
    haystack, path = write_files(tmp_path, NEEDLES[:1], question=NEEDLES[0])
    with pytest.raises(InputError, match="needle 0 does not stand once in its prompt"):
        retrieval(probing(), haystack, path, lengths=[96])
    haystack.write_text(f"{haystack.read_text()} {NEEDLES[0]} it was the.")
    with pytest.raises(InputError, match="already has the needle 'moon star tree"):
        retrieval(probing(), haystack, path, lengths=[96])
    (tmp_path / "b").mkdir()
    files = write_files(tmp_path / "b", NEEDLES)
    plain = needle_files._plain
    joined = lambda loaded, text: plain(loaded, text.replace(". moon", "moon"))  # noqa: E731
    monkeypatch.setattr(needle_files, "_plain", joined)
    with pytest.raises(ModelError, match="cannot be told"):
        retrieval(probing(), *files, lengths=[96])


def test_needles_that_the_tokenizer_does_not_know(tmp_path):
    files = write_files(tmp_path, ["zyx wvu tsr qpo.", "moon."])
    with pytest.raises(ModelError, match="knows none of the needles"):
        retrieval(probing(), *files, lengths=[96])
    files = write_files(tmp_path, ["zyx wvu tsr qpo.", *NEEDLES])
    found = retrieval(probing(), *files, lengths=[96], trials=6)
    assert "1 of 7 needles left out: too short, or the tokenizer does not know them" in found.notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depths": 0}, "depths is 0"),
        ({"trials": 0}, "trials is 0"),
        ({"given": -1}, "given is -1"),
        ({"lengths": [0]}, "length is 0"),
        ({"lengths": [96.5]}, "length is 96.5"),
        ({"lengths": [20]}, "length 20 is out of range"),
        ({"lengths": [96, 1024]}, "length 1024 is out of range.*model and haystack allow 256"),
    ],
)
def test_arguments_that_do_not_fit(files, arguments, message):
    with pytest.raises(InputError, match=message):
        retrieval(probing(), *files, **arguments)


def test_lengths_are_those_that_model_and_haystack_allow(tmp_path, files):
    found = retrieval(probing(), *files, trials=6)
    assert {row["length"] for row in found.tables["retrieval"]} == {256}
    assert any("lengths 512, 1024 left out" in note and "allow 256" in note for note in found.notes)
    short = " ".join(files[0].read_text().split()[:120]) + "."
    files[0].write_text(short)
    found = retrieval(probing(), *files, trials=6)
    (length,) = {row["length"] for row in found.tables["retrieval"]}
    assert 120 < length < 200
    files[0].write_text("it was the.")
    with pytest.raises(InputError, match="needles, question and text need"):
        retrieval(probing(), *files)


def test_too_few_needles_for_a_claim_are_noted(tmp_path):
    found = retrieval(probing(), *write_files(tmp_path, NEEDLES[:1]), lengths=[96], trials=4)
    record = found.evidence[INDUCTION][0]
    assert record.score == 1 and record.low is None and not record.claimed
    assert "retrieval: 1 needles are too few to tell any of 8 heads from chance" in found.notes


def test_a_haystack_keeps_its_tokens_and_sentences(files):
    loaded = probing().loaded
    pieces, _ = tokenized(loaded, "It was the cat? It is; (that one.) And this! So", read_needles(files[1]), CUE, 2)
    words = loaded.tokenizer.convert_ids_to_tokens(pieces.haystack)
    assert [words[i - 1] for i in pieces.sentences[1:]] == ["?", ".", "!"]
    assert pieces.start == (circuits.BOS_ID,)


# ------------------------------------------------------------------ scores by definition
@st.composite
def trials(draw):
    """A trial of few different tokens, and what three heads see and look at."""
    tokens = st.integers(0, 3)
    ids = draw(st.lists(tokens, min_size=6, max_size=14))
    start = draw(st.integers(0, 3))
    positions = range(start, start + draw(st.integers(1, 3)))
    said = draw(st.lists(tokens, min_size=1, max_size=6))
    trial = Trial(Prompt(tuple(ids), positions, 0, len(ids), 0.5), tuple(said), 1.0)
    row = len(ids) + len(said)
    key = draw(
        st.lists(st.lists(st.integers(0, row - 1), min_size=len(said), max_size=len(said)), min_size=3, max_size=3)
    )
    window = draw(st.integers(1, row))
    visible = np.array([[r - window < j <= r for j in range(row)] for r in range(len(ids) - 1, row - 1)])
    seen = visible[:, positions.start : positions.stop]
    return trial, Tops(np.array(key), np.ones((3, len(said)), np.float32), seen, visible.sum(axis=1))


@settings(deadline=None, max_examples=50)
@given(trials())
def test_copied_positions_are_counted_once(drawn):
    trial, tops = drawn
    result = copied(tops.key, trial)
    for head, keys in enumerate(tops.key):
        hits = {
            k
            for k, token in zip(keys, trial.said, strict=True)
            if k in trial.prompt.positions and trial.prompt.ids[k] == token
        }
        assert {trial.prompt.positions[i] for i in result[head].nonzero()[0]} == hits
    assert result.shape == (3, len(trial.prompt.positions))


@settings(deadline=None, max_examples=50)
@given(trials())
def test_chance_is_the_mean_over_all_that_could_be_looked_at(drawn):
    trial, tops = drawn
    # Exact: a position is missed where every row that could copy it looks at another of its keys.
    means = []
    for i, token in enumerate(trial.prompt.wanted):
        rows = [r for r, said in enumerate(trial.said) if said == token and tops.seen[r, i]]
        means.append(1 - np.prod([(tops.counts[r] - 1) / tops.counts[r] for r in rows]))
    assert expected(tops, trial) == pytest.approx(np.mean(means))


def test_chance_by_drawing():
    trial = Trial(Prompt((5, 1, 2, 1, 6, 7), range(1, 4), 0, 9, 0.5), (1, 2, 1), 1.0)
    counts = np.array([6, 7, 8])
    tops = Tops(np.zeros((1, 3), np.int64), np.ones((1, 3), np.float32), np.ones((3, 3), bool), counts)
    random = np.random.default_rng(0)
    keys = np.stack([random.integers(0, n, 40_000) for n in counts], axis=1)
    assert copied(keys, trial).mean() == pytest.approx(expected(tops, trial), rel=0.03)


@settings(deadline=None, max_examples=50)
@given(trials())
def test_trivial_heads(drawn):
    trial, _ = drawn
    ids = [*trial.prompt.ids, *trial.said]
    rows = range(len(trial.prompt.ids) - 1, len(ids) - 1)
    one_hot = np.zeros((4, len(ids), len(ids)))
    for r in rows:
        one_hot[0, r, r - 1] = one_hot[1, r, 0] = one_hot[2, r, r] = 1
        earlier = [j for j in range(r) if ids[j] == ids[r]]
        one_hot[3, r, earlier[-1] + 1 if earlier else len(ids) - 1] = 1
    assert trivial(trial) == pytest.approx([score_of(head, trial) for head in one_hot])


def test_recall_counts_tokens_as_often_as_they_are_in_both():
    assert recall([1, 1, 1, 2], [1, 1, 3, 4]) == 0.5
    assert recall([], [1]) == 0
    assert recall([4, 3, 2, 1], [1, 2, 3, 4]) == 1


def test_find():
    assert find([1, 2, 1, 2, 1], [1, 2, 1]) == [0, 2]
    assert find([1, 2], [2, 1]) == []


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 0.2), st.booleans()), min_size=1, max_size=7))
def test_p_adds_up_all_outcomes(needles):
    means, good = (np.array(column) for column in zip(*needles, strict=True))
    chances = np.minimum(means / 0.1, 1)
    total = sum(
        np.prod(np.where(outcome, chances, 1 - chances))
        for outcome in product([False, True], repeat=len(needles))
        if sum(outcome) >= good.sum()
    )
    assert p_of(np.where(good, 0.1, 0.09), means) == pytest.approx(total)


def test_p_is_an_upper_bound_of_what_chance_does():
    """Heads that copy all of a trial or nothing, the same in all trials of a needle: as dependent as can be."""
    random = np.random.default_rng(0)
    good = (random.random((20_000, 6)) < 0.02).sum(axis=1)
    values = {k: p_of(np.array([1.0] * k + [0.0] * (6 - k)), np.full(6, 0.02)) for k in range(7)}
    for level in (0.05, 0.01):
        assert np.mean([values[k] <= level for k in good]) <= level


def test_trials_say_so_when_they_pass():
    prompt = SimpleNamespace()
    assert not Trial(prompt, (), 0.5).passed
    assert Trial(prompt, (), 0.51).passed
