"""What the demo and its driver process tell each other, as JSON files."""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.cli.demo.settings import CommitMode, SinkKind

JOB = "demo"
"""The job's name, under which its checkpoints and staged rows are."""


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """Where the driver process is to write."""

    kind: SinkKind
    address: str
    """URL of a database, or bootstrap servers."""
    place: str
    """Table or topic."""
    commit_mode: CommitMode


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
