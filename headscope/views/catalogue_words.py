"""What the catalogue says of the whole model in sentences: redundant pairs, the ablation check, its own numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headscope.heads.catalogue.similarity_result import Similarity
from headscope.results import Analysis
from headscope.views.catalogue_sections import Section, head_name, number, several_stacks, with_interval
from headscope.views.catalogue_tables import plain_value
from headscope.views.sections import plural

# Redundant pairs that are named.
_PAIRS = 10
# Summaries that other sections tell.
_TOLD = ("coreference", "retrieval", "redundant_pairs", "redundant_heads", "clusters", "similarity_rows")


def similarity_section(analysis: Analysis, found: Similarity) -> Section:
    """How many pairs are redundant, and the closest of them."""
    several = several_stacks(analysis)
    compared = f"{plural(len(found.heads), 'head')} on {plural(found.rows, 'row')}"
    clusters = f"{plural(len(set(found.clusters)), 'cluster')} at distances up to {found.cut:g}"
    pairs = plural(len(found.redundant), "redundant pair")
    lines = [f"{compared}: {pairs}, nearer than {found.threshold:g}; {clusters}"]
    named = [
        f"{head_name(*a, several)} and {head_name(*b, several)} {number(distance)}"
        for a, b, distance in found.redundant[:_PAIRS]
    ]
    if named:
        more = len(found.redundant) - len(named)
        lines.append(f"closest: {', '.join(named)}{f' and {more:,} more' if more else ''}")
    lines.append("distance: 0 where heads attend alike, 1 where they share no key")
    return Section("similarity", lines=tuple(lines), quiet=False)


def ablation_section(analysis: Analysis, found: Mapping[str, Any]) -> Section:
    """What zeroing the heads of a type adds to the loss, beside random other heads."""
    return Section("ablation check", lines=tuple(_ablation(analysis, found)), quiet=False)


def _ablation(analysis: Analysis, found: Mapping[str, Any]) -> Iterator[str]:
    heads, top, draws = found["heads"], found["top"], plural(found["draws"], "draw")
    kind = found.get("type", "induction")
    which = f"the {len(heads)} strongest {kind} heads" if len(heads) > 1 else f"the strongest {kind} head"
    added = with_interval(top["added"], top["low"], top["high"])
    yield f"zeroing {which} adds {added} nats to a loss of {number(found['base']['second_copy'])} on the second copy"
    for words, name in (("random other", "random"), ("random other", "same_layers")):
        drawn = found[name]
        where = " of the same layers" if name == "same_layers" else ""
        if drawn["mean"] is None:
            yield f"their layers have no others to compare with: no {words} heads{where} were drawn"
            continue
        count = len(heads) - drawn["missing"]
        adds = f"{count} {words} heads{where} add" if count > 1 else f"a {words} head{where} adds"
        ends = f"{number(drawn['min'])} to {number(drawn['max'])}"
        yield f"{adds} {_spread(drawn)} ({draws}, {ends}){_times(drawn['ratio'])}"
    yield _first_copy(found)
    several = several_stacks(analysis)
    names = (f"{head_name(h['stack'], h['layer'], h['head'], several)} {number(h['score'])}" for h in heads)
    yield f"zeroed, with scores: {', '.join(names)}"
    texts = f"{plural(found['sequences'], 'sequence')} of random tokens, {found['length']:,} a copy"
    yield f"nats a prediction; [95 % interval] over {texts}; ± a standard deviation over draws; seed {found['seed']}"


def _spread(drawn: Mapping[str, Any]) -> str:
    return number(drawn["mean"]) + ("" if drawn["sd"] is None else f" ± {number(drawn['sd'])}")


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"; the strongest add {number(ratio, 1)} times as much"


def _first_copy(found: Mapping[str, Any]) -> str:
    top = found["top"]["first_copy"]
    parts = [f"the same heads add {with_interval(top['added'], top['low'], top['high'])}"]
    for words, name in (("random others", "random"), ("those of the same layers", "same_layers")):
        drawn = found[name]["first_copy"]
        if drawn["mean"] is not None:
            parts.append(f"{words} {_spread(drawn)}")
    base = number(found["base"]["first_copy"])
    return f"on the first copy, where nothing is repeated yet (loss {base}), {', '.join(parts)}"


def summary_section(summary: Mapping[str, Any]) -> Section:
    """Numbers of the whole model that no other section tells."""
    lines = []
    for name, value in summary.items():
        if name in _TOLD or isinstance(value, list | tuple):
            continue
        inner = {f"{name} {key}": v for key, v in value.items()} if isinstance(value, Mapping) else {name: value}
        lines += [f"{n}: {plain_value(v)}" for n, v in inner.items() if not isinstance(v, Mapping | list | tuple)]
    return Section("the whole model", lines=tuple(lines), quiet=False)
