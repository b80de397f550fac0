"""The status of a job, computed from its events without I/O and without reading a clock.

Invariants of a status that began as `JobStatus(job)`:
    pending checkpoints rise, and all but savepoints are above the last completed one
    len(history), len(attempts), len(savepoints) <= HISTORY_LENGTH, len(failures) <= FAILURES_LENGTH
    acks over all of `history` <= SUBTASK_HISTORY_LENGTH, unless its newest alone has more
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from typing_extensions import assert_never

from onceflow.core.protocol.ids import SubtaskRef, committer_ref
from onceflow.core.protocol.messages import SinkMetrics, SubtaskMetrics, Wait
from onceflow.core.protocol.sink_counts import keep_totals
from onceflow.core.runtime.events.job_events import (
    AttemptBegan,
    AttemptEnded,
    AttemptRunning,
    CheckpointAcked,
    CheckpointCommitted,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointTriggered,
    CommitRefused,
    EventsDropped,
    JobEnded,
    JobEvent,
    JobRestarting,
    JobStarted,
    JobState,
    LagMeasured,
    LeftoversAborted,
    Moment,
    RecoveredSink,
    SavepointCompleted,
    SavepointRestored,
    SinkBlocked,
    SinksRecovered,
    SlotJoined,
    SlotLeft,
    SlotReported,
    SlotsDeployed,
    SlotsJoined,
    SplitsDiscovered,
    StateDropped,
    SubtaskCommitted,
)
from onceflow.core.runtime.events.status_parts import (
    CommitTally,
    JobWait,
    SinkStatus,
    count_sinks,
    describe_moment,
    describe_refusals,
    describe_sources,
    list_held_sources,
    sum_up_waits,
)
from onceflow.core.spi import SourceProgress, SplitOffsets

HISTORY_LENGTH = 100
"""The number of remembered checkpoints and attempts; enough for a page, bounded for a long run."""

FAILURES_LENGTH = 20
"""The number of aborted checkpoints that are remembered with their acks."""

SUBTASK_HISTORY_LENGTH = 10_000
"""The number of acks that are remembered: about 2 MB. Older checkpoints keep only sums."""


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """A slot of the running attempt."""

    slot: int
    pid: int
    parent_pid: int
    host: str
    rss_bytes: int = 0
    heard_at_s: float = 0.0
    subtasks: tuple[SubtaskMetrics, ...] = ()
    sinks: tuple[SinkMetrics, ...] = ()
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class SubtaskCheckpointStats:
    """The part of one subtask in one checkpoint; times in milliseconds."""

    subtask: SubtaskRef
    ack_ms: float
    """The time from the trigger until the driver received the ack."""
    start_delay_ms: float
    """The time from the trigger to the first barrier, by two clocks; 0 if they disagree."""
    alignment_ms: float
    """The time from the first barrier to the last; 0 with a single input."""
    sync_ms: float
    """The time of the sink's pre-commit and of the copy of the state."""
    async_ms: float
    """The time of the upload."""
    size_bytes: int
    """The size of its state and of rows in flight."""
    uploaded_bytes: int = 0
    """The bytes of `size_bytes` that were uploaded for this checkpoint, in `async_ms`."""
    in_flight_bytes: int = 0
    """The size of the rows that the barrier overtook here."""
    unaligned: bool = False
    """True if the barrier overtook rows here."""


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """A completed checkpoint. Its parts are those of the slowest subtask, in milliseconds."""

    checkpoint: int
    attempt: int
    triggered_at_ms: int
    duration_ms: float
    """The time from the trigger to the decision in the log."""
    alignment_ms: float
    sync_ms: float
    async_ms: float
    append_ms: float
    """The part of `duration_ms` for the append to the log."""
    size_bytes: int
    """The size of the state and of rows in flight."""
    uploaded_bytes: int = 0
    """The bytes of `size_bytes` that were uploaded: neither inline nor stored before."""
    committed_ms: float | None = None
    """The time from the decision to the last report of a commit, by a subtask, or by the driver for
    a sink whose whole checkpoints it commits. None while a report is missing."""
    kind: str = ""
    """The kind, as in `PendingCheckpoint`."""
    in_flight_bytes: int = 0
    """The size of the rows that the barrier overtook, over all subtasks."""
    unaligned: bool = False
    """True if the barrier overtook rows anywhere."""
    subtasks: tuple[SubtaskCheckpointStats, ...] = ()
    """The parts of the subtasks in the order of their acks; empty for old checkpoints."""

    @property
    def upload_bytes_per_s(self) -> float:
        """The upload rate of the slowest subtask; 0 if nothing was uploaded."""
        rates = (
            subtask.uploaded_bytes / subtask.async_ms * 1000
            for subtask in self.subtasks
            if subtask.async_ms
        )
        return min((rate for rate in rates if rate), default=0.0)


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint that is neither completed nor aborted."""

    checkpoint: int
    kind: str
    """The kind: periodic, manual, stop, final, savepoint, savepoint_stop or savepoint_drain."""
    triggered_at: Moment
    subtasks: tuple[SubtaskCheckpointStats, ...] = ()
    """The parts of the subtasks that have acked."""


@dataclass(frozen=True, slots=True)
class SavepointStats:
    """A complete savepoint."""

    checkpoint: int
    kind: str
    """The kind: savepoint, savepoint_stop or savepoint_drain."""
    place: str
    """The directory of the savepoint when it was written."""
    duration_ms: float
    """The time from the trigger to the end of the writing."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointFailure:
    """A checkpoint that was aborted."""

    checkpoint: int
    attempt: int
    failed_at_s: float
    """The time in seconds since the epoch."""
    reason: str
    subtasks: tuple[SubtaskCheckpointStats, ...] = ()
    """The parts of the subtasks that had acked."""


