"""What a repair came to: frozen, without torch and transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LayerRepair:
    """One projection's refit.

    Errors are the squares of what is missing from the stream there, tokens weighted as the next norm does, as shares of
    the variance of what the projection should give. Layers before it are repaired already.

    Attributes:
        name: `stack.layer` of an output projection, the path of a down projection.
        kept: Whether the refitted weight is in the model: no ridge may help on what was held back.
        ridge: The strength that was best on what was held back; None where nothing was kept.
        error_before, error_after: On all texts, which are those that were fitted.
        held_before, held_after: On those that were held back, with the fit to the others.
    """

    name: str
    kept: bool
    ridge: float | None
    error_before: float
    error_after: float
    held_before: float
    held_after: float


@dataclass(frozen=True)
class RepairReport:
    """What a repair came to.

    Attributes:
        layers: In the order of the forward pass.
        mlp: Whether down projections were refitted, too.
        texts, tokens: What was refitted on; tokens are those of the first layer's sequence.
        held_back: Tokens of them that judged the ridge.
    """

    layers: tuple[LayerRepair, ...]
    mlp: bool
    texts: int
    tokens: int
    held_back: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
