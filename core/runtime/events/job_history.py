"""What a job has gone through, for pages and terminals: rates, restarts, many checkpoints.

A listener of the job. `JobStatus` says how the job is now, with the last checkpoints in full; this
keeps what a status of constant size cannot: what happens a second, and more of the past with less
detail.

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
from onceflow.core.runtime.events.job_events import (
    AttemptBegan,
    CheckpointCompleted,
    JobEnded,
    JobEvent,
    JobRestarting,
    SlotLeft,
    SlotReported,
)
from onceflow.core.runtime.events.status import CheckpointStats, JobStatus, SubtaskCheckpointStats

CHECKPOINTS_MAX = 10_000
"""About 5 MB; at one checkpoint a second nearly three hours."""
SAMPLES_MAX = 900
SAMPLE_INTERVAL_S = 2.0
"""With SAMPLES_MAX: half an hour."""
INCIDENTS_MAX = 200
RATE_WINDOW_S = 5.0
"""Over how long a rate is taken: a few heartbeats, so that one late heartbeat moves it little."""


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One completed checkpoint with its slowest subtask; times in milliseconds."""

    checkpoint: int
    attempt: int
    kind: str
    triggered_at_ms: int
    duration_ms: float
    """From the trigger to the decision in the log."""
    append_ms: float
    committed_ms: float | None
    """From the decision until every sink had committed."""
    size_bytes: int
    uploaded_bytes: int
    unaligned: bool
    subtasks: int
    slowest: SubtaskCheckpointStats | None
    """The subtask that acked last; its parts are those of the whole checkpoint's way."""

    @classmethod
    def from_stats(cls, stats: CheckpointStats) -> CheckpointSummary:
        """Return what is kept of `stats`."""
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
    """What went through the job around one moment."""

    at_ms: int
    records_per_s: float | None
    """Read by all sources; None before two heartbeats of an attempt."""
    rows_per_s: float | None
    """Committed by all sinks."""
    lag: int | None
    """Of all sources that can tell; None: none can."""
    in_doubt: int


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that broke: a slot that was lost, a restart, the job's failure."""

    at_ms: int
    attempt: int
    kind: str
    """slot_lost, restart or failed."""
    error: str
    """With the user's traceback, where a function raised."""
    slot: int | None = None
    delay_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChainLoad:
    """What the subtasks of one chain do, over the last RATE_WINDOW_S; shares are of 1."""

    chain: str
    subtasks: int
    records_in: int
    """Of this attempt, as `records_out`. `rejected` of a whole job is over all its attempts."""
    records_out: int
    rejected: int
    input_batches: int
    records_in_per_s: float | None = None
    """None before two heartbeats of every subtask; as all that follows."""
    records_out_per_s: float | None = None
    busy: float | None = None
    """Mean over the subtasks."""
    backpressured: float | None = None
    busiest: int | None = None
    """The subtask that is busy for the largest share."""
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
    """Return the load between two reports; None where a share of nothing would be asked for."""
    # Counters begin at 0 in each attempt, and a late report of the old one may still come.
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
    """Return one entry a chain, in the order in which the chains first appear."""
    by_chain: dict[str, list[SubtaskMetrics]] = {}
    for one in metrics:
        by_chain.setdefault(one.subtask.chain, []).append(one)
    return tuple(_sum_up(chain, members, loads) for chain, members in by_chain.items())


