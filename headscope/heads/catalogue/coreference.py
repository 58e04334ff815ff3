"""Coreference heads: a mention's head word attends to the head word of an earlier mention of the same."""

from __future__ import annotations

from pathlib import Path

from headscope.errors import InputError
from headscope.heads.catalogue.coreference_answers import answers
from headscope.heads.catalogue.coreference_records import Asked, found_by
from headscope.heads.catalogue.coreference_runs import runs_of, spaces_after
from headscope.heads.catalogue.mentions import JSON_HINT, read_mentions
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.result import Found
from headscope.heads.catalogue.words import word_batches


def coreference(probing: Probing, mentions: Path | str) -> Found:
    """How often heads find the antecedents of mentions.

    Of the mentions that have an antecedent, the share whose head word attends most to the head word of an antecedent
    (antecedent accuracy; Clark et al., 2019, "What Does BERT Look At?", section 4.3), with the pieces of words merged
    as there (section 4.1). The paper does not say among which words the most attended one is sought. Here it is among
    the head words of all earlier mentions that the row can see: that is the choice that its baselines (nearest other
    mention, head match) have, it has a chance level, and a head that often rests on a delimiter can still show what it
    would choose. Earlier are mentions that end before the mention begins, since none means a part of itself. The share
    among all words but the mention's own, the paper's wording taken literally, is in `details` as `any_word`.
    Antecedents are earlier mentions only, so that models that look both ways and causal ones answer the same. Mentions
    that have nothing but antecedents before them do not count: nothing can go wrong there. Of candidates alike, each
    counts a part.

    Baselines answer the same questions: the nearest earlier mention; the nearest one with the same head word in lower
    case, or else the nearest one. A head has the type where it is better than the better of the two and than chance,
    each at 5 % after correction for the number of heads. `criteria` names the baselines that it beats.

    The table's head is chosen on a random half of the documents and scored on the other, as are the baselines beside
    it; its gain over the better one is in the summary.

    Args:
        mentions: A file as `read_mentions` takes it.

    Raises:
        InputError: The file is wrong, or has no mention to ask about.
        ModelError: There is no tokenizer, or no readable attention between words.
    """
    documents = read_mentions(mentions)
    runs = runs_of(probing, documents)
    if not any(run.questions for run in runs.runs):
        hint = f"A mention needs an earlier one that means the same and one that does not. {JSON_HINT}"
        raise InputError(f"{mentions} has no mention to choose an antecedent for", hint)
    asked = [run for run in runs.runs if run.questions]
    count = sum(len(run.questions) for run in asked)
    probing.say(f"coreference: {count} mentions in {len(documents)} documents")
    words = word_batches(probing, [run.words for run in asked], [spaces_after(run.words) for run in asked])
    kept = [asked[i] for i in words.kept]
    lost = count - sum(len(run.questions) for run in kept)
    if lost == count:
        raise InputError(
            f"{mentions}: no mention is left: {'; '.join(words.notes)}",
            "give documents whose words the tokenizer keeps apart, or another --tokenizer",
        )
    notes = [*runs.notes, *(f"coreference: {note}" for note in words.notes)]
    notes += [f"coreference: {lost} mentions are lost with them"] if lost else []
    found, more = answers(probing, words, kept)
    return found_by(probing, Asked.of(kept), found, [*notes, *more])
