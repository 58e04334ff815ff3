"""Whether headscope measures a model right: every metric of every head of every text, against plain NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headscope.capture.feed import Axis
from headscope.capture.session import Capture
from headscope.errors import HeadscopeError
from headscope.heads.metrics import metric_names, variant
from headscope.heads.statistics import HeadStatistics, Layer, Values
from headscope.models.sites import Site, find_sites
from independent import Observation, Truth, observe, truth_of
from subjects import Subject, Tokens
from tests import reference
from tests.judging import Judge

TOLERANCE = 1e-5

RETURNED, SCORES, REFUSED, NONE, WRONG = (
    "equal to output_attentions",
    "equal to captured scores",
    "refused",
    "without attention",
    "WRONG",
)


@dataclass(frozen=True)
class Verdict:
    """What came of one model.

    Attributes:
        outcome: One of the five above, or what the caller calls a model that does not get this far.
        reason: Why it is refused, or what is wrong.
        layers: Layers measured, and of these, those whose weights the model returns.
        heads: Heads measured.
        worst: Largest difference of any value, as a share of values above 1.
        left_out: Why layers are left out of what is measured, a line for each reason.
        streamed: Whether any layer was read without its matrix.
    """

    outcome: str
    reason: str = ""
    layers: tuple[int, int] = (0, 0)
    heads: int = 0
    worst: float = 0.0
    left_out: tuple[str, ...] = ()
    streamed: bool = False


class Wrong(Exception):
    """headscope says something else than the model."""


Measured = dict[Layer, dict[str, Values]]


def examine(subject: Subject) -> Verdict:
    """Measure a model with headscope and compare; errors that are not headscope's own come through."""
    try:
        sites = find_sites(subject.model)
    except HeadscopeError as error:
        return _refused_at_once(subject, error)
    seen = observe(subject)
    try:
        values, capture = measure(subject, sites)
    except HeadscopeError as error:
        return Verdict(REFUSED, error.message)
    left_out = tuple(dict.fromkeys(reason.message for reason in capture.unreadable.values()))
    try:
        check_complete(sites, seen, values, capture)
        if not values:
            return Verdict(REFUSED, next(iter(left_out), "no attention was computed on this input"))
        truths = compare_all(subject, sites, seen, values)
    except Wrong as error:
        return Verdict(WRONG, str(error))
    return _equal(truths, values, left_out, capture.streamed)


def _refused_at_once(subject: Subject, error: HeadscopeError) -> Verdict:
    if "has no attention" not in error.message:
        return Verdict(REFUSED, error.message)
    if observe(subject).softmaxes:
        return Verdict(WRONG, f"{error.message}, and yet it computes a softmax of scores")
    return Verdict(NONE, error.message)


def measure(subject: Subject, sites: tuple[Site, ...]) -> tuple[Measured, Capture]:
    """All metrics of all heads, as `--engine auto` measures models in float32."""
    statistics = HeadStatistics(tuple(variant(name) for name in metric_names()))
    capture = Capture(subject.model, sites, lambda site: True, (statistics,), engine="streaming")
    axes = {
        name: Axis(torch.as_tensor(a.lengths), torch.as_tensor(np.array(a.special))) for name, a in subject.axes.items()
    }
    capture.batch(subject.run_inputs(), axes, subject.size)
    values = {key: metrics for key, metrics in statistics.finish().items() if key not in capture.unreadable}
    return values, capture


def check_complete(sites: tuple[Site, ...], seen: Observation, values: Measured, capture: Capture) -> None:
    """Every site that ran is measured or left out with a reason, under its own layer number.

    Raises:
        Wrong: One is not.
    """
    for stack in dict.fromkeys(site.stack for site in sites):
        members = [site for site in sites if site.stack == stack]
        numbers = [site.layer for site in members]
        if len(set(numbers)) < len(numbers):
            raise Wrong(f"{stack}: two sites have the same layer number")
        for rank, site in enumerate(members):
            if site.layer != rank and str(site.layer) not in site.path.split("."):
                raise Wrong(f"{stack}: {site.path} is called layer {site.layer}")
    for site in sites:
        key = (site.stack, site.layer)
        if seen.calls[id(site.module)] > site.call and key not in values and key not in capture.unreadable:
            raise Wrong(f"{_where(site)} ran and is neither measured nor left out")


