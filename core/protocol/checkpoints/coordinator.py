"""The coordinator of checkpoints: it triggers, completes, decides and aborts them.

One coordinator serves one attempt, on the driver's thread. The driver reports facts by calling
methods. Each method returns decisions as a tuple, which the driver carries out in order. A
checkpoint goes through

    collecting --all acked--> appending --logged--> retained -> subsumed
         |                        |
         +--declined, timed out,  +--append failed--> aborted
            subsumed--> aborted

A savepoint is never decided, and no decision subsumes it. It goes through

    collecting --all acked--> writing --written--> over
         +--declined, timed out--+--not written--> aborted

A later checkpoint decides the transactions that sinks prepared for a savepoint, as if the savepoint
had been aborted. A collecting savepoint counts towards the number of concurrent checkpoints. While
it is written, checkpoints go on, unless the job is to stop with it. In that case nothing is
triggered until it is written, and a failure fails the attempt, because the sources have stopped.

A checkpoint that is to end the job ends it, unless its barrier has overtaken rows, which it does if
the rows delay it for too long. Then the checkpoint is an ordinary one, and another one that is to
end the job follows.

If functions make last rows, the FINAL checkpoint decides all rows before them, and END follows. The
barrier of END goes through empty channels, so it overtakes nothing. Rows that functions made before
it are decided with it or not at all. If a job is started again at its end and reads nothing more,
it ends with FINAL: the last rows were already made.

Invariants:
    while a decision is being appended, the caller passes only the outcome of the append; it
    queues all other facts until then
    pending checkpoint > last decided checkpoint, unless it is a savepoint
    a file is discarded only if no retained or pending checkpoint names it (see state_files)
    after FailAttempt and after FinishJob nothing is decided any more
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from onceflow.core.errors import InvariantViolation, require
from onceflow.core.protocol.checkpoints.decisions import (
    AbortSavepoint,
    AppendDecision,
    Barrier,
    CheckpointKind,
    CountFailure,
    Decision,
    DiscardState,
    FailAttempt,
    FinishJob,
    NotifyAbort,
    NotifyComplete,
    SavepointRequest,
    StateForm,
    WriteSavepoint,
)
from onceflow.core.protocol.checkpoints.schedule import CheckpointSettings, TriggerSchedule
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    StateFiles,
    StateHandle,
    SubtaskSnapshot,
    handles_of,
)
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, SubtaskRef


@dataclass(slots=True)
class _Pending:
    trigger: Barrier
    deadline_s: float
    savepoint: SavepointRequest | None = None
    writing: bool = False
    """True for a savepoint that every subtask has acked."""
    snapshots: dict[SubtaskRef, SubtaskSnapshot] = field(
        default_factory=dict[SubtaskRef, SubtaskSnapshot]
    )
    in_target: set[SubtaskRef] = field(default_factory=set[SubtaskRef])
    """The subtasks that wrote their part into the savepoint's own directory."""
    blockers: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The causes for which the writers of each sink wait while acks are missing, by the sink's
    uid."""

    @property
    def in_storage(self) -> tuple[SubtaskSnapshot, ...]:
        """The snapshots whose files are in the job's storage, where the coordinator counts them."""
        return tuple(s for ref, s in self.snapshots.items() if ref not in self.in_target)


