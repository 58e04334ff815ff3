"""Scores that other scores have to beat: how sure heads are, how large their weights are, and chance."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.capture.blocks import Rows
from headscope.capture.feed import Axis
from headscope.capture.outputs import Output, Unit
from headscope.capture.session import Capture
from headscope.importance.by_text import averaged, check_ran, texts_of
from headscope.importance.method import LayerScores, Scored, Task, importance_method
from headscope.models.sites import Site, find_sites
from headscope.models.weights import read_weights

Layer = tuple[str, int]


# ------------------------------------------------------------------ confidence
@importance_method("confidence")
def confidence(task: Task) -> Scored:
    """How sure the head is: the mean over rows of the largest attention weight.

    Voita et al. 2019, section 3.3. The mean is over the rows of a text, then over texts; a group's is that of its
    heads, and layers that share a module are averaged.

    Raises:
        InputError: There are no texts.
        ModelError: A layer's attention weights cannot be read, or the texts do not reach it.
    """
    data = texts_of(task)
    layers = {(s.stack, s.layer): o for o in task.outputs for s in o.sites}
    largest = _Largest()
    sites = find_sites(task.model)
    capture = Capture(task.model, sites, lambda s: (s.stack, s.layer) in layers, (largest,), engine="streaming")
    values: dict[Layer, NDArray[np.float64]] = {}
    for batch in data.batches:
        axes = {name: Axis(axis.lengths, axis.special) for name, axis in batch.axes.items()}
        capture.batch(batch.inputs, axes, len(batch.order))
        _check_read(task, capture, layers)
        for layer, found in largest.finish().items():
            values.setdefault(layer, np.zeros((data.texts, found.shape[1])))[list(batch.order)] = found
    return {
        (unit, output.name): averaged(_confidence(output, unit, values), task.normalise)
        for unit in task.units
        for output in task.outputs
    }


def _confidence(output: Output, unit: str, values: dict[Layer, NDArray[np.float64]]) -> NDArray[np.float64]:
    """float64, (texts, units)."""
    heads = np.mean([values[s.stack, s.layer] for s in output.sites], axis=0)
    means = [heads[:, output.state.places(u.heads)].mean(axis=1) for u in output.units(unit)]
    return np.stack(means, axis=1) if means else np.zeros((len(heads), 0))


def _check_read(task: Task, capture: Capture, layers: Iterable[Layer]) -> None:
    for layer in layers:
        if layer in capture.unreadable:
            raise capture.unreadable[layer]
    check_ran(task.outputs, {o for o in task.outputs if all((s.stack, s.layer) in capture.facts for s in o.sites)})


@dataclass
class _Largest:
    """Sums each row's largest weight over the rows it is fed, text by text: float64, (batch, head)."""

    _sums: dict[Layer, Tensor] = field(default_factory=dict)
    _rows: dict[Layer, Tensor] = field(default_factory=dict)

    def rows(self, site: Site, rows: Rows) -> None:
        """Add rows to the sums of their layer."""
        layer, zero = (site.stack, site.layer), torch.zeros(())
        largest = rows.largest().masked_fill(~rows.valid, 0).sum(dim=-1, dtype=torch.float64)
        self._sums[layer] = self._sums.get(layer, zero) + largest.cpu()
        self._rows[layer] = self._rows.get(layer, zero) + rows.valid.sum(dim=-1).cpu()

    def finish(self) -> dict[Layer, NDArray[np.float64]]:
        """The batch's means by layer; the sums start anew."""
        means = {layer: (total / self._rows[layer].clamp(min=1)).numpy() for layer, total in self._sums.items()}
        self._sums, self._rows = {}, {}
        return means


# ------------------------------------------------------------------ magnitude
@importance_method("magnitude", needs_data=False)
def magnitude(task: Task) -> Scored:
    """How large the head's weights are: the Frobenius norm of its value times its output projection.

    A group's is the root of the sum of its heads' squares, the norm of their matrices one below the other.

    Raises:
        ModelError: Weights are not in memory.
    """
    scores: dict[tuple[str, str], LayerScores] = {}
    for output in task.outputs:
        squares = _squares(task, output)
        for unit in task.units:
            sums = [squares[output.state.places(u.heads)].sum() for u in output.units(unit)]
            norms = np.sqrt(np.array(sums, dtype=np.float64))
            scores[unit, output.name] = LayerScores(averaged(norms[None], task.normalise).scores)
    return scores


def _squares(task: Task, output: Output) -> NDArray[np.float64]:
    """float64, (heads,), in the order of the weights: squared norms of value.T @ output.

    They are the sum of the product of two small matrices, value @ value.T and output @ output.T.
    """
    weights = read_weights(output.sites[0], model=task.model)
    assert weights.output is not None
    values, outputs = weights.value.to("cpu", torch.float64), weights.output.to("cpu", torch.float64)
    kv_heads = output.state.kv_places(tuple(h // output.state.group for h in output.state.kept))
    values = (values @ values.mT)[kv_heads]
    return (values * (outputs @ outputs.mT)).sum(dim=(1, 2)).clamp(min=0).numpy()


# ------------------------------------------------------------------ chance
@importance_method("random", needs_data=False)
def random(task: Task) -> Scored:
    """Chance: numbers between 0 and 1.

    They depend on the seed, the layer, the kind of unit and its original number only.
    """
    return {
        (unit, output.name): LayerScores(_drawn(task.seed, unit, output)[_numbers(output.units(unit))])
        for unit in task.units
        for output in task.outputs
    }


def _drawn(seed: int, unit: str, output: Output) -> NDArray[np.float64]:
    name = zlib.crc32(f"{unit} {output.name}".encode())
    return np.random.default_rng((seed, name)).random(output.state.num_heads)


def _numbers(units: Iterable[Unit]) -> list[int]:
    return [u.number for u in units]
