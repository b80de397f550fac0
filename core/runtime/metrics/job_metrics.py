"""The metrics of one job, computed from its events over all attempts of one driver.

Slots count from zero in each attempt and report by heartbeats. This module adds up the differences,
so a counter continues over restarts. The work of a slot between its last heartbeat and its loss is
missing.

Bounds: series of subtasks and slots <= subtasks_max, of splits <= splits_max per source. Above that
there is one series per chain or source, and none per slot. Reasons of restarts <= REASONS_MAX.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, handles_of
from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.protocol.messages import SinkMetrics, SubtaskMetrics
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.events.status import CheckpointStats, JobStatus
from onceflow.core.runtime.metrics import metric_catalog
from onceflow.core.runtime.metrics.commit_latency import CommitLatency, RecentLatency, SinkInputs
from onceflow.core.runtime.metrics.function_totals import FunctionTotals
from onceflow.core.runtime.metrics.metric_catalog import Family, Histogram, Metric, Value
from onceflow.core.spi import SourceProgress, SplitOffsets

REASONS_MAX = 20
"""The number of error classes with a series of their own; others are counted as `other`."""

_log = logging.getLogger("onceflow.metrics")


@dataclass(frozen=True, slots=True)
class SeriesLimits:
    """The largest numbers of subtasks, and of splits of a source, with series of their own."""

    subtasks_max: int = 200
    splits_max: int = 200


@dataclass(slots=True)
class _SubtaskTotal:
    records_in: int = 0
    records_out: int = 0
    busy_s: float = 0.0
    backpressured_s: float = 0.0
    cpu_s: float = 0.0
    rejected: int = 0

    def add(self, before: SubtaskMetrics | None, now: SubtaskMetrics) -> None:
        """Add the work since `before`; None means since the subtask began."""
        for name in _SUBTASK_FIELDS:
            earlier = getattr(before, name) if before else 0
            setattr(self, name, getattr(self, name) + max(0, getattr(now, name) - earlier))


@dataclass(slots=True)
class _SinkTotal:
    rows_committed: int = 0
    committed: int = 0
    aborted: int = 0
    retried: int = 0
    rows_rejected: int = 0

    def add(self, before: SinkMetrics | None, now: SinkMetrics) -> None:
        """Add the work since `before`; None means since the subtask began."""
        for name in ("rows_committed", "committed", "retried", "rows_rejected"):
            earlier = getattr(before, name) if before else 0
            setattr(self, name, getattr(self, name) + max(0, getattr(now, name) - earlier))

    def add_recovered(self, sink: job_events.RecoveredSink) -> None:
        """Add the transactions of a recovery."""
        self.rows_committed += sink.rows_committed
        self.committed += sink.committed
        self.aborted += sink.aborted


_SUBTASK_FIELDS = tuple(field.name for field in fields(_SubtaskTotal))
_SUBTASK_COUNTERS: Mapping[str, Metric] = {
    "records_in": metric_catalog.SUBTASK_RECORDS_IN,
    "records_out": metric_catalog.SUBTASK_RECORDS_OUT,
    "busy_s": metric_catalog.SUBTASK_BUSY,
    "backpressured_s": metric_catalog.SUBTASK_BACKPRESSURED,
    "cpu_s": metric_catalog.SUBTASK_CPU,
}
_SINK_COUNTERS: Mapping[str, Metric] = {
    "rows_committed": metric_catalog.SINK_ROWS,
    "committed": metric_catalog.SINK_COMMITS,
    "aborted": metric_catalog.SINK_ABORTS,
    "retried": metric_catalog.SINK_RETRIES,
    "rows_rejected": metric_catalog.SINK_REJECTED,
}


@dataclass(frozen=True, slots=True)
class _InDoubt:
    """The prepared transactions that a failed attempt has left."""

    transactions: int
    since_s: float
    """The time by `time.monotonic` since which the oldest has been prepared."""


class JobMetrics:
    """Receives every event of a job, in order, from any thread; any thread collects."""

    def __init__(
        self,
        interval_s: float | None = None,
        limits: SeriesLimits | None = None,
        sinks: Sequence[SinkInputs] = (),
    ) -> None:
        """Create the metrics. If `interval_s` is None, there are no periodic checkpoints."""
        self._interval_s = interval_s
        self._limits = limits or SeriesLimits()
        self._lock = threading.Lock()
        self._status: JobStatus | None = None
        self._attempts = 0
        self._restarts: Counter[str] = Counter()
        self._savepoints = 0
        self._uploaded_bytes = 0
        self._last_decided_s: float | None = None
        self._durations: dict[tuple[str, str], Histogram] = {}
        self._uncommitted: set[int] = set()
        """The completed checkpoints whose commits are not known to have ended."""
        self._subtasks: dict[SubtaskRef, _SubtaskTotal] = {}
        self._sinks: dict[str, _SinkTotal] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        """The numbers of versions and of files that they have added, by sink that creates
        versions."""
        self._functions = FunctionTotals()
        self._latency = CommitLatency(sinks)
        self._last_subtasks: dict[SubtaskRef, SubtaskMetrics] = {}
        self._last_sinks: dict[tuple[str, int], SinkMetrics] = {}
        self._in_doubt: dict[str, _InDoubt] = {}
        self._retained: tuple[CompletedCheckpoint, ...] | None = None
        """The retained checkpoints; None if they are unknown, as for a query."""
        self._fails = False

    def on_event(self, event: job_events.JobEvent, status: JobStatus) -> None:
        """Count one event. Called before the job goes on, so it never raises and never waits."""
        try:
            with self._lock:
                self._status = status
                self._latency.on_event(event)
                self._take(event, status)
        except Exception:
            if not self._fails:
                _log.exception(
                    "the metrics of job %s do not include %s", status.job, type(event).__name__
                )
            self._fails = True

    def retain(self, checkpoints: Sequence[CompletedCheckpoint]) -> None:
        """Set the checkpoints that the log retains now; their files are counted at a scrape."""
        with self._lock:
            self._retained = tuple(checkpoints)

    def collect(self) -> tuple[Family, ...]:
        """Return the current value of every metric."""
        with self._lock:
            status = self._status
            if status is None:
                return ()
            retained = self._retained
            counted = (*self._collect_job(), *self._collect_subtasks(), *self._collect_sinks())
        # Outside the lock, which events take before the job goes on: this adds up thousands of
        # files.
        stored = (
            () if retained is None else (_single(metric_catalog.STORAGE, _sum_files(retained)),)
        )
        return (*counted, *stored, *self._collect_gauges(status))

    def read_latencies(self) -> dict[str, RecentLatency]:
        """Return, by sink, the recent latency until records became visible."""
        with self._lock:
            return self._latency.read_recent(time.time())

    # --- events: under the lock -----------------------------------------------------------------

    def _take(self, event: job_events.JobEvent, status: JobStatus) -> None:
        if isinstance(event, job_events.SlotReported):
            self._add_report(event)
        elif isinstance(event, job_events.SubtaskCommitted | job_events.CheckpointCommitted):
            self._observe_commits(event, status)
        elif isinstance(event, job_events.CheckpointCompleted):
            self._observe_checkpoint(event, status)
        elif isinstance(event, job_events.SavepointCompleted):
            self._savepoints += 1
        elif isinstance(event, job_events.AttemptBegan):
            self._attempts += 1
            # Counters of slots start at 0 in each attempt, but totals grow over all attempts:
            # compute differences only within one attempt.
            self._last_subtasks.clear()
            self._last_sinks.clear()
            self._uncommitted.clear()
            self._functions.begin_attempt()
        elif isinstance(event, job_events.AttemptEnded) and event.error:
            self._note_in_doubt(status, event.at.monotonic_s)
        elif isinstance(event, job_events.JobRestarting):
            self._restarts[self._to_reason(event.error)] += 1
        elif isinstance(event, job_events.SinksRecovered):
            self._in_doubt.clear()
            self._add_recovered(event.sinks)
        elif isinstance(event, job_events.LeftoversAborted):
            self._add_recovered(event.sinks)

    def _to_reason(self, error: str) -> str:
        name = error.partition(":")[0].strip()
        # A user's function may raise any number of classes, and each would be a series of its own.
        known = name in self._restarts or len(self._restarts) < REASONS_MAX
        return name if known and name.isidentifier() else "other"

    def _add_report(self, report: job_events.SlotReported) -> None:
        for metrics in report.subtasks:
            total = self._subtasks.setdefault(metrics.subtask, _SubtaskTotal())
            total.add(self._last_subtasks.get(metrics.subtask), metrics)
            self._last_subtasks[metrics.subtask] = metrics
            if metrics.functions:
                self._functions.add(metrics.subtask, metrics.functions)
        for sink in report.sinks:
            writer = (sink.uid, sink.subtask)
            sum_of_sink = self._sinks.setdefault(sink.uid, _SinkTotal())
            sum_of_sink.add(self._last_sinks.get(writer), sink)
            self._last_sinks[writer] = sink

    def _add_recovered(self, sinks: Iterable[job_events.RecoveredSink]) -> None:
        for sink in sinks:
            self._sinks.setdefault(sink.uid, _SinkTotal()).add_recovered(sink)

    def _note_in_doubt(self, status: JobStatus, now_s: float) -> None:
        for sink in status.sinks:
            if sink.prepared:
                since_s = now_s - sink.oldest_prepared_s
                self._in_doubt[sink.uid] = _InDoubt(sink.prepared, since_s)

    def _observe_checkpoint(self, event: job_events.CheckpointCompleted, status: JobStatus) -> None:
        stats = status.last_checkpoint
        if stats is None or stats.checkpoint != event.checkpoint:
            return
        self._last_decided_s = event.at.wall_s
        self._uploaded_bytes += stats.uploaded_bytes
        self._uncommitted.add(stats.checkpoint)
        for part, duration_ms in _list_parts(stats):
            self._observe(stats.kind, part, duration_ms)

    def _observe_commits(
        self, event: job_events.SubtaskCommitted | job_events.CheckpointCommitted, status: JobStatus
    ) -> None:
        if isinstance(event, job_events.CheckpointCommitted):
            versions, files = self._versions.get(event.uid, (0, 0))
            self._versions[event.uid] = versions + event.versions, files + event.files
        # A checkpoint that the status does not wait for any more has been committed by all sinks.
        ended = self._uncommitted - status.tally.decided_at_s.keys()
        if not ended:
            return
        self._uncommitted -= ended
        for stats in status.history:
            if stats.checkpoint in ended and stats.committed_ms is not None:
                self._observe(stats.kind, "commit", stats.committed_ms)

    def _observe(self, kind: str, part: str, duration_ms: float) -> None:
        histogram = self._durations.get((kind, part))
        if histogram is None:
            histogram = Histogram(metric_catalog.CHECKPOINT_DURATION.buckets)
            self._durations[kind, part] = histogram
        histogram.observe(duration_ms / 1000)

    # --- samples: under the lock ----------------------------------------------------------------

    def _collect_job(self) -> Iterator[Family]:
        yield _single(metric_catalog.ATTEMPTS, self._attempts)
        reasons = sorted(self._restarts.items())
        yield Family(
            metric_catalog.RESTARTS, tuple(((reason,), count) for reason, count in reasons)
        )
        yield Family(
            metric_catalog.CHECKPOINT_DURATION,
            tuple(
                (labels, histogram.value()) for labels, histogram in sorted(self._durations.items())
            ),
        )
        yield _single(metric_catalog.CHECKPOINT_UPLOADED, self._uploaded_bytes)
        yield _single(metric_catalog.SAVEPOINTS, self._savepoints)
        if self._last_decided_s is not None:
            yield _single(metric_catalog.CHECKPOINT_LAST, self._last_decided_s)
        if self._interval_s is not None:
            yield _single(metric_catalog.CHECKPOINT_INTERVAL, self._interval_s)

    def _collect_subtasks(self) -> Iterator[Family]:
        assert self._status is not None
        rejected: Counter[str] = Counter()
        read: Counter[str] = Counter(dict.fromkeys(self._status.sources, 0))
        for subtask, total in self._subtasks.items():
            rejected[subtask.chain] += total.rejected
            if subtask.chain in self._status.sources:
                read[subtask.chain] += total.records_in
        yield _by_label(metric_catalog.REJECTED, rejected)
        yield _by_label(metric_catalog.SOURCE_RECORDS, read)
        labels = self._label_subtasks()
        for name, metric in _SUBTASK_COUNTERS.items():
            sums: dict[tuple[str, ...], float] = {}
            for subtask, total in self._subtasks.items():
                key = labels[subtask]
                sums[key] = sums.get(key, 0) + getattr(total, name)
            yield Family(metric, tuple(sums.items()))
        waiting: dict[tuple[str, ...], float] = {}
        for metrics in self._status.subtasks:
            key = labels.get(metrics.subtask, (metrics.subtask.chain, ""))
            waiting[key] = waiting.get(key, 0) + metrics.input_batches
        yield Family(metric_catalog.SUBTASK_INPUT, tuple(waiting.items()))
        yield from self._functions.collect(lambda subtask: labels[subtask][1])

    def _label_subtasks(self) -> dict[SubtaskRef, tuple[str, str]]:
        if len(self._subtasks) > self._limits.subtasks_max:
            return {subtask: (subtask.chain, "") for subtask in self._subtasks}
        return {subtask: (subtask.chain, str(subtask.index)) for subtask in self._subtasks}

    def _collect_sinks(self) -> Iterator[Family]:
        assert self._status is not None
        sinks = sorted(self._sinks.items())
        for name, metric in _SINK_COUNTERS.items():
            yield Family(metric, tuple(((uid,), getattr(total, name)) for uid, total in sinks))
        made = sorted(self._versions.items())
        yield Family(metric_catalog.SINK_VERSIONS, tuple(((uid,), n) for uid, (n, _) in made))
        yield Family(metric_catalog.SINK_VERSION_FILES, tuple(((uid,), n) for uid, (_, n) in made))
        transactions: list[tuple[tuple[str, ...], Value]] = []
        ages: list[tuple[tuple[str, ...], Value]] = []
        # Slots of a failed attempt have no prepared transactions that they could still commit.
        runs = self._status.state is not job_events.JobState.RESTARTING and not self._in_doubt
        current = {sink.uid: sink for sink in self._status.sinks} if runs else {}
        for uid in sorted({*self._sinks, *current, *self._in_doubt}):
            sink, left = current.get(uid), self._in_doubt.get(uid)
            transactions.append(((uid, "open"), sink.open if sink else 0))
            transactions.append(((uid, "prepared"), sink.prepared if sink else 0))
            transactions.append(((uid, "in_doubt"), left.transactions if left else 0))
            age_s = time.monotonic() - left.since_s if left else 0.0
            ages.append(((uid,), max(age_s, sink.oldest_prepared_s if sink else 0.0)))
        yield Family(metric_catalog.SINK_TRANSACTIONS, tuple(transactions))
        yield Family(metric_catalog.SINK_OLDEST_PREPARED, tuple(ages))
        yield from self._latency.collect()

    # --- samples of the status alone ------------------------------------------------------------

    def _collect_gauges(self, status: JobStatus) -> Iterator[Family]:
        states = tuple(
            ((state.value,), int(state is status.state)) for state in job_events.JobState
        )
        yield Family(metric_catalog.JOB_STATE, states)
        yield Family(
            metric_catalog.CHECKPOINTS,
            (
                (("completed",), status.checkpoints_completed),
                (("failed",), status.checkpoints_failed),
            ),
        )
        yield _single(metric_catalog.CHECKPOINTS_PENDING, len(status.pending))
        if (last := status.last_checkpoint) is not None:
            yield _single(metric_catalog.CHECKPOINT_LAST_NUMBER, last.checkpoint)
            yield _single(metric_catalog.STATE_BYTES, last.size_bytes)
        yield _single(metric_catalog.SLOTS, len(status.slots))
        if len(status.slots) <= self._limits.subtasks_max:
            memory = tuple(((str(slot.slot),), slot.rss_bytes) for slot in status.slots)
            yield Family(metric_catalog.SLOT_MEMORY, memory)
        yield Family(metric_catalog.SOURCE_LAG, tuple(self._collect_lag(status.offsets)))
        yield from _collect_progress(status.progress)
        blockers = tuple(((uid,), len(names)) for uid, names in sorted(status.blockers.items()))
        yield Family(metric_catalog.SINK_BLOCKERS, blockers)
        since: dict[str, float] = {}
        for wait in status.waits:
            since[wait.uid] = min(wait.since_s, since.get(wait.uid, wait.since_s))
        waited = tuple(((uid,), max(0.0, time.time() - at_s)) for uid, at_s in since.items())
        yield Family(metric_catalog.WAITING, waited)
        stuck = tuple(((sink.uid,), int(sink.commit_stuck)) for sink in status.sinks)
        yield Family(metric_catalog.SINK_COMMIT_STUCK, stuck)

    def _collect_lag(
        self, offsets: Mapping[str, tuple[SplitOffsets, ...]]
    ) -> Iterator[tuple[tuple[str, ...], Value]]:
        for uid, splits in sorted(offsets.items()):
            if len(splits) > self._limits.splits_max:
                yield (uid, ""), sum(split.lag for split in splits)
            else:
                yield from (((uid, split.split_id), split.lag) for split in splits)


def _collect_progress(measured: Mapping[str, SourceProgress]) -> Iterator[Family]:
    sources = sorted(measured.items())

    def read_known(
        read: Callable[[SourceProgress], float | None],
    ) -> tuple[tuple[tuple[str, ...], Value], ...]:
        values = ((uid, read(progress)) for uid, progress in sources)
        return tuple(((uid,), value) for uid, value in values if value is not None)

    yield Family(metric_catalog.SOURCE_LAG_BYTES, read_known(lambda at: at.lag_bytes))
    yield Family(metric_catalog.SOURCE_LAG_SECONDS, read_known(lambda at: at.lag_s))
    yield Family(metric_catalog.SOURCE_RETAINED, read_known(lambda at: at.retained_bytes))
    yield Family(metric_catalog.SOURCE_MOVED, read_known(lambda at: at.moved_at_s))
    yield Family(metric_catalog.SOURCE_WARNINGS, read_known(lambda at: len(at.warnings)))
    copies = [(uid, copy) for uid, progress in sources for copy in progress.copies]
    copied = tuple(((uid, copy.table), copy.rows) for uid, copy in copies)
    yield Family(metric_catalog.SOURCE_COPIED, copied)
    expected = tuple(
        ((uid, copy.table), copy.rows_expected)
        for uid, copy in copies
        if copy.rows_expected is not None
    )
    yield Family(metric_catalog.SOURCE_COPY_EXPECTED, expected)


def _list_parts(stats: CheckpointStats) -> Iterator[tuple[str, float]]:
    yield "whole", stats.duration_ms
    delays = (subtask.start_delay_ms for subtask in stats.subtasks)
    yield "start_delay", max(delays, default=0.0)
    yield "alignment", stats.alignment_ms
    yield "synchronous", stats.sync_ms
    yield "upload", stats.async_ms
    yield "append", stats.append_ms


def _sum_files(retained: Sequence[CompletedCheckpoint]) -> int:
    """Return the total size in bytes of all files in `retained`; a shared file counts once."""
    handles = (handle for checkpoint in retained for handle in handles_of(checkpoint.snapshots))
    return sum({handle.path: handle.size_bytes for handle in handles}.values())


def _single(metric: Metric, value: float) -> Family:
    return Family(metric, (((), value),))


def _by_label(metric: Metric, values: Mapping[str, int]) -> Family:
    return Family(metric, tuple(((name,), value) for name, value in sorted(values.items())))