@dataclass(frozen=True, slots=True)
class AttemptStats:
    """The start of an attempt, in seconds since the previous attempt failed or the job started."""

    attempt: int
    restored_checkpoint: int
    began_at_s: float
    """The time in seconds since the epoch."""
    slots_ended_s: float = 0.0
    claimed_s: float = 0.0
    recovered_s: float = 0.0
    slots_up_s: float = 0.0
    deployed_s: float = 0.0
    running_s: float = 0.0
    committed: int = 0
    """The number of transactions that recovery committed."""
    aborted: int = 0
    """The number of transactions that recovery rolled back."""


@dataclass(frozen=True, slots=True)
class _Tally:
    """Internal data of the fold about the running attempt."""

    zero_s: float = 0.0
    """The time by `time.monotonic` at which the previous attempt failed, or the job was started."""
    slots_ended_s: float = 0.0
    recovered: tuple[RecoveredSink, ...] = ()
    decided_at_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """The decision times of the checkpoints that are not known to be committed."""
    committed: CommitTally = field(default_factory=CommitTally)
    subtasks: int = 0
    """The number of subtasks; 0 before the first checkpoint has completed."""
    committers: int = 0
    """The number of sinks whose whole checkpoints the driver commits."""
    earlier_sinks: tuple[SinkStatus, ...] = ()
    """The counts of earlier attempts."""
    earlier_rejected: Mapping[str, int] = field(default_factory=dict[str, int])
    """The records rejected in earlier attempts, by chain."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of a job after one of its events."""

    job: str
    state: JobState = JobState.STARTING
    attempt: int = 0
    restores: int = 0
    slots: tuple[SlotStatus, ...] = ()
    checkpoints_completed: int = 0
    checkpoints_failed: int = 0
    pending: tuple[PendingCheckpoint, ...] = ()
    """The running checkpoints, oldest first."""
    history: tuple[CheckpointStats, ...] = ()
    """The last completed checkpoints, oldest first."""
    failures: tuple[CheckpointFailure, ...] = ()
    """The last aborted checkpoints, oldest first."""
    savepoints: tuple[SavepointStats, ...] = ()
    """The last completed savepoints, oldest first."""
    restored_savepoint: str = ""
    """The savepoint from which this process began the job; empty if there is none."""
    attempts: tuple[AttemptStats, ...] = ()
    last_error: str = ""
    last_error_at_s: float = 0.0
    """The time of `last_error` in seconds since the epoch; 0 without an error."""
    dropped_state: tuple[str, ...] = ()
    """Descriptions of restored state that `allow_non_restored_state` has dropped."""
    sources: frozenset[str] = frozenset()
    """The uids of the job's sources."""
    offsets: Mapping[str, tuple[SplitOffsets, ...]] = field(
        default_factory=dict[str, tuple[SplitOffsets, ...]]
    )
    """The next position of each source's splits at the last checkpoint, and their end."""
    progress: Mapping[str, SourceProgress] = field(default_factory=dict[str, SourceProgress])
    """The distance from the end of the server's data, by source that measures bytes and times."""
    blockers: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The blockers in the target for which a sink's writers wait, by sink with an overdue ack."""
    refusals: Mapping[str, str] = field(default_factory=dict[str, str])
    """The commits that the driver could not make yet, with the reason for people, by sink. For a
    stuck sink, also those that a slot could not make before the attempt ended."""
    stuck: frozenset[str] = frozenset()
    """The sinks of `refusals` that refuse commits until a person helps."""
    tally: _Tally = field(default=_Tally(), repr=False)

    def __str__(self) -> str:
        """Return one line for people; `repr` has every field."""
        return self.describe()

    def describe(self, now_s: float | None = None) -> str:
        """Return one line for people, with the age of the last error if `now_s` is given."""
        committed = sum(sink.rows_committed for sink in self.sinks)
        in_doubt = sum(sink.prepared for sink in self.sinks)
        last = self.last_checkpoint
        newest = f"{last.checkpoint} in {last.duration_ms:.0f} ms" if last else "none yet"
        blocked = "".join(
            f"; sink {uid} waits for {'; '.join(blockers)}"
            for uid, blockers in sorted(self.blockers.items())
        )
        waits = "".join(f"; {wait.describe(now_s)}" for wait in self.waits)
        measured = () if self.state.ended else describe_sources(self.progress, now_s)
        sources = "".join(f"; {text}" for text in measured)
        when = describe_moment(self.last_error_at_s, now_s)
        error = f"; last error{when}: {self.last_error}" if self.last_error else ""
        return (
            f"{self.job}: {self.state.value}, attempt {self.attempt}, {self.records_in} records"
            f" read, {committed} rows committed, {in_doubt} transactions in doubt, checkpoint"
            f" {newest}{sources}{waits}{blocked}{self.describe_refusals()}{error}"
        )

    def describe_refusals(self) -> str:
        """Return a clause for each sink that refuses to commit, to be appended to a sentence."""
        return describe_refusals(self.sinks)

    @property
    def checkpoints_pending(self) -> tuple[int, ...]:
        """The numbers of the running checkpoints."""
        return tuple(pending.checkpoint for pending in self.pending)

    @property
    def last_checkpoint(self) -> CheckpointStats | None:
        """The last completed checkpoint; None before the first."""
        return self.history[-1] if self.history else None

    @property
    def waits(self) -> tuple[JobWait, ...]:
        """The external servers for which sources and sinks of a running job wait."""
        if self.state is not JobState.RUNNING:
            return ()
        of_slots = sum_up_waits(
            (wait, slot.heard_at_s) for slot in self.slots for wait in slot.waits
        )
        held = list_held_sources(self.offsets)
        return tuple(sorted((*of_slots, *held), key=lambda wait: wait.uid)) if held else of_slots

    @property
    def subtasks(self) -> tuple[SubtaskMetrics, ...]:
        """The counters of every subtask, by slot."""
        return tuple(metrics for slot in self.slots for metrics in slot.subtasks)

    @property
    def records_in(self) -> int:
        """The number of records read by all sources in this attempt.

        It restarts at 0 after a restart; records that are read again from the restored checkpoint
        count again.
        """
        return sum(m.records_in for m in self.subtasks if m.subtask.chain in self.sources)

    @property
    def lag(self) -> Mapping[str, int]:
        """The number of records after the last checkpoint, by source that can measure it now."""
        return {uid: sum(split.lag for split in splits) for uid, splits in self.offsets.items()}

    @property
    def rejected(self) -> int:
        """The number of bad records left out in all attempts: dropped, or sent to the dead letters.

        A record that is read again after a restart counts again.
        """
        return sum(self.rejected_by_chain.values())

    @property
    def rejected_by_chain(self) -> Mapping[str, int]:
        """The number of rejected records by chain."""
        totals = Counter(self.tally.earlier_rejected)
        for metrics in self.subtasks:
            totals[metrics.subtask.chain] += metrics.rejected
        return totals

    @property
    def sinks(self) -> tuple[SinkStatus, ...]:
        """The transactions of all sinks in all attempts, by uid.

        A sink is included from the first recovery on, or from the first refused commit.
        """
        reports = (sink for slot in self.slots for sink in slot.sinks)
        return count_sinks(
            self.tally.earlier_sinks, self.tally.recovered, reports, self.refusals, self.stuck
        )


