"""Whether labels mean something: what a model loses without the heads that are said to do it, and without others.

Zeroing induction heads takes in-context learning away (Olsson et al. 2022, "In-context Learning and Induction Heads",
section "Argument 3"). But zeroing any heads does harm, and more so in some layers, so the same number of random other
heads is zeroed beside them: over all layers, and in the very same layers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headscope.capture.evaluation import evaluating
from headscope.errors import InputError, ModelError
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.repeated import RepeatedTokens
from headscope.heads.catalogue.result import Place
from headscope.heads.catalogue.zeroing import Bench, Columns, Floats, batches_of
from headscope.heads.clusters import ClusterSums


def ablation_check(
    probing: Probing,
    ranked: Sequence[tuple[Place, float]],
    *,
    top: int = 10,
    draws: int = 20,
    repeated: RepeatedTokens,
) -> dict[str, Any]:
    """Loss on repeated random tokens with the first heads of a ranking zeroed together, and with as many others.

    A head is zeroed where its results enter the output projection; the model is not changed. The loss is the mean
    cross-entropy, in nats a prediction, of the second copy's tokens but its first: each is predicted at a token that
    was seen in the first copy, with the wanted one after it. The first token of the copy follows one that was never
    followed by it. The loss on the first copy's tokens but its first is given beside it: nothing is repeated there yet.

    Other heads are those of all layers that are read, whatever type they are of: a previous-token head that induction
    heads need is among them, too, so the ratio says less than there is. `same_layers` takes from each layer as many
    other heads as are among the first ones.

    Args:
        probing: The model, loaded with its language-model head. `wanted` and `heads` do not restrict others.
        ranked: Heads with their scores, best first.
        top: How many of them are zeroed; all, if there are fewer.
        draws: Of random other heads, of each kind; heads within a draw are different.
        repeated: Two copies or more; those after the second are not looked at.

    Returns:
        Plain values, all losses in nats a prediction: `heads` (zeroed, with scores), `base` (loss with nothing zeroed),
        `top` (`added` to the loss of the second copy, `low` and `high` its 95 % interval over sequences, and the same
        of the first copy in `first_copy`), `random` and `same_layers` (`mean`, `sd`, `min`, `max` of what draws add,
        `mean` and `sd` in `first_copy`, and `ratio`: what `top` adds over the mean; None where that is not positive;
        `missing` heads of a draw whose layers have too few others; all None where the layers have none), `sequences`,
        `length`, `predictions` (of each copy, over all sequences), `draws`, `seed`, `forward_passes`, `tokens`,
        `seconds`, `notes`.

    Raises:
        InputError: A number is too small, no head is ranked, or there are too few others.
        ModelError: No causal language model, or a head cannot be zeroed on its own.
    """
    if top < 1 or draws < 1 or not ranked:
        raise InputError(
            "nothing to zero: top and draws need 1 or more, and a head must be ranked",
            "give top and draws of 1 or more, and a ranking",
        )
    start = time.perf_counter()
    first = [place for place, _ in ranked[:top]]
    bench = Bench(probing, repeated, batches_of(probing, repeated))
    bench.announce(2 + 2 * draws)
    with evaluating(probing.loaded.model), torch.no_grad():
        bench.check_causal()
        base, columns = bench.base()
        others = _others(probing, first, columns)
        added = bench.loss([columns[place] for place in first]) - base
        sets = _sets(first, others, draws, probing.seed)
        drawn = {
            name: np.array([(bench.loss([columns[p] for p in places]) - base).mean(axis=0) for places in several])
            for name, several in sets.items()
        }
    missing = len(first) - len(sets["same_layers"][0]) if sets["same_layers"] else len(first)
    return {
        "heads": [{"stack": s, "layer": n, "head": h, "score": float(v)} for (s, n, h), v in ranked[:top]],
        "base": {"second_copy": float(base[:, 0].mean()), "first_copy": float(base[:, 1].mean())},
        "top": {**_interval(added[:, 0]), "first_copy": _interval(added[:, 1])},
        "random": _spread(drawn["random"], added, 0),
        "same_layers": _spread(drawn["same_layers"], added, missing),
        "sequences": len(repeated.ids),
        "length": repeated.length,
        "predictions": len(repeated.ids) * (repeated.length - 1),
        "draws": draws,
        "seed": probing.seed,
        "forward_passes": bench.passes,
        "tokens": bench.tokens,
        "seconds": time.perf_counter() - start,
        "notes": _notes(first, missing),
    }


# ------------------------------------------------------------------ which heads
def _others(probing: Probing, first: Sequence[Place], columns: Mapping[Place, Columns]) -> list[Place]:
    """All heads that can be zeroed but the first, in the model's order."""
    lost = [place for place in first if place not in columns]
    if lost:
        _, layer, head = lost[0]
        raise ModelError(
            f"L{layer}H{head} of {probing.loaded.name} cannot be zeroed without other heads or layers",
            "leave --ablate-check out",
        )
    others = [place for place in columns if place not in set(first)]
    if len(others) < len(first):
        raise InputError(
            f"{probing.loaded.name} has {len(others)} heads beside the first {len(first)}, too few to compare with",
            f"zero {max(1, len(columns) // 2)} heads or fewer",
        )
    return others


