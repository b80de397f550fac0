"""What a sink's target records of its sink id, held against the decision log.

A target keeps a proof of each commit, and who claimed the sink id last. What it holds and the log
does not know was committed by the same job from other storage: the storage is an older copy, or the
job has moved on. Whatever the log would then send was committed already. So nothing begins from a
log that is behind a target:

    every commit that a target proves is decided by the log, or was accepted at a rewind

Proofs are pruned, the lowest checkpoints first; the last one of a sink id always stands. So the
highest of each attempt tell enough of what a target has. Of what it lacks they tell less: a copy
may have been made while some transactions of a checkpoint were committed and others were not. A
checkpoint's proofs are pruned together, so one that is there tells that no other was pruned:

    a target that was put back lacks a commit above all its proofs, or beside one of the same
    checkpoint
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onceflow.core.errors import StorageBehind
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log.memory import Decided, LogMemory
from onceflow.core.protocol.log.rules import NO_ATTEMPT, LogView


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """What the target of one sink id says of it."""

    sink_id: str
    attempt: AttemptId = NO_ATTEMPT
    """The newest attempt that has claimed the sink id; 0: none has."""
    committed: tuple[Decided, ...] = ()
    """By attempt, rising: the highest checkpoint of whose transactions there is a proof."""
    through: CheckpointId = GENESIS
    """Where whole checkpoints are committed: the last decision that is; 0 elsewhere."""
    claims: tuple[Decided, ...] = ()
    """By attempt, rising: the last whole checkpoint that was committed when it claimed."""
    proves_each: bool = True
    """Whether a commit is not proven only if its proof was pruned, or the target was put back.

    False: the last commits alone are proven, and `commit` finds out about each of those before.
    """
    proofs: frozenset[TransactionId] = frozenset()
    """Where one of a checkpoint is in it, all are that the target has; empty: it tells none."""

    @property
    def checkpoint_last(self) -> CheckpointId:
        """The highest checkpoint of which there is a proof; 0: there is none."""
        return CheckpointId(max((one.checkpoint for one in self.committed), default=self.through))


def to_record(
    sink_id: str,
    attempt: int,
    transactions: Iterable[TransactionId | Decided],
    *,
    proves_each: bool = True,
    proofs: Iterable[TransactionId] = (),
) -> TargetRecord:
    """Return the record of a target that has proofs of `transactions`, of that sink id.

    `proofs` are of a target that deletes the proofs of a checkpoint together.
    """
    highest: dict[int, int] = {}
    for one in transactions:
        highest[one.attempt] = max(one.checkpoint, highest.get(one.attempt, 0))
    committed = tuple(Decided(*one) for one in sorted(highest.items()))
    return TargetRecord(
        sink_id, AttemptId(attempt), committed, proves_each=proves_each, proofs=frozenset(proofs)
    )


def through_before(record: TargetRecord, attempt: AttemptId) -> CheckpointId:
    """Return the last whole checkpoint that was committed when an attempt after `attempt` claimed.

    That of the record where no such attempt has claimed: all of it is of `attempt` or before. An
    attempt commits also what an earlier one has decided, so the log itself is not judged by this.
    """
    later = (one.checkpoint for one in record.claims if one.attempt > attempt)
    return CheckpointId(next(later, record.through))


def unknown_commits(record: TargetRecord, memory: LogMemory) -> tuple[Decided, ...]:
    """Return what the target has committed and `memory` does not know; empty when it knows all."""
    return tuple(one for one in record.committed if not memory.knows(one, record.sink_id))


def is_set_back(record: TargetRecord, committed: Sequence[Committable]) -> bool:
    """Return whether the target lacks some of `committed`, which the log knows to be committed.

    Then it has gone back to an older copy of itself, and has nothing that was committed later. A
    target need not prove all that it has: Kafka proves the last commit of each subtask alone.
    """
    last = max(((one.attempt, one.checkpoint) for one in record.committed), default=(0, 0))
    own = [c.transaction for c in committed if c.transaction.sink_id == record.sink_id]
    proven = {(one.attempt, one.checkpoint) for one in record.proofs}
    return any(
        (t.attempt, t.checkpoint) > last
        or ((t.attempt, t.checkpoint) in proven and t not in record.proofs)
        for t in own
        if t.checkpoint > record.through
    )


def newest_attempt(records: Iterable[TargetRecord]) -> AttemptId:
    """Return the newest attempt that has claimed any of the sink ids; 0: none has."""
    return max((record.attempt for record in records), default=NO_ATTEMPT)


def require_not_behind(view: LogView, records: Iterable[TargetRecord], storage: str) -> None:
    """Raise StorageBehind unless the log knows all that the targets have committed.

    `storage` says where the log is. For a job that goes on from its log, or begins without one.
    """
    for record in records:
        committed = last_unknown_commit(view, record)
        if committed:
            raise StorageBehind(_describe_lag(view, record, committed, storage))


def last_unknown_commit(view: LogView, record: TargetRecord) -> str:
    """Return what the target has committed last and the log does not know; empty: it knows all."""
    unknown = unknown_commits(record, view.memory) if view.decided else record.committed
    if unknown:
        return f"checkpoint {unknown[-1].checkpoint} of attempt {unknown[-1].attempt}"
    last = view.completed[-1].checkpoint if view.decided else GENESIS
    return f"checkpoint {record.through}" if record.through > last else ""


def _describe_lag(view: LogView, record: TargetRecord, committed: str, storage: str) -> str:
    if view.decided:
        last = view.completed[-1]
        log_end = f"ends at checkpoint {last.checkpoint} of attempt {last.attempt}"
    else:
        log_end = "has decided nothing"
    return (
        f"sink id {record.sink_id!r}: its target has committed {committed} of this job, and the"
        f" decision log in {storage} {log_end}: this"
        " storage is older than what the target has committed. It is a copy, or the job has gone on"
        " in other storage since; or somebody has committed by hand what was not decided. A start"
        " from here would write those rows again, so nothing was written. Start the job in the"
        " storage in which it ran last. To go on in this one, stop it there by `onceflow stop"
        " --savepoint`, and start it here from that savepoint. If that storage is gone for good, or"
        " there never was another one, see 'Storage that is behind its target' in"
        " docs/operations.md"
    )
