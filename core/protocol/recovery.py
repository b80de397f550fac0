"""What a decision lists, in which order it is committed, and which proofs a restore may ask for."""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId


def commit_order(committable: Committable) -> tuple[int, int, int, int]:
    """Sort key: a checkpoint's transactions before the next one's, whatever attempt wrote them."""
    transaction: TransactionId = committable.transaction
    return transaction.checkpoint, transaction.attempt, transaction.subtask, transaction.sequence


def begin_anew(
    last: CompletedCheckpoint, number: CheckpointId, attempt: AttemptId, now_ms: int
) -> CompletedCheckpoint:
    """Return the decision `number` of `attempt`, after which a job has no state and no positions.

    All that `last`, the decision before, lists must have been committed. A start from it begins
    every source where it says, with the number of key groups that the job has always had.
    """
    return CompletedCheckpoint(
        checkpoint=number,
        attempt=attempt,
        parallelism=last.parallelism,
        max_parallelism=last.max_parallelism,
        snapshots=(),
        triggered_at_ms=now_ms,
        completed_at_ms=now_ms,
        delivered_through=last.checkpoint,
    )


def committables_of(completed: CompletedCheckpoint) -> tuple[Committable, ...]:
    """Return everything that `completed` decides to commit, over all sinks, in commit order."""
    committables = [
        committable
        for snapshot in completed.snapshots
        for operator in snapshot.operators
        for committable in operator.committables
    ]
    return tuple(sorted(committables, key=commit_order))


def retain_ledger_from(
    retained: Sequence[CompletedCheckpoint],
    committed: Sequence[Committable] = (),
    savepoint: CompletedCheckpoint | None = None,
) -> CheckpointId:
    """Return the oldest checkpoint whose proofs of commits a restore of `retained` may ask for.

    A retained checkpoint may list what *aborted* checkpoints before it had prepared, so this can be
    lower than the oldest retained checkpoint. `committed` are those that a sink committed last: a
    restore asks for their proofs, too. So does a start from `savepoint`, the last one that was
    taken, in other storage; but not once the sink has committed something after it, for then the
    target tells that all before is committed.
    """
    if savepoint is not None and all(
        c.transaction.checkpoint <= savepoint.checkpoint for c in committed
    ):
        retained = (*retained, savepoint)
    kept = [c for completed in retained for c in committables_of(completed)]
    named = [c.transaction.checkpoint for c in (*kept, *committed)]
    own = [completed.checkpoint for completed in retained]
    return CheckpointId(min([*named, *own], default=0))
