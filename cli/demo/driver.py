"""The driver process as the demo sees it, and what the two tell each other, as JSON files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from onceflow.cli.demo.settings import DemoCommitMode, SinkKind
from onceflow.core.decoders import json_decoder
from onceflow.integration.faults.processes import (
    Watchdog,
    children_of,
    kill_process,
    kill_session,
)

_LOG_TAIL_CHARS = 4000
JOB = "demo"
"""The job's name, under which its checkpoints and staged rows are."""


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """Where the driver process is to write."""

    kind: SinkKind
    address: str
    """URL of a database, or bootstrap servers."""
    savepoint: str
    """Table or topic."""
    commit_mode: DemoCommitMode


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What the driver process is told when it is started."""

    spark_master: str
    bootstrap_servers: str
    topic: str
    sink: SinkSpec
    storage: str
    scratch: str
    status_path: str
    stop_path: str
    """The job stops, with a last checkpoint, when this file appears."""
    group: str
    """The consumer group for which offsets are published."""
    parallelism: int
    backend: str
    interval_s: float
    at_least_once: bool
    unaligned: bool = False
    from_savepoint: str | None = None


@dataclass(frozen=True, slots=True)
class SlotProcess:
    """The process that hosts one slot."""

    slot: int
    pid: int
    parent_pid: int
    """The pyspark daemon that forked it; its parent is the executor's JVM."""


@dataclass(frozen=True, slots=True)
class SinkTransactions:
    """What `JobStatus.sinks` says of one sink's transactions."""

    uid: str
    open: int
    prepared: int
    committed: int
    aborted: int
    oldest_prepared_s: float


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """What the driver process last said."""

    state: str
    attempt: int
    records_in: int
    """Records read in this attempt."""
    checkpoints: int
    slots: tuple[SlotProcess, ...] = ()
    last_error: str = ""
    sinks: tuple[SinkTransactions, ...] = ()


class DriverProcess:
    """At most one driver at a time; each leads a session, so that its orphans can be found."""

    def __init__(self, spec: JobSpec, directory: Path) -> None:
        """Describe it; `start` runs it. `directory` takes the spec, the status and the log."""
        self._spec = spec
        self._spec_path = directory / "job.json"
        self._status_path = Path(spec.status_path)
        self.log_path = directory / "driver.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        self._sessions: list[int] = []

    def start(self) -> None:
        """Run a driver. Its status is None until it has written one."""
        self._spec_path.write_bytes(msgspec.json.encode(self._spec))
        self._status_path.unlink(missing_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "onceflow.cli.demo.job", str(self._spec_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Executors run the driver's own interpreter, whatever `python3` is on PATH.
                env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            )
        self._sessions.append(self._process.pid)
        self._watchdog = Watchdog(self._process.pid)

    def start_as(self, spec: JobSpec) -> None:
        """Run a driver of another `spec`, once the one before has ended."""
        self._spec = spec
        self.start()

    @property
    def pid(self) -> int:
        """The process that runs or ran last."""
        if self._process is None:
            raise RuntimeError("start() first")
        return self._process.pid

    @property
    def starts(self) -> int:
        """How many drivers there have been."""
        return len(self._sessions)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def status(self) -> DriverStatus | None:
        """Return what the running driver last wrote, None before its first report."""
        with contextlib.suppress(FileNotFoundError):
            return json_decoder(DriverStatus).decode(self._status_path.read_bytes())
        return None

    def stop(self) -> None:
        """Tell the driver to stop in good order: a last checkpoint, everything committed."""
        Path(self._spec.stop_path).touch()

    def kill(self) -> tuple[int, ...]:
        """SIGKILL the driver and its JVM, and nothing else; return their pids.

        Slots are left to find out by themselves, as they must when a machine dies.
        """
        # Its only child is the JVM; the Python workers and executors are the JVM's children.
        victims = (self.pid, *children_of(self.pid))
        for victim in victims:
            kill_process(victim)
        self._reap()
        return victims

    def end(self) -> None:
        """Kill everything that this and earlier drivers have left. Idempotent."""
        for session in self._sessions:
            kill_session(session)
        self._reap()

    def log_tail(self) -> str:
        """Return the end of what the drivers printed."""
        if not self.log_path.exists():
            return ""
        return self.log_path.read_text(errors="replace")[-_LOG_TAIL_CHARS:]

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()
        if self._watchdog is not None:
            self._watchdog.release()
            self._watchdog = None
