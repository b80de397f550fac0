"""Deliberately broken variants of the protocol. Each must be caught by the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tests.simulation.end_mutants import END_MUTANTS
from tests.simulation.global_mutants import GLOBAL_MUTANTS
from tests.simulation.log_mutants import LOG_MUTANTS
from tests.simulation.loop_mutants import LOOP_MUTANTS
from tests.simulation.older_copy_mutants import OLDER_COPY_MUTANTS
from tests.simulation.overtaking_mutants import OVERTAKING_MUTANTS
from tests.simulation.rewind_mutants import REWIND_MUTANTS
from tests.simulation.savepoint_mutants import SAVEPOINT_MUTANTS
from tests.simulation.targets import Staged
from tests.simulation.variant import Variant
from tests.simulation.world import World

from onceflow.core.commit.planner import CommitPlan, plan_commits
from onceflow.core.commit.queue import CommitQueue
from onceflow.core.protocol.checkpoints import alignment
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator, Confirmed
from onceflow.core.protocol.checkpoints.decisions import (
    AppendDecision,
    Barrier,
    CheckpointKind,
    Decision,
    DiscardState,
    NotifyAbort,
    NotifyComplete,
)
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    StateFiles,
    StateHandle,
    SubtaskSnapshot,
    handles_of,
    paths_of,
    retain_ledger_from,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.log.memory import LogMemory
from onceflow.core.storage.log.decision_log import DecisionUnknown

# --- the coordinator -----------------------------------------------------------------------------


class _AnyAttempt(CheckpointCoordinator):
    """Takes acks of older attempts for its own."""

    def on_ack(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        snapshot: SubtaskSnapshot,
        now_s: float,
        *,
        in_target: bool = False,
    ) -> tuple[Decision, ...]:
        return super().on_ack(self._attempt, checkpoint, snapshot, now_s, in_target=in_target)


class _OneMissing(CheckpointCoordinator):
    """Completes a checkpoint with one ack missing."""

    def on_ack(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        snapshot: SubtaskSnapshot,
        now_s: float,
        *,
        in_target: bool = False,
    ) -> tuple[Decision, ...]:
        pending = self._pending.get(checkpoint)
        decisions = super().on_ack(attempt, checkpoint, snapshot, now_s, in_target=in_target)
        if pending is not None and len(pending.snapshots) == len(self._subtasks) - 1:
            self._appended = self._complete(pending)
            return (*decisions, AppendDecision(self._appended))
        return decisions


class _NotifiesFirst(CheckpointCoordinator):
    """Tells the sinks to commit before the decision is in the log."""

    def on_ack(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        snapshot: SubtaskSnapshot,
        now_s: float,
        *,
        in_target: bool = False,
    ) -> tuple[Decision, ...]:
        decisions = super().on_ack(attempt, checkpoint, snapshot, now_s, in_target=in_target)
        early = [NotifyComplete(checkpoint, checkpoint)] if decisions else []
        return (*early, *decisions)


class _KeepsLateFiles(CheckpointCoordinator):
    """Keeps the files of an ack that comes late."""

    def on_ack(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        snapshot: SubtaskSnapshot,
        now_s: float,
        *,
        in_target: bool = False,
    ) -> tuple[Decision, ...]:
        decisions = super().on_ack(attempt, checkpoint, snapshot, now_s, in_target=in_target)
        late = checkpoint not in self._pending
        return () if late else decisions


class _TakesLateAcks(CheckpointCoordinator):
    """Takes an ack of a checkpoint that was given up for one of the oldest under way."""

    def on_ack(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        snapshot: SubtaskSnapshot,
        now_s: float,
        *,
        in_target: bool = False,
    ) -> tuple[Decision, ...]:
        if checkpoint not in self._pending and self._pending and not self._over:
            checkpoint = min(self._pending)
        return super().on_ack(attempt, checkpoint, snapshot, now_s, in_target=in_target)


class _ConfirmsAtDecision(CheckpointCoordinator):
    """Counts every subtask's confirmation when the decision is logged."""

    def on_logged(self, checkpoint: CheckpointId, now_s: float) -> tuple[Decision, ...]:
        self._confirmed = Confirmed(self._subtasks, checkpoint)
        return super().on_logged(checkpoint, now_s)


class _DeletesShared(CheckpointCoordinator):
    """Deletes every file of a subsumed checkpoint, shared ones too."""

    def on_logged(self, checkpoint: CheckpointId, now_s: float) -> tuple[Decision, ...]:
        before = [s for kept in self._retained for s in kept.snapshots]
        decisions = super().on_logged(checkpoint, now_s)
        return (*decisions, DiscardState(handles_of(before)))


