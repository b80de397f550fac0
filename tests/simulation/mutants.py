"""Deliberately broken variants of the protocol. Each must be caught by the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.variant import Variant

from onceflow.core.protocol.alignment import AlignmentMode
from onceflow.core.protocol.commits import CommitQueue
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.coordinator import CheckpointCoordinator
from onceflow.core.protocol.decisions import Decision, DiscardState, NotifyComplete
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.recovery import RecoveryPlan, plan_recovery
from onceflow.core.protocol.snapshots import SubtaskSnapshot
from onceflow.core.protocol.state_files import handles_of


class _AnyAttempt(CheckpointCoordinator):
    """Takes acks of older attempts for its own."""

    def acked(
        self, attempt: AttemptId, checkpoint: CheckpointId, snapshot: SubtaskSnapshot, now_s: float
    ) -> tuple[Decision, ...]:
        return super().acked(self._attempt, checkpoint, snapshot, now_s)


class _OneMissing(CheckpointCoordinator):
    """Completes a checkpoint with one ack missing."""

    def acked(
        self, attempt: AttemptId, checkpoint: CheckpointId, snapshot: SubtaskSnapshot, now_s: float
    ) -> tuple[Decision, ...]:
        pending = self._pending.get(checkpoint)
        if pending is not None and len(pending.snapshots) == len(self._subtasks) - 2:
            pending.complete = True
        return super().acked(attempt, checkpoint, snapshot, now_s)


class _DeletesShared(CheckpointCoordinator):
    """Deletes every file of a subsumed checkpoint, shared ones too."""

    def logged(self, checkpoint: CheckpointId, now_s: float) -> tuple[Decision, ...]:
        before = [s for kept in self._retained for s in kept.snapshots]
        decisions = super().logged(checkpoint, now_s)
        return (*decisions, DiscardState(handles_of(before)))


class _NotifiesFirst(CheckpointCoordinator):
    """Tells the sinks to commit before the decision is in the log."""

    def acked(
        self, attempt: AttemptId, checkpoint: CheckpointId, snapshot: SubtaskSnapshot, now_s: float
    ) -> tuple[Decision, ...]:
        decisions = super().acked(attempt, checkpoint, snapshot, now_s)
        early = [NotifyComplete(checkpoint, checkpoint)] if decisions else []
        return (*early, *decisions)


class _ForgetsAborted(CommitQueue):
    """Acks list only the checkpoint's own committable, not those of aborted ones before it."""

    def pending_through(self, checkpoint: CheckpointId) -> tuple[Committable, ...]:
        own = super().pending_through(checkpoint)
        return tuple(c for c in own if c.transaction.checkpoint == checkpoint)


class _OutOfOrder(CommitQueue):
    """Commits the newest decided transaction first."""

    def completed(self, checkpoint: CheckpointId) -> None:
        super().completed(checkpoint)
        self._waiting.sort(key=lambda c: -c.transaction.checkpoint)


class _CommitsUndecided(CommitQueue):
    """Commits everything pending as soon as any checkpoint is decided."""

    def completed(self, checkpoint: CheckpointId) -> None:
        super().completed(max(checkpoint, self._prepared_last))


def _commits_all(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], *, sink_id: str, attempt: int
) -> RecoveryPlan:
    plan = plan_recovery(decided, in_doubt, sink_id=sink_id, attempt=AttemptId(attempt))
    return replace(plan, commit=(*plan.commit, *plan.abort), abort=())


def _aborts_none(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], *, sink_id: str, attempt: int
) -> RecoveryPlan:
    plan = plan_recovery(decided, in_doubt, sink_id=sink_id, attempt=AttemptId(attempt))
    return replace(plan, abort=())


def _commits_none(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], *, sink_id: str, attempt: int
) -> RecoveryPlan:
    plan = plan_recovery(decided, in_doubt, sink_id=sink_id, attempt=AttemptId(attempt))
    return replace(plan, commit=())


def _aborts_decided(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], *, sink_id: str, attempt: int
) -> RecoveryPlan:
    plan = plan_recovery((), in_doubt, sink_id=sink_id, attempt=AttemptId(attempt))
    return replace(plan, commit=())


def _aborts_live(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], *, sink_id: str, attempt: int
) -> RecoveryPlan:
    return plan_recovery(decided, in_doubt, sink_id=sink_id, attempt=AttemptId(attempt + 1))


MUTANTS: tuple[Variant, ...] = (
    Variant("commits at pre-commit, before the decision", commit_at_pre_commit=True),
    Variant("tells sinks to commit before the decision", coordinator=_NotifiesFirst),
    Variant("acks before the prepare", ack_before_prepare=True),
    Variant("alignment lets a channel through", mode=AlignmentMode.AT_LEAST_ONCE),
    Variant("abort rolls back what a later decision lists", roll_back_on_abort=True),
    Variant("appends without create-if-absent", fenced=False),
    Variant("accepts its own ghost record", judged=False),
    Variant("takes acks of older attempts", coordinator=_AnyAttempt, slot_checks_attempt=False),
    Variant("completes with an ack missing", coordinator=_OneMissing),
    Variant("deletes shared files of subsumed checkpoints", coordinator=_DeletesShared),
    Variant("re-uses files of undecided checkpoints", reuse_undecided_files=True),
    Variant("forgets what aborted checkpoints prepared", queue=_ForgetsAborted),
    Variant("commits the newest first", queue=_OutOfOrder),
    Variant("commits what is not decided yet", queue=_CommitsUndecided),
    Variant("takes an unknown outcome for success", unknown_is_committed=True),
    Variant("takes a lost transaction for committed", lost_is_committed=True),
    Variant("recovery commits everything in doubt", plan=_commits_all),
    Variant("recovery aborts nothing", plan=_aborts_none),
    Variant("recovery commits nothing", plan=_commits_none),
    Variant("recovery aborts decided transactions", plan=_aborts_decided),
    Variant("sweep aborts the live attempt's transactions", plan=_aborts_live),
    Variant("names transactions without the attempt", attempt_in_name=False),
    Variant("records the position one too early", position_shift=-1),
    Variant("records the position one too late", position_shift=1),
    Variant("emits the barrier after the next record", snapshot_late=True),
)
