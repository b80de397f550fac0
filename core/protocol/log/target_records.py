"""The comparison of a target's records and transactions in doubt with the decision log.

A target keeps a proof of each commit, and the last attempt that claimed the sink id. If a target
has a commit that the log does not know, the same job committed it from other storage: this storage
is an older copy, or the job has moved on. Then the target has already committed the rows that a
start from this log would send. So no job starts from a log that is behind a target:

    every commit that a target proves is decided by the log, or was accepted at a rewind

Proofs are pruned, lowest checkpoints first; the last one of a sink id always stays. So the highest
proof of each attempt is enough to know what a target has. It is not enough to know what a target
lacks: a copy of the target may have been made while only some transactions of a checkpoint were
committed. The proofs of one checkpoint are pruned together, so if one of them is there, none of the
others was pruned:

    a target that was put back lacks a commit above all its proofs, or lacks a commit of a
    checkpoint of which it has another proof

The log says of a transaction in doubt:

decided     the last checkpoint lists it                       the next start commits it
undecided   its attempt is over and did not decide it          the next start rolls it back
pending     its attempt may be alive and may still decide      only that attempt may settle it
settled     the log knows its commit, the target does not      the next start commits it again
foreign     the log is another job's, or an older copy         nothing is known
unknown     there is no log, or the log has forgotten it       nothing is known
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from onceflow.core.errors import StorageBehind
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, committables_of
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, TransactionId, sink_id_of
from onceflow.core.protocol.log.memory import Decided, LogMemory
from onceflow.core.protocol.log.rules import NO_ATTEMPT, LogView


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """The facts that the target of one sink id reports about it."""

    sink_id: str
    attempt: AttemptId = NO_ATTEMPT
    """The newest attempt that has claimed the sink id; 0 if none has."""
    committed: tuple[Decided, ...] = ()
    """The highest checkpoint with a proof, for each attempt, in rising order of attempts."""
    through: CheckpointId = GENESIS
    """The last committed decision, if the sink commits whole checkpoints; otherwise 0."""
    claims: tuple[Decided, ...] = ()
    """For each attempt that claimed, in rising order, the last whole checkpoint committed by
    then."""
    proves_each: bool = True
    """True if a missing proof means that the proof was pruned or that the target was put back.

    False if only the last commits are proven; `commit` checks each of those first.
    """
    proofs: frozenset[TransactionId] = frozenset()
    """The proofs of transactions. If it contains one transaction of a checkpoint, it contains all
    of that checkpoint that the target has. Empty if the target does not list them."""

    @property
    def checkpoint_last(self) -> CheckpointId:
        """The highest checkpoint with a proof; 0 if there is none."""
        return CheckpointId(max((mark.checkpoint for mark in self.committed), default=self.through))


def to_record(
    sink_id: str,
    attempt: int,
    transactions: Iterable[TransactionId | Decided],
    *,
    proves_each: bool = True,
    proofs: Iterable[TransactionId] = (),
) -> TargetRecord:
    """Return the record of a target that has proofs of `transactions`, all of that sink id.

    `proofs` is for a target that deletes the proofs of a checkpoint together.
    """
    highest: dict[int, int] = {}
    for transaction in transactions:
        highest[transaction.attempt] = max(
            transaction.checkpoint, highest.get(transaction.attempt, 0)
        )
    committed = tuple(Decided(*pair) for pair in sorted(highest.items()))
    return TargetRecord(
        sink_id, AttemptId(attempt), committed, proves_each=proves_each, proofs=frozenset(proofs)
    )


def through_before(record: TargetRecord, attempt: AttemptId) -> CheckpointId:
    """Return the last whole checkpoint committed when an attempt after `attempt` first claimed.

    If no such attempt has claimed, return that of the record: it was committed by `attempt` or an
    earlier one. An attempt also commits decisions of earlier attempts, so this value must not be
    used to judge the log itself.
    """
    later = (claim.checkpoint for claim in record.claims if claim.attempt > attempt)
    return CheckpointId(next(later, record.through))


def unknown_commits(record: TargetRecord, memory: LogMemory) -> tuple[Decided, ...]:
    """Return the target's commits that `memory` does not know; empty if it knows all."""
    return tuple(mark for mark in record.committed if not memory.knows(mark, record.sink_id))