class _KeepsSubsumed(CheckpointCoordinator):
    """Keeps the files of a subsumed checkpoint."""

    def on_logged(self, checkpoint: CheckpointId, now_s: float) -> tuple[Decision, ...]:
        decisions = super().on_logged(checkpoint, now_s)
        return tuple(d for d in decisions if not isinstance(d, DiscardState))


class _RetainsOneLess(CheckpointCoordinator):
    """Deletes what the oldest retained checkpoint needs."""

    def on_logged(self, checkpoint: CheckpointId, now_s: float) -> tuple[Decision, ...]:
        decisions = super().on_logged(checkpoint, now_s)
        if len(self._retained) < 2:
            return decisions
        oldest = handles_of(self._retained[0].snapshots)
        newer = {h.path for kept in self._retained[1:] for h in handles_of(kept.snapshots)}
        return (*decisions, DiscardState(tuple(h for h in oldest if h.path not in newer)))


class _SubsumesNothing(CheckpointCoordinator):
    """Lets older checkpoints be decided after a newer one."""

    def on_logged(self, checkpoint: CheckpointId, now_s: float) -> tuple[Decision, ...]:
        older = {n: p for n, p in self._pending.items() if n < checkpoint}
        for number in older:
            del self._pending[number]
        decisions = super().on_logged(checkpoint, now_s)
        self._pending |= older
        return decisions


class _FinishesAtDecision(CheckpointCoordinator):
    """Ends the job when its last checkpoint is decided, and waits for no commit."""

    def on_logged(self, checkpoint: CheckpointId, now_s: float) -> tuple[Decision, ...]:
        decisions = super().on_logged(checkpoint, now_s)
        if self._last is None:
            return decisions
        self._confirmed = Confirmed(self._subtasks, self._last)
        return (*decisions, *self._proceed(now_s))


class _RefusedIsDecided(CheckpointCoordinator):
    """Takes a decision that could not be appended for one that stands."""

    def on_append_failure(
        self, checkpoint: CheckpointId, reason: str, now_s: float
    ) -> tuple[Decision, ...]:
        return super().on_logged(checkpoint, now_s)


class _AbortsInSilence(CheckpointCoordinator):
    """Tells nobody that a checkpoint has failed."""

    def _fail(self, pending: Any, reason: str, now_s: float) -> list[Decision]:
        decisions = super()._fail(pending, reason, now_s)
        return [d for d in decisions if not isinstance(d, NotifyAbort)]


class _KeepsAbortedFiles(CheckpointCoordinator):
    """Keeps the files of a checkpoint that failed."""

    def _fail(self, pending: Any, reason: str, now_s: float) -> list[Decision]:
        decisions = super()._fail(pending, reason, now_s)
        return [d for d in decisions if not isinstance(d, DiscardState)]


class _NeverTimesOut(CheckpointCoordinator):
    """Waits for ever for an ack that was lost."""

    def tick(self, now_s: float) -> tuple[Decision, ...]:
        for pending in self._pending.values():
            pending.deadline_s = now_s + 1.0
        return super().tick(now_s)


class _IgnoresDeclines(CheckpointCoordinator):
    """Waits for the ack of a subtask that has declined."""

    def on_decline(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        subtask: SubtaskRef,
        reason: str,
        now_s: float,
    ) -> tuple[Decision, ...]:
        return ()


class _ForgetsRequests(CheckpointCoordinator):
    """Drops what was asked for when its checkpoint is triggered."""

    def _trigger(self, kind: CheckpointKind, now_s: float) -> Any:
        asked: Any = self._schedule
        asked._wants_stop, asked._manual_from = False, None
        return super()._trigger(kind, now_s)


class _SaysNothingIsAsked(CheckpointCoordinator):
    """Does not tell the next attempt what was asked for."""

    @property
    def requested(self) -> frozenset[CheckpointKind]:
        return frozenset()


class _FollowsTheWall(CheckpointCoordinator):
    """Takes the wall clock for durations."""

    def tick(self, now_s: float) -> tuple[Decision, ...]:
        return super().tick(self._wall_ms() / 1000 - 1_700_000_000)


class _StopIsPeriodic(CheckpointCoordinator):
    """Goes on after a STOP or FINAL checkpoint as after any other."""

    def on_logged(self, checkpoint: CheckpointId, now_s: float) -> tuple[Decision, ...]:
        decisions = super().on_logged(checkpoint, now_s)
        self._last = None
        return decisions


def _with_files(files: type[StateFiles]) -> type[CheckpointCoordinator]:
    class WithFiles(CheckpointCoordinator):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._files = files(self._retained)

    return WithFiles


