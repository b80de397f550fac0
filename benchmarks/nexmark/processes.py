"""Runs a job of Nexmark in a process of its own, and kills its processes if asked to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

from benchmarks.nexmark.job import TIMEOUT_S, JobSpec, Progress, Result
from benchmarks.stage import BenchmarkError
from onceflow.integration.faults.processes import is_alive, kill_tree

_ROOT = Path(__file__).parents[2]
_LOG_TAIL_CHARS = 3_000
_SLOTS_END_S = 30.0

Line: TypeAlias = Progress | Result


def run_job(spec: JobSpec) -> Result:
    """Run the job to its end.

    Raises:
        BenchmarkError: The job failed.
    """
    with _started(spec) as lines:
        return _read_result(lines, "the job")


def run_killed_job(spec: JobSpec) -> Result:
    """Run the job; kill a slot after a checkpoint, and its driver after one of the next attempt.

    Raises:
        BenchmarkError: The job failed, or it ended before it was killed.
    """
    with _started(spec) as lines:
        first = _read_progress(lines, 1)
        os.kill(first.slot_pids[-1], signal.SIGKILL)
        second = _read_progress(lines, first.attempt + 1)
        lines.kill()
        _await_end(second.slot_pids)
    with _started(spec) as lines:
        return _read_result(lines, "the job after two kills")


class _Lines:
    """The lines of a child process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def read(self) -> Line:
        """Return the next line.

        Raises:
            BenchmarkError: The process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            log = self._log.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
            raise BenchmarkError(f"the job ended with exit code {self._process.wait()}:\n{log}")
        return msgspec.json.decode(line, type=Progress | Result)

    def kill(self) -> None:
        """Kill the driver."""
        self._process.kill()
        self._process.wait()


@contextmanager
def _started(spec: JobSpec) -> Generator[_Lines, None, None]:
    log = Path(spec.directory, "log")
    command = [
        *(sys.executable, "-m", "benchmarks.nexmark.job"),
        msgspec.json.encode(spec).decode(),
    ]
    with log.open("ab") as errors:
        process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=errors)
    try:
        yield _Lines(process, log)
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _read_progress(lines: _Lines, attempt_min: int) -> Progress:
    """Return the first checkpoint of an attempt from `attempt_min` on."""
    while isinstance(line := lines.read(), Progress):
        if line.attempt >= attempt_min and line.slot_pids:
            return line
    raise BenchmarkError("the job ended before its processes were killed: give more --events")


def _read_result(lines: _Lines, job: str) -> Result:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if isinstance(line := lines.read(), Result):
            return line
    raise BenchmarkError(f"{job} has not ended after {TIMEOUT_S} s")


def _await_end(pids: tuple[int, ...]) -> None:
    """Wait until the slots of a killed driver have ended.

    Raises:
        BenchmarkError: A slot still runs.
    """
    deadline = time.monotonic() + _SLOTS_END_S
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise BenchmarkError(f"slots {pids} still run {_SLOTS_END_S} s after their driver")
        time.sleep(0.05)
