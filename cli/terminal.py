"""The functions that all commands share: listings, messages, passwords, objects by name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onceflow.core.errors import ConfigError
from onceflow.core.printable import escape_controls, escape_terminal_codes
from onceflow.core.spi import Sink, Source

Row = Sequence[tuple[str, str]]
"""The cells of a row, each with its style."""


def print_listing(console: Console, headings: Sequence[str], rows: Sequence[Row]) -> None:
    """Print `rows` under `headings`. Piped output is never truncated, coloured or framed."""
    if console.is_terminal:
        table = Table()
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*(Text(escape_controls(cell), style) for cell, style in row))
        console.print(table)
        return
    lines = [list(headings), *([escape_controls(cell) for cell, _ in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        console.print(padded.rstrip(), markup=False, highlight=False, soft_wrap=True)


def console() -> Console:
    """Return the console for results."""
    return Console(highlight=False)


def say(text: str, style: str = "") -> None:
    """Print a message for people on stderr."""
    shown = escape_terminal_codes(text)
    Console(stderr=True, highlight=False).print(shown, markup=False, style=style, soft_wrap=True)


def read_password(path: Path) -> str:
    """Return the content of file `path`, without the line break at its end.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--password-file {path}: {reason}") from None


def read_options(path: Path, option: str) -> dict[str, str]:
    """Read the properties file `path`, which has one name=value on each line.

    Raises:
        ConfigError: The file cannot be read, or has other lines. The message contains no value.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{option} {path}: {reason}") from None
    options: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, value = line.partition("=")
        if not separator:
            raise ConfigError(f"{option} {path}, line {number} is not name=value")
        options[name.strip()] = value.strip()
    return options


def load_sink(name: str) -> Sink:
    """Return the sink `module:name`, or the sink that the function of this name returns.

    Modules in the working directory are found, too.

    Raises:
        ConfigError: It cannot be loaded, or is of another type.
    """
    sink = _load(name, Sink, "--sink")
    if not isinstance(sink, Sink):
        raise ConfigError(f"--sink {name} is a {type(sink).__name__}, not a Sink")
    return sink


def load_source(name: str) -> Source:
    """Return the source `module:name`, or the source that this function returns, like `load_sink`.

    Raises:
        ConfigError: It cannot be loaded, or is of another type.
    """
    source = _load(name, Source, "--source")
    if not isinstance(source, Source):
        raise ConfigError(f"--source {name} is a {type(source).__name__}, not a Source")
    return source


def _load(name: str, kind: type[Sink] | type[Source], option: str) -> object:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{option} {name!r} is not module:name")
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds text
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        value: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
        is_maker = callable(value) and not isinstance(value, kind)
        return cast("Callable[[], object]", value)() if is_maker else value
    except ConfigError:
        raise
    except Exception as error:  # the user's own module may raise anything
        raise ConfigError(f"{option} {name}: {type(error).__name__}: {error}") from error
