"""One whole analysis against `tests/reference.py`: every head's metrics, chance and labels, over several texts."""

from __future__ import annotations

import numpy as np

from headscope.heads.metrics import METRICS, metric_names
from tests import reference

TOLERANCE = 1e-5


class Judge:
    """What is right for one head, from its matrices on each text.

    `texts` holds (weights, visible, special) a text: (query, key), (query, key) and (key,).
    """

    def __init__(self, texts, *, cross=False):
        self.cross = cross
        rests = [reference.rest(*text) for text in texts]
        self.parts = {
            "": [reference.metrics(*text, cross=cross) for text in texts],
            "_chance": [reference.chance(text[1], text[2], cross=cross) for text in texts],
            "_rest": [rest for rest, _ in rests],
            "_rest_chance": [by_chance for _, by_chance in rests],
            "_adjusted": [reference.adjusted(text[0], text[1]) for text in texts],
        }
        self.means = {part: reference.mean_over_texts(values) for part, values in self.parts.items()}

    def value(self, name):
        """The mean of a metric over texts, None where it cannot be measured."""
        return self._of(name, "")

    def chance(self, name):
        """The mean of a metric's chance value."""
        if "_adjusted" in name:
            return None if self.value(name) is None else 0.0
        return self._of(name, "_chance")

    def per_text(self, name):
        """A plain metric of each text."""
        return [values[name] for values in self.parts[""]]

    def _of(self, name, kind):
        stem = name.removesuffix("_rest").removesuffix("_adjusted")
        if self.cross and stem in ("prev_token", "self_attend", "next_token", "mean_distance"):
            return None
        if name.endswith("_adjusted"):
            return self.means["_adjusted"][stem]
        return self.means["_rest" + kind if name.endswith("_rest") else kind][stem]

    def seed(self):
        """(label, runner-up, rest pattern) by the seed rules."""
        label, runner_up = reference.seed_labels(self.means[""])
        rest = {n: self._of(f"{n}_rest", "") for n in ("prev_token", "self_attend", "entropy")}
        some = any(value is not None for value in rest.values())
        rest_label = reference.seed_labels(rest)[0] if label == "attention_sink" and some else None
        return label, runner_up, rest_label

    def calibrated(self):
        """(label, runner-up) by the calibrated rules."""
        values = {n: self.value(f"{n}_adjusted") for n in reference.LABELS}
        return reference.calibrated_choice(values, self.value("relative_entropy"))


def compare(result, judges, names=None):
    """Assert that `result` (of any rules) has exactly the heads of `judges`, {(stack, layer, head): Judge}.

    Returns the largest difference of any metric or chance value.
    """
    assert [(h.stack, h.layer, h.head) for h in result.heads] == sorted(judges, key=_order(result))
    worst = 0.0
    for head in result.heads:
        judge = judges[head.stack, head.layer, head.head]
        for name in names or head.metrics:
            for ours, theirs in ((head.metrics, judge.value(name)), (head.chance, judge.chance(name))):
                assert (ours[name] is None) == (theirs is None), (head.stack, head.name, name, ours[name], theirs)
                worst = max(worst, 0.0 if theirs is None else abs(ours[name] - theirs))
        check_spread(head, judge)
        if result.rules.name == "seed":
            assert (head.pattern, head.runner_up, head.rest_pattern) == judge.seed(), head
        elif result.rules.name == "calibrated":
            assert (head.pattern, head.runner_up) == judge.calibrated(), head
    assert worst < TOLERANCE, worst
    return worst


def check_spread(head, judge):
    """Standard deviation and middle of the interval of the plain metrics, where there are several texts."""
    several = len(judge.parts[""]) > 1
    assert (head.spread is not None) == several
    for name in METRICS if several else ():
        if name in head.spread:
            values, spread = [v for v in judge.per_text(name) if v is not None], head.spread[name]
            assert spread.texts == len(values) and (spread.sd is None) == (len(values) < 2)
            if len(values) > 1:
                assert abs(spread.sd - np.std(values, ddof=1)) < TOLERANCE
                assert abs((spread.low + spread.high) / 2 - np.mean(values)) < TOLERANCE


def _order(result):
    stacks = [stack.name for stack in result.model.stacks]
    return lambda key: (stacks.index(key[0]), *key[1:])


def judged_names():
    """Every metric that the judge knows: all but the adjusted ones of the weights without their first column."""
    return [name for name in metric_names() if "_adjusted_rest" not in name]


def judges_of(family, attentions, lengths, special):
    """`{(stack, layer, head): Judge}` of a family's batch.

    - attentions: `{stack: {layer: (batch, head, query, key)}}`.
    - lengths: real query and key tokens of each example, by stack.
    - special: bool (batch, key) by stack.
    """
    result = {}
    for stack, layers in attentions.items():
        spec = family.stacks[stack]
        for layer, weights in layers.items():
            for head in range(weights.shape[1]):
                texts = []
                for i, (rows, keys) in enumerate(zip(*lengths[stack], strict=True)):
                    visible = reference.visibility(rows, keys, causal=spec.causal, window=spec.window(layer))
                    texts.append((weights[i, head, :rows, :keys], visible, special[stack][i][:keys]))
                result[stack, layer, head] = Judge(texts, cross=stack == "cross")
    return result


def special_of(family, inputs, special_ids, keys):
    """bool (batch, key) by stack: which keys are special tokens. Pictures and sounds have none; a decoder's first
    token is its start, whatever it stands for.

    `keys` says how many key columns a stack has.
    """
    result = {}
    for stack in family.stacks:
        name = "decoder_input_ids" if stack == "decoder" else "input_ids"
        ids = None if stack == "vision" else inputs.get(name)
        result[stack] = np.zeros((2, keys[stack]), bool) if ids is None else np.isin(ids.numpy(), special_ids)
    return result
