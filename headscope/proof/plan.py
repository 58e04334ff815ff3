"""How a site gets from its input to its weights, as data.

A plan holds our own copies of everything that belongs to the checkpoint (weights, norms, sinks, bias tables) and the
choices that were found (which input, which norm, which turn, which mask). It can be made on one model and carried out
on what another one computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from headscope.errors import ModelError
from headscope.models.weights import HeadWeights
from headscope.proof.bias import BiasPlan
from headscope.proof.masks import MaskPlan
from headscope.proof.norms import Norm
from headscope.proof.rotary import Turn

Role = Literal["query", "key", "value"]
Step = Literal["norm", "turn"]


class NotRebuilt(ModelError):
    """A site's computation is none that we have; the message says which part."""


@dataclass(frozen=True)
class End:
    """How queries, keys or values are made.

    Attributes:
        source: Names of the module's inputs that are added up and projected.
        norm: On the projected heads, None for none.
        factor: What queries and keys are multiplied with before the attention function sees them.
    """

    source: tuple[str, ...] = ()
    norm: Norm | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Plan:
    """One site's plan.

    Attributes:
        weights: The checkpoint's weights, by head.
        query, key, value: How each of them is made.
        order: Steps between the projection of queries and keys and their scores.
        turn: How positions turn queries and keys, None where they do not.
        scale: Factor on the dot products.
        bias: What is added to the scores, None for nothing.
        mask: Who may look at whom.
        softcap, sinks: As in `reference.attention`.
        sinks_after: The weights are those without sinks, which only scale the heads' results.
        gated: The heads' results are multiplied with the sigmoid of the gate in `weights` before they are projected.
        between: Something else of the model lies between the heads' results and the output projection.
        borrowed: Queries and keys are the model's own, since how they get their positions is not ours.
        doubt: What the config says and the model does not do, where queries and keys had to be borrowed.
    """

    weights: HeadWeights
    query: End
    key: End
    value: End
    scale: float
    mask: MaskPlan
    order: tuple[Step, ...] = ()
    turn: Turn | None = None
    bias: BiasPlan | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    sinks_after: bool = False
    gated: bool = False
    between: bool = False
    borrowed: bool = False
    doubt: str | None = None

    @property
    def positions(self) -> str:
        """`own`, or `model` where any of the model's own tensors is taken for positions."""
        turned = self.turn is None or self.turn.own
        biased = self.bias is None or self.bias.own
        return "own" if turned and biased and not self.borrowed else "model"

    @property
    def normed(self) -> bool:
        """Whether queries or keys have a norm that we know."""
        return self.query.norm is not None or self.key.norm is not None

    def end(self, role: Role) -> End:
        """How one of the three is made."""
        found: End = getattr(self, role)
        return found

    def with_ends(self, **ends: End) -> Plan:
        """The same plan with other ends, by role."""
        changes: dict[str, Any] = dict(ends)
        return replace(self, **changes)

    def copy(self) -> Plan:
        """The same plan with weights that stay as they are when the model's change. All else are copies already."""
        return replace(self, weights=self.weights.clone())
