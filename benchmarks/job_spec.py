"""The specification and the result of a measured job, as plain values that are sent as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

Backend = Literal["heap", "rocksdb"]
Database = Literal["postgres", "mysql", "mariadb"]
Delivery = Literal["exactly_once", "at_least_once"]
CommitMode = Literal["two_phase", "ledger"]
Storage = Literal["directory", "bucket"]
Barriers = Literal["aligned", "overtaking"]


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one job in a driver process of its own."""

    records: int
    source: Literal["kafka", "generated"] = "kafka"
    sink: Literal["postgres", "mysql", "mariadb", "discard"] = "postgres"
    backend: Backend = "heap"
    delivery: Delivery = "exactly_once"
    task: Literal["finish", "kill_slot"] = "finish"
    parallelism: int = 2
    commit_mode: CommitMode = "two_phase"
    storage: Storage = "directory"
    """Of checkpoints: in the run's directory, or in a bucket of an S3 server of this machine."""
    storage_url: str = ""
    barriers: Barriers = "aligned"
    bootstrap_servers: str = ""
    topic: str = ""
    database_url: str = ""
    table: str = "ledger"
    directory: str = ""
    """Of this run alone: checkpoints, and what a discarding sink counted."""
    server_pids: dict[str, int] = {}
    """Name to root process of the servers whose CPU is counted beside the engine's."""


class CheckpointTimes(msgspec.Struct, frozen=True):
    """One completed checkpoint, in milliseconds; the parts are the slowest subtask's."""

    duration_ms: float
    alignment_ms: float
    sync_ms: float
    async_ms: float
    append_ms: float
    committed_ms: float | None
    size_bytes: int


class Recovery(msgspec.Struct, frozen=True):
    """Seconds from the SIGKILL of a slot, by what was seen."""

    killed_at_records: int
    noticed_s: float
    """The driver knows that the attempt is lost. What follows is counted from the kill too."""
    slots_ended_s: float
    claimed_s: float
    recovered_s: float
    """Sinks agree with the decision log; runs beside the start of the slots."""
    forked_s: float
    """The process that replaces the killed one; the other slots' are used again."""
    slots_up_s: float
    deployed_s: float
    running_s: float
    records_flow_s: float
    """A source of the new attempt has reported a record; seen 0.1 s late at most."""
    rows_flow_s: float
    """Rows that the new attempt has written are visible in the table."""


class DriverRecovery(msgspec.Struct, frozen=True):
    """Seconds from the start of a driver's process, whose predecessor was killed, to each step."""

    imported_s: float
    session_s: float
    """Spark's own session has started, since `imported_s`."""
    claimed_s: float
    recovered_s: float
    """Sinks agree with the decision log; runs beside the start of the slots."""
    daemon_s: float
    """Spark has started the daemon that forks its Python processes."""
    forked_s: float
    """The daemon has imported what it imports, and forked the last slot."""
    slots_up_s: float
    deployed_s: float
    running_s: float
    records_flow_s: float
    """A reader of the new attempt is first asked for records."""
    rows_flow_s: float
    """Rows that the new attempt has written are visible in the table."""

    @property
    def records_without_session_s(self) -> float:
        """Until records flow, without Spark's starting."""
        return self.records_flow_s - (self.session_s - self.imported_s)

    @property
    def rows_without_session_s(self) -> float:
        """Until rows are visible, without Spark's starting."""
        return self.rows_flow_s - (self.session_s - self.imported_s)


class AttemptStart(msgspec.Struct, frozen=True, kw_only=True):
    """The times when an attempt reached each step, in seconds since the epoch."""

    claimed_at_s: float
    recovered_at_s: float
    daemon_at_s: float
    forked_at_s: float
    slots_up_at_s: float
    deployed_at_s: float
    running_at_s: float


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one run. Names that end in `_at_s` are seconds since the epoch."""

    state: str
    imported_at_s: float
    session_at_s: float
    """Spark's session has started."""
    reading_at_s: float
    """The first reader was first asked for records."""
    start: AttemptStart
    """Of the first attempt."""
    committed_at_s: float
    cpu_s: dict[str, float]
    """From the start of reading to the end, by group: engine, and every server.

    The engine's is also there by its parts: driver, jvm and slots."""
    engine_life_cpu_s: float
    """The engine's from the start of its process: JVM, Spark and imports too."""
    stage_cpu_us: dict[str, float]
    """CPU of each chain's own threads, microseconds a record that it took in."""
    slot_rss_bytes_max: int
    checkpoints: tuple[CheckpointTimes, ...]
    recovery: Recovery | None = None

    @property
    def seconds(self) -> float:
        """The seconds from the start of reading to the last committed row."""
        return self.committed_at_s - self.reading_at_s
