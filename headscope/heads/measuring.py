"""Running a model over prepared texts and measuring every head on each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from headscope.capture.feed import Axis
from headscope.capture.session import Capture, Engine, SiteFacts
from headscope.errors import InputError
from headscope.heads.catalogue.examples import Examples
from headscope.heads.catalogue.kinds import key_tokens
from headscope.heads.catalogue.layer_types import LayerTypes
from headscope.heads.catalogue.observing import TypeStatistics
from headscope.heads.catalogue.text_types import TextType
from headscope.heads.metrics import variant
from headscope.heads.pictures import Keep, Maps
from headscope.heads.rules import RuleSet
from headscope.heads.statistics import HeadStatistics, Layer, Values
from headscope.heads.tokens import token_groups
from headscope.models.inputs import Prepared
from headscope.models.loading import LoadedModel
from headscope.models.selection import Selection, ranges
from headscope.models.sites import Site
from headscope.results import MOST_CELLS, AttentionMap

# Batches in which examples are looked for.
_WITH_EXAMPLES = 2
# Up to this many tokens a model in half precision is read from its own, rounded, matrices.
_SHORT = 1024

ENGINES = ("auto", "streaming", "layerwise", "full")


@dataclass(frozen=True)
class Measured:
    """Per-text values by layer and metric, what the sites turned out to be, the first text's maps, sums of types."""

    values: dict[Layer, dict[str, Values]]
    facts: dict[Layer, SiteFacts]
    maps: tuple[AttentionMap, ...]
    warnings: tuple[str, ...]
    engine: str
    types: Mapping[Layer, LayerTypes]


@dataclass(frozen=True)
class Measuring:
    """What is measured, and how.

    Attributes:
        sites, wanted: All attention sites of the model, and those whose heads are measured.
        heads: Which of their heads.
        names: Metrics beside those of the rules.
        engine: One of `ENGINES`.
        words, exclude_special: As for `analyze`.
        types: Types of heads that are measured on the same rows.
    """

    loaded: LoadedModel
    sites: tuple[Site, ...]
    wanted: tuple[Site, ...]
    heads: Selection
    rules: RuleSet
    names: tuple[str, ...]
    engine: str = "auto"
    words: bool = False
    exclude_special: bool = False
    types: tuple[TextType, ...] = ()

    def run(self, prepared: Prepared, maps: Maps = False) -> Measured:
        """Measure all batches.

        Raises:
            InputError: No such head, or no attention of what was asked for was computed.
            ModelError: The model fails, or nothing of what was asked for can be read.
        """
        needed = dict.fromkeys((*self.names, *self.rules.metrics, *self.rules.without_sink().metrics))
        statistics = HeadStatistics(tuple(variant(n) for n in needed))
        observing = TypeStatistics(self.types, prepared.texts)
        consumers = (statistics, observing) if self.types else (statistics,)
        found: dict[Layer, LayerTypes] = {}
        keys = {(s.stack, s.layer) for s in self.wanted}
        capture = Capture(
            self.loaded.model,
            self.sites,
            selected=lambda site: (site.stack, site.layer) in keys,
            consumers=consumers,
            engine=_engine(self.engine, self.loaded.model, prepared),
            renormalise=self.exclude_special,
        )
        parts: list[tuple[tuple[int, ...], dict[Layer, dict[str, Values]]]] = []
        pictures: tuple[AttentionMap, ...] = ()
        most = MOST_CELLS if maps == "pooled" else None
        grouped = self.words or self.exclude_special
        for number, batch in enumerate(prepared.batches):
            first = batch.order.index(0) if maps and 0 in batch.order else None
            merged = (self.words, self.exclude_special)
            keep = None if first is None else Keep(batch, first, self.heads, *merged, most, maps == "mean")
            capture.consumers = consumers if keep is None else (*consumers, keep)
            with_example = number < _WITH_EXAMPLES
            observing.examples = Examples(batch, self.words, self.exclude_special) if with_example else None
            capture.groups = token_groups(batch, self.words, self.exclude_special) if grouped else None
            axes = {n: Axis(a.lengths, a.special, key_tokens(a) if self.types else None) for n, a in batch.axes.items()}
            capture.batch(batch.inputs, axes, len(batch.order))
            parts.append((batch.order, statistics.finish()))
            for layer, sums in observing.finish().items():
                found[layer] = found[layer] + sums if layer in found else sums
            _check_readable(keys, capture)
            if number == 0:
                _check_heads(self.loaded, capture.facts, keys, self.heads)
            if keep is not None:
                pictures = keep.maps()
        facts = {
            (s.stack, s.layer): capture.facts[s.stack, s.layer]
            for s in self.sites
            if (s.stack, s.layer) in capture.facts and (s.stack, s.layer) not in capture.unreadable
        }
        pictures = tuple(m for m in pictures if (m.stack, m.layer) in facts)
        notes = _left_out(self.wanted, capture)
        used = "full" if self.engine == "full" else "streaming" if capture.streamed else "layerwise"
        warnings = (*capture.findings.warnings(), *notes)
        return Measured(_joined(parts, prepared.texts), facts, pictures, warnings, used, found)


