"""The catalog of all metrics of onceflow, and the values that a scrape collects.

Tests compare `/metrics`, the table in docs/reference/metrics.md, the alert rules and the dashboards
with this catalog. Names have one prefix, base units, and `_total` at the end of a counter.

The label that every sample has is not listed: `job_name`, or `query` for a query of Structured
Streaming. (`job` is the label that Prometheus gives to its scrape targets.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

PREFIX = "onceflow_"
JOB_LABEL = "job_name"
QUERY_LABEL = "query"

SECONDS_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""The upper bounds, from an append on a local disk to a target that is away for minutes."""


class MetricType(Enum):
    """The type of a metric in Prometheus's terms."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `name` is the scraped name, with prefix, unit and suffix."""

    name: str
    type: MetricType
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """The upper bounds of a histogram, without infinity."""

    def __post_init__(self) -> None:
        is_total = self.name.endswith("_total")
        if is_total != (self.type is MetricType.COUNTER):
            raise ValueError(f"{self.name}: a counter, and nothing else, ends in _total")
        if bool(self.buckets) != (self.type is MetricType.HISTOGRAM):
            raise ValueError(f"{self.name}: a histogram, and nothing else, has buckets")


def _counter(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(PREFIX + name, MetricType.COUNTER, unit, meaning, labels)


def _gauge(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(PREFIX + name, MetricType.GAUGE, unit, meaning, labels)


def _histogram(name: str, meaning: str, *labels: str) -> Metric:
    kind = MetricType.HISTOGRAM
    return Metric(PREFIX + name, kind, "seconds", meaning, labels, SECONDS_BUCKETS)


# --- the job -------------------------------------------------------------------------------------

JOB_STATE = _gauge(
    "job_state",
    "0 or 1",
    "The job's state: 1 for the state that it is in, and 0 for all others.",
    "state",
)
ATTEMPTS = _counter(
    "attempts_total", "attempts", "How many attempts have begun, the first one included."
)
RESTARTS = _counter(
    "restarts_total",
    "restarts",
    "How often the job was restarted after a failed attempt, by the class of the error.",
    "reason",
)
SLOTS = _gauge("slots", "slots", "How many slots take part in the running attempt.")
SLOT_MEMORY = _gauge(
    "slot_memory_bytes",
    "bytes",
    "How many bytes of memory the process of a slot has resident.",
    "slot",
)

# --- checkpoints ---------------------------------------------------------------------------------

CHECKPOINTS = _counter(
    "checkpoints_total",
    "checkpoints",
    "How many checkpoints have ended, by outcome: completed, or failed (given up).",
    "outcome",
)
CHECKPOINTS_PENDING = _gauge(
    "checkpoints_pending", "checkpoints", "How many checkpoints are under way."
)
CHECKPOINT_DURATION = _histogram(
    "checkpoint_duration_seconds",
    "How many seconds a completed checkpoint took, by kind and part. Part whole is the time from"
    " the trigger to the decision. It contains start_delay, alignment, synchronous and upload of"
    " the slowest subtask, and append. Part commit is the time from the decision until every sink"
    " has committed.",
    "kind",
    "part",
)
CHECKPOINT_LAST = _gauge(
    "checkpoint_last_completed_timestamp_seconds",
    "seconds",
    "When the last completed checkpoint was decided, in seconds since 1970.",
)
CHECKPOINT_LAST_NUMBER = _gauge(
    "checkpoint_last_completed_number", "number", "The number of the last completed checkpoint."
)
CHECKPOINT_INTERVAL = _gauge(
    "checkpoint_interval_seconds",
    "seconds",
    "The interval of checkpoints as it is set, in seconds. Absent if none is set.",
)
CHECKPOINT_UPLOADED = _counter(
    "checkpoint_uploaded_bytes_total",
    "bytes",
    "How many bytes of state completed checkpoints have uploaded.",
)
STATE_BYTES = _gauge(
    "state_bytes", "bytes", "How many bytes of state the last completed checkpoint holds."
)
STORAGE = _gauge(
    "storage_bytes",
    "bytes",
    "How many bytes the state files of retained checkpoints have in storage, without savepoints.",
)
SAVEPOINTS = _counter("savepoints_total", "savepoints", "How many savepoints were completed.")

# --- sources -------------------------------------------------------------------------------------

SOURCE_RECORDS = _counter(
    "source_records_total",
    "records",
    "How many records a source has read. Records that are read again after a restart count again.",
    "source",
)
SOURCE_LAG = _gauge(
    "source_lag_records",
    "records",
    "How many records of a split the last completed checkpoint does not hold yet. Without the label"
    " split it is the sum over all splits of the source.",
    "source",
    "split",
)

SOURCE_LAG_BYTES = _gauge(
    "source_lag_bytes",
    "bytes",
    "How many bytes the server of a source has written after the position of the last completed"
    " checkpoint. Absent if the source counts records instead.",
    "source",
)
SOURCE_LAG_SECONDS = _gauge(
    "source_lag_seconds",
    "seconds",
    "Age of the position of the last completed checkpoint, by the server's clock. 0 if the server"
    " has written nothing since. Absent if the source counts records instead.",
    "source",
)
SOURCE_RETAINED = _gauge(
    "source_retained_bytes",
    "bytes",
    "How many bytes the server keeps for a source, such as the WAL that a replication slot holds.",
    "source",
)
SOURCE_MOVED = _gauge(
    "source_last_move_timestamp_seconds",
    "seconds",
    "When the position from which the server keeps data for a source last moved, in seconds since"
    " 1970.",
    "source",
)
SOURCE_COPIED = _gauge(
    "source_copied_rows",
    "rows",
    "How many rows of a table the first copy has copied. Absent when the copy is finished.",
    "source",
    "table",
)
SOURCE_COPY_EXPECTED = _gauge(
    "source_copy_expected_rows",
    "rows",
    "How many rows the server expects in a table whose first copy is not finished.",
    "source",
    "table",
)
SOURCE_WARNINGS = _gauge(
    "source_warnings",
    "warnings",
    "How many warnings a source has about its server. The status of the job has their text.",
    "source",
)

# --- sinks ---------------------------------------------------------------------------------------

SINK_TRANSACTIONS = _gauge(
    "sink_transactions",
    "transactions",
    "How many transactions of a sink are in a state: open; prepared by a slot of the running"
    " attempt; or in_doubt, which a failed attempt has prepared and recovery has not yet resolved.",
    "sink",
    "state",
)
SINK_OLDEST_PREPARED = _gauge(
    "sink_oldest_prepared_seconds",
    "seconds",
    "Age in seconds of the transaction that has been prepared or in doubt longest. 0 if none is.",
    "sink",
)
SINK_COMMIT_STUCK = _gauge(
    "sink_commit_stuck",
    "sinks",
    "1 while the target refuses a decided commit of the sink again and again and only a person can"
    " change that; 0 otherwise.",
    "sink",
)
SINK_ROWS = _counter(
    "sink_rows_total", "rows", "How many rows slots and recovery have committed.", "sink"
)
SINK_COMMITS = _counter(
    "sink_commits_total",
    "transactions",
    "How many transactions slots and recovery have committed.",
    "sink",
)
SINK_ABORTS = _counter(
    "sink_aborts_total",
    "transactions",
    "How many transactions of older attempts were rolled back.",
    "sink",
)
SINK_RETRIES = _counter(
    "sink_commit_retries_total",
    "tries",
    "How many tries of commits failed and were repeated.",
    "sink",
)
SINK_VERSIONS = _counter(
    "sink_versions_total",
    "versions",
    "How many versions with rows (snapshots of an Iceberg table, say) the driver has made of a"
    " target that keeps versions. Those that a start has made of what waited do not count.",
    "sink",
)
SINK_VERSION_FILES = _counter(
    "sink_version_files_total",
    "files",
    "How many data files these versions have added.",
    "sink",
)
SINK_REJECTED = _counter(
    "sink_rejected_rows_total",
    "rows",
    "How many bad rows the writers of a sink have left out.",
    "sink",
)
WAITING = _gauge(
    "waiting_seconds",
    "seconds",
    "For how many seconds a source or sink has waited for a server outside, or has had a call to"
    " its target under way. Absent where no server is away and no call takes over 3 s.",
    "operator",
)
SINK_BLOCKERS = _gauge(
    "sink_blockers",
    "others",
    "How many sessions and programs writers of a sink wait for in the target, while a writer's"
    " answer to a checkpoint is overdue.",
    "sink",
)

COMMIT_LATENCY = _histogram(
    "commit_latency_seconds",
    "How many seconds pass from a record's own time until its rows are visible in the target. One"
    " sample a record.",
    "sink",
)

# --- subtasks ------------------------------------------------------------------------------------

_OF_CHAIN = " Without the label subtask it is the sum over the chain."
REJECTED = _counter(
    "rejected_records_total",
    "records",
    "How many bad records were left out: dropped, or sent to the dead letters.",
    "chain",
)
SUBTASK_RECORDS_IN = _counter(
    "subtask_records_in_total",
    "records",
    f"How many records a subtask has taken in.{_OF_CHAIN}",
    "chain",
    "subtask",
)
SUBTASK_RECORDS_OUT = _counter(
    "subtask_records_out_total",
    "records",
    f"How many records a subtask has emitted.{_OF_CHAIN}",
    "chain",
    "subtask",
)
SUBTASK_BUSY = _counter(
    "subtask_busy_seconds_total",
    "seconds",
    f"How many seconds a subtask was at work.{_OF_CHAIN}",
    "chain",
    "subtask",
)
SUBTASK_BACKPRESSURED = _counter(
    "subtask_backpressured_seconds_total",
    "seconds",
    f"How many seconds a subtask waited for room in the channels below it.{_OF_CHAIN}",
    "chain",
    "subtask",
)
SUBTASK_CPU = _counter(
    "subtask_cpu_seconds_total",
    "seconds",
    f"How many seconds of processor time a subtask has used.{_OF_CHAIN}",
    "chain",
    "subtask",
)
SUBTASK_INPUT = _gauge(
    "subtask_input_batches",
    "batches",
    f"How many batches wait in the input channels of a subtask.{_OF_CHAIN}",
    "chain",
    "subtask",
)

CATALOG: tuple[Metric, ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Metric)
)
"""The metrics of this module, in the order of their definition."""


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """The current value of a histogram.

    `counts[i]` counts values in the bucket up to `bounds[i]`.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """The count per bucket, not cumulated: len(counts) == len(bounds) + 1. The last bucket has no
    bound."""
    total: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)


class Histogram:
    """A histogram that counts values. Its owner serializes the calls."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count `value`."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def observe_all(self, values: Iterable[tuple[float, int]], total: float) -> None:
        """Count each (value, number of times); `total` is the sum of all values."""
        for value, count in values:
            self._counts[bisect_left(self._bounds, value)] += count
        self._total += total

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add the counts of another histogram with the same bounds."""
        for index, count in enumerate(counts):
            self._counts[index] += count
        self._total += total

    def value(self) -> HistogramValue:
        """Return the current value of the histogram."""
        return HistogramValue(self._bounds, tuple(self._counts), self._total)


Value: TypeAlias = float | HistogramValue


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its samples: the values of its labels, and the value.

    An empty label value means that the sample does not have this label.
    """

    metric: Metric
    samples: tuple[tuple[tuple[str, ...], Value], ...]
