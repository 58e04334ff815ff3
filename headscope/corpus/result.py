"""From sums over a corpus to the analysis that is shown."""

from __future__ import annotations

import numpy as np

from headscope.corpus.job import Job
from headscope.corpus.summary import Summary
from headscope.errors import InputError, ModelError
from headscope.heads.interval import ROUGH_BELOW, interval, rough
from headscope.heads.labels import head_records
from headscope.heads.metrics import plugin_versions
from headscope.models.encoding import TOKENIZER_HINT
from headscope.models.versions import versions
from headscope.reading import Skipped
from headscope.results import Analysis, CorpusInfo, InputInfo, RuleInfo


def analysis_of(summary: Summary, job: Job, corpus: CorpusInfo, skipped: Skipped) -> Analysis:
    """The result.

    Args:
        skipped: What the readers left out; the tokenizer's are in `summary`.

    Raises:
        InputError: No text could be read.
        ModelError: The tokenizer knows nothing of any text.
    """
    if summary.model is None:
        raise InputError(f"the tokenizer finds nothing to read in {corpus.name}", "give texts with words")
    if not summary.known:
        raise ModelError(f"the tokenizer of {summary.model.name} knows none of the texts", TOKENIZER_HINT)
    records = tuple(
        record
        for key, facts in summary.facts.items()
        for record in head_records(facts, summary.sums[key], job.rules, job.names, job.head.within(facts.heads))
    )
    return Analysis(
        model=summary.model,
        engine=summary.engines[0] if len(summary.engines) == 1 else "auto",
        rules=RuleInfo(job.rules.name, job.rules.thresholds),
        inputs=InputInfo(summary.texts, summary.tokens, summary.truncated, summary.first_tokens),
        heads=records,
        versions=versions() | plugin_versions(job.shown),
        warnings=_warnings(summary, job, corpus, skipped),
        corpus=corpus,
    )


def _warnings(summary: Summary, job: Job, corpus: CorpusInfo, skipped: Skipped) -> tuple[str, ...]:
    found = [*skipped.lines()]
    if corpus.sample is not None and summary.texts + summary.skipped < corpus.sample and not corpus.reached:
        found.append(
            f"the corpus has {summary.texts + summary.skipped:,} texts, fewer than a sample of {corpus.sample:,}"
        )
    if summary.skipped:
        named = "; ".join(f"{where}: {reason}" for where, reason in summary.named)
        texts = "1 text was" if summary.skipped == 1 else f"{summary.skipped:,} texts were"
        found.append(f"{texts} left out: {named}{' …' * (summary.skipped > len(summary.named))}")
    if summary.truncated:
        cut = f"{summary.truncated:,} of {summary.texts:,} texts cut to {summary.limit} tokens"
        found.append(f"{cut} (the longest has {summary.longest:,})")
    if summary.unknown:
        found.append(
            f"the tokenizer does not know half or more of {summary.unknown:,} of {summary.texts:,} texts: "
            "what is measured there says little"
        )
    found += rough(summary.texts)
    if corpus.until is not None and not corpus.reached:
        found.append(
            f"the texts ended before every interval was {corpus.until} wide: the widest is {_widest(summary, job)}"
        )
    return tuple(dict.fromkeys((*found, *summary.warnings)))


def narrow(summary: Summary, job: Job, width: float) -> bool:
    """Whether the 95 % interval of every shown metric of every chosen head is at most so wide, over enough texts."""
    return summary.texts >= ROUGH_BELOW and all(found <= width for *_, found in _widths(summary, job))


def _widths(summary: Summary, job: Job) -> list[tuple[str, int, str, int, float]]:
    """Of every shown metric: stack, layer, name, head and width of the head with the widest interval."""
    widths = []
    for (stack, layer), facts in summary.facts.items():
        heads = job.head.within(facts.heads)
        places = [facts.heads.index(head) for head in heads]
        for name, moments in summary.sums[stack, layer].values.items():
            if name not in job.shown or not places:
                continue
            some = moments.take(places)
            low, high = interval(some)
            # One value has no interval yet; what no text shows will have none.
            width = np.where(some.count > 1, high - low, np.where(some.count == 1, np.inf, 0.0))
            worst = int(np.argmax(width))
            widths.append((stack, layer, name, heads[worst], float(width[worst])))
    return widths


def _widest(summary: Summary, job: Job) -> str:
    stack, layer, name, head, width = max(_widths(summary, job), key=lambda found: found[-1])
    return f"{width:.4f}, {name} of {stack} L{layer}H{head}"
