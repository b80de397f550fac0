"""Does a command line of `script/test` select tests itself, or is it for the default run?

A path, the id of a test, `-m` and `--onceflow-sink` select. Every other option leaves the default
selection as it is: `-v`, `-x`, `--lf` and `-k gate` run in it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest


class _ReadSelection:
    """A plugin that reads the parsed command line and ends pytest before it collects anything."""

    selects = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        """Keep whether the command line selects."""
        self.selects = (
            config.args_source is pytest.Config.ArgsSource.ARGS
            or bool(config.getoption("markexpr"))
            or bool(config.getoption("--onceflow-sink"))
        )
        return 0


def selects_tests(arguments: Sequence[str]) -> bool:
    """Return whether pytest takes `arguments` as a selection of tests.

    pytest itself parses them, because it alone knows which options have a value: in `-k gate` there
    is no path.

    Raises:
        SystemExit: pytest refuses the arguments, and has printed why.
    """
    reader = _ReadSelection()
    status = pytest.main([*arguments], plugins=[reader])
    if status:
        raise SystemExit(int(status))
    return reader.selects


if __name__ == "__main__":
    print("own" if selects_tests(sys.argv[1:]) else "default")  # noqa: T201
