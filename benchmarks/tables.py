"""A table of figures, as all reports print them."""

from __future__ import annotations

from rich.table import Table


def figure_table(title: str, first: str, *others: str) -> Table:
    """Return an empty one: the first column names things, the others hold numbers."""
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right")
    return table