class _UnconfirmedFiles(StateFiles):
    """Deletes shared files without waiting until all subtasks have heard of the decision."""

    def release(self, **named: Any) -> tuple[StateHandle, ...]:
        return super().release(**dict(named, confirmed=named["next_checkpoint"]))


class _CountsOnceACall(StateFiles):
    """Counts a file once that several subtasks of a checkpoint name, and drops it for each."""

    def name(self, snapshots: Iterable[SubtaskSnapshot]) -> None:
        self._named.update(paths_of(snapshots))


class _UnawaitedFiles(StateFiles):
    """Deletes shared files without waiting for the checkpoints under way."""

    def release(self, **named: Any) -> tuple[StateHandle, ...]:
        return super().release(**dict(named, oldest_pending=named["next_checkpoint"]))


class _NamedFiles(StateFiles):
    """Deletes shared files that a newer checkpoint names again."""

    def release(self, **named: Any) -> tuple[StateHandle, ...]:
        counts, self._named = self._named, Counter()
        released = super().release(**named)
        self._named = counts
        return released


class _LastedFiles(StateFiles):
    """Keeps every shared file."""

    def release(self, **named: Any) -> tuple[StateHandle, ...]:
        del named
        return ()


# --- alignment -----------------------------------------------------------------------------------


class _WaitsForSkipped(alignment.BarrierAlignment):
    """Goes on waiting for a barrier after its channel brought a later one."""

    def _give_up_skipped(
        self, channel: int, checkpoint: CheckpointId
    ) -> list[alignment.AlignmentAction]:
        return []


class _RemembersAborted(alignment.BarrierAlignment):
    """Remembers every aborted checkpoint."""

    def on_barrier(
        self, channel: int, barrier: Barrier, now_s: float
    ) -> tuple[alignment.AlignmentAction, ...]:
        before = set(self._aborted)
        actions = super().on_barrier(channel, barrier, now_s)
        self._aborted |= before
        return actions


class _IgnoresAborts(alignment.BarrierAlignment):
    """Goes on aligning a checkpoint that was aborted."""

    def on_abort(self, checkpoint: CheckpointId) -> tuple[alignment.AlignmentAction, ...]:
        return ()


class _ForgetsAborts(alignment.BarrierAlignment):
    """Unblocks at an abort, and begins anew when another barrier of it comes."""

    def on_abort(self, checkpoint: CheckpointId) -> tuple[alignment.AlignmentAction, ...]:
        actions = super().on_abort(checkpoint)
        self._aborted.discard(checkpoint)
        return actions


class _StaysBlocked(alignment.BarrierAlignment):
    """Reads no channel again that a snapshot had blocked."""

    def _unblock(self, channels: set[int]) -> list[alignment.AlignmentAction]:
        return []


# --- commits -------------------------------------------------------------------------------------


class _ForgetsAborted(CommitQueue):
    """Acks list only the checkpoint's own committable, not those of aborted ones before it."""

    def pending_through(self, checkpoint: CheckpointId) -> tuple[Committable, ...]:
        own = super().pending_through(checkpoint)
        return tuple(c for c in own if c.transaction.checkpoint == checkpoint)


class _OmitsDecided(CommitQueue):
    """Acks list nothing that is decided and not committed yet."""

    def pending_through(self, checkpoint: CheckpointId) -> tuple[Committable, ...]:
        own = super().pending_through(checkpoint)
        return tuple(c for c in own if c.transaction.checkpoint > self._decided_last)


class _OutOfOrder(CommitQueue):
    """Commits the newest decided transaction first."""

    def note_decision(self, checkpoint: CheckpointId) -> None:
        super().note_decision(checkpoint)
        self._waiting.sort(key=lambda c: -c.transaction.checkpoint)


class _CommitsUndecided(CommitQueue):
    """Commits everything pending as soon as any checkpoint is decided."""

    def note_decision(self, checkpoint: CheckpointId) -> None:
        super().note_decision(max(checkpoint, self._prepared_last))


class _ConfirmsUncommitted(CommitQueue):
    """Says that all is committed up to what is decided."""

    @property
    def committed_through(self) -> CheckpointId:
        return self._decided[-1] if self._decided else self._committed_through


class _ForgetsDecision(CommitQueue):
    """Takes a late word of an older decision for the newest."""

    def note_decision(self, checkpoint: CheckpointId) -> None:
        super().note_decision(checkpoint)
        self._decided_last = checkpoint


class _SkipsFailed(CommitQueue):
    """Goes on to the next transaction when one is not known to be committed."""

    def _again(self, step: Committable, kind: Any, outcome: Any, now_s: float) -> Any:
        return self._finish(already=False)