def _engine(wanted: str, model: PreTrainedModel, prepared: Prepared) -> Engine:
    """The engine that `auto` stands for."""
    if wanted in ("streaming", "layerwise", "full"):
        return cast(Engine, wanted)
    longest = max((a.special.shape[1] for b in prepared.batches for a in b.axes.values()), default=0)
    half = model.dtype in (torch.float16, torch.bfloat16)
    return "layerwise" if half and longest <= _SHORT else "streaming"


def _left_out(wanted: tuple[Site, ...], capture: Capture) -> list[str]:
    """One line for each stack of which something is missing from the result, and why."""
    known = capture.facts.keys() | capture.unreadable.keys()
    idle = dict.fromkeys(s.stack for s in wanted if (s.stack, s.layer) not in known)
    notes = [f"{name}: no attention was computed on this input" for name in idle]
    reasons: dict[str, list[int]] = {}
    for stack, layer in capture.unreadable:
        reasons.setdefault(stack, []).append(layer)
    for stack, numbers in reasons.items():
        which = f"layer {numbers[0]} is" if len(numbers) == 1 else f"layers {ranges(sorted(numbers))} are"
        notes.append(f"{stack}: {which} left out: {capture.unreadable[stack, numbers[0]]}")
    return notes


def _check_heads(loaded: LoadedModel, facts: Mapping[Layer, SiteFacts], wanted: set[Layer], heads: Selection) -> None:
    ran = [facts[key] for key in facts if key in wanted]
    if not ran:
        stacks = sorted({stack for stack, _ in wanted})
        raise InputError(
            f"{', '.join(stacks)}: no attention was computed on this input",
            "Give the input that this part of the model reads.",
        )
    heads.check([f.heads for f in ran], f"the selected layers of {loaded.name}")


def _check_readable(wanted: set[Layer], capture: Capture) -> None:
    """Refuse where nothing that was asked for can be read."""
    if capture.unreadable and not any(key in capture.facts and key not in capture.unreadable for key in wanted):
        raise next(iter(capture.unreadable.values()))


def _joined(
    parts: Sequence[tuple[tuple[int, ...], dict[Layer, dict[str, Values]]]], texts: int
) -> dict[Layer, dict[str, Values]]:
    """Batches put together, texts in the user's order."""
    result: dict[Layer, dict[str, Values]] = {}
    for order, layers in parts:
        for layer, metrics in layers.items():
            for name, values in metrics.items():
                shape = (texts, values.value.shape[1])
                into = result.setdefault(layer, {}).setdefault(
                    name, Values(np.full(shape, np.nan), np.full(shape, np.nan))
                )
                into.value[list(order)], into.chance[list(order)] = values.value, values.chance
    return result