def is_set_back(record: TargetRecord, committed: Sequence[Committable]) -> bool:
    """Return True if the target lacks some of `committed`, which the log knows to be committed.

    Then the target was restored from an older copy and lacks all later commits, too. A target need
    not prove all its commits: Kafka proves only the last commit of each subtask.
    """
    last = max(((mark.attempt, mark.checkpoint) for mark in record.committed), default=(0, 0))
    own = [c.transaction for c in committed if c.transaction.sink_id == record.sink_id]
    proven = {(proof.attempt, proof.checkpoint) for proof in record.proofs}
    return any(
        (t.attempt, t.checkpoint) > last
        or ((t.attempt, t.checkpoint) in proven and t not in record.proofs)
        for t in own
        if t.checkpoint > record.through
    )


def newest_attempt(records: Iterable[TargetRecord]) -> AttemptId:
    """Return the newest attempt that has claimed any of the sink ids; 0 if none has."""
    return max((record.attempt for record in records), default=NO_ATTEMPT)


def require_not_behind(view: LogView, records: Iterable[TargetRecord], storage: str) -> None:
    """Raise StorageBehind unless the log knows all commits of the targets.

    `storage` is the log's location, for the error. For a job that goes on from its log, or starts
    without one.
    """
    for record in records:
        committed = last_unknown_commit(view, record)
        if committed:
            raise StorageBehind(_describe_lag(view, record, committed, storage))


def last_unknown_commit(view: LogView, record: TargetRecord) -> str:
    """Return the target's last commit that the log does not know; empty if it knows all."""
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
        f"sink id {record.sink_id!r}: the target has committed {committed} of this job, but the"
        f" decision log in {storage} {log_end}. Either this storage is an older copy, or the job"
        " has run in other storage since, or a person has committed an undecided transaction. A"
        " start from here would write those rows a second time, so nothing was written. Start"
        " the job in the storage in which it ran last. To continue in this storage, stop the job"
        " in the other one with `onceflow stop --savepoint`, and start it here from that"
        " savepoint. If the other storage is gone for good, or never existed, see 'Storage that"
        " is behind its target' in docs/operations.md"
    )


class LoggedDecision(Enum):
    """The verdict of the log; see the module."""

    DECIDED = "decided"
    UNDECIDED = "undecided"
    PENDING = "pending"
    SETTLED = "settled"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


class RecoveryAction(Enum):
    """The action of the job's next start for a transaction in doubt."""

    COMMIT = "commit"
    ABORT = "abort"
    KEEP = "keep"
    """The start leaves the transaction alone."""
    STOP = "stop"
    """The start stops and names the transaction: a person must decide."""
    UNKNOWN = "unknown"


class Resolution(Enum):
    """The action of a person for a transaction in doubt."""

    COMMIT = "commit"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class InDoubtStatus:
    """The decision, its reason in a sentence, and the action of the next start."""

    decision: LoggedDecision
    recovery_action: RecoveryAction
    reason: str


@dataclass(frozen=True, slots=True)
class LogFacts:
    """The content of a job's decision log, as of one reading, and the signs that the job runs."""

    job: str
    log_id: str
    view: LogView
    liveness: tuple[str, ...] = ()
    """The reasons why the newest attempt may still be running; empty if there are none."""

    @property
    def last(self) -> CompletedCheckpoint | None:
        """The checkpoint from which the next start goes on."""
        return self.view.completed[-1] if self.view.decided else None

    @property
    def decided(self) -> dict[TransactionId, Committable]:
        """The transactions that the next start commits, if they are not committed yet."""
        listed = committables_of(self.last) if self.last else ()
        return {c.transaction: c for c in (*self.view.memory.committed, *listed)}

    @property
    def sink_ids(self) -> frozenset[str]:
        """The sink ids that the log knows: from its transactions and from its operators' names."""
        listed = {
            c.transaction.sink_id for kept in self.view.completed for c in committables_of(kept)
        }
        last = self.last
        operators = {o.uid for s in last.snapshots for o in s.operators} if last else set[str]()
        named = {sink_id_of(self.job, uid) for uid in operators}
        return frozenset(listed | named) | self.view.sinks