# --- recovery ------------------------------------------------------------------------------------


def _commits_all(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], **named: Any
) -> CommitPlan:
    plan = plan_commits(decided, in_doubt, **named)
    return replace(plan, commit=(*plan.commit, *plan.abort), abort=())


def _aborts_none(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], **named: Any
) -> CommitPlan:
    return replace(plan_commits(decided, in_doubt, **named), abort=())


def _commits_none(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], **named: Any
) -> CommitPlan:
    return replace(plan_commits(decided, in_doubt, **named), commit=())


def _commits_listed(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], **named: Any
) -> CommitPlan:
    """Assumes that a transaction which the target does not list is committed."""
    plan = plan_commits(decided, in_doubt, **named)
    listed = {c.transaction for c in in_doubt}
    return replace(plan, commit=tuple(c for c in plan.commit if c.transaction in listed))


def _commits_newest_first(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], **named: Any
) -> CommitPlan:
    plan = plan_commits(decided, in_doubt, **named)
    return replace(plan, commit=plan.commit[::-1])


def _aborts_decided(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], **named: Any
) -> CommitPlan:
    return replace(plan_commits((), in_doubt, **named), commit=())


def _aborts_live(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], **named: Any
) -> CommitPlan:
    later = AttemptId(named["attempt"] + 1)
    return plan_commits(decided, in_doubt, **dict(named, attempt=later))


def _proofs_of_none(retained: Sequence[CompletedCheckpoint], *others: object) -> CheckpointId:
    return CheckpointId(retained[-1].checkpoint + 1)


def _proofs_of_retained(retained: Sequence[CompletedCheckpoint], *others: object) -> CheckpointId:
    return retained[0].checkpoint


def _proofs_listed(retained: Sequence[CompletedCheckpoint], *others: object) -> CheckpointId:
    return retain_ledger_from(retained)


def _proofs_of_checkpoints(
    retained: Sequence[CompletedCheckpoint], committed: Sequence[Committable], *savepoint: object
) -> CheckpointId:
    return retain_ledger_from(retained, committed)


def _remembers_nothing(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], **named: Any
) -> CommitPlan:
    return plan_commits(decided, in_doubt, **dict(named, memory=LogMemory()))


def _keeps_no_floor(world: World) -> None:
    for target in world.targets.values():
        if isinstance(target, Staged):
            target.keeps_floor = False


def _aborts_all(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], **named: Any
) -> CommitPlan:
    plan = plan_commits(decided, in_doubt, **named)
    return replace(plan, commit=(), abort=(*plan.commit, *plan.abort))


