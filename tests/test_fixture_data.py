"""The shipped sentences, documents and needles are well formed, agree with each other, and vary as promised."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import conllu
import pytest

DATA = Path(__file__).parents[1] / "fixtures" / "data"
SENTENCES = conllu.parse((DATA / "english.conllu").read_text(encoding="utf-8"))
DOCUMENTS = [json.loads(line) for line in (DATA / "coreference.jsonl").read_text(encoding="utf-8").splitlines()]
HAYSTACK = (DATA / "haystack.txt").read_text(encoding="utf-8")
NEEDLES = [json.loads(line) for line in (DATA / "needles.jsonl").read_text(encoding="utf-8").splitlines()]


def names(text):
    return text.split()


UPOS = set(names("ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X"))
# The 37 relations of Universal Dependencies 2, and the subtypes that the file uses.
UNIVERSAL = names(
    "acl advcl advmod amod appos aux case cc ccomp clf compound conj cop csubj dep det discourse dislocated expl fixed "
    "flat goeswith iobj list mark nmod nsubj nummod obj obl orphan parataxis punct reparandum root vocative xcomp"
)
SUBTYPES = names("nsubj:pass csubj:pass aux:pass nmod:poss acl:relcl compound:prt")
COMMON = names(
    "nsubj nsubj:pass obj iobj obl nmod nmod:poss det amod advmod aux aux:pass cop case mark cc conj compound nummod "
    "xcomp ccomp advcl acl acl:relcl expl punct compound:prt appos"
)
# Relations whose dependents the guidelines restrict to certain parts of speech.
ALLOWED_UPOS = {
    "det": {"DET"},
    "aux": {"AUX"},
    "aux:pass": {"AUX"},
    "cop": {"AUX"},
    "cc": {"CCONJ"},
    "nummod": {"NUM"},
    "punct": {"PUNCT"},
    "expl": {"PRON"},
    "mark": {"SCONJ", "PART"},
    "case": {"ADP", "PART"},
    "nmod:poss": {"PRON", "NOUN", "PROPN"},
    "advmod": {"ADV", "PART"},
    "amod": {"ADJ"},
    "compound:prt": {"ADP"},
}
NOMINAL = {"NOUN", "PROPN", "PRON", "NUM"}
CORE_NOMINALS = {"nsubj", "nsubj:pass", "obj", "iobj", "obl", "nmod", "appos", "vocative"}


def children(sentence, token):
    return [other for other in sentence if other["head"] == token["id"]]


def arcs(relation):
    """(dependent, head) of one relation, each a token, over the whole file."""
    for sentence in SENTENCES:
        by_id = {token["id"]: token for token in sentence}
        for token in sentence:
            if token["deprel"] == relation:
                yield token, by_id.get(token["head"])


def ancestors(sentence, token):
    """Ids on the way from a token to the root, itself included; AssertionError at a cycle."""
    heads, path = {other["id"]: other["head"] for other in sentence}, [token["id"]]
    while heads[path[-1]]:
        path.append(heads[path[-1]])
        assert len(path) <= len(sentence), sentence.metadata["text"]
    return path


def test_every_sentence_is_one_tree():
    for sentence in SENTENCES:
        assert [token["id"] for token in sentence] == list(range(1, len(sentence) + 1))
        roots = [token["id"] for token in sentence if token["head"] == 0]
        assert roots == [token["id"] for token in sentence if token["deprel"] == "root"] and len(roots) == 1
        assert all(ancestors(sentence, token)[-1] == roots[0] for token in sentence)


def test_the_text_is_the_forms():
    for sentence in SENTENCES:
        glued = [(token["misc"] or {}).get("SpaceAfter") == "No" for token in sentence]
        parts = [token["form"] + ("" if no_space else " ") for token, no_space in zip(sentence, glued, strict=True)]
        assert "".join(parts).strip() == sentence.metadata["text"]
    identifiers = [sentence.metadata["sent_id"] for sentence in SENTENCES]
    assert len(set(identifiers)) == len(identifiers)
    assert len({sentence.metadata["text"] for sentence in SENTENCES}) == len(SENTENCES) >= 160


def test_sentences_have_four_to_eighteen_words():
    lengths = [sum(token["upos"] != "PUNCT" for token in sentence) for sentence in SENTENCES]
    assert min(lengths) >= 4 and max(lengths) <= 18
    assert len(set(lengths)) >= 10, "lengths vary"


def test_tags_and_relations_are_those_of_the_guidelines():
    for sentence in SENTENCES:
        for token in sentence:
            assert token["upos"] in UPOS and token["lemma"]
            assert token["deprel"] in UNIVERSAL + SUBTYPES, (token, sentence.metadata["text"])


@pytest.mark.parametrize("relation", ALLOWED_UPOS)
def test_a_relation_has_the_parts_of_speech_that_it_may_have(relation):
    for sentence in SENTENCES:
        for token in sentence:
            fixed = any(child["deprel"] == "fixed" for child in children(sentence, token))
            if token["deprel"] == relation and not fixed:
                assert token["upos"] in ALLOWED_UPOS[relation], (token["form"], sentence.metadata["text"])


def test_core_dependents_are_nominals_and_clauses_have_verbs_or_copulas():
    for sentence in SENTENCES:
        for token in sentence:
            below = {child["deprel"] for child in children(sentence, token)}
            where = (token["form"], sentence.metadata["text"])
            if token["deprel"] in CORE_NOMINALS and "fixed" not in below:
                assert token["upos"] in NOMINAL, where
            if "cop" in below:
                assert token["upos"] in NOMINAL | {"ADJ", "ADV"}, where
            if "nsubj:pass" in below:
                assert "aux:pass" in below, where
            if "aux:pass" in below:
                assert "nsubj" not in below and token["upos"] == "VERB", where
            if "iobj" in below:
                assert below & {"obj", "ccomp"}, where


def test_words_stand_on_the_side_of_their_head_that_english_allows():
    for relation in names("det aux aux:pass mark cc nummod nmod:poss compound"):
        # A question word that is the predicate stands first: "Where have you been?"
        pairs = [(token, head) for token, head in arcs(relation) if head["form"] != "Where"]
        assert all(token["id"] < head["id"] for token, head in pairs), relation
    for relation in names("iobj compound:prt xcomp nmod"):
        assert all(token["id"] > head["id"] for token, head in arcs(relation)), relation


def test_dependents_of_nouns_have_nouns_as_heads_and_others_have_not():
    for relation in names("det amod nummod nmod nmod:poss compound appos acl acl:relcl"):
        for token, head in arcs(relation):
            assert head["upos"] in NOMINAL, (relation, token["form"], head["form"])
    for relation in names("obj iobj xcomp compound:prt aux:pass"):
        for token, head in arcs(relation):
            assert head["upos"] in ({"VERB", "ADJ"} if relation == "xcomp" else {"VERB"}), (relation, token["form"])
    for token, head in arcs("obl"):
        assert head["upos"] in {"VERB", "ADJ", "ADV"}, (token["form"], head["form"])


def test_marks_cases_and_clauses_agree():
    for sentence in SENTENCES:
        for token in sentence:
            below = {child["deprel"] for child in children(sentence, token)}
            where = (token["form"], sentence.metadata["text"])
            if token["deprel"] == "nmod":
                assert "case" in below, where
            if token["deprel"] in {"ccomp", "csubj:pass", "acl:relcl"}:
                assert below & {"nsubj", "nsubj:pass", "expl"}, where
            if token["deprel"] == "xcomp":
                assert not below & {"nsubj", "nsubj:pass", "cop"}, where
            if "mark" in below:
                assert token["deprel"] in {"advcl", "ccomp", "xcomp", "acl", "csubj", "csubj:pass"}, where
            if {"aux", "cop", "nsubj"} & below:
                assert token["deprel"] not in CORE_NOMINALS | {"amod", "compound"}, where


def test_nothing_has_two_subjects_or_objects():
    for sentence in SENTENCES:
        for token in sentence:
            below = Counter(child["deprel"].split(":")[0] for child in children(sentence, token))
            assert max(below[name] for name in ("nsubj", "obj", "iobj", "cop")) <= 1, sentence.metadata["text"]


def test_function_words_and_punctuation_are_leaves():
    leaves = {"det", "case", "aux", "aux:pass", "cop", "mark", "cc", "compound:prt", "expl"}
    for sentence in SENTENCES:
        for token in sentence:
            below = {child["deprel"] for child in children(sentence, token)}
            if token["deprel"] == "punct":
                assert not below
            if token["deprel"] in leaves:
                assert below <= {"fixed"}, (token["form"], sentence.metadata["text"])


def test_fixed_and_flat_words_and_coordinations_follow_their_heads():
    for relation in ("fixed", "flat", "appos", "conj", "acl", "acl:relcl"):
        for token, head in arcs(relation):
            assert head["id"] < token["id"], (relation, token["form"])
    for sentence in SENTENCES:
        for token in sentence:
            if token["deprel"] == "cc":
                head = sentence[token["head"] - 1]
                assert head["deprel"] == "conj" and token["id"] < head["id"], sentence.metadata["text"]


def test_punctuation_and_most_arcs_cross_nothing():
    crossing = 0
    for sentence in SENTENCES:
        paths = {token["id"]: ancestors(sentence, token) for token in sentence}
        for token in sentence:
            low, high = sorted((token["id"], token["head"]))
            crosses = low > 0 and any(token["head"] not in paths[between] for between in range(low + 1, high))
            assert not (crosses and token["deprel"] == "punct"), sentence.metadata["text"]
            crossing += crosses
    assert 5 <= crossing <= 20, "fronted objects and stranded prepositions are there"


@pytest.mark.parametrize("relation", COMMON)
def test_each_common_relation_occurs_often(relation):
    assert sum(1 for _ in arcs(relation)) >= 25


def test_rarer_relations_occur():
    for relation in ("parataxis", "vocative", "fixed", "csubj", "discourse", "flat"):
        assert sum(1 for _ in arcs(relation)) >= 3


@pytest.mark.parametrize("relation", ["nsubj", "nsubj:pass", "obj", "iobj", "obl", "advcl", "ccomp", "acl:relcl"])
def test_no_fixed_offset_finds_the_head(relation):
    offsets = Counter(head["id"] - token["id"] for token, head in arcs(relation))
    assert max(offsets.values()) / offsets.total() < 0.6


@pytest.mark.parametrize("relation", ["obj", "obl", "advcl", "advmod"])
def test_heads_lie_on_both_sides(relation):
    directions = Counter(head["id"] < token["id"] for token, head in arcs(relation))
    assert min(directions.values()) >= 6 and len(directions) == 2


def sentence_of(document, position):
    return sum(start <= position for start in document["sentences"])


def test_mentions_lie_in_their_sentences_and_hold_their_heads():
    assert len(DOCUMENTS) >= 60
    for document in DOCUMENTS:
        tokens, starts = document["tokens"], document["sentences"]
        assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < len(tokens)
        assert 2 <= len(starts) <= 5
        assert all(tokens[start - 1] in ".?!" for start in [*starts[1:], len(tokens)])
        for start, end, head in (mention for cluster in document["clusters"] for mention in cluster):
            assert 0 <= start <= head < end <= len(tokens)
            assert sentence_of(document, start) == sentence_of(document, end - 1)
            assert re.fullmatch(r"\w+", tokens[head])


def test_clusters_share_no_mention_and_cross_nothing():
    for document in DOCUMENTS:
        assert document["clusters"] and min(map(len, document["clusters"])) >= 2
        mentions = [tuple(mention) for cluster in document["clusters"] for mention in cluster]
        assert len({(start, end) for start, end, _ in mentions}) == len(mentions)
        assert len({head for *_, head in mentions}) == len(mentions)
        for first in mentions:
            for second in mentions:
                assert not first[0] < second[0] < first[1] < second[1], document["tokens"]
        assert all(cluster == sorted(cluster) for cluster in document["clusters"])


def baseline_hits():
    """For each mention that has an antecedent: whether the nearest mention is one, and the nearest of the same head."""
    for document in DOCUMENTS:
        words = [word.lower() for word in document["tokens"]]
        numbered = [(mention[2], number) for number, cluster in enumerate(document["clusters"]) for mention in cluster]
        numbered.sort()
        for index, (head, number) in enumerate(numbered):
            earlier = numbered[:index]
            if number not in [other for _, other in earlier]:
                continue
            same = [other for place, other in earlier if words[place] == words[head]] or [earlier[-1][1]]
            yield earlier[-1][1] == number, same[-1] == number


def test_both_trivial_baselines_find_some_antecedents_and_miss_others():
    hits = Counter(baseline_hits())
    share = {kind: count / hits.total() for kind, count in hits.items()}
    assert hits.total() >= 200
    assert share[(False, False)] > 0.3, "neither finds it"
    assert share[(False, True)] > 0.1 and share[(True, True)] > 0.1
    assert hits[(True, False)] >= 1


def mentions_of_columns(lines):
    """Clusters of one document from the last column, by number: {number: {(start, end)}}, and its words."""
    words, found, open_at = [], {}, {}
    for line in filter(str.strip, lines):
        columns = line.split()
        for mark in columns[-1].split("|"):
            number = mark.strip("()")
            if mark.startswith("("):
                open_at.setdefault(number, []).append(len(words))
            if mark.endswith(")"):
                found.setdefault(number, set()).add((open_at[number].pop(), len(words) + 1))
        words.append(columns[3])
    assert not any(open_at.values())
    return words, found


def test_the_columns_hold_the_first_ten_documents():
    text = (DATA / "coreference.conll").read_text(encoding="utf-8")
    parts = re.findall(r"#begin document \((\w+)\); part 000\n(.*?)#end document\n", text, flags=re.DOTALL)
    assert len(parts) == 10
    for (name, body), document in zip(parts, DOCUMENTS, strict=False):
        words, found = mentions_of_columns(body.splitlines())
        expected = [{(start, end) for start, end, _ in cluster} for cluster in document["clusters"]]
        assert words == document["tokens"]
        assert [found[str(number)] for number in range(len(found))] == expected
        blocks = [block.splitlines() for block in body.strip().split("\n\n")]
        sizes = [0, *(len(block) for block in blocks[:-1])]
        assert [sum(sizes[: index + 1]) for index in range(len(blocks))] == document["sentences"]
        for block in blocks:
            assert [line.split()[:3] for line in block] == [[name, "0", str(index)] for index in range(len(block))]


def test_needles_are_found_nowhere_else():
    assert len(NEEDLES) == 12
    for number, needle in enumerate(NEEDLES):
        assert set(needle) == {"needle", "question", "answer"}
        assert needle["needle"].count(needle["answer"]) == 1
        assert needle["needle"].endswith(".") and needle["question"].endswith("?")
        others = [other["needle"] for index, other in enumerate(NEEDLES) if index != number]
        assert needle["answer"].lower() not in "\n".join([HAYSTACK, *others]).lower()
        assert needle["answer"].lower() not in needle["question"].lower()


def test_the_haystack_is_plain_paragraphs():
    paragraphs = HAYSTACK.strip().split("\n\n")
    assert 11_000 < len(HAYSTACK) < 14_000
    assert len(paragraphs) >= 10 and all(len(paragraph) > 400 for paragraph in paragraphs)
    assert HAYSTACK.isascii()


@pytest.mark.parametrize("name", ["english.conllu", "coreference.jsonl", "coreference.conll", "needles.jsonl"])
def test_the_description_names_every_file(name):
    assert f"`{name}`" in (DATA / "README.md").read_text(encoding="utf-8")


def test_the_description_has_the_right_counts():
    text = (DATA / "README.md").read_text(encoding="utf-8")
    assert f"{len(SENTENCES)} sentences" in text and f"{len(DOCUMENTS)} documents" in text
    rows = dict(re.findall(r"^\| ([a-z:]+) \| (\d+) \|$", text, flags=re.MULTILINE))
    counted = Counter(token["deprel"] for sentence in SENTENCES for token in sentence)
    assert {relation: int(count) for relation, count in rows.items()} == dict(counted)
