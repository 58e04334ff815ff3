"""What an attention layer turned out to be, without the model that it is part of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headscope.capture.session import SiteFacts


@dataclass(frozen=True)
class LayerFacts:
    """One layer's place and sizes: plain numbers, which outlive the model and travel between processes.

    Attributes:
        layer: The model's own layer number.
        heads: The heads' numbers in the original model, in the order of the weights; gaps where heads were removed.
        num_kv_heads: Key/value heads that the layer computes with.
        head_dim: None where it is not known.
        kv_heads: For each of `heads`, the original number of the key/value head that it uses.
    """

    stack: str
    layer: int
    heads: tuple[int, ...]
    num_kv_heads: int
    head_dim: int | None
    kv_heads: tuple[int, ...]

    @classmethod
    def of(cls, facts: SiteFacts) -> LayerFacts:
        """What is known of a site once the model ran."""
        heads = facts.heads
        return cls(
            stack=facts.site.stack,
            layer=facts.site.layer,
            heads=heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            kv_heads=tuple(facts.kv_head(head) for head in heads),
        )

    @property
    def num_heads(self) -> int:
        """Heads in the weights."""
        return len(self.heads)

    def kv_head(self, head: int) -> int:
        """The original number of the key/value head that a head uses. Raises ValueError for one that is not there."""
        return self.kv_heads[self.heads.index(head)]
