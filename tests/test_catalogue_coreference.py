"""Coreference: file formats, answers against plain NumPy on the models' own matrices, statistics, planted heads."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from fixtures.building import build_family
from fixtures.constructed import BERT_KINDS, GPT2_KINDS, ONE_HOT_GAIN, build_bert, build_gpt2, head_kinds
from fixtures.constructed import build_tokenizer as whole_words
from fixtures.tokenizers import build_tokenizer
from headscope.errors import InputError, ModelError
from headscope.heads.catalogue.coreference import coreference
from headscope.heads.catalogue.coreference_runs import kind_of, runs_of, spaces_after
from headscope.heads.catalogue.coreference_statistics import corrected, halves, paired_gain
from headscope.heads.catalogue.mentions import Document, Mention, read_mentions
from headscope.heads.catalogue.probing import Probing
from headscope.heads.clusters import ClusterSums
from headscope.models.loading import wrap_model
from headscope.models.selection import parse_selection
from headscope.models.sites import find_sites

DATA = "fixtures/data/coreference"
FAMILIES = {"bert": "wordpiece", "gpt2": "byte_bpe", "mistral": "unigram_bos"}


def probing_of(model, tokenizer, heads=None, **more):
    sites = find_sites(model)
    return Probing(wrap_model(model, tokenizer), sites, sites, parse_selection("head", heads), **more)


def written(path, documents):
    path.write_text("".join(json.dumps(d) + "\n" for d in documents))
    return path


def here(name, request):
    return request.config.rootpath / name


# ------------------------------------------------------------------ files
def clusters_of(document):
    """The spans of each cluster, whatever its number."""
    numbers = {m.cluster for m in document.mentions}
    return {frozenset((m.start, m.end) for m in document.mentions if m.cluster == n) for n in numbers}


def test_both_formats_of_the_fixtures_read_alike(request):
    lines, columns = (read_mentions(here(DATA + suffix, request)) for suffix in (".jsonl", ".conll"))
    assert (len(lines), len(columns)) == (73, 10)
    for a, b in zip(lines, columns, strict=False):
        assert (a.words, a.sentences, clusters_of(a)) == (b.words, b.sentences, clusters_of(b))
        assert all(m.head == m.end - 1 for m in b.mentions)
    raw = [json.loads(line) for line in here(DATA + ".jsonl", request).read_text().splitlines()]
    for a, b in zip(lines, raw, strict=True):
        assert sorted((m.start, m.end, m.head) for m in a.mentions) == sorted(
            tuple(m) for c in b["clusters"] for m in c
        )
        assert [m.head for m in a.mentions] == sorted(m.head for m in a.mentions)


def columns(*words, name="a/b", part="001"):
    rows = "".join(f"x 0 {i} {word} - {mark}\n" if word else "\n" for i, (word, mark) in enumerate(words))
    return f"#begin document ({name}); part {part}\n{rows}#end document\n"


NESTED = (("the", "(12|(7|(3)"), ("dog", "7)"), ("barks", "12)"), ("", ""), ("it", "(7)|(3)|(12)"))


@pytest.mark.parametrize("name", ["x.conll", "x.v4_gold_conll", "x.gold_conll"])
def test_columns_with_nested_mentions_parts_and_comments(tmp_path, name):
    path = tmp_path / name
    path.write_text("# a comment\n" + columns(*NESTED) + "\n" + columns(("I", "-"), name="a/b", part="2"))
    first, second = read_mentions(path)
    assert first.words == ("the", "dog", "barks", "it") and first.sentences == (0, 3)
    assert clusters_of(first) == {
        frozenset({(0, 1), (3, 4)}),
        frozenset({(0, 2), (3, 4)}),
        frozenset({(0, 3), (3, 4)}),
    }
    assert first.name != second.name and second.mentions == ()


def test_missing_heads_and_sentences(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"tokens": ["a", "b", "c"], "clusters": [[[0, 2], [2, 3, 2]]], "more": 1}\n')
    (document,) = read_mentions(str(path))
    assert document.sentences == (0,) and [m.head for m in document.mentions] == [1, 2]


GOOD = '{"tokens": ["a", "b"], "clusters": [[[0, 1], [1, 2]]]}\n'


def line(tokens='["a", "b"]', clusters="[[[0, 1], [1, 2]]]", more=""):
    return f'{{"tokens": {tokens}, "clusters": {clusters}{more}}}'


@pytest.mark.parametrize(
    ("name", "text", "where", "said"),
    [
        ("x.jsonl", GOOD + '{"tokens": [', ":2", "not JSON"),
        ("x.jsonl", GOOD + "[1]", ":2", "no object"),
        ("x.jsonl", '{"tokens": ["a"]}', ":1", "no object"),
        ("x.jsonl", line(tokens='["a", 1]'), ":1", "no list of words"),
        ("x.jsonl", line(tokens='["a", " "]'), ":1", "no list of words"),
        ("x.jsonl", line(tokens="[]"), ":1", "no list of words"),
        ("x.jsonl", line(tokens='"ab"'), ":1", "no list of words"),
        ("x.jsonl", line(more=', "sentences": [1]'), ":1", "sentences"),
        ("x.jsonl", line(more=', "sentences": [0, 2]'), ":1", "sentences"),
        ("x.jsonl", line(more=', "sentences": [0, 1, 1]'), ":1", "sentences"),
        ("x.jsonl", line(more=', "sentences": [0, 1.0]'), ":1", "sentences"),
        ("x.jsonl", line(more=', "sentences": []'), ":1", "sentences"),
        ("x.jsonl", line(clusters="[[0, 1], [1, 2]]"), ":1", "0 is no mention"),
        ("x.jsonl", line(clusters="[[]]"), ":1", "clusters"),
        ("x.jsonl", line(clusters='{"a": 1}'), ":1", "clusters"),
        ("x.jsonl", line(clusters="[[[0, 1], [1, 3]]]"), ":1", "no span of 2 words"),
        ("x.jsonl", line(clusters="[[[0, 1], [1, 1]]]"), ":1", "no span"),
        ("x.jsonl", line(clusters="[[[-1, 1], [1, 2]]]"), ":1", "no span"),
        ("x.jsonl", line(clusters="[[[0, 1, 1], [1, 2]]]"), ":1", "lies outside"),
        ("x.jsonl", line(clusters="[[[0, true], [1, 2]]]"), ":1", "no mention"),
        ("x.jsonl", line(clusters="[[[0, 1, 0, 0], [1, 2]]]"), ":1", "no mention"),
        ("x.jsonl", line(clusters="[[[0, 2]]]"), ":1", "one mention only, 'a b'"),
        ("x.jsonl", line(clusters="[[[0, 1], [0, 1]]]"), ":1", "twice"),
        ("x.jsonl", "\n", "", "holds no document"),
        ("x.conll", "", "", "holds no document"),
        ("x.txt", GOOD, "", "suffix"),
        ("x.conll", columns(("a", "(1"), ("b", "(1)")), ":2", "never ends"),
        ("x.conll", columns(("a", "(1)"), ("b", "1)")), ":3", "never began"),
        ("x.conll", columns(("a", "(1)"), ("b", "(2|1)")), ":3", "never began"),
        ("x.conll", columns(("a", "(1)|1")), ":2", "'1' is no mention"),
        ("x.conll", columns(("a", "((1))")), ":2", "no mention"),
        ("x.conll", columns(("a", "(1)"), ("b", "-")), ":1", "one mention only, 'a'"),
        ("x.conll", columns(("a", "(1)|(1)")), ":1", "twice"),
        ("x.conll", columns(), ":1", "without words"),
        ("x.conll", "a 0 0 b - -\n", ":1", "outside of a document"),
        ("x.conll", "#end document\n", ":1", "never began"),
        ("x.conll", "#begin document (a); part 000\na 0 0 b - -\n", ":1", "never ends"),
        ("x.conll", "#begin document (a); part 000\n" * 2, ":2", "before"),
        ("x.conll", "#begin document (a); part 000\na 0 0 b\n", ":2", "4 columns"),
    ],
)
def test_malformed_files_are_refused_with_their_line(tmp_path, name, text, where, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_mentions(path)
    assert f"{path}{where}" in refused.value.message and said in refused.value.message
    assert "\n" not in refused.value.message


def test_what_is_no_text_or_no_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="missing"):
        read_mentions(tmp_path / "missing.jsonl")
    (tmp_path / "x.jsonl").write_bytes(b'{"tokens": ["\xff"]}\n')
    with pytest.raises(InputError, match=r"x.jsonl:1 is not UTF-8"):
        read_mentions(tmp_path / "x.jsonl")


# ------------------------------------------------------------------ mentions and their kinds
def test_kinds_of_mentions():
    text = "Anna saw the old Baker . Bakers like Rome . She fed bakers . This dog is hers"
    document = Document("x", tuple(text.split()), (0, 6, 10, 14), ())
    kinds = {
        (0, 1): "proper",  # begins a sentence, nowhere in small letters
        (2, 5): "proper",
        (6, 7): "nominal",  # begins a sentence, elsewhere in small letters
        (8, 9): "proper",
        (10, 11): "pronoun",
        (12, 13): "nominal",
        (14, 16): "nominal",
        (17, 18): "pronoun",
    }
    assert {span: kind_of(document, Mention(span[1] - 1, *span, 0)) for span in kinds} == kinds


def test_marks_join_the_word_before_them():
    words = ["He", "said", ",", '"', "no", "!", '"', "(", "Anna", "'s", ")", "?", "."]
    text = "".join(w + " " * space for w, space in zip(words, spaces_after(words), strict=True)).strip()
    assert text == 'He said, " no! " ( Anna\'s ) ? .'


# ------------------------------------------------------------------ answers, once more
def word_matrices(model, tokenizer, words):
    """Words' attention, float64 (layer, head, word, word), from the model's own matrices."""
    text = " ".join(words).replace(" .", ".").replace(" ,", ",")
    ends = np.cumsum([len(w) + (w not in ".,") for w in words]) - (words[0] not in ".,")
    encoded = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
    with torch.no_grad():
        given = model(input_ids=encoded["input_ids"], output_attentions=True).attentions
    weights = np.stack([a[0].double().numpy() for a in given])
    special = set(tokenizer.all_special_ids)
    pieces = [[] for _ in words]
    for place, ((start, end), number) in enumerate(
        zip(encoded["offset_mapping"][0].tolist(), encoded["input_ids"][0].tolist(), strict=True)
    ):
        if number not in special:
            start += len(text[start:end]) - len(text[start:end].lstrip())
            pieces[int(np.searchsorted(ends, start, side="right"))].append(place)
    merged = np.zeros((*weights.shape[:2], len(words), len(words)))
    for q, rows in enumerate(pieces):
        for k, keys in enumerate(pieces):
            merged[:, :, q, k] = weights[:, :, rows][..., keys].sum(axis=-1).mean(axis=-1)
    return merged


def plain_answers(words, clusters, weights, seen):
    """One dictionary a question, from the definitions alone; weights (head, word, word)."""
    mentions = sorted((m[2], m[0], m[1], c) for c, cluster in enumerate(clusters) for m in cluster)
    for head, start, _, cluster in mentions:
        earlier = [(h, c) for h, _, end, c in mentions if end <= start and seen[head, h]]
        places = sorted({h for h, _ in earlier})
        right = {h for h, c in earlier if c == cluster}
        if not right or len(right) == len(places):
            continue
        same = [h for h in places if words[h].lower() == words[head].lower()]
        others = [k for k in range(len(words)) if seen[head, k] and k != head]
        yield {
            "score": [max(places, key=lambda k, w=w: w[head, k]) in right for w in weights],
            "any_word": [max(others, key=lambda k, w=w: w[head, k]) in right for w in weights],
            "chance": len(right) / len(places),
            "nearest_mention": places[-1] in right,
            "head_match": (same or places)[-1] in right,
        }


MARKS = [".", ","]
VOCABULARY = [
    "the",
    "cat",
    "dog",
    "bird",
    "river",
    "house",
    "unwatered",
    "seabed",
    "moonlit",
    "it",
    "she",
    "his",
    *MARKS,
]


def random_documents(count, seed):
    """Documents of random words and mentions, mentions inside others among them."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        size = int(rng.integers(12, 30))
        words = ["the", *rng.choice(VOCABULARY, size - 1).tolist()]
        # Marks are written onto the word before them.
        words = ["the", *("cat" if a in MARKS and b in MARKS else b for a, b in pairwise(words))]
        spans = {}
        for start in rng.choice(size - 3, 8, replace=False).tolist():
            end = start + int(rng.integers(1, 4))
            spans[start, end] = [start, end, int(rng.integers(start, end))]
        order = list(spans.values())
        documents.append({"tokens": words, "clusters": [order[:3], order[3:5], order[5:]]})
    return documents


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_plain_loops(family, tmp_path):
    model, tokenizer = build_family(family), build_tokenizer(FAMILIES[family])
    if family == "mistral":
        model.config.sliding_window = 24
    documents = random_documents(6, 3)
    found = coreference(probing_of(model, tokenizer, batch_size=4), written(tmp_path / "x.jsonl", documents))
    matrices = [word_matrices(model, tokenizer, d["tokens"]) for d in documents]
    assert len(found.evidence) == np.prod(matrices[0].shape[:2])
    cut = 0
    for (_, layer, head), (record,) in found.evidence.items():
        answers = []
        for d, weights in zip(documents, matrices, strict=True):
            # A sliding window differs from layer to layer.
            seen = (weights[layer] > 0).any(axis=0)
            cut += int((~seen[np.tril_indices(len(seen))]).sum())
            answers += list(plain_answers(d["tokens"], d["clusters"], weights[layer, head][None], seen))
        assert record.eligible == len(answers) > 15
        assert record.score == pytest.approx(np.mean([a["score"][0] for a in answers]))
        assert record.chance == pytest.approx(np.mean([a["chance"] for a in answers]), abs=1e-6)
        for name in ("any_word", "nearest_mention", "head_match"):
            assert record.details[name] == pytest.approx(np.mean(np.ravel([a[name] for a in answers]))), name
        by_kind = record.details["kinds"].values()
        assert sum(k["mentions"] for k in by_kind) == record.eligible
        assert sum(k["mentions"] * k["accuracy"] for k in by_kind) == pytest.approx(record.score * record.eligible)
    assert (cut > 0) == (family == "mistral")