def apply(status: JobStatus, event: JobEvent) -> JobStatus:
    """Return `status` as it is after `event`. Pure; takes every event in every state."""
    match event:
        case JobStarted() | AttemptBegan() | AttemptEnded() | JobRestarting() | JobEnded():
            return _apply_to_job(status, event)
        case SlotsJoined() | SinksRecovered() | SlotsDeployed() | AttemptRunning():
            return _apply_to_start(status, event)
        case SlotJoined() | SlotReported():
            return replace(status, slots=_slots_after(status.slots, event))
        case StateDropped() | LeftoversAborted() | LagMeasured() | SinkBlocked() | CommitRefused():
            return _apply_to_rest(status, event)
        case SlotLeft() | SplitsDiscovered() | EventsDropped():
            # A slot that has left stays, with its last counters, until the next attempt begins.
            return status
        case _:
            return _apply_to_checkpoints(status, event)


def _apply_to_job(
    status: JobStatus,
    event: JobStarted | AttemptBegan | AttemptEnded | JobRestarting | JobEnded,
) -> JobStatus:
    tally, now_s = status.tally, event.at.monotonic_s
    match event:
        case JobStarted(sources):
            return replace(status, sources=sources, tally=_Tally(zero_s=now_s))
        case AttemptBegan(attempt, restored):
            # Use the monotonic clock: the wall clock may be set while an attempt starts.
            since_s = round(now_s - tally.zero_s, 4)
            stats = AttemptStats(
                attempt=attempt,
                restored_checkpoint=restored,
                began_at_s=event.at.wall_s - since_s,
                slots_ended_s=tally.slots_ended_s,
                claimed_s=since_s,
            )
            return replace(
                status,
                attempt=attempt,
                restores=status.restores + (restored > 0 or bool(status.attempts)),
                slots=(),
                pending=(),
                offsets={},
                progress={},
                blockers={},
                # A stuck commit stays stuck until it succeeds.
                refusals={
                    sink.uid: sink.commit_refusal for sink in status.sinks if sink.commit_stuck
                },
                stuck=frozenset(sink.uid for sink in status.sinks if sink.commit_stuck),
                attempts=(*status.attempts, stats)[-HISTORY_LENGTH:],
                tally=_Tally(
                    tally.zero_s,
                    tally.slots_ended_s,
                    earlier_sinks=tuple(map(keep_totals, status.sinks)),
                    earlier_rejected=status.rejected_by_chain,
                ),
            )
        case AttemptEnded():
            return replace(status, tally=replace(tally, zero_s=now_s))
        case JobRestarting(_, error):
            ended = replace(tally, slots_ended_s=now_s - tally.zero_s)
            restarting = replace(status, state=JobState.RESTARTING, tally=ended)
            return _record_error(restarting, error, event.at)
        case JobEnded(state, error):
            return _record_error(replace(status, state=state), error, event.at)


