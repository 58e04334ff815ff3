"""`repair`: the projections of a pruned model refitted, front to back, in step with the original model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.capture.evaluation import evaluating
from headscope.errors import InputError, ModelError
from headscope.models.batches import Batch
from headscope.repair.attention import without_matrices
from headscope.repair.lockstep import ForwardPass, Pause, forward_passes
from headscope.repair.needs import needs
from headscope.repair.places import Place, find_places, paths_of
from headscope.repair.refit import RIDGES, Refit, Sums, refit, token_weights
from headscope.repair.report import LayerRepair, RepairReport
from headscope.repair.rows import rows_of


def repair(
    original: PreTrainedModel,
    pruned: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    layers: Sequence[str] | None = None,
    mlp: bool = False,
    ridges: Sequence[float] = RIDGES,
    report: Callable[[str], None] = lambda line: None,
) -> RepairReport:
    """Refit the output projections of a pruned model, in place, towards the original model's residual stream.

    Weights keep dtype and shape, those of removed heads stay zero, and no bias is changed. Models compute in their own
    dtype, sums are computed in float32 and kept in float64: in half precision, what is missing from the stream carries
    the rounding of both streams. Should anything go wrong, every weight is as before.

    Args:
        original: As it was before heads went; left as it is.
        pruned: With heads removed or zeroed: the same modules by path.
        batches: Texts that neither chose heads nor will judge the result. Each batch takes two threads and holds one
            layer's activations in each model: a few thousand tokens a batch do well.
        layers: As `stack.layer`, those to refit; None for all that lost heads.
        mlp: Refit down projections, too, from the first of these layers on: helps on text like these texts only.
        ridges: Strengths to choose from, as shares of the mean diagonal; each layer takes what is best on every fifth
            text, which is held back for that.
        report: Called with a line on what it will take.

    Raises:
        InputError: There are no batches, or no such layer.
        ModelError: There is nothing to refit, or it cannot be: see `find_places`. Nothing was changed.
    """
    if not batches or not ridges:
        what = "texts to repair on" if ridges else "ridges to choose from"
        raise InputError(f"there are no {what}", "Give some.")
    if original is pruned:
        raise InputError("a repair needs the original model beside the pruned one", "Prune a copy.")
    with _as_needed(original), _as_needed(pruned), torch.no_grad():
        places = find_places(original, pruned, batches[0], layers, mlp=mlp)
        texts, tokens = sum(len(b.order) for b in batches), sum(_tokens(b) for b in batches)
        report(needs(original, places, tokens).line)
        streams = [place.stream for place in places]
        with (
            _all_or_nothing(places),
            forward_passes(original, batches, streams) as wanted,
            forward_passes(pruned, batches, streams, dict(paths_of(places))) as given,
        ):
            steps = [_Step(place, batches, texts, wanted, given) for place in places]
            found = [step.run(ridges) for step in steps]
    return RepairReport(tuple(found), mlp, texts, steps[0].tokens, steps[0].held_back)


def check_repair(original: PreTrainedModel, pruned: PreTrainedModel, batch: Batch, *, mlp: bool = False) -> None:
    """Refuse at once what `repair` would refuse after all scores are taken; a few tokens of the batch are run.

    Raises:
        ModelError: There is nothing to refit, or it cannot be.
    """
    with _as_needed(original), _as_needed(pruned), torch.no_grad():
        find_places(original, pruned, batch, mlp=mlp)


@contextmanager
def _as_needed(model: PreTrainedModel) -> Iterator[None]:
    with evaluating(model), without_matrices(model):
        yield


def _tokens(batch: Batch) -> int:
    return max((int(axis.lengths.sum()) for axis in batch.axes.values()), default=len(batch.order))


@contextmanager
def _all_or_nothing(places: Sequence[Place]) -> Iterator[None]:
    """Weights are as before if the block does not end well, an interrupt included."""
    before = [(place.weight, place.weight.clone()) for place in places]
    try:
        yield
    except BaseException:
        for weight, values in before:
            weight.copy_(values)
        raise


# ------------------------------------------------------------------ one projection
class _Step:
    """One place, at which all forward passes are brought to stand."""

    def __init__(
        self,
        place: Place,
        batches: Sequence[Batch],
        texts: int,
        wanted: Sequence[ForwardPass],
        given: Sequence[ForwardPass],
    ) -> None:
        self.place, self.batches, self.texts = place, batches, texts
        self.wanted, self.given = wanted, given
        self.tokens = self.held_back = 0

    def run(self, ridges: Sequence[float]) -> LayerRepair:
        """Sum over all batches, refit, and correct the streams that wait."""
        place = self.place
        weight = place.weight[place.columns.to(place.weight.device)]
        rest = Sums.of_none(weight)
        held = Sums.of_none(weight)
        waiting: list[Pause] = []
        for batch, original, pruned in zip(self.batches, self.wanted, self.given, strict=True):
            target, now = self._next(original), self._next(pruned)
            self._add(batch, target.value, now, rest, held)
            waiting.append(now)
        self.tokens, self.held_back = rest.tokens + held.tokens, held.tokens
        if not math.isfinite(rest.rr + held.rr):
            raise ModelError(
                f"layer {place.name} gives numbers that are not finite, so it cannot be refitted",
                "Look at the model's weights, or load it in a dtype with a wider range.",
            )
        found = refit(rest, held, weight, ridges)
        if found.change is not None:
            self._put_in(weight, found.change, waiting)
        return _layer(place, found)

    def _next(self, one: ForwardPass) -> Pause:
        at = one.resume()
        if at is None or at.stream != self.place.stream:
            raise ModelError(
                f"layer {self.place.name} does not run on every text, so it cannot be refitted", "Go without a repair."
            )
        return at

    def _add(self, batch: Batch, target: Tensor, now: Pause, rest: Sums, held: Sums) -> None:
        stream, x = self.place.stream, self._inputs(now)
        rows = rows_of(batch, self.place.axis, target.shape, self.texts)
        for places, sums in ((rows.fitted, rest), (rows.held, held)):
            if not len(places):
                continue
            aim, given = (_precise(_flat(t)[places.to(t.device)]).to(x.device) for t in (target, now.value))
            weights = token_weights(aim, given, centred=stream.centred)
            sums.add(_precise(x[places.to(x.device)]), (aim - given) / stream.scale, weights)

    def _inputs(self, now: Pause) -> Tensor:
        assert now.inputs is not None  # they are kept for every place
        x = _flat(now.inputs)
        columns = self.place.columns.to(x.device)
        return x if len(columns) == x.shape[-1] else x[:, columns]

    def _put_in(self, weight: Tensor, change: Tensor, waiting: Sequence[Pause]) -> None:
        """The new weight into the model; into each stream what it changes there, as rounded to the model's dtype."""
        new = (weight.to(change) + change).to(weight)
        self.place.weight[self.place.columns.to(weight.device)] = new
        moved = _precise(new) - _precise(weight)
        for now in waiting:
            more = _precise(self._inputs(now)) @ moved * self.place.stream.scale
            now.value.copy_(_precise(now.value) + more.reshape(now.value.shape).to(now.value.device))


def _layer(place: Place, found: Refit) -> LayerRepair:
    return LayerRepair(
        name=place.name,
        kept=found.change is not None,
        ridge=found.ridge,
        error_before=found.error_before,
        error_after=found.error_after,
        held_before=found.held_before,
        held_after=found.held_after,
    )


def _flat(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])


def _precise(value: Tensor) -> Tensor:
    """float32, or float64 where it is that."""
    return value.to(torch.promote_types(value.dtype, torch.float32))
