"""What a probe works with: a type of head that brings its own inputs is a function from this to what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headscope.capture.blocks import Consumer
from headscope.capture.session import Capture, Engine, SiteFacts
from headscope.heads.catalogue.result import Place
from headscope.models.loading import LoadedModel
from headscope.models.selection import Selection
from headscope.models.sites import Site


@dataclass(frozen=True)
class Probing:
    """A model whose heads are looked at.

    Attributes:
        loaded: In evaluation mode; where a type needs it, with its language-model head.
        sites, wanted: All attention sites of the model, and those whose heads are asked for.
        heads: Which of their heads, in original numbers.
        engine: How attention is read.
        seed: Of everything random.
        batch_size: Texts a forward pass; None chooses by length.
        say: Shows a line of progress.
    """

    loaded: LoadedModel
    sites: tuple[Site, ...]
    wanted: tuple[Site, ...]
    heads: Selection
    engine: Engine = "streaming"
    seed: int = 0
    batch_size: int | None = None
    say: Callable[[str], None] = lambda line: None

    def capture(self, *consumers: Consumer, engine: Engine | None = None, renormalise: bool = False) -> Capture:
        """A capture that shows the rows of the wanted sites to these consumers."""
        keys = {(s.stack, s.layer) for s in self.wanted}
        return Capture(
            self.loaded.model,
            self.sites,
            selected=lambda site: (site.stack, site.layer) in keys,
            consumers=consumers,
            engine=engine or self.engine,
            renormalise=renormalise,
        )

    def places(self, facts: SiteFacts) -> list[tuple[int, Place]]:
        """The wanted heads of a site that ran: each one's place among its weights, and where it is in the model."""
        numbers = facts.heads
        chosen = self.heads.within(numbers)
        return [(numbers.index(h), (facts.site.stack, facts.site.layer, h)) for h in chosen]
