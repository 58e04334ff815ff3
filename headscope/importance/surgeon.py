"""What heads cost once the others have made up for them: Optimal Brain Surgeon (Hassibi & Stork 1993) for whole heads.

Of one output projection with weight W, (out, in), let C be the mean of c cᵀ over tokens, c what goes in, and G that of
g gᵀ, g the derivative of the loss by what comes out. Without the columns r, and with the others k refitted, the output
keeps an error of covariance W_r (C_rr - C_rk C_kk⁻¹ C_kr) W_rᵀ. G weighs it:

    E(r) = tr(M_rr (P_rr)⁻¹), where M = Wᵀ G W and P = (C + RIDGE · mean(diag C) · I)⁻¹

because (P_rr)⁻¹ is that Schur complement of C.

Scale. With g of a text's summed loss and an error δ that is independent between tokens, the loss changes by half of
Σ (gᵀδ)² over tokens, if the Hessian is taken to be the empirical Fisher matrix. What is measured after a repair is two
to three times as large, so the half is left out, and E is near it. A loss that is summed over T tokens and N
predictions grows by T tr(mean(g gᵀ) Cov δ) / N a prediction: so G is the sum of g gᵀ over all tokens, divided by N.
Where the loss is 1 - cosine, g is of the output's part in a random direction: the mean of (Σ gᵀδ)² is the squared
change of a unit vector, |a - b|² = 2 - 2 cosine. There the half is exact and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.capture.outputs import Output, frozen, watching
from headscope.errors import InputError, ModelError
from headscope.importance.elimination import eliminate, rising
from headscope.importance.loss import Loss
from headscope.importance.method import LayerScores, Scored, Task, importance_method
from headscope.importance.texts import Data
from headscope.models.batches import Batch, TokenAxis, mask_of

RIDGE = 1e-3


@importance_method("surgeon", for_repair=True)
def surgeon(task: Task) -> Scored:
    """Loss that a set of heads adds after the best repair, by gradients and covariances of what heads give.

    Scores and losses are nats a prediction, or 1 - cosine a text; one forward and one backward pass a batch.

    Raises:
        InputError: There are no texts, or scores are to be normalised.
        ModelError: A layer is not run, no loss depends on it, or numbers are not finite.
    """
    sums, predictions = _gather(task, gradients=True)
    half = 0.5 if _data(task).loss.kind == "output" else 1.0
    scored: dict[tuple[str, str], LayerScores] = {}
    for output in task.outputs:
        found = sums.pop(output)
        assert found.gradients is not None
        inverse, weight = _inverse_and_weight(output, found)
        cost = weight @ (found.gradients * (half / predictions)) @ weight.mT
        scored |= _scores(output, task.units, inverse, cost)
    return scored


@importance_method("reconstruction", for_repair=True)
def reconstruction(task: Task) -> Scored:
    """Share of a layer's output that a set of heads takes away after the best repair, whatever it is worth.

    Squares of the output's size without its bias: 1 when all heads are gone. One forward pass a batch.

    Raises:
        InputError, ModelError: As for `surgeon`.
    """
    sums, _ = _gather(task, gradients=False)
    scored: dict[tuple[str, str], LayerScores] = {}
    for output in task.outputs:
        found = sums.pop(output)
        columns = _columns(output)
        inverse, weight = _inverse_and_weight(output, found)
        gram = weight @ weight.mT
        size = (gram * found.mean(columns)).sum()
        scored |= _scores(output, task.units, inverse, gram / size if size > 0 else gram)
    return scored


# ------------------------------------------------------------------ sums over tokens
@dataclass
class Sums:
    """What one output projection has seen.

    Attributes:
        inputs: float64, (in, in): the sum of c cᵀ over real tokens, of all calls where layers share the module.
        gradients: float64, (out, out): the sum of g gᵀ; None where none are wanted.
        tokens: How many tokens went in.
    """

    inputs: Tensor
    gradients: Tensor | None
    tokens: int = 0

    def mean(self, columns: Tensor) -> Tensor:
        """(columns, columns): the mean of c cᵀ over tokens."""
        return self.inputs[columns[:, None], columns] / max(self.tokens, 1)


def gather(
    model: PreTrainedModel, outputs: Sequence[Output], data: Data, *, gradients: bool = True
) -> tuple[dict[Output, Sums], float]:
    """Sums over all texts for each output, and how many predictions the texts have.

    Derivatives are of the summed loss of each text. One forward pass a batch, and one backward with `gradients`.

    Raises:
        ModelError: An output is not run, no loss depends on any, or numbers are not finite.
    """
    sums = {output: _empty(output, gradients) for output in outputs}
    predictions = 0.0
    with frozen(model), torch.set_grad_enabled(gradients):
        for batch in data.batches:
            with _adding(sums, batch):
                loss, count = _summed(data.loss, model, batch)
                if gradients:
                    _backward(loss)
            predictions += count
    for output, found in sums.items():
        _check(output, found)
    return sums, predictions


def _gather(task: Task, *, gradients: bool) -> tuple[dict[Output, Sums], float]:
    if task.normalise:
        raise InputError(
            "errors that are left after a repair cannot be normalised: layers are compared by their size",
            "leave normalising to single heads' scores, such as gradient's",
        )
    data = _data(task)
    matrices = [o.weight.shape[0] ** 2 + (o.weight.shape[1] ** 2 if gradients else 0) for o in task.outputs]
    task.report(f"covariances of {len(matrices)} layers take {8 * sum(matrices) / 2**20:,.0f} MiB")
    return gather(task.model, task.outputs, data, gradients=gradients)


def _data(task: Task) -> Data:
    if task.data is None:
        raise InputError("there are no texts, which this method needs", "give some with --data")
    return task.data


def _empty(output: Output, gradients: bool) -> Sums:
    size_in, size_out = output.weight.shape
    # Apple's devices have no float64.
    device = "cpu" if output.weight.device.type == "mps" else output.weight.device
    squares = (torch.zeros(n, n, dtype=torch.float64, device=device) for n in (size_in, size_out))
    return Sums(next(squares), next(squares) if gradients else None)


@contextmanager
def _adding(sums: dict[Output, Sums], batch: Batch) -> Iterator[None]:
    """Within the block, what passes through the outputs, forward and backward, is added to their sums."""

    def see(output: Output, given: Tensor) -> Tensor | None:
        rows = _real(given.detach(), batch.axes.get(output.sites[0].query_axis))
        sums[output].inputs += _products(rows, sums[output].inputs)
        sums[output].tokens += len(rows)
        # No parameter takes gradients, so that they begin where heads meet first.
        begins = torch.is_grad_enabled() and not given.requires_grad
        return given.detach().requires_grad_() if begins else None

    def hook(output: Output) -> Callable[[nn.Module, Any, Tensor], None]:
        total = sums[output].gradients

        def derived(gradient: Tensor) -> None:
            assert total is not None
            total.add_(_products(_real(gradient, batch.axes.get(output.sites[0].query_axis)), total))

        def after(_: nn.Module, __: Any, given: Tensor) -> None:
            if total is not None and given.requires_grad:
                given.register_hook(derived)  # type: ignore[no-untyped-call]  # torch does not say

        return after

    handles = [output.module.register_forward_hook(hook(output)) for output in sums]
    try:
        with watching(tuple(sums), see):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _real(values: Tensor, axis: TokenAxis | None) -> Tensor:
    """(tokens, features): without padding, where values lie along the batch's tokens."""
    rows = values.flatten(0, -2)
    if axis is None or values.shape[:-1] not in (axis.special.shape, (axis.special.numel(),)):
        return rows
    mask = mask_of(axis).bool().flatten()
    return rows if mask.all() else rows[mask.to(rows.device)]


