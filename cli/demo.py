"""The command `onceflow demo`, which runs the demo of the cloned repository."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

import onceflow

# The demo needs the harness of the crash tests, which is not installed with the package.
_REPOSITORY = Path(onceflow.__file__).parents[2]
_EXIT_NO_VERDICT = 2

# All flags, including --help, are passed to the demo.
_ALL_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}

demo = typer.Typer(add_completion=False)


@demo.command("demo", context_settings=_ALL_FLAGS, add_help_option=False)
def run_demo(context: typer.Context) -> None:
    """Run payments from a real Kafka into a real database, under SIGKILL. In a clone only."""
    if not (_REPOSITORY / "demo" / "__main__.py").exists():
        print(
            "onceflow demo: the demo needs the test servers of the repository. Clone the"
            " repository and run script/demo there, with the same flags.",
            file=sys.stderr,
        )
        raise typer.Exit(_EXIT_NO_VERDICT)
    paths = (str(_REPOSITORY / "src"), str(_REPOSITORY), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "demo", *context.args]
    os.execve(sys.executable, command, environment)  # noqa: S606 - signals are the demo's own
