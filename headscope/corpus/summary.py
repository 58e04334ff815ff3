"""What was measured on any number of texts, as sums that merge in any order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from headscope.heads.catalogue.layer_types import LayerTypes
from headscope.heads.layer_facts import LayerFacts
from headscope.heads.statistics import Layer
from headscope.heads.sums import LayerSums
from headscope.results import ModelInfo

Sums = TypeVar("Sums", LayerSums, LayerTypes)

# Warnings and skipped texts that are named.
MOST_NAMED = 10


@dataclass(frozen=True)
class Summary:
    """A commutative monoid: `a + b` measures the texts of both, `Summary()` none.

    Counts are exact; sums of floats are the same whatever the order up to rounding, and bit for bit in one order.

    Attributes:
        first: The number of the first partition in it; tells whose tokens are shown. -1 for none.
        texts, tokens, truncated: Texts that were measured, their tokens, and how many were cut.
        longest, limit: Tokens of the longest text before it was cut, and of what was kept of it; 0 if none was.
        unknown: Texts of which the tokenizer knows less than half; `known`: whether it knew anything of any text.
        skipped: Texts of which the tokenizer makes nothing; `named`: the first of them, where and why.
        first_text: The number in the corpus of the first text that was measured; -1 for none.
        first_tokens: Labels of that text's tokens.
        model: None before anything was measured.
        engines: The engines that ran.
        facts, sums: By layer, in the model's order.
        types: By layer, what the texts showed of types of heads; empty where none are asked for.
        warnings: One line each, as often as not the same for all texts.
    """

    first: int = -1
    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    longest: int = 0
    limit: int = 0
    unknown: int = 0
    known: bool = False
    skipped: int = 0
    named: tuple[tuple[str, str], ...] = ()
    first_text: int = -1
    first_tokens: tuple[str, ...] = ()
    model: ModelInfo | None = None
    engines: tuple[str, ...] = ()
    facts: Mapping[Layer, LayerFacts] = field(default_factory=dict)
    sums: Mapping[Layer, LayerSums] = field(default_factory=dict)
    types: Mapping[Layer, LayerTypes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __add__(self, other: Summary) -> Summary:
        if self.first < 0 or other.first < 0:
            return self if other.first < 0 else other
        a, b = (self, other) if self.first <= other.first else (other, self)
        return Summary(
            first=a.first,
            texts=a.texts + b.texts,
            tokens=a.tokens + b.tokens,
            truncated=a.truncated + b.truncated,
            longest=max(a.longest, b.longest),
            limit=max(a.limit, b.limit),
            unknown=a.unknown + b.unknown,
            known=a.known or b.known,
            skipped=a.skipped + b.skipped,
            named=(a.named + b.named)[:MOST_NAMED],
            first_text=a.first_text if a.first_text >= 0 else b.first_text,
            first_tokens=a.first_tokens or b.first_tokens,
            model=_larger(a.model, b.model),
            engines=tuple(sorted({*a.engines, *b.engines})),
            facts={layer: a.facts[layer] if layer in a.facts else b.facts[layer] for layer in _layers(a, b)},
            sums={layer: _sum(a.sums.get(layer), b.sums.get(layer)) for layer in _layers(a, b)},
            types={
                layer: _sum(a.types.get(layer), b.types.get(layer))
                for layer in _layers(a, b)
                if layer in a.types or layer in b.types
            },
            warnings=tuple(dict.fromkeys((*a.warnings, *b.warnings)))[:MOST_NAMED],
        )


def _layers(a: Summary, b: Summary) -> list[Layer]:
    """In the order of the one that has most: a layer that one lacks was not computed on its texts."""
    more, less = (a, b) if len(a.sums) >= len(b.sums) else (b, a)
    return list(dict.fromkeys((*more.sums, *less.sums)))


def _sum(a: Sums | None, b: Sums | None) -> Sums:
    if a is None or b is None:
        found = a if b is None else b
        assert found is not None
        return found
    return a + b


def _larger(a: ModelInfo | None, b: ModelInfo | None) -> ModelInfo | None:
    """The one that saw more of the model."""
    if a is None or b is None:
        return a if b is None else b
    return b if sum(len(s.layers) for s in b.stacks) > sum(len(s.layers) for s in a.stacks) else a