def _record_error(status: JobStatus, error: str, at: Moment) -> JobStatus:
    return replace(status, last_error=error, last_error_at_s=at.wall_s) if error else status


def _apply_to_start(
    status: JobStatus, event: SlotsJoined | SinksRecovered | SlotsDeployed | AttemptRunning
) -> JobStatus:
    if not status.attempts:
        return status
    *older, stats = status.attempts
    since_s = round(event.at.monotonic_s - status.tally.zero_s, 4)
    match event:
        case SlotsJoined():
            stats = replace(stats, slots_up_s=since_s)
        case SinksRecovered(sinks):
            stats = replace(
                stats,
                recovered_s=since_s,
                committed=sum(sink.committed for sink in sinks),
                aborted=sum(sink.aborted for sink in sinks),
            )
            # Everything that was decided is committed.
            tally = replace(status.tally, recovered=sinks)
            status = replace(status, tally=tally, refusals={}, stuck=frozenset())
        case SlotsDeployed():
            stats = replace(stats, deployed_s=since_s)
        case AttemptRunning(committers):
            stats = replace(stats, running_s=since_s)
            tally = replace(status.tally, committers=len(committers))
            status = replace(status, state=JobState.RUNNING, tally=tally)
    return replace(status, attempts=(*older, stats))


def _slots_after(
    slots: tuple[SlotStatus, ...], event: SlotJoined | SlotReported
) -> tuple[SlotStatus, ...]:
    index = bisect_left(slots, event.slot, key=lambda slot: slot.slot)
    known = next((slot for slot in slots[index : index + 1] if slot.slot == event.slot), None)
    match event:
        case SlotJoined(number, pid, parent_pid, host):
            now = SlotStatus(number, pid, parent_pid, host)
        case SlotReported(_, subtasks, sinks, rss_bytes, waits):
            # Ignore a report of a slot that has not joined this attempt: it is from the previous.
            if known is None:
                return slots
            now = replace(
                known,
                subtasks=subtasks,
                sinks=sinks,
                rss_bytes=rss_bytes,
                waits=waits,
                heard_at_s=event.at.wall_s,
            )
    return (*slots[:index], now, *slots[index + bool(known) :])


