"""Syntax heads: words whose most attended other word is the one that they depend on, or that depends on them.

For each relation and both directions a head's accuracy is the share of eligible words, those that can see the other
end, whose most attended other word is the other end (Clark et al., 2019, "What Does BERT Look At?", section 4.2). The
trivial explanation is the best fixed offset of -6 to +6 words on the same words. The best head and the best offset are
chosen on one half of the sentences, and everything is scored on the other.

A head has the type for a relation and a direction where its accuracy is at least ten points above the best offset's
(Voita et al., 2019, "Analyzing Multi-Head Self-Attention", section 5.2), a paired bootstrap over sentences tells them
apart with all heads, relations and directions accounted for, and its interval lies above what a random visible word
gives: for relations that span many words offsets may be worse than chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.errors import InputError
from headscope.heads.catalogue.attended import Attended, Visible, attended_words
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.result import Example, Found, Looked, Place, TypeRecord
from headscope.heads.catalogue.syntax_questions import OFFSETS, Question, Seen, Text, questions
from headscope.heads.catalogue.syntax_statistics import Compared, Counts, by_sentence, compare
from headscope.heads.catalogue.treebank import Parsed, read_treebank
from headscope.heads.catalogue.words import word_batches
from headscope.heads.statistics import Layer

TYPE = "syntax"
# What each half must have for a relation to be measured.
MIN_WORDS = 10
MIN_SENTENCES = 5
# Voita's ten points, and the share of false claims.
MARGIN = 0.10
ALPHA = 0.05
# Words to each side of an example's.
_NEAR = 12


def syntax(probing: Probing, treebank: str | PathLike[str]) -> Found:
    """Measure all wanted heads on the sentences of a CoNLL-U file.

    Returns:
        Records of every head: one a relation and direction that it has the type for, or else its best one, by the half
        that chooses. Scores, intervals and p-values are of the other half. `tables["relations"]` has a row a relation
        and direction (and stack, where they see different words) with its best head and best offset; of those with
        fewer than ten eligible words in a half, only how many there are.

    Raises:
        InputError: The file cannot be read, or no relation is frequent enough.
        ModelError: There is no tokenizer, or no wanted layer can be read.
    """
    parsed = read_treebank(treebank)
    words = word_batches(probing, [s.words for s in parsed], [s.spaces for s in parsed])
    attended = attended_words(probing, words)
    places = {layer: probing.places(facts) for layer, facts in attended.facts.items()}
    found = judged(attended, [parsed[i] for i in words.kept], places, probing.seed)
    return Found(found.evidence, found.tables, (*words.notes, *attended.notes, *found.notes), found.summary)


def judged(
    attended: Attended, sentences: Sequence[Parsed], places: Mapping[Layer, Sequence[tuple[int, Place]]], seed: int = 0
) -> Found:
    """What `syntax` finds, from what heads attend to.

    Args:
        attended: Of these sentences, in their order.
        places: The heads to judge, as `Probing.places` gives them.
    """
    text, random = Text.of(sentences), np.random.default_rng(seed)
    scoring = random.permutation(len(sentences)) % 2 == 1
    answers = [a for group in _groups(attended, places, text) for a in _answers(group, text, scoring, random)]
    tests = sum(a.compared is not None for a in answers)
    if not tests:
        raise InputError(
            f"no relation is frequent enough: {MIN_WORDS} words in {MIN_SENTENCES} sentences of each half are needed",
            "Give a treebank of more sentences.",
        )
    records: dict[Place, list[tuple[float, TypeRecord]]] = {}
    for answer in answers:
        if answer.compared is not None:
            for head, place in enumerate(answer.group.places):
                record = _record(answer, answer.compared, head, tests, text, sentences)
                records.setdefault(place, []).append((float(answer.compared.ahead[head]), record))
    rows = tuple(_row(answer, tests) for answer in answers)
    return Found({place: _chosen(found) for place, found in records.items()}, {"relations": rows})


# ------------------------------------------------------------------ what is asked
@dataclass(frozen=True, eq=False)
class _Group:
    """Heads that see the same words.

    Attributes:
        places: Where they are.
        attended, weights: (head, word): the word that each word attends to most, -1 for none, and how much.
        offsets: (offset, word): the visible word at each offset, -1 for none.
    """

    places: tuple[Place, ...]
    attended: NDArray[np.int32]
    weights: NDArray[np.float32]
    offsets: NDArray[np.int32]
    seen: Seen


@dataclass(frozen=True, eq=False)
class _Answer:
    """One question to all heads of a group; `compared` is None where too few words are `eligible` in a half."""

    group: _Group
    question: Question
    eligible: int
    compared: Compared | None


def _groups(attended: Attended, places: Mapping[Layer, Sequence[tuple[int, Place]]], text: Text) -> Iterator[_Group]:
    layers: dict[int, list[Layer]] = {}
    for layer in attended.by_layer:
        layers.setdefault(id(attended.visible[layer]), []).append(layer)
    for together in layers.values():
        visible: Visible = attended.visible[together[0]]
        seen = Seen.of(text, visible)
        chosen = [(layer, [place for place, _ in places[layer]]) for layer in together if places[layer]]
        if not chosen:
            continue
        yield _Group(
            tuple(place for layer, _ in chosen for _, place in places[layer]),
            np.concatenate([text.numbered(attended.by_layer[layer])[rows] for layer, rows in chosen]),
            np.concatenate([np.concatenate(attended.weights[layer], axis=-1)[rows] for layer, rows in chosen]),
            np.stack([seen.at(offset) for offset in OFFSETS]).astype(np.int32),
            seen,
        )


def _answers(group: _Group, text: Text, scoring: NDArray[np.bool_], random: np.random.Generator) -> Iterator[_Answer]:
    for question in questions(text, group.seen):
        sentence = text.sentence[question.words]
        half = scoring[sentence]
        enough = all(h.sum() >= MIN_WORDS and len(np.unique(sentence[h])) >= MIN_SENTENCES for h in (half, ~half))
        if not enough:
            yield _Answer(group, question, int(half.sum()), None)
            continue
        right = (question.right(words) for words in (group.attended, group.offsets))
        values = (np.ones(len(sentence)), *right, question.chance)
        counts = Counts(*(by_sentence(v, sentence) for v in values))
        is_scoring = scoring[np.unique(sentence)]
        compared = compare(counts.take(~is_scoring), counts.take(is_scoring), random)
        yield _Answer(group, question, compared.eligible, compared)


# ------------------------------------------------------------------ what is said
def _record(
    answer: _Answer, found: Compared, head: int, tests: int, text: Text, sentences: Sequence[Parsed]
) -> TypeRecord:
    p = min(1.0, float(found.p[head]) * tests)
    score, difference = float(found.accuracy[head]), float(found.difference[head])
    above = p <= ALPHA and float(found.low[head]) > found.chance
    claimed = above and difference >= MARGIN
    example = _example(answer, found.offset, head, text, sentences) if claimed else None
    return TypeRecord(
        TYPE,
        score,
        found.chance,
        found.eligible,
        float(found.low[head]),
        float(found.high[head]),
        example,
        claimed,
        (("clark_2019",) if above else ()) + (("voita_2019",) if claimed else ()),
        (f"offset {OFFSETS[found.offset]:+d}", found.offset_accuracy),
        p,
        {
            "relation": answer.question.relation,
            "direction": answer.question.direction,
            "difference": difference,
            "difference_low": float(found.difference_low[head]),
            "difference_high": float(found.difference_high[head]),
        },
    )


def _chosen(records: Sequence[tuple[float, TypeRecord]]) -> tuple[TypeRecord, ...]:
    """Those that are claimed, highest above their offset first, or the one that the selection half puts first."""
    claimed = [record for _, record in records if record.claimed]
    if claimed:
        return tuple(sorted(claimed, key=lambda r: -float(r.details["difference"])))
    return (max(records, key=lambda pair: pair[0])[1],)


def _example(answer: _Answer, offset: int, head: int, text: Text, sentences: Sequence[Parsed]) -> Example | None:
    """The right word with the largest weight, of those that the offset gets wrong where there are any."""
    group, question = answer.group, answer.question
    right = question.right(group.attended[head])
    telling = right & ~question.right(group.offsets[offset])
    words = question.words[telling if telling.any() else right]
    if not len(words):
        return None
    word = int(words[group.weights[head, words].argmax()])
    sentence = int(text.sentence[word])
    begin, spelled = int(text.begin[sentence]), sentences[sentence].words
    here, there = word - begin, int(group.attended[head, word]) - begin
    near = spelled[max(0, min(here, there) - _NEAR) : max(here, there) + _NEAR + 1]
    looked = Looked(there, spelled[there], float(group.weights[head, word]))
    return Example(" ".join(near), here, spelled[here], (looked,))


def _row(answer: _Answer, tests: int) -> dict[str, Any]:
    """The best head of one question; None where it was not measured."""
    row: dict[str, Any] = {"relation": answer.question.relation, "direction": answer.question.direction}
    found = answer.compared
    if found is None:
        stack = answer.group.places[0][0]
        return row | {"stack": stack} | dict.fromkeys(_NUMBERS) | {"eligible": answer.eligible}
    head = found.best
    p = float(found.p[head])
    numbers = (
        *answer.group.places[head][1:],
        *(float(a[head]) for a in (found.accuracy, found.low, found.high)),
        OFFSETS[found.offset],
        found.offset_accuracy,
        *(float(a[head]) for a in (found.difference, found.difference_low, found.difference_high)),
        min(1.0, p * tests),
        p,
        found.eligible,
        found.chance,
    )
    return row | {"stack": answer.group.places[head][0]} | dict(zip(_NUMBERS, numbers, strict=True))


# `p` is corrected for heads, relations and directions, `p_heads` for heads only.
_NUMBERS = (
    *("layer", "head", "accuracy", "low", "high", "offset", "offset_accuracy", "difference", "diff_low", "diff_high"),
    *("p", "p_heads", "eligible", "chance"),
)
