"""The label map for a terminal: layers down, heads across, one coloured cell with a letter a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from headscope.results import HeadRecord
from headscope.views.labels import LabelStyle, cell_letters, marked


@dataclass(frozen=True)
class LabelMap:
    """One stack's map. Cells lose the blank before them to fit; wider maps continue under the first heads."""

    layers: Mapping[int, Sequence[HeadRecord]]
    styles: Mapping[str, LabelStyle]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heads = sorted({record.head for records in self.layers.values() for record in records})
        margin = max(len(str(layer)) for layer in self.layers) + len("L") + 1
        space = max(options.max_width - margin, 3)
        # A sink's two letters, and one more column where such a cell is marked.
        text = max(2, *(len(self._letters(record)) for records in self.layers.values() for record in records))
        blank = 1 if (text + 1) * len(heads) <= space or text * len(heads) > space else 0
        cell = text + blank
        parts = -(-len(heads) * cell // space)
        size = -(-len(heads) // parts)
        for start in range(0, len(heads), size):
            if start:
                yield Text()
            yield from self._part(heads[start : start + size], margin, cell, blank)

    def _letters(self, record: HeadRecord) -> str:
        return marked(cell_letters(record, self.styles), record)

    def _part(self, heads: Sequence[int], margin: int, cell: int, blank: int) -> RenderResult:
        yield Text(" " * margin + _head_numbers(heads, cell, blank), style="dim", no_wrap=True)
        for layer, records in self.layers.items():
            found = {record.head: record for record in records}
            line = Text(f"L{layer}".ljust(margin), no_wrap=True, overflow="fold")
            for head in heads:
                self._add_cell(line, found.get(head), cell, blank)
            yield line

    def _add_cell(self, line: Text, record: HeadRecord | None, cell: int, blank: int) -> None:
        if record is None:
            line.append(" " * cell)
            return
        style = self.styles[record.pattern]
        line.append(" " * blank + self._letters(record).ljust(cell - blank), style=f"{style.ink} on {style.fill}")


def _head_numbers(heads: Sequence[int], cell: int, blank: int) -> str:
    """Every head's number over its cell, or every fifth where cells are too narrow for that."""
    every = 1 if cell > len(str(heads[-1])) else 5
    out = ""
    for position, head in enumerate(heads):
        number = str(head) if position % every == 0 else ""
        out = out.ljust(position * cell + blank)
        out += number
    return out