def _products(rows: Tensor, total: Tensor) -> Tensor:
    """The sum of outer products over rows, in float32, where and in what the total is kept."""
    rows = rows.float()
    return (rows.mT @ rows).to(total.device).to(total.dtype)


def _summed(loss: Loss, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, float]:
    """What to derive, summed over a batch's predictions, and how many those are."""
    if loss.kind == "output":
        return loss.to_derive(model, batch).sum(), float(len(batch.order))
    found = loss.of(model, batch)
    return (found.mean * found.count.float().to(found.mean.device)).sum(), float(found.count.sum())


def _backward(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise ModelError("the loss depends on none of these layers' heads", "Choose other stacks.")
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not say


def _check(output: Output, found: Sums) -> None:
    if not found.tokens:
        raise ModelError(f"{output.name} is not run on these texts", "Choose the stacks that are.")
    if not all(t is None or bool(t.isfinite().all()) for t in (found.inputs, found.gradients)):
        raise ModelError(f"numbers at {output.name} are not finite on these texts", "Load the model with float32.")


# ------------------------------------------------------------------ sets of heads
def _columns(output: Output) -> Tensor:
    """Where the results of all heads lie that still give something: no other can make up for one that goes."""
    return torch.cat([unit.columns for unit in output.units("head")])


def _inverse_and_weight(output: Output, found: Sums) -> tuple[Tensor, Tensor]:
    """P and Wᵀ of the columns of all heads that are left, (columns, columns) and (columns, out)."""
    columns = _columns(output).to(found.inputs.device)
    mean = found.mean(columns)
    # A layer that gives zeros costs nothing, but has no inverse.
    ridge = max(RIDGE * float(mean.diagonal().mean()), 1e-100)
    mean.diagonal().add_(ridge)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(mean))
    return inverse, output.weight.to(columns.device)[columns].double()


def _scores(output: Output, units: Sequence[str], inverse: Tensor, cost: Tensor) -> dict[tuple[str, str], LayerScores]:
    scored: dict[tuple[str, str], LayerScores] = {}
    for unit in units:
        order, losses = eliminate(inverse, cost, [len(u.columns) for u in output.units(unit)])
        scores = np.empty(len(order))
        scores[list(order)] = rising(np.diff(losses))
        scored[unit, output.name] = LayerScores(scores, order=order, losses=losses)
    return scored
