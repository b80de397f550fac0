"""What a new attempt does with what older ones left in a sink's target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log_memory import NOTHING_REMEMBERED, Coverage, LogMemory
from onceflow.core.protocol.snapshots import CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What to do with the transactions of one sink, each in the order given."""

    commit: tuple[Committable, ...]
    """Decided: commit, also when the target does not list them (then it proves why).

    Also those that were committed last, whose proof says that the target has not gone back.
    """
    abort: tuple[Committable, ...]
    """Of older attempts and not decided: their records will be, or were, sent again."""
    foreign: tuple[Committable, ...]
    """Of other sinks: never touched."""
    kept: tuple[Committable, ...] = ()
    """Of this attempt, which is alive, or of a newer one, which has fenced us: never touched."""
    returned: tuple[Committable, ...] = ()
    """Those of `commit` that were committed once and are in doubt again.

    The target has gone back to an older copy.
    """
    forgotten: tuple[Committable, ...] = ()
    """Of attempts that the log no longer remembers: nobody may touch them but a person."""


def plan_recovery(
    decided: Sequence[Committable],
    in_doubt: Sequence[Committable],
    *,
    sink_id: str,
    attempt: AttemptId,
    memory: LogMemory = NOTHING_REMEMBERED,
) -> RecoveryPlan:
    """Return what attempt `attempt` does with the transactions of sink `sink_id`.

    `decided` are the committables that the restored checkpoint lists (all sinks' may be passed);
    `in_doubt` is what the target holds prepared; `memory` is what the log remembers besides. Called
    by the driver between claiming an attempt and starting its slots, and again once its first
    checkpoint is decided: a slot of an older attempt may have prepared in between. Idempotent.

    What a decision of its own attempt covers was committed once: it is committed again, and never
    rolled back, for its records are not sent again.

    Restoring an *older* retained checkpoint than the last takes decisions back. The stream goes on
    from that older barrier, so what later checkpoints had decided is sent again: transactions of
    theirs that are still in doubt are aborted here and come once; those already committed come
    twice. Nothing in the target tells these apart, so only an operator who knows it may choose so.
    """
    own = {committable.transaction: committable for committable in decided}
    done = {committable.transaction: committable for committable in memory.of_sink(sink_id)}
    abort: list[Committable] = []
    foreign: list[Committable] = []
    kept: list[Committable] = []
    returned: list[Committable] = []
    forgotten: list[Committable] = []
    for committable in in_doubt:
        transaction = committable.transaction
        if transaction.sink_id != sink_id:
            foreign.append(committable)
        elif transaction in own:
            continue
        elif transaction.attempt >= attempt:
            kept.append(committable)
        else:
            match memory.coverage(transaction):
                case Coverage.DECIDED:
                    returned.append(done.get(transaction, committable))
                case Coverage.UNDECIDED:
                    abort.append(committable)
                case Coverage.FORGOTTEN:
                    forgotten.append(committable)
    listed = {t: c for t, c in own.items() if t.sink_id == sink_id}
    commit = {c.transaction: c for c in returned} | done | listed
    return RecoveryPlan(
        commit=tuple(sorted(commit.values(), key=commit_order)),
        abort=tuple(sorted(abort, key=commit_order)),
        foreign=tuple(foreign),
        kept=tuple(kept),
        returned=tuple(sorted(returned, key=commit_order)),
        forgotten=tuple(sorted(forgotten, key=commit_order)),
    )


def commit_order(committable: Committable) -> tuple[int, int, int, int]:
    """Sort key: a checkpoint's transactions before the next one's, whatever attempt wrote them."""
    transaction: TransactionId = committable.transaction
    return transaction.checkpoint, transaction.attempt, transaction.subtask, transaction.sequence


def begun_anew(
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
    found = [
        committable
        for snapshot in completed.snapshots
        for operator in snapshot.operators
        for committable in operator.committables
    ]
    return tuple(sorted(found, key=commit_order))


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
