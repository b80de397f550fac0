"""What a new attempt does with what older ones left in a sink's target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.snapshots import CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What to do with the transactions of one sink, each in the order given."""

    commit: tuple[Committable, ...]
    """Decided: commit, also when the target does not list them (then it proves why)."""
    abort: tuple[Committable, ...]
    """Of older attempts and not decided: their records will be, or were, sent again."""
    foreign: tuple[Committable, ...]
    """Of other sinks: never touched."""
    kept: tuple[Committable, ...] = ()
    """Of this attempt, which is alive, or of a newer one, which has fenced us: never touched."""


def plan_recovery(
    decided: Sequence[Committable],
    in_doubt: Sequence[Committable],
    *,
    sink_id: str,
    attempt: AttemptId,
) -> RecoveryPlan:
    """Return what attempt `attempt` does with the transactions of sink `sink_id`.

    `decided` are the committables that the restored checkpoint lists (all sinks' may be passed);
    `in_doubt` is what the target holds prepared. Called by the driver between claiming an attempt
    and starting its slots, and again once its first checkpoint is decided: a slot of an older
    attempt may have prepared in between. Idempotent.

    Restoring an *older* retained checkpoint than the last takes decisions back. The stream goes on
    from that older barrier, so what later checkpoints had decided is sent again: transactions of
    theirs that are still in doubt are aborted here and come once; those already committed come
    twice. Nothing in the target tells these apart, so only an operator who knows it may choose so.
    """
    own = {committable.transaction: committable for committable in decided}
    commit = [c for c in own.values() if c.transaction.sink_id == sink_id]
    abort: list[Committable] = []
    foreign: list[Committable] = []
    kept: list[Committable] = []
    for committable in in_doubt:
        transaction = committable.transaction
        if transaction.sink_id != sink_id:
            foreign.append(committable)
        elif transaction in own:
            continue
        elif transaction.attempt < attempt:
            abort.append(committable)
        else:
            kept.append(committable)
    return RecoveryPlan(
        commit=tuple(sorted(commit, key=commit_order)),
        abort=tuple(sorted(abort, key=commit_order)),
        foreign=tuple(foreign),
        kept=tuple(kept),
    )


def commit_order(committable: Committable) -> tuple[int, int, int, int]:
    """Sort key: a checkpoint's transactions before the next one's, whatever attempt wrote them."""
    transaction: TransactionId = committable.transaction
    return transaction.checkpoint, transaction.attempt, transaction.subtask, transaction.sequence


def committables_of(completed: CompletedCheckpoint) -> tuple[Committable, ...]:
    """Return everything that `completed` decides to commit, over all sinks, in commit order."""
    found = [
        committable
        for snapshot in completed.snapshots
        for operator in snapshot.operators
        for committable in operator.committables
    ]
    return tuple(sorted(found, key=commit_order))


def proofs_needed_from(retained: Sequence[CompletedCheckpoint]) -> CheckpointId:
    """Return the oldest checkpoint whose proofs of commits a restore of `retained` may ask for.

    A retained checkpoint may list what *aborted* checkpoints before it had prepared, so this can be
    lower than the oldest retained checkpoint.
    """
    listed = [c.transaction.checkpoint for kept in retained for c in committables_of(kept)]
    own = [kept.checkpoint for kept in retained]
    return CheckpointId(min([*listed, *own], default=0))