def _apply_to_rest(
    status: JobStatus,
    event: StateDropped | LeftoversAborted | LagMeasured | SinkBlocked | CommitRefused,
) -> JobStatus:
    match event:
        case CommitRefused(uid, refusal, is_stuck):
            refusals = {known: why for known, why in status.refusals.items() if known != uid}
            refusals |= {uid: refusal} if refusal else {}
            stuck = status.stuck | {uid} if is_stuck else status.stuck - {uid}
            return replace(status, refusals=refusals, stuck=stuck)
        case SinkBlocked(uid, blockers):
            waiting = {known: others for known, others in status.blockers.items() if known != uid}
            waiting |= {uid: blockers} if blockers else {}
            return replace(status, blockers=waiting)
        case LagMeasured(uid, splits, progress):
            offsets = {known: ends for known, ends in status.offsets.items() if known != uid}
            offsets |= {uid: splits} if splits else {}
            measured = {known: at for known, at in status.progress.items() if known != uid}
            measured |= {} if progress is None else {uid: progress}
            return replace(status, offsets=offsets, progress=measured)
        case StateDropped(state):
            new = sorted(set(state) - set(status.dropped_state))
            return replace(status, dropped_state=(*status.dropped_state, *new))
        case LeftoversAborted(attempt, sinks):
            # The sweep of an attempt may end after it; do not add its counts to another attempt.
            if attempt != status.attempt:
                return status
            known = {sink.uid: sink for sink in status.tally.recovered}
            for sink in sinks:
                before = known.get(sink.uid)
                aborted = sink.aborted + (before.aborted if before else 0)
                known[sink.uid] = replace(before or sink, aborted=aborted)
            tally = replace(status.tally, recovered=tuple(known.values()))
            return replace(status, tally=tally)


def _apply_to_savepoints(
    status: JobStatus, event: SavepointCompleted | SavepointRestored
) -> JobStatus:
    match event:
        case SavepointRestored(_, place):
            return replace(status, restored_savepoint=place)
        case SavepointCompleted(checkpoint, place, size_bytes):
            done = next(
                (pending for pending in status.pending if pending.checkpoint == checkpoint), None
            )
            if done is None:
                return status
            duration_ms = _ms_between(done.triggered_at, event.at)
            stats = SavepointStats(checkpoint, done.kind, place, duration_ms, size_bytes)
            return replace(
                status,
                pending=tuple(pending for pending in status.pending if pending is not done),
                savepoints=(*status.savepoints, stats)[-HISTORY_LENGTH:],
            )


def _apply_to_checkpoints(
    status: JobStatus,
    event: CheckpointTriggered
    | CheckpointAcked
    | CheckpointCompleted
    | CheckpointFailed
    | SavepointCompleted
    | SavepointRestored
    | SubtaskCommitted
    | CheckpointCommitted,
) -> JobStatus:
    match event:
        case SavepointCompleted() | SavepointRestored():
            return _apply_to_savepoints(status, event)
        case CheckpointTriggered(checkpoint, kind):
            begun = PendingCheckpoint(checkpoint, kind.value, event.at)
            return replace(status, pending=(*status.pending, begun))
        case CheckpointAcked():
            return replace(
                status, pending=tuple(_add_ack(pending, event) for pending in status.pending)
            )
        case CheckpointCompleted():
            return _complete_checkpoint(status, event)
        case CheckpointFailed():
            return _fail_checkpoint(status, event)
        case SubtaskCommitted() | CheckpointCommitted():
            return _record_commit(status, event)
        case _:
            assert_never(event)


def _add_ack(pending: PendingCheckpoint, event: CheckpointAcked) -> PendingCheckpoint:
    if pending.checkpoint != event.checkpoint:
        return pending
    timings = event.timings
    stats = SubtaskCheckpointStats(
        subtask=event.subtask,
        ack_ms=_ms_between(pending.triggered_at, event.at),
        start_delay_ms=timings.start_delay_ms,
        alignment_ms=timings.alignment_ms,
        sync_ms=timings.sync_ms,
        async_ms=timings.async_ms,
        uploaded_bytes=timings.uploaded_bytes,
        size_bytes=timings.size_bytes,
        in_flight_bytes=timings.in_flight_bytes,
        unaligned=timings.overtaken,
    )
    return replace(pending, subtasks=(*pending.subtasks, stats))


