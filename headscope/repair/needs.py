"""What a repair takes, said before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from headscope.repair.places import Place
from headscope.repair.refit import RIDGES

# What a paused pass holds of every token: the stream, what its layer read, and the embeddings.
_HELD = 3


@dataclass(frozen=True)
class Needs:
    """Memory beside the two models, and work.

    Attributes:
        tokens: Of the texts.
        activations: Bytes that paused passes hold.
        sums: Bytes of one layer's sums and of solving for its weight, and of the weights as they were.
        passes: Work, as forward passes of the original model over the same tokens.
    """

    tokens: int
    activations: int
    sums: int
    passes: float

    @property
    def bytes(self) -> int:
        """All memory, beside the two models and what one batch takes on its way through a layer."""
        return self.activations + self.sums

    @property
    def line(self) -> str:
        """For the user."""
        return (
            f"Repair on {self.tokens:,} tokens: {_size(self.activations)} of activations and {_size(self.sums)} of "
            f"sums beside both models, as much work as {self.passes:.1f} forward passes"
        )


def needs(model: PreTrainedModel, places: Sequence[Place], tokens: int) -> Needs:
    """What refitting at these places takes; nothing is run.

    Args:
        model: The original.
        tokens: Of the texts to refit on.
    """
    weights = [place.weight for place in places]
    shapes = [tuple(weight.shape) for weight in weights]
    size = weights[0].element_size()
    held = max(2 * _HELD * outputs + inputs for inputs, outputs in shapes)
    # Those of fitted, held back and all tokens, and a matrix with its factor.
    sums = max(8 * (5 * inputs**2 + 4 * inputs * outputs) for inputs, outputs in shapes)
    before = sum(inputs * outputs for inputs, outputs in shapes) * size
    forward = 2 * tokens * max(_multiplied(model), 1)
    adding = sum(2 * tokens * (inputs**2 + 2 * inputs * outputs) for inputs, outputs in shapes)
    solving = sum((len(RIDGES) + 1) * (inputs**3 // 3 + 4 * inputs**2 * outputs) for inputs, outputs in shapes)
    return Needs(tokens, tokens * held * size, sums + before, 2 + (adding + solving) / forward)


def _multiplied(model: PreTrainedModel) -> int:
    """Numbers in the matrices that each token is multiplied with."""
    embeddings = {
        id(p) for m in model.modules() if "Embedding" in type(m).__name__ for p in m.parameters(recurse=False)
    }
    return sum(p.numel() for p in model.parameters() if p.ndim > 1 and id(p) not in embeddings)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{max(count / 1e6, 0.1):.3g} MB"
