"""The history of a job for pages and terminals: rates, restarts, many checkpoints.

It is a listener of the job. `JobStatus` has the current state, with the last checkpoints in full.
This module keeps data that a status of constant size cannot: rates per second, and more of the past
in less detail.

Bounds:
    len(checkpoints) <= CHECKPOINTS_MAX
    len(samples) <= SAMPLES_MAX, len(incidents) <= INCIDENTS_MAX
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.protocol.messages import SubtaskMetrics
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.events.status import CheckpointStats, JobStatus, SubtaskCheckpointStats

CHECKPOINTS_MAX = 10_000
"""The number of kept checkpoints: about 5 MB; at one checkpoint a second nearly three hours."""
SAMPLES_MAX = 900
SAMPLE_INTERVAL_S = 2.0
"""The interval between samples; with SAMPLES_MAX, they cover half an hour."""
INCIDENTS_MAX = 200
RATE_WINDOW_S = 5.0
"""The time over which a rate is measured: a few heartbeats, so that a late one changes it
little."""


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A completed checkpoint with its slowest subtask; times in milliseconds."""

    checkpoint: int
    attempt: int
    kind: str
    triggered_at_ms: int
    duration_ms: float
    """The time from the trigger to the decision in the log."""
    append_ms: float
    committed_ms: float | None
    """The time from the decision until every sink had committed; None while that is not known."""
    size_bytes: int
    uploaded_bytes: int
    unaligned: bool
    subtasks: int
    slowest: SubtaskCheckpointStats | None
    """The subtask that acked last. Its parts are those of the checkpoint's critical path."""

    @classmethod
    def from_stats(cls, stats: CheckpointStats) -> CheckpointSummary:
        """Return the summary of `stats`."""
        slowest = max(stats.subtasks, key=lambda ack: ack.ack_ms, default=None)
        return cls(
            checkpoint=stats.checkpoint,
            attempt=stats.attempt,
            kind=stats.kind,
            triggered_at_ms=stats.triggered_at_ms,
            duration_ms=stats.duration_ms,
            append_ms=stats.append_ms,
            committed_ms=stats.committed_ms,
            size_bytes=stats.size_bytes,
            uploaded_bytes=stats.uploaded_bytes,
            unaligned=stats.unaligned,
            subtasks=len(stats.subtasks),
            slowest=slowest,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """The throughput of the job around one moment."""

    at_ms: int
    records_per_s: float | None
    """The records read by all sources; None before two heartbeats of an attempt."""
    rows_per_s: float | None
    """The rows committed by all sinks; None if unknown."""
    lag: int | None
    """The lag of all sources that can measure it; None if there is none."""
    in_doubt: int


@dataclass(frozen=True, slots=True)
class Incident:
    """A failure: a lost slot, a restart, or the job's failure."""

    at_ms: int
    attempt: int
    kind: str
    """The kind: slot_lost, restart or failed."""
    error: str
    """The error, with the user's traceback if a function raised."""
    slot: int | None = None
    delay_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChainLoad:
    """The load of one chain's subtasks over the last RATE_WINDOW_S; shares are from 0 to 1."""

    chain: str
    subtasks: int
    records_in: int
    """The count of this attempt, as for `records_out`. A job's `rejected` counts all attempts."""
    records_out: int
    rejected: int
    input_batches: int
    records_in_per_s: float | None = None
    """The rate; this and the following fields are None before two heartbeats of every subtask."""
    records_out_per_s: float | None = None
    busy: float | None = None
    """The mean over the subtasks."""
    backpressured: float | None = None
    busiest: int | None = None
    """The subtask with the largest busy share."""
    busy_max: float | None = None


@dataclass(frozen=True, slots=True)
class SubtaskLoad:
    """The rates of one subtask over the last RATE_WINDOW_S."""

    records_in_per_s: float
    records_out_per_s: float
    busy: float
    backpressured: float


def compare_metrics(
    earlier: SubtaskMetrics, later: SubtaskMetrics, seconds: float
) -> SubtaskLoad | None:
    """Return the load between two reports; None if they cannot be compared."""
    # Counters start at 0 in each attempt, and a late report of the old attempt may arrive.
    if seconds <= 0 or later.records_in < earlier.records_in:
        return None
    return SubtaskLoad(
        (later.records_in - earlier.records_in) / seconds,
        (later.records_out - earlier.records_out) / seconds,
        min(1.0, max(0.0, (later.busy_s - earlier.busy_s) / seconds)),
        min(1.0, max(0.0, (later.backpressured_s - earlier.backpressured_s) / seconds)),
    )


def sum_up_chains(
    metrics: Iterable[SubtaskMetrics], loads: dict[SubtaskRef, SubtaskLoad]
) -> tuple[ChainLoad, ...]:
    """Return one entry per chain, in the order in which the chains first appear."""
    by_chain: dict[str, list[SubtaskMetrics]] = {}
    for of_subtask in metrics:
        by_chain.setdefault(of_subtask.subtask.chain, []).append(of_subtask)
    return tuple(_sum_up(chain, members, loads) for chain, members in by_chain.items())


def _sum_up(
    chain: str, members: list[SubtaskMetrics], loads: dict[SubtaskRef, SubtaskLoad]
) -> ChainLoad:
    total = ChainLoad(
        chain,
        len(members),
        sum(member.records_in for member in members),
        sum(member.records_out for member in members),
        sum(member.rejected for member in members),
        sum(member.input_batches for member in members),
    )
    known = [
        (loads[member.subtask], member.subtask.index)
        for member in members
        if member.subtask in loads
    ]
    # Do not sum only a part: right after a start, the rate would seem to double within
    # seconds.
    if len(known) < len(members):
        return total
    busiest, index = max(known, key=lambda pair: pair[0].busy)
    return replace(
        total,
        records_in_per_s=sum(load.records_in_per_s for load, _ in known),
        records_out_per_s=sum(load.records_out_per_s for load, _ in known),
        busy=sum(load.busy for load, _ in known) / len(known),
        backpressured=sum(load.backpressured for load, _ in known) / len(known),
        busiest=index,
        busy_max=busiest.busy,
    )


class JobHistory:
    """Collects the events of one job on the listener's thread; any thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checkpoints: deque[CheckpointSummary] = deque(maxlen=CHECKPOINTS_MAX)
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._incidents: deque[Incident] = deque(maxlen=INCIDENTS_MAX)
        self._reports: dict[int, deque[job_events.SlotReported]] = {}
        """The reports of the last RATE_WINDOW_S and one before, by slot."""
        self._sampled: tuple[float, int] | None = None
        """The monotonic time of the last sample, and the rows committed by then."""

    def on_event(self, event: job_events.JobEvent, status: JobStatus) -> None:
        """Process one event, with the status after it."""
        with self._lock:
            if isinstance(event, job_events.SlotReported):
                self._take_report(event, status)
            elif isinstance(event, job_events.CheckpointCompleted):
                self._take_checkpoint(status)
            elif isinstance(event, job_events.AttemptBegan):
                self._reports.clear()
                self._sampled = None
            elif isinstance(event, job_events.SlotLeft) and event.error:
                self._note("slot_lost", event, status, event.error, slot=event.slot)
            elif isinstance(event, job_events.JobRestarting):
                self._note("restart", event, status, event.error, delay_s=event.delay_s)
                self._add_sample(event.at.wall_s, None, None, status)
            elif isinstance(event, job_events.JobEnded) and event.error:
                self._note("failed", event, status, event.error)

    def checkpoints(
        self, before: int | None, limit: int, status: JobStatus
    ) -> tuple[CheckpointSummary, ...]:
        """Return up to `limit` checkpoints below number `before`, the newest last."""
        with self._lock:
            self._refresh(status)
            kept = [
                summary
                for summary in self._checkpoints
                if before is None or summary.checkpoint < before
            ]
        return tuple(kept[-limit:])

    def samples(self) -> tuple[Sample, ...]:
        """Return the samples of the last half hour, newest last."""
        with self._lock:
            return tuple(self._samples)

    def incidents(self) -> tuple[Incident, ...]:
        """Return the incidents, newest last."""
        with self._lock:
            return tuple(self._incidents)

    def chains(self, status: JobStatus) -> tuple[ChainLoad, ...]:
        """Return the current load of each chain."""
        rejected = status.rejected_by_chain
        return tuple(
            replace(chain, rejected=rejected.get(chain.chain, 0))
            for chain in sum_up_chains(status.subtasks, self.loads())
        )

    def loads(self) -> dict[SubtaskRef, SubtaskLoad]:
        """Return the current load of each subtask that has reported twice."""
        with self._lock:
            return dict(self._loads())

    # --- steps: under the lock --------------------------------------------------------------------

    def _loads(self) -> Iterator[tuple[SubtaskRef, SubtaskLoad]]:
        for reports in self._reports.values():
            earliest, latest = reports[0], reports[-1]
            seconds = latest.at.monotonic_s - earliest.at.monotonic_s
            before = {metrics.subtask: metrics for metrics in earliest.subtasks}
            for metrics in latest.subtasks:
                first = before.get(metrics.subtask)
                load = compare_metrics(first, metrics, seconds) if first else None
                if load is not None:
                    yield metrics.subtask, load

    def _take_report(self, event: job_events.SlotReported, status: JobStatus) -> None:
        reports = self._reports.setdefault(event.slot, deque())
        reports.append(event)
        now_s = event.at.monotonic_s
        # Compare the second oldest report: one report before the window is kept, so that the
        # difference covers the whole window.
        while len(reports) > 2 and reports[1].at.monotonic_s <= now_s - RATE_WINDOW_S:
            reports.popleft()
        since_s = now_s - self._sampled[0] if self._sampled else None
        if since_s is not None and since_s < SAMPLE_INTERVAL_S:
            return
        sources = status.sources
        read = [load.records_in_per_s for ref, load in self._loads() if ref.chain in sources]
        rows = sum(sink.rows_committed for sink in status.sinks)
        committed: float | None = None
        # The number of rows may fall when an attempt's counters restart; skip a negative
        # rate.
        if self._sampled and since_s and rows >= self._sampled[1]:
            committed = (rows - self._sampled[1]) / since_s
        self._sampled = (now_s, rows)
        self._add_sample(event.at.wall_s, sum(read) if read else None, committed, status)

    def _add_sample(
        self, wall_s: float, read: float | None, committed: float | None, status: JobStatus
    ) -> None:
        lag = sum(status.lag.values()) if status.lag else None
        in_doubt = sum(sink.prepared for sink in status.sinks)
        self._samples.append(Sample(int(wall_s * 1000), read, committed, lag, in_doubt))

    def _take_checkpoint(self, status: JobStatus) -> None:
        self._refresh(status)
        if (stats := status.last_checkpoint) is not None:
            self._checkpoints.append(CheckpointSummary.from_stats(stats))

    def _refresh(self, status: JobStatus) -> None:
        """Add the commit times, which become known some time after the decision."""
        committed = {stats.checkpoint: stats.committed_ms for stats in status.history}
        # From the newest backwards, only as far as the status remembers: times of older
        # checkpoints are known already or never will be.
        for index in range(1, min(len(committed), len(self._checkpoints)) + 1):
            kept = self._checkpoints[-index]
            at = committed.get(kept.checkpoint)
            if kept.committed_ms is None and at is not None:
                self._checkpoints[-index] = replace(kept, committed_ms=at)

    def _note(
        self,
        kind: str,
        event: job_events.SlotLeft | job_events.JobRestarting | job_events.JobEnded,
        status: JobStatus,
        error: str,
        *,
        slot: int | None = None,
        delay_s: float | None = None,
    ) -> None:
        at_ms = int(event.at.wall_s * 1000)
        self._incidents.append(Incident(at_ms, status.attempt, kind, error, slot, delay_s))