def compare_all(
    subject: Subject, sites: tuple[Site, ...], seen: Observation, values: Measured
) -> dict[Layer, Difference]:
    """Every measured layer's largest difference.

    Raises:
        Wrong: It is too large, or there is nothing to compare a layer with.
    """
    by_key = {(site.stack, site.layer): site for site in sites}
    found: dict[Layer, Difference] = {}
    for key, metrics in values.items():
        site, heads = by_key[key], next(iter(metrics.values())).value.shape[1]
        truth = truth_of(seen, site.module, site.call, subject.size, heads)
        if truth is None:
            raise Wrong(f"{_where(site)} has nothing to be compared with")
        found[key] = Difference(truth, compare(subject, site, truth, metrics))
    _check_order(found)
    return found


@dataclass(frozen=True)
class Difference:
    """A layer's weights and how far its values are from theirs."""

    truth: Truth
    worst: float


def _check_order(found: dict[Layer, Difference]) -> None:
    """Layers of a stack lie in the model's output in the order of their numbers; some have the same weights."""
    places: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for (stack, layer), difference in found.items():
        returned = difference.truth.returned
        if returned is not None:
            places.setdefault((stack, returned.field), []).append((layer, returned.index))
    for (stack, name), pairs in places.items():
        order = [index for _, index in sorted(pairs)]
        if order != sorted(order):
            raise Wrong(f"{stack}: layers in the order of their numbers are {order} in {name}")


# ------------------------------------------------------------------ one layer
def compare(subject: Subject, site: Site, truth: Truth, metrics: dict[str, Values]) -> float:
    """The largest difference of any metric or chance value of one layer.

    Raises:
        Wrong: It is above the tolerance; names text, head and metric.
    """
    rows, keys = truth.weights.shape[2:]
    query, key = (_tokens(subject, name, n) for name, n in ((site.query_axis, rows), (site.key_axis, keys)))
    worst = 0.0
    for text in range(subject.size):
        own = (slice(0, int(query.lengths[text])), slice(0, int(key.lengths[text])))
        weights, visible = truth.weights[text][:, *own], truth.visible[text][:, *own].any(axis=0)
        for head, matrix in enumerate(weights):
            expected = _expected(matrix, visible, key.special[text][own[1]], site.cross or rows != keys)
            for name, kind, theirs in expected:
                ours = _value(metrics, name, kind, text, head)
                off = _off(ours, theirs)
                if not off <= TOLERANCE:
                    raise Wrong(f"{_where(site)} head {head} text {text}: {name} ({kind}) is {ours}, not {theirs}")
                worst = max(worst, off)
    return worst


def _tokens(subject: Subject, axis: str, n: int) -> Tokens:
    known = subject.axes.get(axis)
    # An image's positions may join those of the tokens.
    return Tokens.plain(subject.size, n) if known is None or known.special.shape[1] != n else known


def _expected(
    weights: NDArray[np.float64], visible: NDArray[np.bool_], special: NDArray[np.bool_], cross: bool
) -> Iterator[tuple[str, str, float | None]]:
    judge = Judge([(weights, visible, special)], cross=cross)
    for name in metric_names():
        if "_adjusted_rest" not in name:
            yield name, "value", judge.value(name)
            yield name, "chance", judge.chance(name)
    for name, value in _adjusted_rest(weights, visible).items():
        yield name, "value", None if cross else value


def _adjusted_rest(weights: NDArray[np.float64], visible: NDArray[np.bool_]) -> dict[str, float | None]:
    """The adjusted metrics of the weights without their first column, each row scaled to one."""
    left, seen = weights.copy(), visible.copy()
    left[:, 0], seen[:, 0] = 0, False
    whole = left.sum(axis=1, keepdims=True)
    seen[whole[:, 0] < reference.REST_LEFT] = False
    left /= np.where(whole > 0, whole, 1)
    values = reference.adjusted(left, seen)
    return {f"{name}_adjusted_rest": value for name, value in values.items() if name != "sink"}


def _value(metrics: dict[str, Values], name: str, kind: str, text: int, head: int) -> float | None:
    if name not in metrics:
        return None
    number = float(getattr(metrics[name], kind)[text, head])
    return None if np.isnan(number) else number


def _off(ours: float | None, theirs: float | None) -> float:
    """The difference, relative for values above 1; infinite where only one can be measured."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else np.inf
    return abs(ours - theirs) / max(1.0, abs(theirs))


def _where(site: Site) -> str:
    return f"{site.stack}.{site.layer} ({site.path})"


def _equal(found: dict[Layer, Difference], values: Measured, left_out: tuple[str, ...], streamed: bool) -> Verdict:
    returned = sum(d.truth.returned is not None for d in found.values())
    return Verdict(
        RETURNED if returned == len(found) else SCORES,
        layers=(len(found), returned),
        heads=sum(next(iter(metrics.values())).value.shape[1] for metrics in values.values()),
        worst=max(d.worst for d in found.values()),
        left_out=left_out,
        streamed=streamed,
    )