def test_baselines_of_the_fixture(request):
    path = here(DATA + ".jsonl", request)
    found = coreference(probing_of(build_family("bert"), build_tokenizer("wordpiece"), heads="0"), path)
    answers = []
    for text in path.read_text().splitlines():
        d = json.loads(text)
        everything = np.ones((len(d["tokens"]),) * 2, bool)
        answers += list(plain_answers(d["tokens"], d["clusters"], [], everything))
    assert {h for _, _, h in found.evidence} == {0}
    for (record,) in found.evidence.values():
        assert record.eligible == len(answers)
        for name in ("nearest_mention", "head_match"):
            assert record.details[name] == pytest.approx(np.mean([a[name] for a in answers]))
        assert record.alternative == ("head match", record.details["head_match"])
        assert not record.claimed and record.example is None and record.p > 0.05


def test_encoder_decoders_are_measured_in_both_stacks(tmp_path):
    model, tokenizer = build_family("t5"), build_tokenizer("unigram_eos")
    found = coreference(probing_of(model, tokenizer), written(tmp_path / "x.jsonl", random_documents(4, 1)))
    assert {stack for stack, _, _ in found.evidence} == {"encoder", "decoder"}
    assert found.tables["coreference"][0]["name"].split()[0] in ("encoder", "decoder")


