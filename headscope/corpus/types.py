"""The head catalogue over a corpus: what the texts showed, and the types that bring their own inputs, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from headscope.capture.session import Engine
from headscope.corpus.job import Job
from headscope.corpus.summary import Summary
from headscope.corpus.worker import load
from headscope.heads.catalogue.catalogue import gather
from headscope.heads.catalogue.choice import Choice
from headscope.heads.catalogue.probing import Probing
from headscope.models.chosen_sites import select_sites
from headscope.models.sites import find_sites
from headscope.results import Analysis


def with_types(
    result: Analysis, choice: Choice, summary: Summary, job: Job, model: Any, tokenizer: Any, say: Callable[[str], None]
) -> Analysis:
    """A corpus' analysis with the types of its heads.

    Args:
        model, tokenizer: As the caller gave them; a model by name is loaded here.
    """
    if choice.needs_head:
        job = replace(job, loading={**job.loading, "own_class": True})
    loaded = load(job, model, tokenizer)
    sites = find_sites(loaded.model)
    wanted = select_sites(sites, job.stack, job.layer, loaded.name)
    engine = cast(Engine, result.engine if result.engine != "auto" else "streaming")
    probing = Probing(loaded, sites, wanted, job.head, engine, choice.seed, job.batch_size, say)
    heads = {
        (stack, layer): [(facts.heads.index(h), (stack, layer, h)) for h in job.head.within(facts.heads)]
        for (stack, layer), facts in summary.facts.items()
    }
    records, catalogue, notes = gather(probing, choice, summary.types, heads, None, result.heads)
    return replace(
        result, heads=records, catalogue=catalogue, warnings=tuple(dict.fromkeys((*result.warnings, *notes)))
    )
