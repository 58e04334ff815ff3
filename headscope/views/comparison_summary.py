"""What a comparison of two models found, in a few lines."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import RenderableType

from headscope.comparison.result import Comparison
from headscope.results import ModelInfo
from headscope.views.columns import Facts
from headscope.views.sections import plural
from headscope.views.text import visible

# One in so many 95 % intervals leaves out what it should hold.
_BY_CHANCE = 20


def header_lines(result: Comparison) -> RenderableType:
    """Both models, the texts and the rules."""
    return Facts([(name, visible(value)) for name, value in facts(result)])


def facts(result: Comparison) -> list[tuple[str, str]]:
    """The header of a report: name and value, as plain text that is not yet safe to show."""
    tokens = " and ".join(f"{count:,}" for count in dict.fromkeys(result.tokens))
    rows = f", distances on {plural(result.rows, 'row')}" if result.rows else ""
    return [
        ("model A", _model(result.a)),
        ("model B", _model(result.b)),
        ("input", f"{plural(result.texts, 'text')}, {tokens} tokens{rows}"),
        ("rules", result.rules.name),
    ]


def _model(model: ModelInfo) -> str:
    layers = ", ".join(f"{s.name}: {plural(len(s.layers), 'layer')}" for s in model.stacks)
    return f"{model.name} ({model.class_name}, {model.dtype} on {model.device}; {layers})"


def summary(result: Comparison) -> list[str]:
    """What was found, a line each: labels, heads of one model only, distances, differences of metrics, matching."""
    return [_labels(result), *_missing(result), *_distances(result), *_metrics(result), *_moves(result)]


def _labels(result: Comparison) -> str:
    both = [h for h in result.heads if h.in_both]
    changed = sum(h.changed for h in both)
    return f"{changed:,} of {plural(len(both), 'head')} that both models have changed label"


def _missing(result: Comparison) -> Iterator[str]:
    for name, removed in zip("AB", result.removed, strict=True):
        if removed:
            heads = "; ".join(f"{place}: {', '.join(map(str, heads))}" for place, heads in removed.items())
            yield f"pruned from {name}: {heads}"
    gone = _pruned(result)
    for name, there in (("A", "pattern_a"), ("B", "pattern_b")):
        only = [
            h
            for h in result.heads
            if not h.in_both and getattr(h, there) is not None and (h.stack, h.layer, h.head) not in gone
        ]
        if only:
            layers = len({(h.stack, h.layer) for h in only})
            yield f"only {name} has {plural(len(only), 'head')}, in {plural(layers, 'layer')}"


def _pruned(result: Comparison) -> set[tuple[str, int, int]]:
    places = set()
    for removed in result.removed:
        for place, heads in removed.items():
            stack, _, layer = place.rpartition(".")
            places |= {(stack, int(layer), head) for head in heads}
    return places


def _distances(result: Comparison) -> Iterator[str]:
    known = [h for h in result.heads if h.distance is not None]
    if known:
        far = max(known, key=lambda h: h.distance or 0.0)
        values = [h.distance or 0.0 for h in known]
        mean = math.fsum(values) / len(values)
        name = f", {name_of(result, far.stack, far.name)}" if far.distance else ""
        yield f"distance between heads of the same number: {mean:.3f} on average, {max(values):.3f} at most{name}"


def _metrics(result: Comparison) -> Iterator[str]:
    known = [(h, m) for h in result.heads if h.spread for m in h.spread if h.spread[m].low is not None]
    if known:
        clear = sum(h.clear(m) for h, m in known)
        yield (
            f"{clear:,} of {len(known):,} differences of metrics have an interval without 0; "
            f"by chance alone it would be about {round(len(known) / _BY_CHANCE):,}"
        )


def _moves(result: Comparison) -> Iterator[str]:
    if result.matching:
        moved = [m for m in result.matching if m.a != m.b]
        named = ", ".join(" → ".join(m.names) for m in moved[:6]) + (", …" if len(moved) > 6 else "")
        yield f"best matching: {plural(len(result.matching), 'pair')}, {len(moved):,} of other numbers" + (
            f" ({named})" if moved else ""
        )


def name_of(result: Comparison, stack: str, name: str) -> str:
    """A head's name; the stack before it where there are several."""
    return f"{stack}.{name}" if len({h.stack for h in result.heads}) > 1 else name