def _sets(first: Sequence[Place], others: Sequence[Place], draws: int, seed: int) -> dict[str, list[list[Place]]]:
    """Random other heads: as many of all layers, and in each layer as many as the first ones have there, if it can."""
    counts = Counter(place[:2] for place in first)
    layers = {layer: [p for p in others if p[:2] == layer] for layer in sorted(counts)}
    random, same = [], []
    for draw in range(draws):
        random.append(_drawn(np.random.default_rng((seed, draw, 0)), others, len(first)))
        generator = np.random.default_rng((seed, draw, 1))
        same.append([p for layer, own in layers.items() for p in _drawn(generator, own, counts[layer])])
    return {"random": random, "same_layers": same if same[0] else []}


def _drawn(generator: np.random.Generator, places: Sequence[Place], count: int) -> list[Place]:
    """Different ones; all, if there are too few."""
    if not places:
        return []
    return [places[i] for i in generator.choice(len(places), min(count, len(places)), replace=False)]


# ------------------------------------------------------------------ what is told
def _interval(added: Floats) -> dict[str, float | None]:
    sums = ClusterSums.of(added, np.zeros(1), np.ones(1))
    low, high = (float(end) if np.isfinite(end) else None for end in sums.interval())
    return {"added": float(sums.score), "low": low, "high": high}


def _spread(drawn: Floats, added: Floats, missing: int) -> dict[str, Any]:
    """Of (draws, 2) means over sequences; `added` is what the first heads do, (sequences, 2)."""
    if not len(drawn):
        nothing = dict.fromkeys(("mean", "sd", "min", "max", "ratio"))
        return {**nothing, "first_copy": {"mean": None, "sd": None}, "missing": missing}
    mean = drawn.mean(axis=0)
    sd = [float(s) for s in drawn.std(axis=0, ddof=1)] if len(drawn) > 1 else [None, None]
    return {
        "mean": float(mean[0]),
        "sd": sd[0],
        "min": float(drawn[:, 0].min()),
        "max": float(drawn[:, 0].max()),
        "ratio": float(added[:, 0].mean() / mean[0]) if mean[0] > 0 else None,
        "first_copy": {"mean": float(mean[1]), "sd": sd[1]},
        "missing": missing,
    }


def _notes(first: Sequence[Place], missing: int) -> list[str]:
    if not missing:
        return []
    if missing == len(first):
        return ["ablation check: the layers of the zeroed heads have no others, so none of the same layers were drawn"]
    few = len(first) - missing
    return [
        f"ablation check: the layers of the {len(first)} zeroed heads have too few others: draws from them have {few}"
    ]
