"""What all commands share: listings, what is said beside a result, passwords in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onceflow.core.errors import ConfigError

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


def console() -> Console:
    """Return where results go."""
    return Console(highlight=False)


def say(text: str, style: str = "") -> None:
    """Print what is not a result, for people."""
    Console(stderr=True, highlight=False).print(text, markup=False, style=style, soft_wrap=True)


def read_password(path: Path) -> str:
    """Return what file `path` holds, without the line break at its end.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--password-file {path}: {reason}") from None