def _sum_up(
    chain: str, members: list[SubtaskMetrics], loads: dict[SubtaskRef, SubtaskLoad]
) -> ChainLoad:
    total = ChainLoad(
        chain,
        len(members),
        sum(one.records_in for one in members),
        sum(one.records_out for one in members),
        sum(one.rejected for one in members),
        sum(one.input_batches for one in members),
    )
    known = [(loads[one.subtask], one.subtask.index) for one in members if one.subtask in loads]
    # No sum of a part: right after a start it would show a rate that seems to double within
    # seconds.
    if len(known) < len(members):
        return total
    busiest, index = max(known, key=lambda one: one[0].busy)
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
    """Takes the events of one job on the listener's thread; any thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checkpoints: deque[CheckpointSummary] = deque(maxlen=CHECKPOINTS_MAX)
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._incidents: deque[Incident] = deque(maxlen=INCIDENTS_MAX)
        self._reports: dict[int, deque[SlotReported]] = {}
        """By slot, those of the last RATE_WINDOW_S and one before."""
        self._sampled: tuple[float, int] | None = None
        """When the last sample was taken, monotonic, and the rows committed by then."""

    def on_event(self, event: JobEvent, status: JobStatus) -> None:
        """Take one event, and the status as of it."""
        with self._lock:
            if isinstance(event, SlotReported):
                self._take_report(event, status)
            elif isinstance(event, CheckpointCompleted):
                self._take_checkpoint(status)
            elif isinstance(event, AttemptBegan):
                self._reports.clear()
                self._sampled = None
            elif isinstance(event, SlotLeft) and event.error:
                self._note("slot_lost", event, status, event.error, slot=event.slot)
            elif isinstance(event, JobRestarting):
                self._note("restart", event, status, event.error, delay_s=event.delay_s)
                self._add_sample(event.at.wall_s, None, None, status)
            elif isinstance(event, JobEnded) and event.error:
                self._note("failed", event, status, event.error)

    def checkpoints(
        self, before: int | None, limit: int, status: JobStatus
    ) -> tuple[CheckpointSummary, ...]:
        """Return up to `limit` checkpoints below number `before`, the newest last."""
        with self._lock:
            self._refresh(status)
            kept = [one for one in self._checkpoints if before is None or one.checkpoint < before]
        return tuple(kept[-limit:])

    def samples(self) -> tuple[Sample, ...]:
        """Return what was measured in the last half hour, the newest last."""
        with self._lock:
            return tuple(self._samples)

    def incidents(self) -> tuple[Incident, ...]:
        """Return what broke, the newest last."""
        with self._lock:
            return tuple(self._incidents)

    def chains(self, status: JobStatus) -> tuple[ChainLoad, ...]:
        """Return what each chain does now."""
        rejected = status.rejected_by_chain
        return tuple(
            replace(chain, rejected=rejected.get(chain.chain, 0))
            for chain in sum_up_chains(status.subtasks, self.loads())
        )

    def loads(self) -> dict[SubtaskRef, SubtaskLoad]:
        """Return what each subtask does now, of those that have reported twice."""
        with self._lock:
            return dict(self._loads())

    # --- steps: under the lock --------------------------------------------------------------------

    def _loads(self) -> Iterator[tuple[SubtaskRef, SubtaskLoad]]:
        for reports in self._reports.values():
            earliest, latest = reports[0], reports[-1]
            seconds = latest.at.monotonic_s - earliest.at.monotonic_s
            before = {one.subtask: one for one in earliest.subtasks}
            for one in latest.subtasks:
                first = before.get(one.subtask)
                load = compare_metrics(first, one, seconds) if first else None
                if load is not None:
                    yield one.subtask, load

    def _take_report(self, event: SlotReported, status: JobStatus) -> None:
        reports = self._reports.setdefault(event.slot, deque())
        reports.append(event)
        now_s = event.at.monotonic_s
        # The second oldest is looked at: one report before the window is kept, so that the
        # difference covers all of it.
        while len(reports) > 2 and reports[1].at.monotonic_s <= now_s - RATE_WINDOW_S:
            reports.popleft()
        since_s = now_s - self._sampled[0] if self._sampled else None
        if since_s is not None and since_s < SAMPLE_INTERVAL_S:
            return
        sources = status.sources
        read = [load.records_in_per_s for ref, load in self._loads() if ref.chain in sources]
        rows = sum(sink.rows_committed for sink in status.sinks)
        committed: float | None = None
        # Rows may seem to fall when an attempt's counters begin anew; a negative rate would be
        # drawn.
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
        """Note when the sinks had committed: it is known some time after the decision."""
        committed = {one.checkpoint: one.committed_ms for one in status.history}
        # From the newest backwards, and no further than the status remembers: what is older is
        # known already or never will be.
        for index in range(1, min(len(committed), len(self._checkpoints)) + 1):
            kept = self._checkpoints[-index]
            at = committed.get(kept.checkpoint)
            if kept.committed_ms is None and at is not None:
                self._checkpoints[-index] = replace(kept, committed_ms=at)

    def _note(
        self,
        kind: str,
        event: SlotLeft | JobRestarting | JobEnded,
        status: JobStatus,
        error: str,
        *,
        slot: int | None = None,
        delay_s: float | None = None,
    ) -> None:
        at_ms = int(event.at.wall_s * 1000)
        self._incidents.append(Incident(at_ms, status.attempt, kind, error, slot, delay_s))
