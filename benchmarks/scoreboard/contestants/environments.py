"""Virtual environments of engines that this project does not depend on, made once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.scoreboard.contestant import NotRun, Say
from onceflow.core.local_files import cache_directory
from onceflow.integration.servers.process import exclusive

_TIMEOUT_S = 600.0
_ERROR_CHARS = 1500


def find_python(name: str) -> Path:
    """Return the Python of the environment `name`, whether it exists or not."""
    return cache_directory() / name / "bin" / "python"


def make_environment(name: str, requirements: Sequence[str], say: Say) -> None:
    """Make the environment `name` with the pinned requirements, unless it is complete.

    Raises:
        NotRun: The packages could not be installed.
    """
    directory = cache_directory() / name
    complete = directory / "requirements"
    text = "\n".join(requirements)
    with exclusive(directory.with_name(f"{name}.lock"), _TIMEOUT_S):
        if complete.exists() and complete.read_text() == text:
            return
        say(f"    installing {', '.join(requirements)} into {directory}")
        python = find_python(name)
        commands: tuple[list[str | Path], ...] = (
            [sys.executable, "-m", "venv", "--clear", directory],
            [python, "-m", "pip", "install", "--quiet", *requirements],
        )
        for command in commands:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
            )
            if done.returncode:
                raise NotRun(
                    f"{name} could not be installed: {(done.stdout + done.stderr)[-_ERROR_CHARS:]}"
                )
        complete.write_text(text)
