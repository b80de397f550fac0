"""The driver process as the demo sees it, and what the two tell each other, as JSON files."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
from demo.settings import DemoCommitMode, SinkKind
from tests.support.driver_process import DriverProcess

from onceflow.core.decoding import json_decoder
from onceflow.core.runtime.events.status import JobStatus

JOB = "demo"
"""The job's name, under which its checkpoints and staged rows are."""


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """The target of the driver process."""

    kind: SinkKind
    address: str
    """URL of a database, or bootstrap servers."""
    target: str
    """Table or topic."""
    commit_mode: DemoCommitMode


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The specification that the driver process gets when it is started."""

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
    """The transactions of one sink, as `JobStatus.sinks` reports them."""

    uid: str
    open: int
    prepared: int
    committed: int
    aborted: int
    oldest_prepared_s: float


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """The last report of the driver process."""

    state: str
    attempt: int
    records_in: int
    """Records read in this attempt."""
    checkpoints: int
    slots: tuple[SlotProcess, ...] = ()
    last_error: str = ""
    sinks: tuple[SinkTransactions, ...] = ()


def write_status(path: Path, status: JobStatus) -> None:
    """Replace the file at `path` with a `DriverStatus`."""
    report = DriverStatus(
        state=status.state.value,
        attempt=status.attempt,
        records_in=status.records_in,
        checkpoints=status.checkpoints_completed,
        slots=tuple(
            SlotProcess(slot=slot.slot, pid=slot.pid, parent_pid=slot.parent_pid)
            for slot in status.slots
        ),
        last_error=status.last_error,
        sinks=tuple(
            SinkTransactions(
                uid=sink.uid,
                open=sink.open,
                prepared=sink.prepared,
                committed=sink.committed,
                aborted=sink.aborted,
                oldest_prepared_s=sink.oldest_prepared_s,
            )
            for sink in status.sinks
        ),
    )
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(report))
    # Replaced whole: the demo reads it at any time.
    fresh.replace(path)


class DemoDriver(DriverProcess):
    """The demo's driver, which is told a `JobSpec` and says how its job stands."""

    def __init__(self, spec: JobSpec, directory: Path) -> None:
        """Describe it; `start` runs it. `directory` takes the spec, the status and the log."""
        super().__init__(directory)
        self._spec = spec
        self._spec_path = directory / "job.json"
        self._status_path = Path(spec.status_path)

    def start(self) -> None:
        """Run a driver. Its status is None until it has written one."""
        self._spec_path.write_bytes(msgspec.json.encode(self._spec))
        self._status_path.unlink(missing_ok=True)
        # Executors run the driver's own interpreter, whatever `python3` is on PATH.
        self.launch("demo.job", [self._spec_path], {"PYSPARK_PYTHON": sys.executable})

    def start_as(self, spec: JobSpec) -> None:
        """Run a driver of another `spec`, once the one before has ended."""
        self._spec = spec
        self.start()

    def status(self) -> DriverStatus | None:
        """Return what the running driver last wrote, None before its first report."""
        with contextlib.suppress(FileNotFoundError):
            return json_decoder(DriverStatus).decode(self._status_path.read_bytes())
        return None

    def stop(self) -> None:
        """Tell the driver to stop in good order: a last checkpoint, everything committed."""
        Path(self._spec.stop_path).touch()