MUTANTS: tuple[Variant, ...] = (
    Variant("commits at pre-commit, before the decision", commit_at_pre_commit=True),
    Variant("tells sinks to commit before the decision", coordinator=_NotifiesFirst),
    Variant("acks before the prepare", ack_before_prepare=True),
    Variant("alignment lets a channel through", mode=alignment.AlignmentMode.AT_LEAST_ONCE),
    Variant("abort rolls back what a later decision lists", roll_back_on_abort=True),
    Variant("appends without create-if-absent", overwrites=True),
    Variant("takes what exists for its own record", takes_what_exists=True),
    Variant("takes a lost reply of an append for a refusal", lost_reply_is_refusal=True),
    Variant("takes its own record for another driver's", exists_is_anothers=True),
    Variant("accepts its own orphan record", judged=False),
    Variant("takes acks of older attempts", coordinator=_AnyAttempt, slot_checks_attempt=False),
    Variant("completes with an ack missing", coordinator=_OneMissing),
    Variant("takes late acks for the next checkpoint's", coordinator=_TakesLateAcks),
    Variant("lets an older checkpoint be decided after a newer", coordinator=_SubsumesNothing),
    Variant("tells nobody that a checkpoint failed", coordinator=_AbortsInSilence),
    Variant("waits for a lost ack for ever", coordinator=_NeverTimesOut),
    Variant("waits for who has declined", coordinator=_IgnoresDeclines),
    Variant("takes a refused decision for one that stands", coordinator=_RefusedIsDecided),
    Variant("takes an unknown append for a refused one", taken_for_refused=DecisionUnknown),
    Variant("counts confirmations when the decision is logged", coordinator=_ConfirmsAtDecision),
    Variant("finishes before the last commits", coordinator=_FinishesAtDecision),
    Variant("never ends", coordinator=_StopIsPeriodic),
    Variant("forgets what was asked for when it is triggered", coordinator=_ForgetsRequests),
    Variant("forgets what was asked for with the attempt", coordinator=_SaysNothingIsAsked),
    Variant("goes by the wall clock", coordinator=_FollowsTheWall),
    Variant("deletes shared files of subsumed checkpoints", coordinator=_DeletesShared),
    Variant("deletes files of a retained checkpoint", coordinator=_RetainsOneLess),
    Variant("never deletes files of subsumed checkpoints", coordinator=_KeepsSubsumed),
    Variant("never deletes files of failed checkpoints", coordinator=_KeepsAbortedFiles),
    Variant("never deletes files of late acks", coordinator=_KeepsLateFiles),
    Variant("never deletes shared files", coordinator=_with_files(_LastedFiles)),
    Variant("counts once what two subtasks name", coordinator=_with_files(_CountsOnceACall)),
    Variant("deletes shared files unconfirmed", coordinator=_with_files(_UnconfirmedFiles)),
    Variant("deletes shared files under pending", coordinator=_with_files(_UnawaitedFiles)),
    Variant("deletes shared files that are named again", coordinator=_with_files(_NamedFiles)),
    Variant("re-uses files of undecided checkpoints", reuse_undecided_files=True),
    Variant("confirms what its state has not heard of", confirms_unheard=True),
    Variant("waits for a barrier that was skipped", alignment=_WaitsForSkipped),
    Variant("never forgets aborted checkpoints", alignment=_RemembersAborted),
    Variant("aligns aborted checkpoints", alignment=_IgnoresAborts),
    Variant("aligns aborted checkpoints anew", alignment=_ForgetsAborts),
    Variant("never unblocks a channel", alignment=_StaysBlocked),
    Variant("forgets what aborted checkpoints prepared", queue=_ForgetsAborted),
    Variant("omits what is decided and not committed", queue=_OmitsDecided),
    Variant("commits the newest first", queue=_OutOfOrder),
    Variant("commits what is not decided yet", queue=_CommitsUndecided),
    Variant("confirms what is not committed", queue=_ConfirmsUncommitted),
    Variant("takes a late word for the newest decision", queue=_ForgetsDecision),
    Variant("skips a transaction that is not committed", queue=_SkipsFailed),
    Variant("takes an unknown outcome for success", unknown_is_committed=True),
    Variant("takes a lost transaction for committed", lost_is_committed=True),
    Variant("recovery commits everything in doubt", plan=_commits_all),
    Variant("recovery aborts nothing", plan=_aborts_none),
    Variant("recovery commits nothing", plan=_commits_none),
    Variant("recovery asks only for what is listed", plan=_commits_listed),
    Variant("recovery commits the newest first", plan=_commits_newest_first),
    Variant("recovery aborts decided transactions", plan=_aborts_decided),
    Variant("recovery takes a failed listing for an empty one", failed_listing_is_empty=True),
    Variant("recovery takes a failed abort for done", failed_abort_is_done=True),
    Variant("sweep aborts the live attempt's transactions", plan=_aborts_live),
    Variant("sweeps nothing after the first checkpoint", sweep=False),
    Variant("prunes every proof", retain_ledger_from=_proofs_of_none),
    Variant("prunes proofs that a checkpoint lists", retain_ledger_from=_proofs_of_retained),
    Variant("prunes proofs of what was committed last", retain_ledger_from=_proofs_listed),
    Variant("prunes proofs that a savepoint lists", retain_ledger_from=_proofs_of_checkpoints),
    Variant("prunes proofs without a floor", prepare=_keeps_no_floor),
    Variant("recovery knows the last checkpoint alone", plan=_remembers_nothing),
    Variant("reads a split before a decision holds it", reads_undecided_splits=True),
    Variant("lists the first transaction of a pre-commit alone", lists_first_only=True),
    Variant("names all transactions of a pre-commit alike", names_tables_alike=True),
    Variant("starts without a sink that nobody settles", checks_sinks=False),
    Variant("forgets retired sinks without asking them", asks_retired=False),
    Variant("forgets retired sinks before the sweep", settles_early=True),
    Variant("rolls back what retired sinks hold", retired_plan=_aborts_all),
    *GLOBAL_MUTANTS,
    *LOG_MUTANTS,
    *OVERTAKING_MUTANTS,
    *END_MUTANTS,
    *OLDER_COPY_MUTANTS,
    *LOOP_MUTANTS,
    *SAVEPOINT_MUTANTS,
    *REWIND_MUTANTS,
    Variant("names transactions without the attempt", attempt_in_name=False),
    Variant("records the position one too early", position_shift=-1),
    Variant("records the position one too late", position_shift=1),
    Variant("emits the barrier after the next record", snapshot_late=True),
)
