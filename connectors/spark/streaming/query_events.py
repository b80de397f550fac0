"""The events and the status of Structured Streaming queries, in the form of those of jobs.

    batch n of a query                  checkpoint n + 1 of a job: a job's first one is 1
    a run of the query                  attempt; a query started again is a new job of the same name
    addBatch, which commits the sink    the subtask's synchronous part
    the rows of the sources             what subtasks have read, a source each

Spark reports a batch when it is complete. So a running batch is not visible, and a failed batch is
reported with the end of its query.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)
from typing_extensions import override

from onceflow.core.imports import require_package
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.snapshots import SnapshotTimings
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import SubtaskMetrics
from onceflow.core.runtime.driver.health import Health
from onceflow.core.runtime.driver.metrics_server import ShownJob, ShownMetrics
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.events.listeners import JobListener, StatusTracker
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.runtime.metrics.exposition import Measured
from onceflow.core.runtime.metrics.job_metrics import JobMetrics, SeriesLimits
from onceflow.core.runtime.metrics.metric_catalog import QUERY_LABEL
from onceflow.core.settings.pipeline_settings import Metrics

_WHOLE = SubtaskRef("query", 0)


class QueryEvents(StreamingQueryListener):
    """A Spark listener that sends the events of every query to `listeners`, and keeps their status.

    Pass it to `spark.streams.addListener`. It runs on the driver, on a thread of Spark. Listeners
    run on their own threads, like those of a `Pipeline`, and their errors are logged.
    `JobStatus.job` is the query's name, or its id if it has no name.

    With `metrics=Metrics(prometheus_bind=…)`, Prometheus can read the running queries there. The
    metrics have the same names as those of jobs, and the label `query`. A counter continues if a
    query is started again in the same process.
    """

    def __init__(
        self, listeners: Sequence[JobListener] = (), *, metrics: Metrics | None = None
    ) -> None:
        """Prepare without events.

        Raises:
            ConfigError: Metrics are requested, and the package that writes them is not installed.
        """
        self._listeners = tuple(listeners)
        self._metrics = metrics or Metrics()
        if self._metrics.prometheus_bind is not None:
            require_package("prometheus_client")
        self._lock = threading.Lock()
        self._queries: dict[str, _Query] = {}
        self._counters: dict[str, JobMetrics] = {}

    def statuses(self) -> dict[str, JobStatus]:
        """Return the status of each query with events, by the query's id. Any thread may call."""
        with self._lock:
            return {query_id: query.tracker.status for query_id, query in self._queries.items()}

    @override
    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Start a new status of the query."""
        self._begin(str(event.id), event.name)

    @override
    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Publish the events of a completed batch."""
        progress = event.progress
        with self._lock:
            query = self._queries.get(str(progress.id))
        # A listener that was added to a running query has not seen its start.
        (query or self._begin(str(progress.id), progress.name)).on_progress(progress)

    @override
    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Do nothing, because nothing has happened."""

    @override
    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Publish the end of the query: stopped, or failed with Spark's reason."""
        with self._lock:
            query = self._queries.get(str(event.id))
        if query is not None:
            query.on_end(event.exception)

    def _begin(self, query_id: str, name: str | None) -> _Query:
        limits = SeriesLimits(self._metrics.subtasks_max, self._metrics.splits_max)
        with self._lock:
            # Counters are kept by the query's id, so they continue when the query is started again.
            # All other data belong to one run.
            counters = self._counters.setdefault(query_id, JobMetrics(limits=limits))
            before = self._queries.get(query_id)
            query = _Query(name or query_id, self._listeners, counters, self._metrics)
            self._queries[query_id] = query
        if before is not None:
            before.hide()
        query.show()
        return query


class _Query:
    """A run of a query."""

    def __init__(
        self, name: str, listeners: Sequence[JobListener], counters: JobMetrics, metrics: Metrics
    ) -> None:
        self._name = name
        self._counters = counters
        self.tracker = StatusTracker(name, listeners, counters.on_event)
        shown = ShownMetrics(metrics, name, ShownJob(self._measure, self._judge_health))
        self.show, self.hide = shown.show, shown.hide
        self._read: dict[str, int] = {}
        self._running = False
        self.tracker.publish(job_events.JobStarted())

    def on_progress(self, progress: StreamingQueryProgress) -> None:
        """Publish the events that a job would publish for the batch."""
        rows = _rows_by_source(progress)
        # Batches are counted from 0, and checkpoint 0 is the empty start.
        number = CheckpointId(progress.batchId + 1)
        now, milliseconds = job_events.Moment.now(), progress.durationMs
        # The sources are known only now: Spark names them with the first progress.
        if not self._running:
            self._run(progress.batchId, sources=frozenset(rows))
        for source, count in rows.items():
            self._read[source] = self._read.get(source, 0) + count
        self._report()
        if "addBatch" not in milliseconds:
            return  # Spark asked its sources, and there was nothing to do
        publish = self.tracker.publish
        total_s = milliseconds.get("triggerExecution", 0) / 1000
        publish(
            job_events.CheckpointTriggered(
                number, CheckpointKind.PERIODIC, at=_before(now, total_s)
            )
        )
        timings = SnapshotTimings(sync_ms=float(milliseconds["addBatch"]))
        publish(job_events.CheckpointAcked(number, _WHOLE, timings, at=now))
        publish(job_events.CheckpointCompleted(number, _commit_ms(milliseconds), at=now))
        publish(job_events.SubtaskCommitted(_WHOLE, number, at=now))

    def on_end(self, error: str | None) -> None:
        """Publish the end of the query."""
        text = error or ""
        if self._running:
            self.tracker.publish(job_events.AttemptEnded(AttemptId(1), text))
        state = job_events.JobState.FAILED if text else job_events.JobState.STOPPED
        self.tracker.publish(job_events.JobEnded(state, text))
        self.tracker.close()
        self.hide()

    def _measure(self) -> Measured:
        return Measured(self._counters.collect(), {QUERY_LABEL: self._name})

    def _judge_health(self) -> Health:
        state = self.tracker.status.state
        unready = "" if state is job_events.JobState.RUNNING else f"the query is {state.value}"
        return Health(self._name, "", unready)

    def _run(self, batch: int, sources: frozenset[str]) -> None:
        self._running = True
        publish = self.tracker.publish
        publish(job_events.JobStarted(sources))
        publish(job_events.AttemptBegan(AttemptId(1), CheckpointId(batch)))
        publish(job_events.SlotJoined(0, os.getpid(), os.getppid(), socket.gethostname()))
        publish(job_events.AttemptRunning())

    def _report(self) -> None:
        subtasks = tuple(
            SubtaskMetrics(SubtaskRef(source, 0), records_in=count)
            for source, count in self._read.items()
        )
        self.tracker.publish(job_events.SlotReported(0, subtasks))


def _rows_by_source(progress: StreamingQueryProgress) -> dict[str, int]:
    rows: dict[str, int] = {}
    for number, source in enumerate(progress.sources):
        name = (
            source.description if len(progress.sources) == 1 else f"{number}: {source.description}"
        )
        rows[name] = max(0, source.numInputRows)
    return rows


def _commit_ms(milliseconds: Mapping[str, Any]) -> float:
    """Return the time for Spark's own logs, which decide whether a batch is repeated."""
    return float(milliseconds.get("walCommit", 0) + milliseconds.get("commitOffsets", 0))


def _before(now: job_events.Moment, seconds: float) -> job_events.Moment:
    return job_events.Moment(now.monotonic_s - seconds, now.wall_s - seconds)
