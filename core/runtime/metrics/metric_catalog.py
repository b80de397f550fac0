"""Every metric of onceflow: its name, type, unit, meaning and labels, each said once.

`/metrics`, the table in docs/monitoring.md, the alert rules and the dashboards are held against
this catalog by tests. Names have one prefix, base units, and `_total` at the end of a counter.

The label that every sample has is not listed: `job_name`, or `query` for a query of Structured
Streaming. (`job` is the label that Prometheus gives to what it scrapes.)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PREFIX = "onceflow_"
JOB_LABEL = "job_name"
QUERY_LABEL = "query"

SECONDS_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds, from an append on a local disk to a target that is away for minutes."""


class MetricType(Enum):
    """How a value moves, as Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` is as it is scraped, with prefix, unit and suffix."""

    name: str
    type: MetricType
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without infinity."""

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

JOB_STATE = _gauge("job_state", "0 or 1", "1 for the state that the job is in.", "state")
ATTEMPTS = _counter("attempts_total", "attempts", "Attempts that have begun, the first included.")
RESTARTS = _counter(
    "restarts_total",
    "restarts",
    "Restarts after a failed attempt, by the class of its error.",
    "reason",
)
SLOTS = _gauge("slots", "slots", "Slots that take part in the running attempt.")
SLOT_MEMORY = _gauge("slot_memory_bytes", "bytes", "Resident memory of a slot's process.", "slot")

# --- checkpoints ---------------------------------------------------------------------------------

CHECKPOINTS = _counter(
    "checkpoints_total",
    "checkpoints",
    "Checkpoints by outcome: completed, or failed, which means given up.",
    "outcome",
)
CHECKPOINTS_PENDING = _gauge("checkpoints_pending", "checkpoints", "Checkpoints under way.")
CHECKPOINT_DURATION = _histogram(
    "checkpoint_duration_seconds",
    "Time of a completed checkpoint by kind and part: whole (from the trigger to the decision), of"
    " it start_delay, alignment, synchronous and upload of the slowest subtask, and append; and"
    " commit (from the decision until every sink has committed).",
    "kind",
    "part",
)
CHECKPOINT_LAST = _gauge(
    "checkpoint_last_completed_timestamp_seconds",
    "seconds",
    "When the last completed checkpoint was decided, since 1970.",
)
CHECKPOINT_LAST_NUMBER = _gauge(
    "checkpoint_last_completed_number", "number", "The number of the last completed checkpoint."
)
CHECKPOINT_INTERVAL = _gauge(
    "checkpoint_interval_seconds",
    "seconds",
    "The interval of checkpoints that is set; absent where none is.",
)
CHECKPOINT_UPLOADED = _counter(
    "checkpoint_uploaded_bytes_total", "bytes", "State that completed checkpoints have uploaded."
)
STATE_BYTES = _gauge("state_bytes", "bytes", "State that the last completed checkpoint holds.")
STORAGE = _gauge(
    "storage_bytes",
    "bytes",
    "State files in checkpoint storage that retained checkpoints name; without savepoints.",
)
SAVEPOINTS = _counter("savepoints_total", "savepoints", "Savepoints that were completed.")

# --- sources -------------------------------------------------------------------------------------

SOURCE_RECORDS = _counter(
    "source_records_total",
    "records",
    "Records that a source has read; those read again after a restart count again.",
    "source",
)
SOURCE_LAG = _gauge(
    "source_lag_records",
    "records",
    "Records of a split that the last completed checkpoint does not hold. Without the label split:"
    " of all splits of the source.",
    "source",
    "split",
)

# --- sinks ---------------------------------------------------------------------------------------

SINK_TRANSACTIONS = _gauge(
    "sink_transactions",
    "transactions",
    "Transactions by state: open, prepared by a slot of the running attempt, or in_doubt: left"
    " prepared by a failed attempt and not yet resolved by recovery.",
    "sink",
    "state",
)
SINK_OLDEST_PREPARED = _gauge(
    "sink_oldest_prepared_seconds",
    "seconds",
    "Age of the transaction that has been prepared or in doubt for longest; 0: there is none.",
    "sink",
)
SINK_ROWS = _counter("sink_rows_total", "rows", "Rows committed, by slots and recovery.", "sink")
SINK_COMMITS = _counter(
    "sink_commits_total", "transactions", "Transactions committed, by slots and recovery.", "sink"
)
SINK_ABORTS = _counter(
    "sink_aborts_total", "transactions", "Transactions of older attempts, rolled back.", "sink"
)
SINK_RETRIES = _counter(
    "sink_commit_retries_total", "tries", "Tries of commits that failed and were repeated.", "sink"
)
SINK_REJECTED = _counter(
    "sink_rejected_rows_total", "rows", "Bad rows that the writers of a sink left out.", "sink"
)
SINK_BLOCKERS = _gauge(
    "sink_blockers",
    "others",
    "Whom writers of a sink wait for in the target while their ack is overdue.",
    "sink",
)

COMMIT_LATENCY = _histogram(
    "commit_latency_seconds",
    "From a record's own time until its rows are visible in the target; a sample a record.",
    "sink",
)

# --- subtasks ------------------------------------------------------------------------------------

_OF_CHAIN = " Without the label subtask: of the whole chain."
REJECTED = _counter(
    "rejected_records_total",
    "records",
    "Bad records left out: dropped, or sent to the dead letters.",
    "chain",
)
SUBTASK_RECORDS_IN = _counter(
    "subtask_records_in_total", "records", f"Records taken.{_OF_CHAIN}", "chain", "subtask"
)
SUBTASK_RECORDS_OUT = _counter(
    "subtask_records_out_total", "records", f"Records emitted.{_OF_CHAIN}", "chain", "subtask"
)
SUBTASK_BUSY = _counter(
    "subtask_busy_seconds_total", "seconds", f"Time at work.{_OF_CHAIN}", "chain", "subtask"
)
SUBTASK_BACKPRESSURED = _counter(
    "subtask_backpressured_seconds_total",
    "seconds",
    f"Time spent waiting for room below.{_OF_CHAIN}",
    "chain",
    "subtask",
)
SUBTASK_CPU = _counter(
    "subtask_cpu_seconds_total", "seconds", f"Processor time.{_OF_CHAIN}", "chain", "subtask"
)
SUBTASK_INPUT = _gauge(
    "subtask_input_batches",
    "batches",
    f"Batches that wait in the input channels.{_OF_CHAIN}",
    "chain",
    "subtask",
)

CATALOG: tuple[Metric, ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Metric)
)
"""All of them, in the order of this file."""