def _complete_checkpoint(status: JobStatus, event: CheckpointCompleted) -> JobStatus:
    done = next(
        (pending for pending in status.pending if pending.checkpoint == event.checkpoint), None
    )
    if done is None:
        return status
    acks = done.subtasks
    stats = CheckpointStats(
        checkpoint=event.checkpoint,
        attempt=status.attempt,
        triggered_at_ms=int(done.triggered_at.wall_s * 1000),
        duration_ms=_ms_between(done.triggered_at, event.at),
        alignment_ms=max((ack.alignment_ms for ack in acks), default=0.0),
        sync_ms=max((ack.sync_ms for ack in acks), default=0.0),
        async_ms=max((ack.async_ms for ack in acks), default=0.0),
        append_ms=round(event.append_ms, 3),
        uploaded_bytes=sum(ack.uploaded_bytes for ack in acks),
        size_bytes=sum(ack.size_bytes for ack in acks),
        kind=done.kind,
        in_flight_bytes=sum(ack.in_flight_bytes for ack in acks),
        unaligned=any(ack.unaligned for ack in acks),
        subtasks=acks,
    )
    decided_at_s = {**status.tally.decided_at_s, event.checkpoint: event.at.monotonic_s}
    return replace(
        status,
        pending=tuple(
            pending
            for pending in status.pending
            # A decision ends older pending checkpoints, as in the coordinator. Savepoints belong
            # to their users and go on.
            if pending.checkpoint > event.checkpoint
            or (pending.checkpoint < event.checkpoint and pending.kind.startswith("savepoint"))
        ),
        checkpoints_completed=status.checkpoints_completed + 1,
        history=_bound_history((*status.history, stats)),
        tally=replace(status.tally, decided_at_s=decided_at_s, subtasks=len(acks)),
    )


def _fail_checkpoint(status: JobStatus, event: CheckpointFailed) -> JobStatus:
    number = event.checkpoint
    acks = next(
        (pending.subtasks for pending in status.pending if pending.checkpoint == number), ()
    )
    failure = CheckpointFailure(number, status.attempt, event.at.wall_s, event.reason, acks)
    return replace(
        status,
        pending=tuple(pending for pending in status.pending if pending.checkpoint != number),
        checkpoints_failed=status.checkpoints_failed + 1,
        failures=(*status.failures, failure)[-FAILURES_LENGTH:],
        last_error=f"checkpoint {number}: {event.reason}",
        last_error_at_s=event.at.wall_s,
    )


def _record_commit(status: JobStatus, event: SubtaskCommitted | CheckpointCommitted) -> JobStatus:
    """Record the commit of a subtask, or of a committer of the driver."""
    who = event.subtask if isinstance(event, SubtaskCommitted) else committer_ref(event.uid)
    checkpoint, now_s = event.checkpoint, event.at.monotonic_s
    tally = replace(status.tally, committed=status.tally.committed.with_commit(who, checkpoint))
    lowest = tally.committed.lowest_of(tally.subtasks + tally.committers)
    # A commit of a later checkpoint includes the earlier ones, so one confirmation may complete
    # several.
    done = {number: at_s for number, at_s in tally.decided_at_s.items() if number <= lowest}
    if not done:
        return replace(status, tally=tally)
    history = tuple(
        replace(stats, committed_ms=round((now_s - done[stats.checkpoint]) * 1000, 3))
        if stats.checkpoint in done
        else stats
        for stats in status.history
    )
    waiting = {number: at_s for number, at_s in tally.decided_at_s.items() if number not in done}
    return replace(status, history=history, tally=replace(tally, decided_at_s=waiting))


def _bound_history(history: tuple[CheckpointStats, ...]) -> tuple[CheckpointStats, ...]:
    """Return the newest entries, and drop acks of older ones beyond SUBTASK_HISTORY_LENGTH."""
    history = history[-HISTORY_LENGTH:]
    acks = 0
    for number, stats in enumerate(reversed(history)):
        acks += len(stats.subtasks)
        if number and acks > SUBTASK_HISTORY_LENGTH:
            older, newer = history[:-number], history[-number:]
            return (*(replace(entry, subtasks=()) for entry in older), *newer)
    return history


def _ms_between(earlier: Moment, later: Moment) -> float:
    return round((later.monotonic_s - earlier.monotonic_s) * 1000, 3)
