"""What every view needs to know of an analysis before it draws: its parts, its metrics, its facts."""

from __future__ import annotations

import math

from headscope.heads.interval import ROUGH_BELOW
from headscope.results import STABLE, Analysis, CorpusInfo, HeadRecord, Stack

Layers = dict[int, list[HeadRecord]]

UNSTABLE_MARK = "*"
STABLE_TERM = "stable: the share of texts on which the head has its label"
SECOND_TERM = "second: the other label that it has most often"


def by_stack(analysis: Analysis) -> dict[str, Layers]:
    """The records by stack, then by layer, in the order in which they come."""
    stacks: dict[str, Layers] = {}
    for record in analysis.heads:
        stacks.setdefault(record.stack, {}).setdefault(record.layer, []).append(record)
    return stacks


def metric_names(analysis: Analysis) -> list[str]:
    """Every metric that some head has, in the order in which they first come."""
    return list(dict.fromkeys(name for record in analysis.heads for name in record.metrics))


def has_spread(analysis: Analysis) -> bool:
    """True where at least one metric has an interval over texts."""
    return any(record.spread for record in analysis.heads)


def has_stability(analysis: Analysis) -> bool:
    """True where at least one head's label was seen on several texts."""
    return any(record.stability is not None for record in analysis.heads)


def interval_note(analysis: Analysis) -> str:
    """What ± says in tables."""
    rough = analysis.inputs.texts < ROUGH_BELOW
    return "± half of a 95 % interval over texts" + f", rough over fewer than {ROUGH_BELOW}" * rough


def unstable(record: HeadRecord) -> bool:
    """True where too many texts give the head another label."""
    return record.stability is not None and record.stability < STABLE


def stability_note(analysis: Analysis) -> str:
    """The mark, how many labels are not stable, and what that means; empty where one text was measured."""
    known = [record for record in analysis.heads if record.stability is not None]
    if not known:
        return ""
    if not any(map(unstable, known)):
        return f"every label is stable: {percent(STABLE)} of the texts or more give the head the same"
    count, allowed = sum(map(unstable, known)), f"more than {percent(1 - STABLE)} of the texts"
    if count == 1:
        return f"{UNSTABLE_MARK} 1 of {plural(len(known), 'label')} is not stable: on {allowed} this head has another"
    labels = f"{count:,} of {plural(len(known), 'label')}"
    return f"{UNSTABLE_MARK} {labels} are not stable: on {allowed} these heads have another"


def percent(share: float) -> str:
    """`90 %`, rounded down: 100 % is every text, and what is shown as stable is."""
    return f"{math.floor(100 * share + 1e-9)} %"


def covers_model(analysis: Analysis) -> bool:
    """True where the records are all heads of all layers of the stacks they belong to, and of more than one layer."""
    stacks = by_stack(analysis)
    if sum(len(layers) for layers in stacks.values()) < 2:
        return False
    return all(_head_counts(layers) == _expected(analysis, name) for name, layers in stacks.items())


def _head_counts(layers: Layers) -> dict[int, int]:
    return {layer: len(records) for layer, records in layers.items()}


def _expected(analysis: Analysis, name: str) -> dict[int, int] | None:
    for stack in analysis.model.stacks:
        if stack.name == name:
            return dict(zip(stack.layers, stack.num_heads, strict=True))
    return None


def facts(analysis: Analysis) -> list[tuple[str, str]]:
    """The header of a report: name and value, as plain text that is not yet safe to show."""
    model, corpus = analysis.model, analysis.corpus
    kind = f"{model.class_name} ({model.type}), {model.dtype} on {model.device}"
    heads = "; ".join(_stack_fact(stack, model.num_kv_heads) for stack in model.stacks)
    return [
        ("model", model.name),
        ("class", kind),
        ("heads", heads),
        ("input", _input_fact(analysis)) if corpus is None else ("texts", _texts_fact(analysis, corpus)),
        ("rules", _rules_fact(analysis)),
    ]


def _stack_fact(stack: Stack, num_kv_heads: int | None) -> str:
    counts = sorted(set(stack.num_heads))
    heads = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "0"
    shared = f" ({num_kv_heads} key/value)" if num_kv_heads is not None and counts != [num_kv_heads] else ""
    return f"{stack.name}: {plural(len(stack.layers), 'layer')} × {heads} heads{shared}"


def _input_fact(analysis: Analysis) -> str:
    parts = _sizes(analysis)
    if analysis.inputs.first_tokens:
        parts.append(f"position 0 is {analysis.inputs.first_tokens[0]!r}")
    return ", ".join(parts)


def _texts_fact(analysis: Analysis, corpus: CorpusInfo) -> str:
    """Which texts of the corpus were measured, and why no more. A position 0 that they share is not known."""
    parts = _sizes(analysis)
    if corpus.skipped:
        parts.append(f"{corpus.skipped:,} skipped")
    chosen = []
    if corpus.sample is not None:
        most = "" if analysis.inputs.texts == corpus.sample else "at most "
        chosen.append(f"a sample of {most}{corpus.sample:,}")
    if corpus.until is not None and corpus.reached:
        chosen.append(f"stopped when every interval was at most {corpus.until:g} wide")
    elif corpus.until is not None:
        chosen.append(f"not every interval is at most {corpus.until:g} wide")
    drawn = f"; {', '.join(chosen)} (seed {corpus.seed})" if chosen else ""
    return f"{corpus.name}: {', '.join(parts)}{drawn}"


def _sizes(analysis: Analysis) -> list[str]:
    inputs = analysis.inputs
    parts = [plural(inputs.texts, "text"), plural(inputs.tokens, "token")]
    return [*parts, f"{inputs.truncated:,} cut short"] if inputs.truncated else parts


def _rules_fact(analysis: Analysis) -> str:
    thresholds = ", ".join(f"{name} {value:g}" for name, value in analysis.rules.thresholds.items())
    return f"{analysis.rules.name}: {thresholds}" if thresholds else analysis.rules.name


def plural(count: int, noun: str) -> str:
    """`1 text`, `2,000 texts`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
