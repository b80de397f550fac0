"""The entry point of the program `onceflow`, which reports missing packages of extras."""

from __future__ import annotations

import sys

from onceflow.core.errors import MissingExtra
from onceflow.core.imports import naming_extras

_EXIT_USAGE = 2


def main() -> None:
    """Run the command line. This is the entry point of the package."""
    try:
        with naming_extras():
            from onceflow.cli.main import main as run_command
    except MissingExtra as error:
        print(f"onceflow: {error}", file=sys.stderr)
        raise SystemExit(_EXIT_USAGE) from error
    run_command()
