"""Gathers what happens in a job into the status that others read."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.snapshots import CompletedCheckpoint, SubtaskSnapshot
from onceflow.core.runtime.driver.status import (
    AttemptStats,
    CheckpointStats,
    JobState,
    JobStatus,
    SinkStatus,
    SlotStatus,
)
from onceflow.core.runtime.messages import Heartbeat, Hello

_log = logging.getLogger("onceflow.runtime.progress")

HISTORY_LENGTH = 100
"""Completed checkpoints whose numbers are kept; enough for a page, bounded for a long run."""


@dataclass(slots=True)
class _Pending:
    triggered_at: float
    acked: list[SubtaskSnapshot] = field(default_factory=list[SubtaskSnapshot])


class Progress:
    """Written by the job driver's thread, read by any."""

    def __init__(self, job: str, sources: frozenset[str]) -> None:
        self._lock = threading.Lock()
        self._sources = sources
        self._status = JobStatus(job, JobState.STARTING)
        self._pending: dict[CheckpointId, _Pending] = {}
        self._history: deque[CheckpointStats] = deque(maxlen=HISTORY_LENGTH)
        self._decided_at: dict[CheckpointId, float] = {}
        self._committed: dict[SubtaskRef, CheckpointId] = {}
        self._subtask_count = 0
        self._recovered: dict[str, SinkStatus] = {}
        self._attempts: deque[AttemptStats] = deque(maxlen=HISTORY_LENGTH)
        self._began = time.monotonic()

    def status(self) -> JobStatus:
        """Return the job as of now."""
        with self._lock:
            subtasks = tuple(m for slot in self._status.slots for m in slot.subtasks)
            return replace(
                self._status,
                checkpoints_pending=tuple(self._pending),
                last_checkpoint=self._history[-1] if self._history else None,
                history=tuple(self._history),
                attempts=tuple(self._attempts),
                subtasks=subtasks,
                records_in=sum(m.records_in for m in subtasks if m.subtask.chain in self._sources),
                rejected=sum(m.rejected for m in subtasks),
                sinks=self._sinks(),
            )

    def state(self, state: JobState, error: str = "") -> None:
        """Note where the job stands."""
        with self._lock:
            self._status = replace(
                self._status, state=state, last_error=error or self._status.last_error
            )

    def failing(self) -> float:
        """Start the clock of the next attempt, for this one has just failed; return its time."""
        self._began = time.monotonic()
        return self._began

    def attempt(self, attempt: int, restored: CheckpointId, slots_ended_s: float) -> None:
        """Begin a new attempt."""
        with self._lock:
            self._pending.clear()
            self._decided_at.clear()
            self._committed.clear()
            self._recovered.clear()
            first = not self._attempts
            self._status = replace(
                self._status,
                attempt=attempt,
                slots=(),
                restores=self._status.restores + (restored > 0 or not first),
            )
            self._attempts.append(
                AttemptStats(
                    attempt=attempt,
                    restored_checkpoint=restored,
                    began_at_s=time.time() - self._since(),
                    slots_ended_s=slots_ended_s,
                    claimed_s=self._since(),
                )
            )

    def recovered(self, sinks: Sequence[SinkStatus]) -> None:
        """All sinks agree with the log."""
        stats = self._attempts[-1]
        if not stats.recovered_s:
            self._attempts[-1] = replace(
                stats,
                recovered_s=self._since(),
                committed=sum(sink.committed for sink in sinks),
                aborted=sum(sink.aborted for sink in sinks),
            )
            with self._lock:
                self._recovered = {sink.uid: sink for sink in sinks}

    def swept(self, sinks: Sequence[SinkStatus]) -> None:
        """What slots of older attempts had prepared after recovery is rolled back."""
        with self._lock:
            for sink in sinks:
                known = self._recovered.get(sink.uid, sink)
                if known is not sink:
                    known = replace(known, aborted=known.aborted + sink.aborted)
                self._recovered[sink.uid] = known

    def slot_connected(self, hello: Hello) -> None:
        """A slot is up."""
        slot = SlotStatus(hello.slot, hello.pid, hello.parent_pid, hello.host)
        with self._lock:
            slots = {known.slot: known for known in self._status.slots} | {hello.slot: slot}
            self._status = replace(self._status, slots=tuple(slots[n] for n in sorted(slots)))

    def slots_up(self) -> None:
        """Every slot is up."""
        self._attempts[-1] = replace(self._attempts[-1], slots_up_s=self._since())

    def deployed(self) -> None:
        """Every slot has its state on the way."""
        self._attempts[-1] = replace(self._attempts[-1], deployed_s=self._since())

    def running(self) -> None:
        """Every slot runs."""
        self._attempts[-1] = replace(self._attempts[-1], running_s=self._since())
        self.state(JobState.RUNNING)

    def dropped(self, state: Iterable[str]) -> None:
        """The restored checkpoint holds `state`, and the pipeline goes on without it."""
        with self._lock:
            known = self._status.dropped_state
            new = tuple(sorted(set(state) - set(known)))
            self._status = replace(self._status, dropped_state=known + new)
        for one in new:
            _log.warning("job %s: %s was restored and is dropped", self._status.job, one)

    def heartbeat(self, beat: Heartbeat) -> None:
        """A slot is alive and tells its counters."""
        with self._lock:
            self._status = replace(
                self._status,
                slots=tuple(
                    replace(
                        slot,
                        subtasks=beat.subtasks,
                        sinks=beat.sinks,
                        rss_bytes=beat.rss_bytes,
                        heard_at_s=time.time(),
                    )
                    if slot.slot == beat.slot
                    else slot
                    for slot in self._status.slots
                ),
            )

    def triggered(self, checkpoint: CheckpointId) -> None:
        """A checkpoint has begun."""
        with self._lock:
            self._pending[checkpoint] = _Pending(time.monotonic())

    def acked(self, checkpoint: CheckpointId, snapshot: SubtaskSnapshot) -> None:
        """A subtask has done its part."""
        with self._lock:
            if pending := self._pending.get(checkpoint):
                pending.acked.append(snapshot)

    def decided(self, completed: CompletedCheckpoint, append_ms: float) -> None:
        """A checkpoint is in the decision log."""
        now = time.monotonic()
        with self._lock:
            pending = self._pending.get(completed.checkpoint, _Pending(now))
            for older in [n for n in self._pending if n <= completed.checkpoint]:
                del self._pending[older]
            timings = [snapshot.timings for snapshot in completed.snapshots]
            self._history.append(
                CheckpointStats(
                    checkpoint=completed.checkpoint,
                    attempt=completed.attempt,
                    triggered_at_ms=completed.triggered_at_ms,
                    duration_ms=round((now - pending.triggered_at) * 1000, 3),
                    alignment_ms=max((t.alignment_ms for t in timings), default=0.0),
                    sync_ms=max((t.sync_ms for t in timings), default=0.0),
                    async_ms=max((t.async_ms for t in timings), default=0.0),
                    append_ms=round(append_ms, 3),
                    size_bytes=sum(t.size_bytes for t in timings),
                )
            )
            self._decided_at[completed.checkpoint] = now
            self._subtask_count = len(completed.snapshots)
            self._status = replace(
                self._status, checkpoints_completed=self._status.checkpoints_completed + 1
            )

    def checkpoint_failed(self, checkpoint: CheckpointId, reason: str) -> None:
        """A checkpoint will never be."""
        with self._lock:
            self._pending.pop(checkpoint, None)
            self._status = replace(
                self._status,
                checkpoints_failed=self._status.checkpoints_failed + 1,
                last_error=f"checkpoint {checkpoint}: {reason}",
            )

    def committed(self, subtask: SubtaskRef, checkpoint: CheckpointId) -> None:
        """A subtask has nothing left to commit up to `checkpoint`."""
        now = time.monotonic()
        with self._lock:
            self._committed[subtask] = max(checkpoint, self._committed.get(subtask, checkpoint))
            if len(self._committed) < self._subtask_count:
                return
            lowest = min(self._committed.values())
            for decided in [n for n in self._decided_at if n <= lowest]:
                committed_ms = round((now - self._decided_at.pop(decided)) * 1000, 3)
                for index, stats in enumerate(self._history):
                    if stats.checkpoint == decided:
                        self._history[index] = replace(stats, committed_ms=committed_ms)

    def _sinks(self) -> tuple[SinkStatus, ...]:
        """Add up what recovery and the slots did, by sink. Called with the lock held."""
        total = dict(self._recovered)
        for one in (sink for slot in self._status.slots for sink in slot.sinks):
            known = total.get(one.uid, SinkStatus(one.uid, one.sink_id))
            total[one.uid] = replace(
                known,
                open=known.open + one.open,
                prepared=known.prepared + one.prepared,
                committed=known.committed + one.committed,
                retried=known.retried + one.retried,
                rows_committed=known.rows_committed + one.rows_committed,
                rows_rejected=known.rows_rejected + one.rows_rejected,
                oldest_prepared_s=max(known.oldest_prepared_s, one.oldest_prepared_s),
                last_commit_ms=max(known.last_commit_ms, one.last_commit_ms),
            )
        return tuple(total[uid] for uid in sorted(total))

    def _since(self) -> float:
        return round(time.monotonic() - self._began, 4)
