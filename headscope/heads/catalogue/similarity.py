"""How alike heads are: the distance between any two, groups of them, and pairs of which one could do.

Clark et al. (2019, "What Does BERT Look At?", section 6) sum the Jensen-Shannon divergence of two heads' rows over all
rows of a text and draw heads on a map. The sum grows with the text, so we take the mean over a sample of rows, in
units of log 2, and its square root: that is a metric (Endres and Schindelin, 2003, IEEE Transactions on Information
Theory 49), and one that Euclidean space can hold (Fuglede and Topsøe, 2004), which is what the map needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.capture.feed import Axis
from headscope.capture.session import Capture
from headscope.errors import InputError
from headscope.heads.catalogue.clustering import average_linkage, classical_scaling, numbered
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.result import Found, Place, TypeRecord
from headscope.heads.catalogue.similarity_evidence import redundant_records
from headscope.heads.catalogue.similarity_result import Similarity, groups_of
from headscope.heads.catalogue.similarity_rows import RowSampler, SampledRow
from headscope.models.inputs import Prepared
from headscope.models.selection import ranges

# Both are what a head's own attention does when it is given other context: its rows in the second half of a text of 512
# tokens with and without the first half (keys of the second half only, rows scaled to sum to one). Half of the heads of
# a Llama of 135 million parameters are further than 0.20 from themselves, and of MiniLM 0.42; nine heads in ten are
# within 0.44 and 0.50. Two heads closer than the first are redundant: less than a quarter of a row's attention would
# have to move to make them equal, as half the sum of differences is at most sqrt(2 ln 2) x distance (Pinsker's
# inequality on both halves of the divergence). Clusters closer than the second are merged.
REDUNDANT = 0.2
CLUSTER = 0.5
# Forward passes at most; of more batches, some are drawn.
PASSES = 8
# Examples whose tokens are not known count as so many tokens where rows are shared out.
_TOKENS = 256
# Keys whose sums are computed at a time, so that they stay in a core's cache.
_COLUMNS = 256
_TINY = 1e-35


def similarity(probing: Probing, prepared: Prepared, *, max_rows: int = 256) -> tuple[Similarity, Found]:
    """Compare every two heads whose rows and keys are the same tokens, on the given texts.

    A seeded sample of rows counts: real tokens that see two keys or more. Fewer than `max_rows` are taken where heads x
    rows x keys would pass 2^26 weights (256 MiB), or pairs x rows x keys 2^34 sums; rows too long for either alone are
    passed over. Rows are scaled to sum to one, so what goes to a learned sink is left out; a row of which next to
    nothing is left does not count for that head. Layers with sliding windows compare with others: keys that a row does
    not see have no weight.

    Two heads that both look at the first token only are alike, too: each record's `alternative` is the nearer of a head
    that does nothing else and one that spreads evenly, at its distance.

    Args:
        probing: The heads; those of cross-attention are left out.
        prepared: The user's texts; at most eight batches of them are run.
        max_rows: Rows to take from each stack.

    Returns:
        All distances, and a record of the type `redundant` for each head: its score is the distance to the head that is
        most like it, lower is more alike.

    Raises:
        InputError: `max_rows` is below 1, there are no two heads to compare, or no row to compare them on.
        ModelError: The model fails, or no layer can be read.
    """
    if max_rows < 1:
        raise InputError(f"max_rows is {max_rows}, needs 1 or more", "give 1 or more")
    rows, notes = _sampled(probing, prepared, max_rows)
    heads = sorted({place for row in rows for place in row.heads}, key=_in_order(probing))
    if len(heads) < 2:
        raise InputError("similarity compares heads, and there are fewer than two", "Select more layers or heads.")
    sums, counts = _summed(rows, heads)
    measured, distance = _distances(sums, counts)
    if len(measured) < len(heads):
        lost = [heads[i] for i in range(len(heads)) if i not in set(measured.tolist())]
        names = ", ".join(f"{stack} L{layer}H{head}" for stack, layer, head in lost)
        notes.append(f"similarity: {names} left out: too little of their attention goes to tokens")
    found = _similarity([heads[i] for i in measured], distance, int(counts.max()))
    records = redundant_records(found, rows, prepared)
    return found, Found(records, notes=tuple(notes), summary=_summary(found, records))


def _summary(found: Similarity, records: Mapping[Place, tuple[TypeRecord, ...]]) -> dict[str, int]:
    claimed = sum(record.claimed for several in records.values() for record in several)
    return {
        "redundant_pairs": len(found.redundant),
        "redundant_heads": claimed,
        "clusters": len(set(found.clusters)),
        "similarity_rows": found.rows,
    }


def _in_order(probing: Probing) -> Callable[[Place], tuple[int, int]]:
    """What sorts heads as the model has them."""
    order = {(s.stack, s.layer): i for i, s in enumerate(probing.sites)}
    return lambda place: (order[place[0], place[1]], place[2])


# ------------------------------------------------------------------ rows
def _sampled(probing: Probing, prepared: Prepared, max_rows: int) -> tuple[list[SampledRow], list[str]]:
    """The rows, text by text, and what was left out."""
    rng = np.random.default_rng(probing.seed)
    rows: list[SampledRow] = []
    skipped: dict[str, str] = {s.stack: "cross-attention has keys of other tokens" for s in probing.wanted if s.cross}
    capture = probing.capture()
    dealt = shares(prepared, max_rows, rng)
    left, part = sum(count for _, count in dealt), 1.0
    for number, count in dealt:
        # What one batch does not use, rows and memory, is for the next.
        share = part * count / left
        sampler = RowSampler(probing, number, count, share, rng, skipped)
        capture.consumers = (sampler,)
        batch = prepared.batches[number]
        axes = {name: Axis(a.lengths, a.special) for name, a in batch.axes.items()}
        capture.batch(batch.inputs, axes, len(batch.order))
        rows += sampler.taken()
        left, part = left - count, part - sampler.used
    _check(capture, rows)
    notes = [f"similarity: {stack} is left out: {reason}" for stack, reason in skipped.items()]
    return [row.without(capture.unreadable) for row in rows], [*notes, *_notes(capture)]


def shares(prepared: Prepared, max_rows: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Batches to run and how many rows to take from each, as if rows were drawn from all of their tokens."""
    passes = min(PASSES, len(prepared.batches))
    chosen = sorted(int(i) for i in rng.choice(len(prepared.batches), passes, replace=False))
    sizes = []
    for i in chosen:
        lengths = [int(a.lengths.sum()) for a in prepared.batches[i].axes.values()]
        sizes.append(max(lengths, default=_TOKENS * len(prepared.batches[i].order)))
    counts = rng.multivariate_hypergeometric(sizes, min(max_rows, sum(sizes)), method="marginals")
    return [(i, int(n)) for i, n in zip(chosen, counts, strict=True) if n]


