"""Selecting layers and heads: `5`, `-1`, `0,2,5`, `3-7`, `all`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headscope.errors import InputError
from headscope.models.sites import Site, select_stacks

_ITEM = re.compile(r"(?P<single>-?\d+)|(?P<low>\d+)\s*-\s*(?P<high>\d+)")


@dataclass(frozen=True)
class Selection:
    """Numbers as a user writes them; None selects all. Negative ones count from the end."""

    what: str
    text: str
    items: tuple[tuple[int, int], ...] | None

    def within(self, available: Sequence[int]) -> tuple[int, ...]:
        """The numbers of `available` (ascending) that are selected; ones that do not exist are left out."""
        if self.items is None:
            return tuple(available)
        return tuple(n for n in available if any(low <= n <= high for low, high in self._resolved(available)))

    def check(self, lists: Iterable[Sequence[int]], where: str) -> None:
        """Make sure that every selected number, and every end of a range, exists in at least one of `lists`.

        Raises:
            InputError: One does not; the message names the valid ones.
        """
        if self.items is None:
            return
        lists = [list(numbers) for numbers in lists]
        valid = sorted({n for a in lists for n in a})
        for low, high in self.items:
            if low < 0:
                exists = any(-low <= len(a) for a in lists)
            else:
                # A range may span layers without attention, but must not reach past the last one.
                exists = bool(valid) and high <= valid[-1] and any(low <= n <= high for n in valid)
            if not exists:
                asked = str(low) if low == high else f"{low}-{high}"
                raise InputError(
                    f"{self.what} {asked} does not exist in {where}",
                    f"Valid {self.what}s: {ranges(valid)}; -1 is the last.",
                )

    def _resolved(self, available: Sequence[int]) -> list[tuple[int, int]]:
        found = []
        for low, high in self.items or ():
            if low >= 0:
                found.append((low, high))
            elif -low <= len(available):
                found.append((available[low], available[low]))
        return found


def parse_selection(what: str, value: str | int | Iterable[int] | None) -> Selection:
    """Read a selection of layers or heads.

    Args:
        what: `layer` or `head`, for messages.
        value: Text in the grammar above, a number, several numbers, or None for all.

    Raises:
        InputError: The text does not parse, or selects nothing.
    """
    if value is None:
        value = "all"
    if not isinstance(value, str):
        value = str(value) if isinstance(value, int) else ",".join(str(int(v)) for v in value)
    if value.strip() == "all":
        return Selection(what, value, None)
    items = []
    for part in value.split(","):
        match = _ITEM.fullmatch(part.strip())
        if match is None:
            raise _unreadable(what, value)
        if match["single"] is not None:
            items.append((int(match["single"]),) * 2)
        else:
            low, high = int(match["low"]), int(match["high"])
            if low > high:
                raise _unreadable(what, value)
            items.append((low, high))
    return Selection(what, value, tuple(items))


def _unreadable(what: str, value: str) -> InputError:
    return InputError(f"cannot read --{what} '{value}'", "Write 5, -1, 0,2,5, 3-7 or all.")


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
        raise InputError(
            f"stack {', '.join(wanted or ())} does not exist in {where}",
            f"Stacks: {', '.join(dict.fromkeys(s.stack for s in sites))}; or a module path such as {sites[0].path}.",
        )
    available: dict[str, list[int]] = {}
    for site in stacked:
        available.setdefault(site.stack, []).append(site.layer)
    layers.check(available.values(), where)
    chosen = {(name, n) for name, numbers in available.items() for n in layers.within(numbers)}
    return tuple(s for s in stacked if (s.stack, s.layer) in chosen)


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7`: ascending numbers in short."""
    parts: list[str] = []
    start = previous = None
    for n in [*numbers, None]:
        if previous is not None and n == previous + 1:
            previous = n
            continue
        if previous is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = n
    return ", ".join(parts)
