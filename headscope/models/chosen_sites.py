"""Which of a model's attention sites a user chose."""

from __future__ import annotations

from collections.abc import Sequence

from headscope.errors import InputError
from headscope.models.selection import Selection
from headscope.models.sites import Site, select_stacks


def select_sites(
    sites: Sequence[Site], stack: str | Sequence[str] | None, layers: Selection, where: str
) -> tuple[Site, ...]:
    """The sites of the wanted stacks and layers.

    Args:
        sites: All sites of a model.
        stack: Stack names or module path prefixes; None for all.
        layers: The layers within them.
        where: The model's name, for messages.

    Raises:
        InputError: A stack or a layer does not exist; the message names those that do.
    """
    wanted = (stack,) if isinstance(stack, str) else stack
    stacked = select_stacks(sites, wanted)
    if not stacked:
        raise InputError("no stack is selected", f"Stacks: {', '.join(dict.fromkeys(s.stack for s in sites))}.")
    available: dict[str, list[int]] = {}
    for site in stacked:
        available.setdefault(site.stack, []).append(site.layer)
    layers.check(available.values(), where)
    chosen = {(name, n) for name, numbers in available.items() for n in layers.within(numbers)}
    return tuple(s for s in stacked if (s.stack, s.layer) in chosen)
