"""Rows of text for people: a table on a terminal, plain columns elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Sequence[tuple[str, str]]
"""Cells, each with its style."""


def print_listing(console: Console, headings: Sequence[str], rows: Sequence[Row]) -> None:
    """Print `rows` under `headings`. What is piped is never cut, coloured or drawn around."""
    if console.is_terminal:
        table = Table()
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell, style) for cell, style in row))
        console.print(table)
        return
    lines = [list(headings), *([cell for cell, _ in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        console.print(padded.rstrip(), markup=False, highlight=False, soft_wrap=True)