def _check(capture: Capture, rows: Sequence[SampledRow]) -> None:
    if capture.unreadable and not capture.facts.keys() - capture.unreadable.keys():
        raise next(iter(capture.unreadable.values()))
    if not rows:
        raise InputError(
            "no row of this input sees two tokens, or every row is too long to compare so many heads",
            "Give a longer text, cut it with max_length, or select fewer layers.",
        )


def _notes(capture: Capture) -> list[str]:
    notes = []
    reasons: dict[str, list[int]] = {}
    for stack, layer in capture.unreadable:
        reasons.setdefault(stack, []).append(layer)
    for stack, layers in reasons.items():
        why = capture.unreadable[stack, layers[0]]
        notes.append(f"similarity: {stack}: layers {ranges(sorted(layers))} are left out: {why}")
    for stack in capture.findings.unseen:
        notes.append(f"similarity: {stack}: rows are scaled to sum to one, without what goes to a learned sink")
    return notes


# ------------------------------------------------------------------ distances
def _summed(rows: Sequence[SampledRow], heads: Sequence[Place]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Divergences of every two heads summed over rows, and how many rows there are, (head, head) each."""
    place = {head: i for i, head in enumerate(heads)}
    sums, counts = np.zeros((len(heads),) * 2), np.zeros((len(heads),) * 2, dtype=np.int64)
    for row in rows:
        weights = row.scaled()
        said = ~weights[:, 0].isnan()
        index = np.array([place[p] for p, known in zip(row.heads, said.tolist(), strict=True) if known], dtype=int)
        sums[np.ix_(index, index)] += pair_divergences(weights[said])
        counts[np.ix_(index, index)] += 1
    return sums, counts


def pair_divergences(rows: Tensor) -> NDArray[np.float64]:
    """Jensen-Shannon divergence between any two of some rows that sum to one, in units of log 2: (row, row).

    With J(p, q) = sum of (p + q) log2 (p + q) over keys it is J(p, p) / 4 + J(q, q) / 4 - J(p, q) / 2, exactly 0 where
    rows are equal. Of rows that nearly are, float32 leaves the divergence right to about 1e-6.

    Args:
        rows: (row, key); computed in float32, and summed in float64.
    """
    count, keys = rows.shape
    joint = torch.zeros(count, count, dtype=torch.float64)
    room, more = torch.empty(2, count * _COLUMNS)
    for start in range(0, keys, _COLUMNS):
        part = rows[:, start : start + _COLUMNS]
        part = part[:, (part > 0).any(dim=0)].float() + _TINY
        for i in range(count):
            size, shape = part[i:].numel(), part[i:].shape
            both = torch.add(part[i:], part[i], out=room[:size].view(shape))
            joint[i, i:] += torch.log2(both, out=more[:size].view(shape)).mul_(both).sum(dim=-1)
    own = joint.diagonal()
    upper = ((own + own[:, None]) / 2 - joint).triu(1).clamp(0, 2) / 2
    return (upper + upper.T).numpy()


def _distances(sums: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Heads that could be measured, and their distances, NaN between those of which no row says both."""
    kept = np.flatnonzero(counts.diagonal() > 0)
    while True:
        linked = counts[np.ix_(kept, kept)] > 0
        gaps = np.zeros(len(kept), dtype=int)
        for group in groups_of(linked):
            gaps[group] = (~linked[np.ix_(group, group)]).sum(axis=1)
        if not gaps.any():
            break
        kept = np.delete(kept, gaps.argmax())
    with np.errstate(divide="ignore", invalid="ignore"):
        return kept, np.sqrt((sums / counts)[np.ix_(kept, kept)])


def _similarity(heads: Sequence[Place], distance: NDArray[np.float64], rows: int) -> Similarity:
    groups = groups_of(np.isfinite(distance))
    position, clusters = np.zeros((len(heads), 2)), []
    for group in groups:
        within = distance[np.ix_(group, group)]
        position[group] = classical_scaling(within)
        parts = np.array(average_linkage(within).cut(CLUSTER))
        clusters += [group[parts == i].tolist() for i in range(parts.max() + 1)]
    pairs = [(int(a), int(b)) for a, b in zip(*np.nonzero(np.triu(distance < REDUNDANT, 1)), strict=True)]
    redundant = sorted(((heads[a], heads[b], float(distance[a, b])) for a, b in pairs), key=lambda pair: pair[2])
    numbers = tuple(numbered(clusters, len(heads)))
    return Similarity(tuple(heads), distance, numbers, tuple(redundant), REDUNDANT, position, rows, CLUSTER)
