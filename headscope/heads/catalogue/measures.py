"""What the types of heads measure on a text: functions from rows of attention to values a row, as metrics are.

A function gives several measures at once, by name. What makes no sense for the rows (an offset where keys are another
sequence, kinds of tokens that are not known) is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headscope.attention.visibility import Target
from headscope.capture.blocks import Rows
from headscope.capture.key_tokens import REPEATS, SUCCESSORS
from headscope.heads.catalogue.kinds import OTHER_SPECIAL, PUNCTUATION
from headscope.heads.metrics import RowValues

Measures = Callable[[Rows], Mapping[str, RowValues]]
"""Values (batch, head, rows) and the rows that can show the measure, by the measure's name."""

# Offsets that have a type of their own, and those around a token that make its window.
OFFSETS = tuple(k for k in range(-6, 7) if k)
WINDOW = (-2, -1, 0, 1, 2)
FIRST = Target(key=0)
# Weights that differ by less are equal but for rounding.
_TIE = 1e-3


def offsets(rows: Rows) -> dict[str, RowValues]:
    """`at:K`: the weight on the key at offset K; rows that see it. `most:K`: 1 where the largest weight is there.

    Where another key nearby, or the first one, has as much, the largest is not there. `window`: the weight on keys up
    to two away, the row's own included; rows that see more than those.
    """
    if rows.cross:
        return {}
    numbers = [k for k in (*OFFSETS, 0) if _ever_seen(rows, Target(offset=k))]
    targets = [Target(offset=k) for k in numbers]
    seen = [rows.has(t) & rows.sees(t) for t in targets]
    at = torch.stack([rows.at(t).masked_fill(~s, 0) for t, s in zip(targets, seen, strict=True)])
    first = rows.at(FIRST) * _elsewhere(rows, max(map(abs, numbers)))
    nearly = torch.maximum(at.amax(dim=0), first) * (1 - _TIE)
    alone = ((at >= nearly).sum(dim=0) + (first >= nearly)) == 1
    most = (at >= torch.maximum(nearly, rows.largest() * (1 - _TIE))) & alone & (at > 0)
    result: dict[str, RowValues] = {}
    for place, number in enumerate(numbers):
        eligible = rows.valid & seen[place] & (rows.counts >= 2)
        result[f"at:{number}"] = at[place], eligible
        result[f"most:{number}"] = most[place].float(), eligible
    near = [i for i, k in enumerate(numbers) if k in WINDOW]
    count = torch.stack([seen[i].expand(rows.counts.shape) for i in near]).sum(dim=0)
    result["window"] = at[near].sum(dim=0), rows.valid & (rows.counts > count)
    return result


def first_token(rows: Rows) -> dict[str, RowValues]:
    """`first`: the weight on the first key; rows that see it and others, the first row of self-attention left out."""
    later = rows.positions > 0 if not rows.cross else rows.positions >= 0
    could = rows.valid & rows.has(FIRST) & rows.sees(FIRST) & (rows.counts >= 2)
    return {"first": (rows.at(FIRST), could & later)}


def kinds(rows: Rows) -> dict[str, RowValues]:
    """By kind of token, the weight on the keys of that kind; rows that see one, and others."""
    result = {}
    for kind in (OTHER_SPECIAL, PUNCTUATION) if rows.tokens is not None else ():
        count = _counted(rows, kind)
        result[kind] = rows.on_kind(kind), rows.valid & (count > 0) & (rows.counts > count)
    return result


def relations(rows: Rows) -> dict[str, RowValues]:
    """The weight on keys in a relation to the row (`KeyTokens.cells`); rows that have such in sight, and others.

    `successors` is "prefix matching" of Olsson et al. 2022, on the rows that could show it.
    """
    if rows.cross or rows.tokens is None:
        return {}
    result = {}
    for name in (REPEATS, SUCCESSORS):
        count = rows.counts_of(name)
        result[name] = rows.onto(name), rows.valid & (count > 0) & (rows.counts > count)
    return result


def breadth(rows: Rows) -> dict[str, RowValues]:
    """`broad`: a row's entropy over ln(visible keys), rows scaled to sum to one; `sharp`: 1 less that.

    Rows that see two keys or more.
    """
    relative = rows.entropy(scaled=True) / rows.counts.clamp(min=2).log()
    eligible = rows.valid & (rows.counts >= 2) & (rows.total() > 0)
    return {"broad": (relative, eligible), "sharp": (1 - relative, eligible)}


def _ever_seen(rows: Rows, target: Target) -> bool:
    """Whether any row of the layer, in this block or not, sees its target; the own key counts always."""
    view = rows.view

    def find() -> bool:
        return bool(view.at(target.positions(torch.arange(view.rows, device=rows.valid.device))).any())

    return target.offset == 0 or view.remember(("ever", target), find)


def _elsewhere(rows: Rows, away: int) -> Tensor:
    """bool, (rows,): rows from which the first key is further than any offset that is looked at."""
    return rows.positions > away


def _counted(rows: Rows, kind: str) -> Tensor:
    """int64, (batch or 1, 1, rows): keys of a kind that each row sees."""
    mark = rows.kind(kind)
    total: Tensor = rows.view.remember(("kind", mark), lambda: rows.view.sums(mark.long(), mark.device))
    return total[..., rows.first_row : rows.first_row + rows.size]
