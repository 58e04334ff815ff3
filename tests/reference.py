"""Every metric, chance value and label, computed plainly in NumPy float64 from the written definitions alone.

The judge of the package's own numbers: it shares no code with it. One head's matrix at a time:

- weights: float, (query, key), real tokens only.
- visible: bool, (query, key), the keys that a row may look at.
- special: bool, (key,), keys that are special tokens.

None stands for what cannot be measured.
"""

from __future__ import annotations

import numpy as np

POSITIONAL = {"sink": None, "prev_token": -1, "self_attend": 0, "next_token": 1}
LABELS = {
    "sink": "attention_sink",
    "prev_token": "prev_token",
    "next_token": "next_token",
    "self_attend": "self_attend",
}
REST_LEFT = 1e-3


def visibility(num_queries, num_keys=None, *, causal=False, window=None):
    """bool (query, key): all keys, those not after the row (causal), of these the last `window` ones, or those nearer
    than `window` on both sides."""
    query, key = np.indices((num_queries, num_keys or num_queries))
    seen = key <= query if causal else np.ones_like(query, bool)
    return seen if window is None else seen & (abs(query - key) < window)


def uniform(visible):
    """The weights of a head that spreads uniformly over its visible keys."""
    return visible / np.maximum(visible.sum(axis=1, keepdims=True), 1)


def _mean(values):
    values = np.asarray(values, np.float64)
    return float(values.mean()) if values.size else None


def _row_entropy(weights):
    return -(weights * np.log(weights + 1e-9)).sum(axis=1)


def _targets(name, num_queries, num_keys):
    """(row, column) of every row that has a target for a positional metric."""
    offset = POSITIONAL[name]
    pairs = [(row, 0 if offset is None else row + offset) for row in range(num_queries)]
    return [(row, column) for row, column in pairs if 0 <= column < num_keys]


def positional(weights, name, rows=None):
    """Mean weight on the target, over rows that have one (and are among `rows`)."""
    pairs = _targets(name, *weights.shape)
    return _mean([weights[row, column] for row, column in pairs if rows is None or row in rows])


def metrics(weights, visible, special, *, cross=False):
    """All metrics of one head by name; positions mean nothing across two sequences."""
    weights = np.asarray(weights, np.float64)
    rows = {"next_token": _sees_next(visible)}
    found = {n: None if cross and n != "sink" else positional(weights, n, rows.get(n)) for n in POSITIONAL}
    return found | _spread(weights, visible, special, np.arange(weights.shape[1]), cross)


def _sees_next(visible):
    """Rows that may look at the token after them."""
    return {row for row, column in _targets("next_token", *visible.shape) if visible[row, column]}


def _spread(weights, visible, special, columns, cross):
    entropy, count = _row_entropy(weights), visible.sum(axis=1)
    whole = weights.sum(axis=1, keepdims=True)
    several = (count > 1) & (whole[:, 0] > 0)
    rows = np.arange(len(weights))
    distance = (weights * abs(rows[:, None] - columns[None, :])).sum(axis=1)
    return {
        "entropy": _mean(entropy),
        "special": _mean(weights[:, special].sum(axis=1)) if special.any() else None,
        "relative_entropy": _mean(_row_entropy(weights[several] / whole[several]) / np.log(count[several])),
        "mean_distance": None if cross else _mean(distance),
        "max_weight": _mean(weights.max(axis=1, initial=0)),
    }


def chance(visible, special, *, cross=False):
    """What the uniform head scores on the same rows."""
    return metrics(uniform(visible), visible, special, cross=cross)


def rest(weights, visible, special):
    """The `*_rest` metrics by plain name, and their chance values: the first column removed, rows renormalised, rows
    with less than 1e-3 left out. A positional metric counts rows whose target column is still there."""
    weights = np.asarray(weights, np.float64)
    kept = [row for row in range(len(weights)) if weights[row, 1:].sum() >= REST_LEFT]
    spread = uniform(np.concatenate([np.zeros((len(visible), 1), bool), visible[:, 1:]], axis=1))
    left = np.zeros_like(weights)
    left[kept, 1:] = weights[kept, 1:] / weights[kept, 1:].sum(axis=1, keepdims=True)
    return tuple(_rest_values(matrix, visible, special, kept) for matrix in (left, spread))


def _rest_values(matrix, visible, special, kept):
    values = {}
    for name in ("prev_token", "self_attend", "next_token"):
        rows = _sees_next(visible).intersection(kept) if name == "next_token" else set(kept)
        pairs = [(row, column) for row, column in _targets(name, *matrix.shape) if column >= 1 and row in rows]
        values[name] = _mean([matrix[row, column] for row, column in pairs])
    columns = np.arange(1, matrix.shape[1])
    entropy, count = _row_entropy(matrix[:, 1:])[kept], visible[kept, 1:].sum(axis=1)
    distance = (matrix[:, 1:] * abs(np.arange(len(matrix))[:, None] - columns)).sum(axis=1)[kept]
    return values | {
        "entropy": _mean(entropy),
        "special": _mean(matrix[kept][:, 1:][:, special[1:]].sum(axis=1)) if special[1:].any() else None,
        "relative_entropy": _mean(entropy[count > 1] / np.log(count[count > 1])),
        "mean_distance": _mean(distance),
        "max_weight": _mean(matrix[kept, 1:].max(axis=1, initial=0)),
    }


def adjusted(weights, visible):
    """(m - chance) / (1 - chance) of the positional metrics, over rows that see two keys or more and their target."""
    weights, spread = np.asarray(weights, np.float64), uniform(visible)
    values = {}
    for name in POSITIONAL:
        pairs = _targets(name, *weights.shape)
        eligible = {row for row, column in pairs if visible[row].sum() > 1 and visible[row, column]}
        value, by_chance = positional(weights, name, eligible), positional(spread, name, eligible)
        values[name] = None if value is None else (value - by_chance) / (1 - by_chance)
    return values


def mean_over_texts(values):
    """The mean of each metric over texts; texts on which it is None are left out."""
    names = values[0]
    return {name: _mean([text[name] for text in values if text[name] is not None]) for name in names}


def _above(value, threshold):
    return value is not None and value > threshold


def seed_labels(values):
    """(label, runner-up) by the seed rules; "broad" holds whatever else does, so only a broad head has no runner-up."""
    holding = ["attention_sink"] * _above(values.get("sink"), 0.4) + ["prev_token"] * _above(values["prev_token"], 0.3)
    holding += ["self_attend"] * _above(values["self_attend"], 0.4)
    holding += ["focused"] * (values["entropy"] is not None and values["entropy"] < 0.5) + ["broad"]
    return holding[0], holding[1] if len(holding) > 1 else None


def rest_pattern(weights, visible, special):
    """What rules 2 to 5 say without the first column; None where no row has anything left."""
    values, _ = rest(weights, visible, special)
    return None if values["entropy"] is None else seed_labels(values)[0]


def calibrated_labels(weights, visible, special):
    """(label, runner-up) by the calibrated rules, for one text."""
    return calibrated_choice(adjusted(weights, visible), metrics(weights, visible, special)["relative_entropy"])


def calibrated_choice(values, entropy):
    """(label, runner-up) from the adjusted values by plain name and the relative entropy."""
    values = {name: value for name, value in values.items() if value is not None}
    if not values and entropy is None:
        return "unmeasurable", None
    best = sorted(values, key=values.get, reverse=True)
    if not best or values[best[0]] <= 0.3:
        return ("focused" if entropy < 0.25 else "broad"), None
    second = LABELS[best[1]] if len(best) > 1 and values[best[1]] > 0.1 else None
    return LABELS[best[0]], second
