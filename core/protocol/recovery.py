"""The transactions of a decision, their commit order, and the proofs that a restore may need."""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId


def commit_order(committable: Committable) -> tuple[int, int, int, int]:
    """Return the sort key that puts the transactions of a checkpoint before those of the next.

    The attempt that wrote a transaction comes after the checkpoint in the key.
    """
    transaction: TransactionId = committable.transaction
    return transaction.checkpoint, transaction.attempt, transaction.subtask, transaction.sequence


def begin_anew(
    last: CompletedCheckpoint, number: CheckpointId, attempt: AttemptId, now_ms: int
) -> CompletedCheckpoint:
    """Return the decision `number` of `attempt`, after which a job has no state and no positions.

    All transactions that the previous decision `last` lists must have been committed. A start from
    the new decision begins every source at its configured start. The number of key groups never
    changes.
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
    """Return all transactions that `completed` decides to commit, of all sinks, in commit order."""
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
    """Return the oldest checkpoint whose proofs of commits a restore of `retained` may need.

    A retained checkpoint may list transactions that earlier *aborted* checkpoints prepared, so the
    result can be lower than the oldest retained checkpoint. `committed` are the last commits of a
    sink: a restore asks for their proofs, too. A start in other storage from `savepoint`, the last
    one taken, asks for its proofs as well. But it does not once the sink has committed a
    transaction after it, because then the target shows that all earlier ones are committed.
    """
    if savepoint is not None and all(
        c.transaction.checkpoint <= savepoint.checkpoint for c in committed
    ):
        retained = (*retained, savepoint)
    kept = [c for completed in retained for c in committables_of(completed)]
    named = [c.transaction.checkpoint for c in (*kept, *committed)]
    own = [completed.checkpoint for completed in retained]
    return CheckpointId(min([*named, *own], default=0))
