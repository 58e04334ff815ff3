"""What heads and baselines answer: which earlier mention each mention's head word attends to most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.capture.blocks import RowBlock, Rows
from headscope.capture.feed import Axis
from headscope.capture.session import SiteFacts
from headscope.errors import ModelError
from headscope.heads.catalogue.attended import between_words, word_groups
from headscope.heads.catalogue.coreference_runs import Question, Run
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.words import WordBatches
from headscope.heads.statistics import Layer
from headscope.models.selection import ranges
from headscope.models.sites import Site

Floats = NDArray[np.float32]
# Weights that differ by less are alike; merging the pieces of words rounds them.
_ALIKE = 1e-6


@dataclass(frozen=True, eq=False)
class Answers:
    """One layer's answers to all questions, in the order of the runs. 1 is right, 0 is wrong, of several candidates
    alike the share that is right.

    Attributes:
        facts: The layer.
        eligible: bool, (question,): at least one right and one wrong candidate are visible.
        chance, nearest, match: float32, (question,): any visible candidate; the nearest one; the nearest one of the
            same word, or else the nearest one.
        value, any_word: float32, (question, head): the most attended candidate; the most attended of all words but
            the mention's own.
        chosen: int32, (question, head): the most attended candidate, a position in the run; the first of several.
        weight: float32, (question, head): the attention that it gets.
    """

    facts: SiteFacts
    eligible: NDArray[np.bool_]
    chance: Floats
    nearest: Floats
    match: Floats
    value: Floats
    any_word: Floats
    chosen: NDArray[np.int32]
    weight: Floats


def answers(probing: Probing, words: WordBatches, runs: Sequence[Run]) -> tuple[dict[Layer, Answers], tuple[str, ...]]:
    """Run the model over the runs that `words` has kept, which are `runs`, in this order.

    Cross-attention is left out: its keys are another text's.

    Returns:
        Answers by layer, and notes: what is odd about the attention, and which layers are missing.

    Raises:
        ModelError: The model fails, or none of its wanted layers has readable attention between words.
    """
    consumer = _Asking(tuple(runs))
    capture = probing.capture(consumer)
    wanted = capture.selected
    for batch in words.batches:
        capture.selected = between_words(wanted, batch)
        capture.groups = word_groups(batch)
        consumer.order = batch.order
        capture.batch(batch.inputs, {n: Axis(a.lengths, a.special) for n, a in batch.axes.items()}, len(batch.order))
    found = {k: v for k, v in consumer.tables.items() if k not in capture.unreadable}
    if not found:
        reasons = list(capture.unreadable.values())
        raise (
            reasons[0]
            if reasons
            else ModelError(
                f"{probing.loaded.name}: none of the wanted layers has attention between the words of a text",
                "Coreference is measured in self-attention over text.",
            )
        )
    notes = [*capture.findings.warnings(), *_missing(capture.unreadable)]
    return {layer: Answers(capture.facts[layer], **table) for layer, table in found.items()}, tuple(notes)


def _missing(unreadable: Mapping[Layer, ModelError]) -> list[str]:
    """One line a stack and reason."""
    layers: dict[tuple[str, str], list[int]] = {}
    for (stack, layer), reason in unreadable.items():
        layers.setdefault((stack, str(reason)), []).append(layer)
    return [f"{stack}: layers {ranges(sorted(n))} are left out: {reason}" for (stack, reason), n in layers.items()]


@dataclass
class _Asking:
    """The consumer of rows of words.

    Attributes:
        order: Which runs the texts of the present batch are.
        tables: By layer, the arrays of `Answers`, by name.
    """

    runs: tuple[Run, ...]
    order: tuple[int, ...] = ()
    tables: dict[Layer, dict[str, NDArray[Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = [len(run.questions) for run in self.runs]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def rows(self, site: Site, rows: Rows) -> None:
        """Answer the questions of these rows."""
        for block in rows.blocks():
            for text, run in enumerate(self.order):
                self._ask(site, block, text, run)

    def _ask(self, site: Site, block: RowBlock, text: int, run: int) -> None:
        here = range(block.first_row, block.first_row + block.size)
        asked = [(self._first[run] + i, q) for i, q in enumerate(self.runs[run].questions) if q.head in here]
        if not asked:
            return
        questions = [q for _, q in asked]
        rows = torch.tensor([q.head - block.first_row for q in questions], device=block.weights.device)
        weights = block.weights[text][:, rows].cpu()
        seen = block.visible[min(text, len(block.visible) - 1), 0][rows].cpu()
        layer = (site.stack, site.layer)
        if layer not in self.tables:
            self.tables[layer] = _empty(int(self._first[-1]), weights.shape[0])
        places = np.array([i for i, _ in asked])
        for name, values in _answered(questions, weights, seen).items():
            self.tables[layer][name][places] = values.numpy()


def _empty(questions: int, heads: int) -> dict[str, NDArray[Any]]:
    result: dict[str, NDArray[Any]] = {"eligible": np.zeros(questions, np.bool_)}
    for name in ("chance", "nearest", "match"):
        result[name] = np.zeros(questions, np.float32)
    for name in ("value", "any_word", "weight"):
        result[name] = np.zeros((questions, heads), np.float32)
    result["chosen"] = np.zeros((questions, heads), np.int32)
    return result


def _answered(questions: Sequence[Question], weights: Tensor, seen: Tensor) -> dict[str, Tensor]:
    """Answers from weights (head, question, word) and what is visible, bool (question, word)."""
    wide = [_spread(questions, name, weights.shape[-1]) for name in ("candidates", "right", "same")]
    candidates, right, same = wide
    own = torch.zeros_like(seen)
    own[torch.arange(len(questions)), torch.tensor([q.head for q in questions])] = True
    open_ones = candidates & seen
    same = same & open_ones
    nearest, matching = _last(open_ones), torch.where(same.any(dim=-1), _last(same), _last(open_ones))
    value, chosen, weight = _most_attended(weights, open_ones, right)
    return {
        "eligible": (open_ones & right).any(dim=-1) & (open_ones & ~right).any(dim=-1),
        "chance": (open_ones & right).sum(dim=-1) / open_ones.sum(dim=-1).clamp(min=1),
        "nearest": right.gather(1, nearest[:, None])[:, 0].float(),
        "match": right.gather(1, matching[:, None])[:, 0].float(),
        "value": value.T,
        "any_word": _most_attended(weights, seen & ~own, right)[0].T,
        "chosen": chosen.T.int(),
        "weight": weight.T,
    }


def _spread(questions: Sequence[Question], name: str, words: int) -> Tensor:
    """bool, (question, word): the candidates, or those of them that are `right` or the `same` word."""
    result = torch.zeros(len(questions), words, dtype=torch.bool)
    for row, q in enumerate(questions):
        marks = True if name == "candidates" else torch.from_numpy(getattr(q, name))
        result[row, torch.from_numpy(q.candidates)] = marks
    return result


def _last(marks: Tensor) -> Tensor:
    """int64, (question,): the last marked word, 0 where there is none."""
    return (marks * torch.arange(marks.shape[-1])).amax(dim=-1)


def _most_attended(weights: Tensor, choices: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(head, question) each: the share of right ones among the most attended choices, the first of them, its weight."""
    offered = weights.masked_fill(~choices, -1.0)
    most, chosen = offered.max(dim=-1)
    alike = choices & (offered >= most[..., None] * (1 - _ALIKE))
    share = (alike & right).sum(dim=-1) / alike.sum(dim=-1).clamp(min=1)
    return share, chosen, most.clamp(min=0)
