"""Gradients of the loss with respect to gates that multiply heads' results: one pass forward and back for all heads."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.capture.outputs import Output, frozen, watching
from headscope.errors import ModelError
from headscope.importance.by_text import averaged, check_ran, texts_of
from headscope.importance.loss import Loss
from headscope.importance.method import Scored, Task, importance_method
from headscope.models.batches import Batch


@importance_method("gradient")
def gradient(task: Task) -> Scored:
    """How much the loss of a text changes with a gate on the head (Michel et al. 2019).

    Section 4.1, I_h = E_x |Att_h(x)^T dL(x) / dAtt_h(x)|: the product is summed over all tokens and features of a text
    before its absolute value is taken, and the mean is over texts. L is the mean over what is predicted of a text, in
    nats. A group has a gate of its own. Parameters take no gradients; batches do not matter.

    Raises:
        InputError: There are no texts.
        ModelError: A module is not reached by them, does not get one result a text, or the loss has no gradient.
    """
    return _scores(task, per_token=False)


@importance_method("gradient-token")
def gradient_token(task: Task) -> Scored:
    """How much the loss of a text changes with gates on the head at each token.

    As `gradient`, but absolute values are taken of every token's product, and then summed over the tokens of a text.

    Raises:
        InputError, ModelError: As `gradient`.
    """
    return _scores(task, per_token=True)


def _scores(task: Task, per_token: bool) -> Scored:
    data = texts_of(task)
    values = {(u, o.name): np.zeros((data.texts, len(o.units(u)))) for u in task.units for o in task.outputs}
    with frozen(task.model):
        for batch in data.batches:
            products = _products(task, data.loss, batch, per_token)
            for unit, output in ((u, o) for u in task.units for o in task.outputs):
                values[unit, output.name][list(batch.order)] = _by_unit(output, unit, products.get(output))
    return {key: averaged(found, task.normalise) for key, found in values.items()}


def _products(task: Task, loss: Loss, batch: Batch, per_token: bool) -> dict[Output, Tensor]:
    gates = _Gates(len(batch.order), per_token)
    with watching(task.outputs, gates.see):
        total = loss.to_derive(task.model, batch).sum()
        check_ran(task.outputs, gates.ran)
        if not total.requires_grad:
            raise ModelError(
                f"{type(task.model).__name__} computes its loss without gradients", "Score its heads by ablation."
            )
        total.backward()  # type: ignore[no-untyped-call]  # torch does not say
    return gates.products


def _by_unit(output: Output, unit: str, products: Tensor | None) -> NDArray[np.float64] | float:
    """float64, (batch, units): absolute values, summed over the tokens if those are still apart.

    Zero where no gradient came back: the loss does not depend on the module.
    """
    units = output.units(unit)
    if products is None or not units:
        return 0.0
    sums = torch.stack([products[..., output.state.places(u.heads)].sum(-1) for u in units], dim=-1).abs()
    return (sums.sum(1) if sums.ndim == 3 else sums).cpu().numpy()


@dataclass
class _Gates:
    """Products of heads' results with their gradients in one batch.

    Attributes:
        size: Texts in the batch.
        per_token: Keep the tokens of a text apart.
        products: float64, (batch, heads) or (batch, tokens, heads), heads in the order of the weights. Calls of a
            module add up.
        ran: The modules that were called.
    """

    size: int
    per_token: bool
    products: dict[Output, Tensor] = field(default_factory=dict)
    ran: set[Output] = field(default_factory=set)

    def see(self, output: Output, context: Tensor) -> Tensor:
        """Have the gradient of what goes into an output projection come back here."""
        if context.shape[0] != self.size:
            raise ModelError(
                f"{output.sites[0].path} has results of shape {tuple(context.shape)} for {self.size} texts: not one "
                "block of tokens a text",
                "Leave this part of the model out with --stack.",
            )
        self.ran.add(output)
        # Nothing before the first module takes gradients. Others are seen through a view: what else uses the same
        # tensor does not pass the gate.
        seen = context.view_as(context) if context.requires_grad else context.detach().requires_grad_()
        values = seen.detach()
        seen.register_hook(lambda back: self._add(output, values, back))  # type: ignore[no-untyped-call]  # as above
        return seen

    def _add(self, output: Output, values: Tensor, back: Tensor) -> None:
        rows = output.projection.rows
        product = (values.float() * back.float()).reshape(self.size, -1, rows.heads, rows.dim).sum(-1)
        product = (product if self.per_token else product.sum(1)).double()
        known = self.products.get(output)
        if known is not None and known.shape != product.shape:
            raise ModelError(
                f"{output.sites[0].path} is called with different numbers of tokens for the same texts",
                "Take --method gradient, which adds them up.",
            )
        self.products[output] = product if known is None else known + product
