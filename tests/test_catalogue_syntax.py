"""Syntax heads: planted ones are found, offsets are no syntax, numbers are those of a plain loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fixtures.building import build_family
from fixtures.circuits import offset_model
from fixtures.tokenizers import build_tokenizer
from headscope.errors import InputError
from headscope.heads.catalogue.attended import Attended, Visible, attended_words
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.syntax import judged, syntax
from headscope.heads.catalogue.syntax_questions import OFFSETS
from headscope.heads.catalogue.syntax_statistics import paired_bootstrap
from headscope.heads.catalogue.treebank import Arc, Parsed, read_treebank
from headscope.heads.catalogue.words import word_batches
from headscope.models.loading import wrap_model
from headscope.models.selection import parse_selection
from headscope.models.sites import find_sites

TREEBANK = Path(__file__).parents[1] / "fixtures" / "data" / "english.conllu"
LAYER = ("self", 0)
DIRECTIONS = ("dependent_to_head", "head_to_dependent")


@pytest.fixture(scope="module")
def sentences():
    return read_treebank(TREEBANK)


def given(sentences, words, causal=False):
    """What heads attend to: `words` is one (head, word) array a sentence."""
    sizes = [len(s.words) for s in sentences]
    first = tuple(np.zeros(n, np.int32) for n in sizes)
    last = tuple(np.arange(n, dtype=np.int32) if causal else np.full(n, n - 1, np.int32) for n in sizes)
    weights = tuple(np.where(w >= 0, 0.5, 0).astype(np.float32) for w in words)
    words = tuple(w.astype(np.int32) for w in words)
    return Attended({LAYER: words}, {LAYER: weights}, {LAYER: Visible(first, last)}, {}, ())


def places(heads):
    return {LAYER: [(h, (*LAYER, h)) for h in range(heads)]}


def at_random(random, size, heads, causal=False):
    """A random other visible word for each word, -1 where there is none."""
    result = np.full((heads, size), -1)
    for i in range(size):
        others = [j for j in range(i + 1 if causal else size) if j != i]
        if others:
            result[:, i] = random.choice(others, heads)
    return result


def at_offset(size, offset, causal=False):
    there = np.arange(size) + offset
    return np.where((there >= 0) & (there < size) & ((offset < 0) | (not causal)), there, -1)


def follow(sentence, words, relation, direction, share, random):
    """Let the words of a relation attend to its other end, with some probability."""
    for arc in sentence.arcs:
        if arc.relation == relation and random.random() < share:
            query, key = (arc.dependent, arc.head) if direction == DIRECTIONS[0] else (arc.head, arc.dependent)
            words[query] = key


def claims(found):
    return {
        (p, r.details["relation"], r.details["direction"]) for p, rs in found.evidence.items() for r in rs if r.claimed
    }


@pytest.mark.parametrize(
    ("relation", "direction"), [("obj", DIRECTIONS[0]), ("nsubj", DIRECTIONS[1]), ("case", DIRECTIONS[1])]
)
def test_a_planted_head_is_found_and_no_other(sentences, relation, direction):
    random = np.random.default_rng(3)
    words = [at_random(random, len(s.words), 12) for s in sentences]
    for sentence, w in zip(sentences, words, strict=True):
        w[1] = at_offset(len(sentence.words), -1)
        follow(sentence, w[7], relation, direction, 0.9, random)
    found = judged(given(sentences, words), sentences, places(12))
    assert {c for c in claims(found) if c[1] != "all"} == {(("self", 0, 7), relation, direction)}
    assert {c[0] for c in claims(found)} == {("self", 0, 7)}
    record = next(r for r in found.evidence["self", 0, 7] if r.details["relation"] == relation)
    assert 0.82 < record.score < 0.98 and record.low < record.score < record.high
    assert record.criteria == ("clark_2019", "voita_2019") and record.p <= 0.05
    assert record.alternative[1] < record.score - 0.1
    query, key = record.example.token, record.example.keys[0]
    ends = {
        (s.words[a.dependent], s.words[a.head])
        if direction == DIRECTIONS[0]
        else (s.words[a.head], s.words[a.dependent])
        for s in sentences
        for a in s.arcs
        if a.relation == relation
    }
    assert (query, key.token) in ends and key.weight == 0.5
    (row,) = (r for r in found.tables["relations"] if (r["relation"], r["direction"]) == (relation, direction))
    assert (row["layer"], row["head"], row["accuracy"], row["p"]) == (0, 7, record.score, record.p)
    assert len(found.evidence) == 12 and all(len(r) == 1 for p, r in found.evidence.items() if p[2] != 7)


@pytest.mark.parametrize("causal", [False, True])
def test_heads_at_fixed_offsets_equal_the_best_one_and_never_beat_it(sentences, causal):
    words = [np.stack([at_offset(len(s.words), k, causal) for k in OFFSETS]) for s in sentences]
    found = judged(given(sentences, words, causal), sentences, places(len(OFFSETS)))
    assert not claims(found)
    measured = [r for r in found.tables["relations"] if r["layer"] is not None]
    assert len(measured) > 20
    for row in measured:
        assert row["head"] == OFFSETS.index(row["offset"])
        assert (row["difference"], row["diff_low"], row["diff_high"]) == (0, 0, 0)
        assert row["accuracy"] == row["offset_accuracy"] and row["p"] == 1
        assert not causal or row["offset"] < 0


def plain(sentences, words, causal, relation, direction, chosen):
    """(right, eligible, chance) of one head over some sentences, by a loop over words."""
    right = eligible = chance = 0
    for number in chosen:
        sentence = sentences[number]
        size = len(sentence.words)
        for i in range(size):
            if direction == DIRECTIONS[0]:
                ends = {a.head for a in sentence.arcs if a.dependent == i and relation in (a.relation, "all")}
            else:
                ends = {a.dependent for a in sentence.arcs if a.head == i and relation in (a.relation, "all")}
            others = {j for j in range(size) if j != i and (not causal or j < i)}
            if ends & others:
                eligible += 1
                chance += len(ends & others) / len(others)
                right += int(words[number][i]) in ends & others
    return right / max(eligible, 1), eligible, chance / max(eligible, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_accuracies_and_choices_are_those_of_a_plain_loop(sentences, causal):
    random = np.random.default_rng(5)
    words = [at_random(random, len(s.words), 3, causal) for s in sentences]
    found = judged(given(sentences, words, causal), sentences, places(3), seed=4)
    scoring = np.random.default_rng(4).permutation(len(sentences)) % 2 == 1
    halves = [np.flatnonzero(scoring == half) for half in (False, True)]
    heads = [[w[h] for w in words] for h in range(3)]
    offsets = [[at_offset(len(s.words), k, causal) for s in sentences] for k in OFFSETS]
    for row in found.tables["relations"]:
        name = (row["relation"], row["direction"])
        if name[0] not in ("all", "obj", "det", "nsubj:pass"):
            continue
        if row["layer"] is None:
            assert plain(sentences, heads[0], causal, *name, halves[1])[1] == row["eligible"] < 10
            continue
        by_head, by_offset = (
            [plain(sentences, w, causal, *name, halves[0])[0] for w in many] for many in (heads, offsets)
        )
        head, offset = int(np.argmax(by_head)), int(np.argmax(by_offset))
        assert (row["head"], row["offset"]) == (head, OFFSETS[offset])
        score = plain(sentences, heads[head], causal, *name, halves[1])
        assert np.allclose([row["accuracy"], row["eligible"], row["chance"]], score)
        baseline = plain(sentences, offsets[offset], causal, *name, halves[1])[0]
        assert np.isclose(row["offset_accuracy"], baseline)
        assert np.isclose(row["difference"], row["accuracy"] - baseline)
        assert row["low"] <= row["accuracy"] <= row["high"] and row["diff_low"] <= row["difference"] <= row["diff_high"]


def test_bootstrap_intervals_and_p_are_those_of_a_plain_loop():
    random = np.random.default_rng(0)
    words = random.integers(1, 5, 40).astype(float)
    gain = (random.random((6, 40)) < 0.4) * words - 0.3 * words
    mean, low, high, p = paired_bootstrap(gain, words, np.random.default_rng(1), 4000)
    np.testing.assert_allclose(mean, gain.sum(1) / words.sum())
    drawn = []
    for _ in range(4000):
        picks = random.integers(0, 40, 40)
        drawn.append(gain[:, picks].sum(1) / words[picks].sum())
    drawn = np.array(drawn)
    np.testing.assert_allclose([low, high], np.quantile(drawn, (0.025, 0.975), axis=0), atol=0.02)
    spread = drawn.std(0)
    scale = np.maximum(spread, np.median(spread))
    largest = ((drawn - mean) / scale).max(1)
    np.testing.assert_allclose(p, [(largest >= m / s).mean() for m, s in zip(mean, scale, strict=True)], atol=0.03)


def test_false_claims_are_as_rare_as_said():
    """Twenty heads that are right as often as the offset, by chance: below 5 % in one of twenty sets of sentences."""
    smallest = []
    for seed in range(80):
        random = np.random.default_rng(seed)
        offset, heads = random.random(60) < 0.4, random.random((20, 60)) < 0.4
        smallest.append(paired_bootstrap(heads.astype(float) - offset, np.ones(60), random, 800)[3].min())
    assert np.mean(np.array(smallest) <= 0.05) <= 0.15
    assert 0.3 < np.mean(smallest) < 0.7 and np.std(smallest) > 0.15


def test_heads_at_random_have_no_syntax(sentences):
    sentences = sentences[:200]
    for seed in range(4):
        random = np.random.default_rng(seed)
        words = [at_random(random, len(s.words), 16) for s in sentences]
        found = judged(given(sentences, words), sentences, places(16), seed)
        assert not claims(found)
        assert len(found.evidence) == 16 and all(0 <= r.score <= 1 for (r,) in found.evidence.values())


def test_the_seed_decides_the_halves_and_nothing_else_does(sentences):
    sentences = sentences[:150]
    words = [at_random(np.random.default_rng(len(s.words)), len(s.words), 4) for s in sentences]
    tables = [judged(given(sentences, words), sentences, places(4), seed).tables for seed in (0, 0, 1)]
    assert tables[0] == tables[1] != tables[2]


def test_rare_relations_are_listed_and_too_few_sentences_refused(sentences):
    words = [at_random(np.random.default_rng(0), len(s.words), 2) for s in sentences]
    rows = judged(given(sentences, words), sentences, places(2)).tables["relations"]
    assert len({tuple(row) for row in rows}) == 1
    (rare,) = (r for r in rows if (r["relation"], r["direction"]) == ("flat", DIRECTIONS[0]))
    assert rare["accuracy"] is rare["layer"] is rare["p"] is None and rare["eligible"] <= 3
    with pytest.raises(InputError, match="no relation is frequent enough: 10 words in 5 sentences of each half"):
        judged(given(sentences[:6], words[:6]), sentences[:6], places(2))


# ------------------------------------------------------------------ from files and models
def line(number, form, head, relation, misc="_"):
    return "\t".join([str(number), form, "_", "_", "_", "_", str(head), relation, "_", misc])


def test_contractions_and_empty_nodes(tmp_path):
    rows = [
        line("1", "We", 4, "nsubj"),
        line("2-3", "don't", "_", "_"),
        line("2", "do", 4, "aux"),
        line("3", "n't", 4, "advmod"),
        line("4", "go", 0, "root"),
        line("4.1", "gone", "_", "_"),
        line("5-6", "du", "_", "_", "SpaceAfter=No"),
        line("5", "de", 6, "case"),
        line("6", "le", 4, "obl:arg"),
        line("7", ".", 4, "punct"),
    ]
    path = tmp_path / "small.conllu"
    path.write_text("# text = We don't go du.\n" + "\n".join(rows) + "\n\n", encoding="utf-8")
    (sentence,) = read_treebank(path)
    assert sentence == Parsed(
        ("We", "do", "n't", "go", "du", "."),
        (True, False, True, True, False, True),
        (Arc(0, 3, "nsubj"), Arc(1, 3, "aux"), Arc(2, 3, "advmod"), Arc(4, 3, "obl:arg")),
    )


def test_files_that_are_no_treebanks_are_named(tmp_path):
    for name, content, message in [
        ("words.conllu", b"1\tcat\tx\n\n", "words.conllu has no dependencies"),
        ("head.conllu", line(1, "cat", "x", "obj").encode() + b"\n\n", "sentence 0 is not CoNLL-U"),
        ("number.conllu", b"1\t\tcat\n\n", "sentence 0 has a word without a form"),
        ("bytes.conllu", b"\xff\xfe\xff", "sentence 0 is not CoNLL-U"),
        ("flat.conllu", line(1, "cat", 0, "root").encode() + b"\n\n", "has no dependencies"),
        ("far.conllu", line(1, "cat", 7, "obj").encode() + b"\n\n", "sentence 0 has no word 7, the head of word 1"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_treebank(tmp_path / name)
    with pytest.raises(InputError, match="cannot read"):
        read_treebank(tmp_path / "missing.conllu")


def probing_of(model, tokenizer, **more):
    sites = find_sites(model)
    return Probing(wrap_model(model, tokenizer=tokenizer), sites, sites, parse_selection("head", "all"), **more)


def test_all_wanted_heads_of_a_model_have_records():
    probing = probing_of(build_family("bert"), build_tokenizer("wordpiece"))
    found = syntax(probing, TREEBANK)
    assert len(found.evidence) == 12
    some = Probing(probing.loaded, probing.sites, probing.sites[1:2], parse_selection("head", "2,3"))
    assert set(syntax(some, TREEBANK).evidence) == {("self", 1, 2), ("self", 1, 3)}


def test_constructed_offset_heads_are_the_offset(sentences):
    """Unknown words are one token as well, so that two tokens before is two words before."""
    circuit = offset_model()
    probing = probing_of(circuit.model, circuit.tokenizer)
    plain_words = [s for s in sentences if all(w.isalpha() for w in s.words[:-1])]
    words = word_batches(probing, [s.words for s in plain_words], [s.spaces for s in plain_words])
    attended = attended_words(probing, words)
    for layer, head in circuit.places("two_before"):
        for target in attended.by_layer["self", layer]:
            assert (target[head, 2:] == np.arange(target.shape[1] - 2)).all()
    found = syntax(probing, TREEBANK)
    assert not claims(found)
    (row,) = (r for r in found.tables["relations"] if (r["relation"], r["direction"]) == ("obj", DIRECTIONS[0]))
    assert row["offset"] == -2 and row["offset_accuracy"] > 0.25
    two_before = found.evidence["self", *circuit.places("two_before")[0]]
    assert all(r.alternative[1] == pytest.approx(r.score, abs=0.2) for r in two_before)


def test_reading_needs_the_package(monkeypatch):
    import headscope.heads.catalogue.treebank as module

    def missing(name, extra, purpose):
        raise InputError(f"{purpose} needs {name}", f'pip install "headscope[{extra}]"')

    monkeypatch.setattr(module, "library", missing)
    with pytest.raises(InputError, match="needs conllu") as caught:
        read_treebank(TREEBANK)
    assert caught.value.hint == 'pip install "headscope[conllu]"'