# ------------------------------------------------------------------ planted heads
OTHERS = ("dog", "bird", "moon", "sun", "river", "house", "tree")


def planted(count, seed):
    """Documents whose pronouns mean the cat, while something else stands nearer; the rest is found by its word."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        other, third = rng.choice(OTHERS, 2, replace=False).tolist()
        words = f"so the cat see the {other} . it was by the {other} and his {third} was also there .".split()
        cat, same = [[1, 3, 2], [7, 8, 7], [13, 14, 13]], [[4, 6, 5], [10, 12, 11]]
        if rng.random() < 0.5:
            size = len(words)
            words += f"then the {other} look at him".split()
            cat, same = [*cat, [size + 5, size + 6, size + 5]], [*same, [size + 1, size + 3, size + 2]]
        documents.append({"tokens": words, "sentences": [0, 7], "clusters": [cat, same]})
    return documents


@pytest.mark.parametrize(("build", "kinds"), [(build_bert, BERT_KINDS), (build_gpt2, GPT2_KINDS)])
def test_the_planted_heads_are_found_and_no_others(build, kinds, tmp_path):
    model = build(gain=ONE_HOT_GAIN)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    path = written(tmp_path / "x.jsonl", planted(30, 0))
    found = coreference(probing_of(model, whole_words(kinds)), path)
    heads = head_kinds(kinds, model.config.num_hidden_layers)
    for (_, layer, head), (record,) in found.evidence.items():
        assert record.claimed == (heads[layer, head] == "content_token"), heads[layer, head]
        if record.claimed:
            assert record.p < 0.01 and record.criteria == ("beats_nearest_mention", "beats_head_match")
            assert record.details["kinds"]["pronoun"]["accuracy"] == 1
            assert record.details["kinds"]["nominal"]["accuracy"] == 0
            assert record.example.keys[0].token == "cat" and record.example.token in ("it", "his", "him")
            assert record.example.text.split()[-1] == record.example.token
        if heads[layer, head] == "alike":
            assert record.score == pytest.approx(record.chance)
    best = found.summary["coreference"]
    planted_places = {f"L{layer}H{head}" for (layer, head), kind in heads.items() if kind == "content_token"}
    assert best["head"] in planted_places and best["baseline"] == "head match" and best["low"] > 0
    rows = {(r["name"], r["kind"]): r for r in found.tables["coreference"]}
    assert rows[best["head"], "pronoun"]["accuracy"] == 1 and rows["head match", "pronoun"]["accuracy"] == 0
    assert rows[best["head"], "all"]["accuracy"] - rows["head match", "all"]["accuracy"] == pytest.approx(best["gain"])
    assert rows["nearest mention", "all"]["mentions"] == rows["chance", "all"]["mentions"]
    assert {tuple(r) for r in found.tables["coreference"]} == {("name", "kind", "accuracy", "low", "high", "mentions")}
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert coreference(probing_of(model, whole_words(kinds)), path) == found


def test_a_head_that_only_beats_the_nearest_mention_says_so(tmp_path):
    # Only repeated words are asked about: a head that looks at the cat is right by luck, head match always.
    rng = np.random.default_rng(1)
    documents = []
    for _ in range(30):
        other = rng.choice(OTHERS)
        words = f"so the cat see the {other} . then the cat and the {other} come".split()
        clusters = [[[1, 3, 2], [8, 10, 9]], [[4, 6, 5], [11, 13, 12]]]
        documents.append({"tokens": words, "clusters": clusters})
    model = build_gpt2(gain=ONE_HOT_GAIN)
    found = coreference(probing_of(model, whole_words(GPT2_KINDS)), written(tmp_path / "x.jsonl", documents))
    heads = head_kinds(GPT2_KINDS, model.config.num_hidden_layers)
    records = [r for (_, layer, head), (r,) in found.evidence.items() if heads[layer, head] == "content_token"]
    assert records
    for record in records:
        assert not record.claimed and record.p == 1 and record.alternative == ("head match", 1.0)
        assert record.criteria == ("beats_nearest_mention",)


def test_the_example_is_one_that_no_baseline_answers(tmp_path):
    # The head gives half of its attention to each cat: rightly from the second one, as head match does, and from *it*.
    text = "so the cat see the dog . then the cat and the dog come . it look at this with him"
    clusters = [[[1, 3, 2], [8, 10, 9], [15, 16], [20, 21]], [[4, 6, 5], [11, 13, 12], [18, 19]]]
    model = build_gpt2(gain=ONE_HOT_GAIN)
    path = written(tmp_path / "x.jsonl", [{"tokens": text.split(), "clusters": clusters}] * 30)
    found = coreference(probing_of(model, whole_words(GPT2_KINDS)), path)
    claimed = [record for (record,) in found.evidence.values() if record.claimed]
    assert claimed and all(record.score == pytest.approx(3 / 5) for record in claimed)
    for record in claimed:
        assert record.example.token == "it" and record.example.keys[0].weight == pytest.approx(0.5)
        assert (record.example.position, record.example.keys[0].position) == (15, 2)


# ------------------------------------------------------------------ long documents, and what cannot be asked
def test_long_documents_are_cut_between_sentences(tmp_path):
    model, tokenizer = build_family("bert"), build_tokenizer("wordpiece")
    model.config.max_position_embeddings = 24
    sentence = ["the", "cat", "and", "the", "dog", "see", "it", "."]
    spans = [[[8 * n, 8 * n + 2], [8 * n + 6, 8 * n + 7]] for n in range(5)]
    dogs = [[8 * n + 3, 8 * n + 5] for n in range(5)]
    clusters = [[m for pair in spans for m in pair], dogs]
    path = written(
        tmp_path / "x.jsonl", [{"tokens": sentence * 5, "sentences": [0, 8, 16, 24, 32], "clusters": clusters}]
    )
    probing = probing_of(model, tokenizer)
    runs = runs_of(probing, read_mentions(path))
    assert [(r.first, len(r.words)) for r in runs.runs] == [(0, 16), (16, 16), (32, 8)]
    assert all(len(tokenizer(" ".join(r.words))["input_ids"]) <= 24 for r in runs.runs)
    # Of cats and dogs that are named or meant again, all but two have an antecedent; a run's first ones lose theirs.
    assert (runs.with_antecedent, runs.across, runs.certain) == (15 - 2, 2 * 2, 0)
    found = coreference(probing, path)
    assert any("4 of 13 mentions with an antecedent are lost" in note for note in found.notes)
    assert {r.eligible for (r,) in found.evidence.values()} == {9}
    # A document is what intervals are over, and it is but one.
    assert all(r.low is None and not r.claimed for (r,) in found.evidence.values())
    assert found.tables["coreference"] == () and any("best head" in note for note in found.notes)


def test_mentions_with_nothing_to_choose_are_not_asked(tmp_path):
    model, tokenizer = build_family("bert"), build_tokenizer("wordpiece")
    alone = {"tokens": ["the", "cat", "see", "it", "and", "it"], "clusters": [[[0, 2], [3, 4], [5, 6]]]}
    probing = probing_of(model, tokenizer)
    with pytest.raises(InputError, match="no mention to choose"):
        coreference(probing, written(tmp_path / "x.jsonl", [alone]))
    found = coreference(probing, written(tmp_path / "x.jsonl", [alone, *random_documents(3, 0)]))
    certain = [int(note.split()[1]) for note in found.notes if "do not count" in note]
    assert certain and certain[0] >= 2


def test_a_model_without_tokenizer_is_refused(request):
    with pytest.raises(ModelError, match="no tokenizer"):
        coreference(probing_of(build_family("bert"), None), here(DATA + ".jsonl", request))


# ------------------------------------------------------------------ statistics
def test_heads_that_gain_nothing_are_seldom_claimed():
    rng = np.random.default_rng(0)
    claimed = 0
    for trial in range(120):
        rows = np.repeat(rng.integers(1, 8, (40, 1)), 30, axis=1).astype(float)
        value = rng.binomial(rows.astype(int), 0.5).astype(float)
        expected = rng.binomial(rows[:, :1].astype(int), 0.5) * np.ones((1, 30))
        claimed += bool((corrected(value, expected, rows, trial) < 0.05).any())
    # At 5 % more than 13 of 120 happen in less than 1 % of cases.
    assert stats.binom.sf(13, 120, 0.05) < 0.01 and claimed <= 13


def test_a_true_gain_is_found_and_p_values_are_ordered():
    rng = np.random.default_rng(1)
    rows = np.full((50, 20), 5.0)
    value = rng.binomial(5, 0.5, (50, 20)).astype(float)
    value[:, 7] = rng.binomial(5, 0.75, 50)
    expected = np.full((50, 20), 2.5)
    p = corrected(value, expected, rows, 0)
    assert p[7] < 0.01 and np.argmin(p) == 7
    assert (p >= ClusterSums.of(value, expected, rows).p_above()).all()
    single = corrected(value[:, [3]], expected[:, [3]], rows[:, [3]], 0)
    assert single[0] < p[3]
    t = stats.ttest_1samp(value[:, 3] - 2.5, 0, alternative="greater").pvalue
    assert single[0] == pytest.approx(t, abs=0.03)


def test_few_documents_and_no_questions():
    ones = np.ones((3, 2))
    p = corrected(ones, 0 * ones, ones, 0)
    assert p == pytest.approx([0.125, 0.125])
    rows = np.array([[1.0, 0.0]] * 6)
    p = corrected(rows, 0 * rows, rows, 0)
    assert p[0] == pytest.approx(0.5**6) and np.isnan(p[1])
    assert corrected(ones[:1], 0 * ones[:1], ones[:1], 0) == pytest.approx([0.5, 0.5])
    assert corrected(0 * ones, 0 * ones, ones, 0) == pytest.approx([1, 1])


def test_the_gain_of_a_chosen_head():
    rng = np.random.default_rng(2)
    rows = rng.integers(1, 9, 60).astype(float)
    value, expected = (
        rng.binomial(rows.astype(int), 0.7).astype(float),
        rng.binomial(rows.astype(int), 0.5).astype(float),
    )
    gain = paired_gain(value, expected, rows, 0)
    assert gain.gain == pytest.approx((value - expected).sum() / rows.sum())
    other = stats.bootstrap(
        (value - expected, rows),
        lambda g, n, axis=-1: g.sum(axis=axis) / n.sum(axis=axis),
        paired=True,
        method="percentile",
        n_resamples=4000,
        random_state=5,
    ).confidence_interval
    assert (gain.low, gain.high) == pytest.approx((other.low, other.high), abs=0.02)
    assert gain.p < 0.01 and paired_gain(expected, value, rows, 0).p > 0.95
    assert paired_gain(value[:1], expected[:1], rows[:1], 0) is None


def test_halves_share_nothing_and_hold_all():
    for count in (2, 7, 10):
        first, second = halves(np.arange(count) * 3, 4)
        assert len(first) == count // 2 and sorted([*first, *second]) == list(range(0, 3 * count, 3))
        assert all(a < b for half in (first, second) for a, b in pairwise(half))
    assert not np.array_equal(halves(np.arange(20), 0)[0], halves(np.arange(20), 1)[0])
