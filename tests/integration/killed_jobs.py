"""The processes of a job that a crash test kills, and starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.integration.decision_directory import DecisionDirectory
from typing_extensions import Self

from onceflow.core.crash_points import VARIABLE

_ROOT = Path(__file__).parents[2]


class KilledJob:
    """The attempts of one job, each a process of `program`."""

    def __init__(self, program: Path, directory: Path) -> None:
        self._program = program
        self.log = DecisionDirectory(directory / "log")
        self._points = directory / "crash-points"
        self._started: list[subprocess.Popen[bytes]] = []
        self.log.path.mkdir()
        self._points.mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """Leave no process behind, however the test ended."""
        for process in self._started:
            process.kill()
            process.communicate(timeout=30)

    def start_with(self, *arguments: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, str(self._program), *map(str, arguments)],
            env={
                **os.environ,
                VARIABLE: str(self._points),
                "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)]),
            },
            stderr=subprocess.PIPE,
        )
        self._started.append(process)
        return process


def finished(process: subprocess.Popen[bytes], *, timeout_s: float = 90) -> int:
    """Return how the attempt ended: 0, or minus SIGKILL."""
    _, errors = process.communicate(timeout=timeout_s)
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return process.returncode
