"""The loss that is added when one head is taken away: exact, and as dear as that many forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.capture.outputs import Output, Unit, watching
from headscope.errors import InputError
from headscope.importance.by_text import check_ran, texts_of
from headscope.importance.loss import Losses, TextLoss
from headscope.importance.method import LayerScores, Scored, Task, importance_method
from headscope.importance.partial import Kept, Recorded, giving, layers_of, record
from headscope.importance.texts import Data
from headscope.models.batches import Batch, mask_of


@importance_method("ablation")
def ablation(task: Task) -> Scored:
    """Loss that is added when the head gives zero, or its mean, instead.

    In nats a prediction, with a standard error over texts. The mean is over all real tokens of the texts. Layers before
    the head are not run again. Before it starts, `Task.report` is told what it will cost.

    Raises:
        InputError: There are no texts, or `replace` is neither `zero` nor `mean`.
        ModelError: A module is not reached by the texts.
    """
    data = texts_of(task)
    if task.replace not in ("zero", "mean"):
        raise InputError(f"a head cannot be replaced by {task.replace!r}", "It is replaced by zero or by its mean.")
    with torch.no_grad():
        means = _means(task, data) if task.replace == "mean" else {}
        trials = _trials(task, means, data.texts)
        before = _run_all(task, data, trials)
    return {
        (unit, output.name): _scores([trials[output, u.heads].losses for u in output.units(unit)], before)
        for unit in task.units
        for output in task.outputs
    }


def _scores(losses: Sequence[NDArray[np.float64]], before: Losses) -> LayerScores:
    added = np.array([Losses(total, before.count).added(before) for total in losses]).reshape(-1, 2)
    return LayerScores(added[:, 0], added[:, 1])


# ------------------------------------------------------------------ what is tried
@dataclass(frozen=True, eq=False)
class _Trial:
    """One unit taken away.

    Attributes:
        gone: bool, (in_features,): what is replaced of the output projection's input.
        fill: float32, (in_features,): by what.
        losses: float64, (texts,): each text's loss without the unit, summed over what it predicts.
    """

    output: Output
    gone: Tensor
    fill: Tensor
    losses: NDArray[np.float64] = field(repr=False)

    def see(self, _: Output, context: Tensor) -> Tensor:
        """What goes into the output projection, without the unit."""
        return torch.where(self.gone.to(context.device), self.fill.to(context), context)


_Trials = dict[tuple[Output, tuple[int, ...]], _Trial]


def _trials(task: Task, means: dict[Output, Tensor], texts: int) -> _Trials:
    """By module and heads: a group of one head is the head."""
    units = [(o, u) for o in task.outputs for unit in task.units for u in o.units(unit)]
    return {(o, u.heads): _trial(o, u, means, texts) for o, u in units}


def _trial(output: Output, unit: Unit, means: dict[Output, Tensor], texts: int) -> _Trial:
    gone = torch.zeros(output.weight.shape[0], dtype=torch.bool)
    gone[unit.columns] = True
    return _Trial(output, gone, means.get(output, torch.zeros(len(gone))), np.zeros(texts))


def _means(task: Task, data: Data) -> dict[Output, Tensor]:
    """float32, (in_features,), of each module: the mean of what goes into it, over all real tokens."""
    sums: dict[Output, Tensor] = {}
    counts: dict[Output, int] = {}
    for batch in data.batches:
        for output, context in _contexts(task, data, batch):
            sums[output] = sums.get(output, torch.zeros(())) + context[0]
            counts[output] = counts.get(output, 0) + context[1]
    return {output: (total / counts[output]).float() for output, total in sums.items()}


def _contexts(task: Task, data: Data, batch: Batch) -> list[tuple[Output, tuple[Tensor, int]]]:
    """Of each call of each module the sum, float64, over a batch's real tokens, and their number."""
    found: list[tuple[Output, tuple[Tensor, int]]] = []

    def see(output: Output, context: Tensor) -> None:
        tokens = _real(batch, output, context)
        found.append((output, (tokens.float().sum(0).double().cpu(), len(tokens))))

    with watching(task.outputs, see):
        data.loss.of(task.model, batch)
    return found


def _real(batch: Batch, output: Output, context: Tensor) -> Tensor:
    """(tokens, in_features): without padding, where the axis of tokens is known."""
    axis = batch.axes.get(output.sites[0].query_axis)
    if axis is None or context.shape[:2] != axis.special.shape:
        return context.flatten(0, -2)
    return context[mask_of(axis).bool().to(context.device)]


# ------------------------------------------------------------------ trying
def _run_all(task: Task, data: Data, trials: _Trials) -> Losses:
    """Fill in the losses of all trials; those of the model as it is."""
    before = Losses(np.zeros(data.texts), np.zeros(data.texts))
    layers = layers_of(task.model)
    alone: set[Output] = set()
    # The largest first: what it takes says most about the rest.
    for number, batch in enumerate(sorted(data.batches, key=_size, reverse=True)):
        run = _runner(task, data, batch)
        if number == 0:
            run()  # warms up, so that the next one can be timed
        found, recorded = record(layers, task.outputs, run)
        check_ran(task.outputs, recorded.kept)
        if number == 0:
            alone = {o for o, kept in recorded.kept.items() if _same(run, kept, found)}
            task.report(_cost(recorded, alone, data, batch, trials))
        _put(before.total, batch, found)
        before.count[list(batch.order)] = found.count.numpy()
        for output in task.outputs:
            own = [t for t in trials.values() if t.output is output]
            _try(own, batch, run, recorded.kept[output] if output in alone else {})
    return before


def _try(trials: Sequence[_Trial], batch: Batch, run: Callable[[], TextLoss], kept: Kept) -> None:
    with giving(kept):
        for trial in trials:
            with watching((trial.output,), trial.see):
                _put(trial.losses, batch, run())


def _runner(task: Task, data: Data, batch: Batch) -> Callable[[], TextLoss]:
    return lambda: data.loss.of(task.model, batch)


def _put(total: NDArray[np.float64], batch: Batch, found: TextLoss) -> None:
    total[list(batch.order)] = found.mean.double().cpu().numpy() * found.count.numpy()


def _same(run: Callable[[], TextLoss], kept: Kept, before: TextLoss) -> bool:
    """Whether the model gives the same when layers only give what they gave: some leave other things behind, too."""
    try:
        with giving(kept):
            again = run()
    # Whatever a model raises that misses something that its earlier layers leave behind: they are run then.
    except Exception:
        return False
    return torch.allclose(again.mean, before.mean, rtol=1e-5, atol=1e-6, equal_nan=True)


# ------------------------------------------------------------------ cost
def _cost(recorded: Recorded, alone: set[Output], data: Data, batch: Batch, trials: _Trials) -> str:
    passes = sum(recorded.share[t.output] if t.output in alone else 1.0 for t in trials.values())
    share = sum(map(_size, data.batches)) / _size(batch)
    seconds = recorded.seconds * share * (passes + 1)
    return (
        f"ablation: {len(trials)} trials on {data.texts} texts, as much as {passes:.0f} forward passes over them: "
        f"about {_duration(seconds)}"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _size(batch: Batch) -> int:
    """Tokens, padding included; texts where there are no tokens."""
    return sum(axis.special.numel() for axis in batch.axes.values()) or len(batch.order)
