"""A table that never loses a column: what does not fit the width goes into a further block under the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from headscope.views.text import ascii_only

# Where the first column and another do not fit side by side, the first is broken down to so many cells.
_LEAST = 8


@dataclass(frozen=True)
class Column:
    """One column: its header and a cell a row. The text is safe to show already."""

    header: Text
    cells: tuple[Text, ...]
    justify: Literal["left", "right", "center"] = "left"

    @property
    def width(self) -> int:
        """Terminal cells that the widest line of the column takes."""
        return max(line.cell_len for text in (self.header, *self.cells) for line in text.split(allow_blank=True))


@dataclass(frozen=True)
class ColumnBlocks:
    """Columns side by side, in as many blocks as the console's width asks for; each block repeats the first column.

    `widths` overrides the columns' own widths, so that several tables line up.
    """

    columns: Sequence[Column]
    widths: Sequence[int] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = list(self.widths or (column.width for column in self.columns))
        gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= options.max_width else 1
        widths = fitted(widths, options.max_width, gap)
        for number, block in enumerate(blocks_of(widths, options.max_width, gap)):
            if number:
                yield Text()
            yield self._table(block, widths, gap, options.ascii_only)

    def _table(self, block: Sequence[int], widths: Sequence[int], gap: int, plain: bool) -> Table:
        # The rule is a row: a box would add cells that the arithmetic of `blocks_of` would have to know.
        table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=True, header_style="bold")
        for index in block:
            column = self.columns[index]
            table.add_column(
                encodable(column.header, plain),
                justify=column.justify,
                vertical="bottom",
                min_width=widths[index],
                max_width=widths[index],
                overflow="fold",
            )
        mark = "-" if plain else "─"
        table.add_row(*(Text(mark * widths[index], style="dim") for index in block))
        for row in zip(*(self.columns[index].cells for index in block), strict=True):
            table.add_row(*(encodable(cell, plain) for cell in row))
        return table


def encodable(text: Text, plain: bool) -> Text:
    """`text` as it is, or spelled out in ASCII where the stream carries nothing else."""
    if not plain or text.plain.isascii():
        return text
    return Text(ascii_only(text.plain), style=text.style, justify=text.justify)


def fitted(widths: Sequence[int], max_width: int, gap: int) -> list[int]:
    """Widths of which the first and any other stand side by side; cells are broken into lines where they are wider."""
    first, *others = widths
    if not others:
        return [min(first, max_width)]
    first = min(first, max(_LEAST, max_width - gap - max(others)))
    return [first, *(min(width, max(1, max_width - gap - first)) for width in others)]


def blocks_of(widths: Sequence[int], max_width: int, gap: int) -> Iterator[list[int]]:
    """Indices of the columns in each block: column 0, then as many others as `max_width` cells hold, at least one."""
    block, used = [0], widths[0]
    for index in range(1, len(widths)):
        if len(block) > 1 and used + gap + widths[index] > max_width:
            yield block
            block, used = [0], widths[0]
        block.append(index)
        used += gap + widths[index]
    yield block


@dataclass(frozen=True)
class Lines:
    """Lines of text that wrap at the console's width, spelled out in ASCII where the stream carries nothing else."""

    lines: Sequence[Text]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*(encodable(line, options.ascii_only) for line in self.lines))


@dataclass(frozen=True)
class Facts:
    """Names and values under each other; a value that wraps stays right of the names."""

    pairs: Sequence[tuple[str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in self.pairs:
            grid.add_row(Text(name, style="dim"), encodable(Text(value), options.ascii_only))
        yield grid
