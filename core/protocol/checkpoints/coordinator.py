"""When checkpoints are taken, when they are complete, and what becomes of them.

One coordinator serves one attempt, on the driver's thread. Facts go in by method, decisions come
out as a tuple, to be carried out in order. A checkpoint goes through

    collecting --all acked--> appending --logged--> retained -> subsumed
         |                        |
         +--declined, timed out,  +--append failed--> aborted
            subsumed--> aborted

and a savepoint, which is never decided, and which no decision subsumes, through

    collecting --all acked--> writing --written--> over
         +--declined, timed out--+--not written--> aborted

What sinks have prepared for it is decided by a later checkpoint, as if it had been aborted. While
one is collecting it counts as under way; while it is written, checkpoints go on, unless the job is
to stop with it: then nothing is triggered until it is written, and a failure fails the attempt,
for the sources have stopped.

A checkpoint that is to end the job ends it unless its barrier has overtaken rows, as it does when
they take long. Then it is one as any other, and is followed by another that is to end the job.

Where functions make last rows, the FINAL checkpoint decides all rows before those, and is followed
by END. Its barrier goes through channels that are empty, so nothing is overtaken, and what
functions have made before it is decided with it or not at all. A job that is started again at its
end, and reads nothing more, ends with FINAL: the last rows are there.

Invariants:
    while a checkpoint is appending, nothing is told but how that ended: other facts wait with
    whoever tells
    pending checkpoint > last decided checkpoint, unless it is a savepoint
    a file is discarded only if no retained or pending checkpoint names it (see state_files)
    after FailAttempt and after FinishJob nothing is decided any more
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from onceflow.core.protocol.checkpoints.decisions import (
    AbortSavepoint,
    AppendDecision,
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
    TriggerCheckpoint,
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
from onceflow.core.protocol.invariant import InvariantViolation, require


@dataclass(slots=True)
class _Pending:
    trigger: TriggerCheckpoint
    deadline_s: float
    savepoint: SavepointRequest | None = None
    writing: bool = False
    """A savepoint of which every subtask has acked."""
    snapshots: dict[SubtaskRef, SubtaskSnapshot] = field(
        default_factory=dict[SubtaskRef, SubtaskSnapshot]
    )
    blockers: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """By uid of a sink, what its writers wait for while acks are missing."""


class CheckpointCoordinator:
    """Decides on the checkpoints of one attempt. See the module for the life of a checkpoint.

    `retained` are the completed checkpoints in the log, oldest first, the restored one last;
    `sources` are the subtasks whose end, when all have reported it, calls for a final checkpoint;
    `committers` confirm commits as subtasks do, and ack nothing: those of whole checkpoints.
    `now_s` is of a clock that is never set (`time.monotonic`): all waiting goes by it. `wall_ms`
    says what time it is for people, and nothing is decided by it.
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
        """`makes_last_rows`: whether functions make rows at the end of the input."""
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
        """What is being appended to the log."""
        self._files = StateFiles(self._retained)
        self._confirmed = Confirmed(subtasks, self._decided_last)
        self._committers = committers
        self._delivered = Confirmed(committers, self._decided_last)
        self._undelivered: list[CheckpointId] = []
        """Decided, and not known to be committed by all of `committers`."""
        self._consecutive = 0
        self._schedule = TriggerSchedule(settings, sources, now_s)
        self._makes_last_rows = makes_last_rows
        restored = self._retained[-1] if self._retained else None
        self._ended_at = (
            _positions(restored, sources) if restored and restored.input_ended else None
        )
        """Where the sources stood when functions had made their last rows; None: they have not."""
        self._sources = sources
        self._last: CheckpointId | None = None
        """The decided checkpoint after which the job finishes."""
        self._over = False

    @property
    def pending(self) -> tuple[CheckpointId, ...]:
        """The checkpoints that are neither decided nor given up, oldest first."""
        return tuple(sorted(self._pending))

    @property
    def completed(self) -> tuple[CompletedCheckpoint, ...]:
        """The retained checkpoints, oldest first."""
        return tuple(self._retained)

    @property
    def requested(self) -> frozenset[CheckpointKind]:
        """What was asked for (MANUAL, STOP) and is not fulfilled: for the next attempt to ask."""
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
        """Abort what is late and trigger what is due."""
        decisions: list[Decision] = []
        # A copy: a failure takes its checkpoint out of the table.
        for pending in list(self._pending.values()):
            if now_s >= pending.deadline_s and not self._over:
                decisions += self._fail(pending, self._reason_of_timeout(pending), now_s)
        return (*decisions, *self._proceed(now_s))

    def overdue(self, now_s: float) -> frozenset[SubtaskRef]:
        """Return the subtasks that have owed an ack for half of the checkpoint timeout."""
        half_s = self._settings.timeout_s / 2
        late = (p for p in self._pending.values() if now_s >= p.deadline_s - half_s)
        return frozenset(ref for p in late for ref in self._subtasks - p.snapshots.keys())

    def note_blockers(self, sink: str, blockers: tuple[str, ...]) -> None:
        """Take in what the writers of `sink` wait for now, for people; empty: nothing is known.

        A checkpoint that is pending now, and times out, says it.
        """
        for pending in self._pending.values():
            pending.blockers[sink] = blockers

    def request(self, kind: CheckpointKind, now_s: float) -> tuple[Decision, ...]:
        """Ask for a checkpoint outside the interval: MANUAL or STOP.

        It is triggered at once, or when fewer than `max_concurrent` are pending. Requests that wait
        at the same time are fulfilled by one checkpoint, and a FINAL or STOP one fulfills all.
        If the one that was triggered fails, another follows after a pause; `requested` says what
        this attempt has left unfulfilled.
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
        """Ask for a savepoint: triggered after those asked for before, as soon as `request` is.

        It is tried once: it ends with `WriteSavepoint` and `on_savepoint_end`, with
        `AbortSavepoint` or with the attempt.
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
        """Take in that a savepoint is written, durably and whole, or that `error` kept it from it.

        Ignored when it was given up meanwhile. What was uploaded for it is discarded: the savepoint
        stands alone.
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
        return (over, *self._drop(pending.snapshots.values()), *self._proceed(now_s))

    def on_source_end(self, subtask: SubtaskRef, now_s: float) -> tuple[Decision, ...]:
        """Take in that a source subtask has emitted its last record; idempotent.

        When all have, a FINAL checkpoint is triggered. Those under way are awaited, not aborted:
        finished sources still take part in them, and what they decide need not be decided again.
        """
        self._schedule.note_source_end(subtask)
        return tuple(self._proceed(now_s))

    def on_ack(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        snapshot: SubtaskSnapshot,
        now_s: float,
    ) -> tuple[Decision, ...]:
        """Take in that one subtask's part of `checkpoint` is durable. Never raises.

        An ack of another attempt is ignored. One that is late, unknown or doubled has the files
        discarded that nothing else names, also when the job has finished meanwhile.
        """
        # After a job has finished, late acks still bring files that nobody else would delete. After
        # a failure they are left to the next attempt's sweep.
        failed = self._over and self._last is None
        if failed or attempt != self._attempt:
            return ()
        pending = self._pending.get(checkpoint)
        subtask = snapshot.subtask
        if pending is None or subtask not in self._subtasks or subtask in pending.snapshots:
            return tuple(self._discard_late(snapshot))
        pending.snapshots[subtask] = snapshot
        # From the ack on, and not from the decision: a checkpoint under way that names a shared
        # file keeps it from being deleted with an older one.
        self._files.name([snapshot])
        if pending.snapshots.keys() == self._subtasks:
            if pending.savepoint is not None:
                pending.writing = True
                completed = self._complete(pending)
                # Functions have made their last rows for this savepoint. A checkpoint that finds
                # the sources at the same positions must not have them made again.
                if pending.savepoint.kind.ends_input:
                    self._ended_at = _positions(completed, self._sources)
                return (WriteSavepoint(pending.savepoint, completed), *self._proceed(now_s))
            self._appended = self._complete(pending)
            # Nothing else is decided until its end is known: `_proceed` would refuse to.
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
        """Take in that a subtask cannot take part: the checkpoint is aborted. Never raises.

        Ignored when late, unknown or of another attempt.
        """
        pending = self._pending.get(checkpoint)
        if self._over or attempt != self._attempt or pending is None:
            return ()
        decisions = self._fail(pending, f"{subtask} declined: {reason}", now_s)
        return (*decisions, *self._proceed(now_s))

    def on_logged(self, checkpoint: CheckpointId, now_s: float) -> tuple[Decision, ...]:
        """Take in that the decision log holds `checkpoint`: the commit point of the whole job.

        Raises:
            InvariantViolation: It was not being appended.
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
        # What the log retains no more is dropped, and so is every older checkpoint that is pending:
        # this decision commits all that they would have. Savepoints are their users' and go on.
        self._retained.append(decided)
        subsumed = self._retained[: -self._settings.retained]
        self._retained = self._retained[-self._settings.retained :]
        decisions: list[Decision] = [NotifyComplete(checkpoint, self._retained[0].checkpoint)]
        dropped: list[SubtaskSnapshot] = [s for old in subsumed for s in old.snapshots]
        older_pending = [n for n, p in self._pending.items() if n < checkpoint and not p.savepoint]
        for older in sorted(older_pending):
            # Nobody needs to be told: who hears of `checkpoint` waits for no older one.
            dropped += self._pending.pop(older).snapshots.values()
        decisions += self._drop(dropped)
        if decided.final:
            self._last = checkpoint
        return (*decisions, *self._proceed(now_s))

    def on_append_failure(
        self, checkpoint: CheckpointId, reason: str, now_s: float
    ) -> tuple[Decision, ...]:
        """Take in that the log certainly does *not* hold `checkpoint` and never will.

        Its files are deleted. A driver that is not certain ends the attempt instead: the next one
        reads the log and knows.

        Raises:
            InvariantViolation: It was not being appended.
        """
        if self._over:
            return ()
        self._end_append(checkpoint)
        decisions = self._fail(self._pending[checkpoint], f"decision not appended: {reason}", now_s)
        return (*decisions, *self._proceed(now_s))

    def on_committed(
        self, subtask: SubtaskRef, checkpoint: CheckpointId, now_s: float
    ) -> tuple[Decision, ...]:
        """Take in that `subtask` heard of `checkpoint` and has nothing left to commit up to it.

        Every subtask reports this for every completed checkpoint, also one that has no sink: shared
        files wait for it, and the job finishes by it. A committer may report much later, and only
        the end of the job waits for it: files are the subtasks' own.

        Raises:
            InvariantViolation: `checkpoint` is not decided; something was committed too early.
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
        # Only the slowest subtask holds files and the end of the job back.
        if confirmed.lowest == before:
            return ()
        return (*self._drop(()), *self._proceed(now_s))

    def _proceed(self, now_s: float) -> list[Decision]:
        """Whatever the facts so far allow next: finish or trigger."""
        require(self._appended is None, "a fact was told while a decision is appended")
        if self._over:
            return []
        if self._last is not None:
            everyone = (self._confirmed.lowest, *(self._delivered[one] for one in self._committers))
            if min(everyone) < self._last or self._pending:
                return []
            self._over = True
            return [FinishJob(self._last)]
        due = self._due()
        return [self._trigger(due[0], now_s)] if due is not None and now_s >= due[1] else []

    def _due(self) -> tuple[CheckpointKind, float] | None:
        """Return what is to be triggered next and when, if anything may be by then."""
        kinds = {p.trigger.kind for p in self._pending.values()}
        ending = any(kind.ends_job or kind.stops_sources for kind in kinds)
        # A savepoint that is being written keeps no barriers in the stream any more.
        collecting = sum(not p.writing for p in self._pending.values())
        if ending or self._last is not None or collecting >= self._settings.concurrent:
            return None
        checkpoints = (n for n, p in self._pending.items() if p.savepoint is None)
        return self._schedule.due(max(checkpoints, default=GENESIS))

    def _trigger(self, kind: CheckpointKind, now_s: float) -> TriggerCheckpoint:
        after_s = self._settings.overtakes_after(kind)
        request = self._schedule.next_savepoint() if kind.is_savepoint else None
        form = request.form if request else StateForm.NATIVE
        trigger = TriggerCheckpoint(self._next_checkpoint, kind, self._wall_ms(), after_s, form)
        self._next_checkpoint = CheckpointId(self._next_checkpoint + 1)
        # From the trigger, savepoints included: a writing savepoint that hangs would otherwise
        # never end.
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
        """Abort one checkpoint, count it, and end the attempt if that was one too many."""
        checkpoint = pending.trigger.checkpoint
        del self._pending[checkpoint]
        if pending.savepoint is not None:
            return self._fail_savepoint(pending, pending.savepoint, reason)
        self._schedule.note_failure(now_s)
        self._consecutive += 1
        decisions: list[Decision] = [NotifyAbort(checkpoint, reason)]
        decisions += self._drop(pending.snapshots.values())
        # Told even when it ends the attempt: events and metrics count every failure.
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
        """Give a savepoint up. It counts as no failure, unless the job was to stop with it."""
        checkpoint = pending.trigger.checkpoint
        decisions: list[Decision] = [NotifyAbort(checkpoint, reason)]
        decisions += self._drop(pending.snapshots.values())
        decisions.append(AbortSavepoint(request, checkpoint, reason))
        # Sources have stopped for it and cannot go on in this attempt. The next one starts them
        # again.
        if request.kind.stops_sources:
            self._over = True
            text = f"the job was to stop with savepoint {checkpoint}, which failed: {reason}"
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
            # A savepoint may be complete only after a later checkpoint is decided. A job that
            # begins from it has no such decision, and must not name its commits after it.
            undelivered=tuple(one for one in self._undelivered if one < trigger.checkpoint),
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
        return min((self._delivered[one] for one in self._committers), default=GENESIS)

    def _drop(self, snapshots: Iterable[SubtaskSnapshot]) -> list[Decision]:
        """Take in that a checkpoint is gone, and delete every file whose wait is over."""
        private = self._files.drop(snapshots, decided_last=self._decided_last)
        return self._discard(private, None)

    def _discard_late(self, snapshot: SubtaskSnapshot) -> list[Decision]:
        """Delete what a late ack has brought and no checkpoint names, or have it wait."""
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
    """Return where every split stands, whichever subtask reads it."""
    # By chain and not by subtask: another parallelism gives the same splits to other subtasks.
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
    """The newest decision that each of many is known to have committed, and the lowest of these."""

    def __init__(self, everyone: Iterable[SubtaskRef], checkpoint: CheckpointId) -> None:
        self._of = dict.fromkeys(everyone, checkpoint)
        self._counts = Counter(self._of.values())

    def __contains__(self, who: SubtaskRef) -> bool:
        return who in self._of

    def __getitem__(self, who: SubtaskRef) -> CheckpointId:
        return self._of[who]

    @property
    def lowest(self) -> CheckpointId:
        """What all have committed; costs what there are decisions, not subtasks."""
        # There are few distinct numbers, for confirmations lag by a checkpoint or two; there may be
        # thousands of subtasks.
        return min(self._counts)

    def raise_to(self, checkpoint: CheckpointId, who: SubtaskRef) -> None:
        """Take in that `who` has committed up to `checkpoint`; ignored when it has more."""
        before = self._of[who]
        if checkpoint <= before:
            return
        self._of[who] = checkpoint
        self._counts[checkpoint] += 1
        self._counts[before] -= 1
        if not self._counts[before]:
            del self._counts[before]


__all__ = ["CheckpointCoordinator", "CheckpointSettings"]