class CheckpointCoordinator:
    """The coordinator of one attempt's checkpoints. See the module for the life of a checkpoint.

    `retained` are the completed checkpoints in the log, oldest first, with the restored one last.
    `sources` are the subtasks whose end triggers a final checkpoint, once all of them have reported
    it. `committers` are the committers of whole checkpoints: they confirm commits like subtasks,
    but ack nothing. `now_s` comes from a monotonic clock (`time.monotonic`), which all waiting
    uses. `wall_ms` returns the wall-clock time for people. No decision depends on it.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        *,
        attempt: AttemptId,
        subtasks: frozenset[SubtaskRef],
        sources: frozenset[SubtaskRef],
        parallelism: int,
        max_parallelism: int,
        retained: Sequence[CompletedCheckpoint],
        next_checkpoint: CheckpointId,
        now_s: float,
        wall_ms: Callable[[], int],
        committers: frozenset[SubtaskRef] = frozenset(),
        makes_last_rows: bool = False,
    ) -> None:
        """Create the coordinator; `makes_last_rows`: functions make rows at the end of input."""
        if not subtasks or not sources <= subtasks:
            raise ValueError("subtasks must not be empty and must include the sources")
        self._settings = settings
        self._attempt = attempt
        self._subtasks = subtasks
        self._parallelism = parallelism
        self._max_parallelism = max_parallelism
        self._retained = list(retained)
        self._next_checkpoint = next_checkpoint
        self._wall_ms = wall_ms
        self._decided_last = self._retained[-1].checkpoint if self._retained else GENESIS
        require(next_checkpoint > self._decided_last, f"checkpoint {next_checkpoint} is decided")
        self._pending: dict[CheckpointId, _Pending] = {}
        self._appended: CompletedCheckpoint | None = None
        """The checkpoint that is being appended to the log."""
        self._files = StateFiles(self._retained)
        self._confirmed = Confirmed(subtasks, self._decided_last)
        self._committers = committers
        self._delivered = Confirmed(committers, self._decided_last)
        self._undelivered: list[CheckpointId] = []
        """The decided checkpoints that are not known to be committed by all of `committers`."""
        self._consecutive = 0
        self._schedule = TriggerSchedule(settings, sources, now_s)
        self._makes_last_rows = makes_last_rows
        restored = self._retained[-1] if self._retained else None
        self._ended_at = (
            _positions(restored, sources) if restored and restored.input_ended else None
        )
        """The positions of the sources when functions had made their last rows; None if they have
        not."""
        self._sources = sources
        self._last: CheckpointId | None = None
        """The decided checkpoint after whose commits the job finishes."""
        self._over = False

    @property
    def pending(self) -> tuple[CheckpointId, ...]:
        """The checkpoints that are neither decided nor aborted, oldest first."""
        return tuple(sorted(self._pending))

    @property
    def completed(self) -> tuple[CompletedCheckpoint, ...]:
        """The retained checkpoints, oldest first."""
        return tuple(self._retained)

    @property
    def requested(self) -> frozenset[CheckpointKind]:
        """The unfulfilled requests (MANUAL, STOP), which the next attempt requests again."""
        return self._schedule.requested

    def next_wake_s(self) -> float | None:
        """Return the time of the next useful `tick` if nothing else happens, or None."""
        if self._over:
            return None
        wakes = [pending.deadline_s for pending in self._pending.values()]
        due = self._due()
        if due is not None:
            wakes.append(due[1])
        return min(wakes, default=None)

    def tick(self, now_s: float) -> tuple[Decision, ...]:
        """Abort the checkpoints that have timed out and trigger the one that is due."""
        decisions: list[Decision] = []
        # Iterate over a copy: `_fail` removes the checkpoint from `_pending`.
        for pending in list(self._pending.values()):
            if now_s >= pending.deadline_s and not self._over:
                decisions += self._fail(pending, self._reason_of_timeout(pending), now_s)
        return (*decisions, *self._proceed(now_s))

    def overdue(self, now_s: float) -> frozenset[SubtaskRef]:
        """Return the subtasks whose ack is still missing after half of the checkpoint timeout."""
        half_s = self._settings.timeout_s / 2
        late = (p for p in self._pending.values() if now_s >= p.deadline_s - half_s)
        return frozenset(ref for p in late for ref in self._subtasks - p.snapshots.keys())

    def note_blockers(self, sink: str, blockers: tuple[str, ...]) -> None:
        """Record the current causes for which the writers of `sink` wait; empty if none is known.

        They appear in the error of a now pending checkpoint that times out, for people to read.
        """
        for pending in self._pending.values():
            pending.blockers[sink] = blockers

    def request(self, kind: CheckpointKind, now_s: float) -> tuple[Decision, ...]:
        """Request a checkpoint outside the interval: MANUAL or STOP.

        The checkpoint is triggered at once, or as soon as fewer than `max_concurrent` are pending.
        One checkpoint fulfills all requests that wait at the same time. A FINAL or STOP checkpoint
        fulfills requests of all kinds. If the triggered checkpoint fails, another one follows after
        a pause. `requested` returns the requests that this attempt has not fulfilled.
        """
        match kind:
            case CheckpointKind.MANUAL:
                self._schedule.request_manual(self._next_checkpoint)
            case CheckpointKind.STOP:
                self._schedule.request_stop()
            case _:
                raise ValueError(f"{kind} cannot be requested")
        return tuple(self._proceed(now_s))

    def request_savepoint(self, request: SavepointRequest, now_s: float) -> tuple[Decision, ...]:
        """Request a savepoint; it waits like a `request`, behind earlier savepoint requests.

        It is tried once. It ends with `WriteSavepoint` and `on_savepoint_end`, with
        `AbortSavepoint`, or with the attempt.
        """
        if not request.kind.is_savepoint:
            raise ValueError(
                f"{request.kind} was requested as a savepoint, and is none of the kinds of"
                " savepoints"
            )
        self._schedule.request_savepoint(request)
        return tuple(self._proceed(now_s))

    def on_savepoint_end(
        self, checkpoint: CheckpointId, now_s: float, *, error: str = ""
    ) -> tuple[Decision, ...]:
        """Record that a savepoint is completely and durably written, or that `error` prevented it.

        Ignored if the savepoint was aborted in the meantime. The files uploaded for the savepoint
        are discarded, because the written savepoint does not depend on them.
        """
        pending = self._pending.get(checkpoint)
        if self._over or pending is None or not pending.writing:
            return ()
        if error:
            return (*self._fail(pending, f"not written: {error}", now_s), *self._proceed(now_s))
        del self._pending[checkpoint]
        if pending.trigger.kind is CheckpointKind.SAVEPOINT_STOP:
            self._schedule.stop_after_savepoint()
        over = NotifyAbort(checkpoint, "the savepoint is written")
        return (over, *self._drop(pending.in_storage), *self._proceed(now_s))

    def on_source_end(self, subtask: SubtaskRef, now_s: float) -> tuple[Decision, ...]:
        """Record that a source subtask has emitted its last record; idempotent.

        When all source subtasks have, a FINAL checkpoint is triggered. It waits for pending
        checkpoints and does not abort them: finished sources still take part in them, and rows that
        they decide need not be decided again.
        """
        self._schedule.note_source_end(subtask)
        return tuple(self._proceed(now_s))

    def on_ack(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        snapshot: SubtaskSnapshot,
        now_s: float,
        *,
        in_target: bool = False,
    ) -> tuple[Decision, ...]:
        """Record that one subtask's part of `checkpoint` is durable.

        An ack of another attempt is ignored. If the ack is late, unknown or a duplicate, the files
        that no other checkpoint names are discarded. This also holds after the job has finished.

        `in_target`: the files are in the directory of a savepoint. They are deleted with that
        directory, so the coordinator never discards them.

        Raises:
            InvariantViolation: `in_target`, and the pending checkpoint is no savepoint.
        """
        # After a job has finished, late acks still bring files that no other process would delete.
        # After a failure, the next attempt's sweep deletes them.
        failed = self._over and self._last is None
        if failed or attempt != self._attempt:
            return ()
        pending = self._pending.get(checkpoint)
        subtask = snapshot.subtask
        if pending is None or subtask not in self._subtasks or subtask in pending.snapshots:
            return () if in_target else tuple(self._discard_late(snapshot))
        require(
            pending.savepoint is not None or not in_target,
            f"{subtask} has written checkpoint {checkpoint} into the directory of a savepoint",
        )
        pending.snapshots[subtask] = snapshot
        if in_target:
            pending.in_target.add(subtask)
        else:
            # Name the files from the ack on, not only from the decision on: a pending checkpoint
            # that names a shared file prevents its deletion together with an older checkpoint.
            self._files.name([snapshot])
        if pending.snapshots.keys() == self._subtasks:
            if pending.savepoint is not None:
                pending.writing = True
                completed = self._complete(pending)
                # Functions have made their last rows for this savepoint. If a later checkpoint
                # finds the sources at the same positions, functions must not make these rows again.
                if pending.savepoint.kind.ends_input:
                    self._ended_at = _positions(completed, self._sources)
                in_target_now = frozenset(pending.in_target)
                write = WriteSavepoint(pending.savepoint, completed, in_target_now)
                return (write, *self._proceed(now_s))
            self._appended = self._complete(pending)
            # Decide nothing else until the append has ended: `_proceed` would refuse to.
            return (AppendDecision(self._appended),)
        return tuple(self._proceed(now_s))

    def on_decline(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        subtask: SubtaskRef,
        reason: str,
        now_s: float,
    ) -> tuple[Decision, ...]:
        """Abort the checkpoint because a subtask cannot take part. Never raises.

        Ignored if the report is late, or of an unknown checkpoint or another attempt.
        """
        pending = self._pending.get(checkpoint)
        if self._over or attempt != self._attempt or pending is None:
            return ()
        decisions = self._fail(pending, f"{subtask} declined: {reason}", now_s)
        return (*decisions, *self._proceed(now_s))

    def on_logged(self, checkpoint: CheckpointId, now_s: float) -> tuple[Decision, ...]:
        """Record that the decision log holds `checkpoint`: the commit point of the whole job.

        Raises:
            InvariantViolation: The checkpoint was not being appended.
        """
        if self._over:
            return ()
        decided = self._end_append(checkpoint)
        kind = self._pending.pop(checkpoint).trigger.kind
        if kind is CheckpointKind.FINAL and not _has_in_flight(decided) and not decided.final:
            self._schedule.end_job_after_input()
        require(checkpoint > self._decided_last, f"{checkpoint} after {self._decided_last}")
        self._decided_last = checkpoint
        self._undelivered += [checkpoint] if self._committers else []
        self._consecutive = 0
        self._schedule.note_decision(checkpoint, now_s)
        # Drop the checkpoints that the log no longer retains and every older pending checkpoint:
        # this decision commits all transactions that they would have committed. Savepoints belong
        # to their users and go on.
        self._retained.append(decided)
        subsumed = self._retained[: -self._settings.retained]
        self._retained = self._retained[-self._settings.retained :]
        decisions: list[Decision] = [NotifyComplete(checkpoint, self._retained[0].checkpoint)]
        dropped: list[SubtaskSnapshot] = [s for old in subsumed for s in old.snapshots]
        older_pending = [n for n, p in self._pending.items() if n < checkpoint and not p.savepoint]
        for older in sorted(older_pending):
            # Subtasks need no abort: a subtask that learns of `checkpoint` waits for no older one.
            dropped += self._pending.pop(older).snapshots.values()
        decisions += self._drop(dropped)
        if decided.final:
            self._last = checkpoint
        return (*decisions, *self._proceed(now_s))

    def on_append_failure(
        self, checkpoint: CheckpointId, reason: str, now_s: float
    ) -> tuple[Decision, ...]:
        """Record that the log certainly does *not* hold `checkpoint` and never will.

        The checkpoint's files are deleted. A driver that is not certain must end the attempt
        instead: the next attempt reads the log and finds out.

        Raises:
            InvariantViolation: The checkpoint was not being appended.
        """
        if self._over:
            return ()
        self._end_append(checkpoint)
        decisions = self._fail(self._pending[checkpoint], f"decision not appended: {reason}", now_s)
        return (*decisions, *self._proceed(now_s))

    def on_committed(
        self, subtask: SubtaskRef, checkpoint: CheckpointId, now_s: float
    ) -> tuple[Decision, ...]:
        """Record that `subtask` knows of `checkpoint` and has committed everything up to it.

        Every subtask reports this for every completed checkpoint, also a subtask without a sink:
        the deletion of shared files and the end of the job depend on these reports. A committer may
        report much later. Only the end of the job waits for a committer, because committers own no
        files.

        Raises:
            InvariantViolation: `checkpoint` is not decided; the subtask committed too early.
        """
        confirmed = self._delivered if subtask in self._committers else self._confirmed
        if self._over or subtask not in confirmed:
            return ()
        require(
            checkpoint <= self._decided_last,
            f"{subtask} committed checkpoint {checkpoint}; {self._decided_last} is decided",
        )
        before = confirmed.lowest
        confirmed.raise_to(checkpoint, subtask)
        if subtask in self._committers:
            self._undelivered = [n for n in self._undelivered if n > self._find_delivered_through()]
        # Only the slowest subtask delays the deletion of files and the end of the job.
        if confirmed.lowest == before:
            return ()
        return (*self._drop(()), *self._proceed(now_s))

    def _proceed(self, now_s: float) -> list[Decision]:
        """Return the decisions that the facts so far allow: FinishJob, or a trigger."""
        require(self._appended is None, "a fact was told while a decision is appended")
        if self._over:
            return []
        if self._last is not None:
            everyone = (
                self._confirmed.lowest,
                *(self._delivered[committer] for committer in self._committers),
            )
            if min(everyone) < self._last or self._pending:
                return []
            self._over = True
            return [FinishJob(self._last)]
        due = self._due()
        return [self._trigger(due[0], now_s)] if due is not None and now_s >= due[1] else []

    def _due(self) -> tuple[CheckpointKind, float] | None:
        """Return the kind to trigger next and its time, or None if no trigger is allowed now."""
        kinds = {p.trigger.kind for p in self._pending.values()}
        ending = any(kind.ends_job or kind.stops_sources for kind in kinds)
        # A savepoint that is being written has no barriers in the stream any more.
        collecting = sum(not p.writing for p in self._pending.values())
        if ending or self._last is not None or collecting >= self._settings.concurrent:
            return None
        checkpoints = (n for n, p in self._pending.items() if p.savepoint is None)
        return self._schedule.due(max(checkpoints, default=GENESIS))

    def _trigger(self, kind: CheckpointKind, now_s: float) -> Barrier:
        after_s = self._settings.overtakes_after(kind)
        request = self._schedule.next_savepoint() if kind.is_savepoint else None
        form = request.form if request else StateForm.NATIVE
        target = request.target if request else None
        trigger = Barrier(self._next_checkpoint, kind, self._wall_ms(), after_s, form, target)
        self._next_checkpoint = CheckpointId(self._next_checkpoint + 1)
        # The deadline counts from the trigger, also for savepoints: otherwise a savepoint whose
        # write hangs would never end.
        deadline_s = now_s + self._settings.timeout_s
        self._pending[trigger.checkpoint] = _Pending(trigger, deadline_s, request)
        if request is None:
            self._schedule.note_trigger(now_s)
        return trigger

    def _reason_of_timeout(self, pending: _Pending) -> str:
        missing = sorted(self._subtasks - pending.snapshots.keys())
        late = f"no ack of {', '.join(map(str, missing))}" if missing else "not written"
        blocked = "".join(
            f"; sink {sink} waits for {'; '.join(blockers)}"
            for sink, blockers in sorted(pending.blockers.items())
            if blockers and missing
        )
        return f"{late} within {self._settings.timeout_s} s{blocked}"

    def _fail(self, pending: _Pending, reason: str, now_s: float) -> list[Decision]:
        """Abort one checkpoint, count the failure, and end the attempt after too many failures."""
        checkpoint = pending.trigger.checkpoint
        del self._pending[checkpoint]
        if pending.savepoint is not None:
            return self._fail_savepoint(pending, pending.savepoint, reason)
        self._schedule.note_failure(now_s)
        self._consecutive += 1
        decisions: list[Decision] = [NotifyAbort(checkpoint, reason)]
        decisions += self._drop(pending.snapshots.values())
        # Report the failure even if it ends the attempt: events and metrics count every failure.
        decisions.append(CountFailure(checkpoint, reason))
        if self._consecutive > self._settings.tolerable_failures:
            self._over = True
            text = (
                f"checkpoint {checkpoint} failed: {reason} ({self._consecutive} in a row,"
                f" {self._settings.tolerable_failures} tolerated)"
            )
            decisions.append(FailAttempt(text, checkpoint))
        return decisions

    def _fail_savepoint(
        self, pending: _Pending, request: SavepointRequest, reason: str
    ) -> list[Decision]:
        """Abort a savepoint.

        This counts as no failure, unless the job was to stop with the savepoint.
        """
        checkpoint = pending.trigger.checkpoint
        decisions: list[Decision] = [NotifyAbort(checkpoint, reason)]
        decisions += self._drop(pending.in_storage)
        decisions.append(AbortSavepoint(request, checkpoint, reason))
        # The sources have stopped for this savepoint and cannot go on in this attempt. The next
        # attempt starts them again.
        if request.kind.stops_sources:
            self._over = True
            text = (
                f"the job could not stop with savepoint {checkpoint}, because the savepoint"
                f" failed: {reason}"
            )
            decisions.append(FailAttempt(text, checkpoint))
        return decisions

    def _end_append(self, checkpoint: CheckpointId) -> CompletedCheckpoint:
        appended, self._appended = self._appended, None
        if appended is None or appended.checkpoint != checkpoint:
            raise InvariantViolation(f"append of {checkpoint} ended, but {appended} was under way")
        return appended

    def _complete(self, pending: _Pending) -> CompletedCheckpoint:
        trigger, snapshots = pending.trigger, pending.snapshots
        completed = CompletedCheckpoint(
            checkpoint=trigger.checkpoint,
            attempt=self._attempt,
            parallelism=self._parallelism,
            max_parallelism=self._max_parallelism,
            snapshots=tuple(snapshots[subtask] for subtask in sorted(snapshots)),
            triggered_at_ms=trigger.triggered_at_ms,
            completed_at_ms=self._wall_ms(),
            delivered_through=self._find_delivered_through(),
            # A savepoint may become complete after a later checkpoint is decided. A job that starts
            # from the savepoint does not have that decision and must not name its commits after it.
            undelivered=tuple(
                checkpoint for checkpoint in self._undelivered if checkpoint < trigger.checkpoint
            ),
        )
        at_end = self._ended_at is not None and self._ended_at == _positions(
            completed, self._sources
        )
        input_ended = trigger.kind.ends_input or at_end
        last_rows_follow = (
            trigger.kind is CheckpointKind.FINAL and self._makes_last_rows and not input_ended
        )
        ends = trigger.kind.ends_job and not _has_in_flight(completed) and not last_rows_follow
        return replace(completed, final=ends, input_ended=input_ended)

    def _find_delivered_through(self) -> CheckpointId:
        return min((self._delivered[committer] for committer in self._committers), default=GENESIS)

    def _drop(self, snapshots: Iterable[SubtaskSnapshot]) -> list[Decision]:
        """Drop the snapshots of a removed checkpoint, and delete the files that are now free."""
        private = self._files.drop(snapshots, decided_last=self._decided_last)
        return self._discard(private, None)

    def _discard_late(self, snapshot: SubtaskSnapshot) -> list[Decision]:
        """Delete the files of a late ack that no checkpoint names; shared files may wait first."""
        handles = handles_of([snapshot])
        private = self._files.find_unnamed(handles, decided_last=self._decided_last)
        return self._discard(private, handles)

    def _discard(
        self, private: tuple[StateHandle, ...], among: tuple[StateHandle, ...] | None
    ) -> list[Decision]:
        shared = self._files.release(
            confirmed=self._confirmed.lowest,
            next_checkpoint=self._next_checkpoint,
            oldest_pending=min(self._pending, default=self._next_checkpoint),
            among=among,
        )
        return [DiscardState(private + shared)] if private or shared else []


def _has_in_flight(completed: CompletedCheckpoint) -> bool:
    return any(snapshot.in_flight for snapshot in completed.snapshots)


def _positions(
    completed: CompletedCheckpoint, sources: frozenset[SubtaskRef]
) -> Counter[tuple[str, bytes]]:
    """Return the position of every split, independent of the subtask that reads it."""
    # Group by chain, not by subtask: with another parallelism, other subtasks read the same splits.
    chains = {source.chain for source in sources}
    return Counter(
        (snapshot.subtask.chain, element)
        for snapshot in completed.snapshots
        if snapshot.subtask.chain in chains
        for operator in snapshot.operators
        for elements in operator.lists.values()
        for element in elements
    )


class Confirmed:
    """The newest decision that each subtask has confirmed as committed, and the lowest of these."""

    def __init__(self, everyone: Iterable[SubtaskRef], checkpoint: CheckpointId) -> None:
        self._of = dict.fromkeys(everyone, checkpoint)
        self._counts = Counter(self._of.values())

    def __contains__(self, who: SubtaskRef) -> bool:
        return who in self._of

    def __getitem__(self, who: SubtaskRef) -> CheckpointId:
        return self._of[who]

    @property
    def lowest(self) -> CheckpointId:
        """The newest decision that all have committed.

        The cost grows with the number of different decisions, not with the number of subtasks.
        """
        # There are few distinct numbers, because confirmations lag by a checkpoint or two. There
        # may be thousands of subtasks.
        return min(self._counts)

    def raise_to(self, checkpoint: CheckpointId, who: SubtaskRef) -> None:
        """Record that `who` has committed up to `checkpoint`; ignored if it has committed more."""
        before = self._of[who]
        if checkpoint <= before:
            return
        self._of[who] = checkpoint
        self._counts[checkpoint] += 1
        self._counts[before] -= 1
        if not self._counts[before]:
            del self._counts[before]


__all__ = ["CheckpointCoordinator", "CheckpointSettings"]
