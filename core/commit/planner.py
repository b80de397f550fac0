"""The plans for the transactions of sinks and of Spark's batches: commit, abort, keep or refuse.

The functions take facts and return a plan. A transaction is, in this order:

    FOREIGN     of another sink                                             keep
    LISTED      listed by a decision, and perhaps not committed yet         commit
    LIVE        of an attempt that may still decide it                      keep
    COMMITTED   known to be committed, and in doubt again                   commit
    UNDECIDED   of an attempt that is over and did not decide it            abort
    FORGOTTEN   of an attempt that the decisions do not remember            refuse

Every caller plans here: a job's recovery and its sweep, commits of whole checkpoints, the batches
that Spark writes, and `onceflow txn`, which shows what the next start would do.

An attempt claims, and then makes the targets agree with the decisions. Once it has decided, it
rolls back the transactions of tries that did not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from onceflow.core.protocol.batches import BatchClaim, BatchDecision
from onceflow.core.protocol.checkpoints.snapshots import commit_order
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.protocol.log.memory import NOTHING_REMEMBERED, Coverage


class DecisionMemory(Protocol):
    """The memory of a decision log, or of another keeper of decisions, besides the listed ones."""

    def coverage(self, transaction: TransactionId) -> Coverage:
        """Return the decision of the ended attempt of `transaction`, as far as it is remembered."""
        ...

    def of_sink(self, sink_id: str) -> Sequence[Committable]:
        """Return the transactions committed under `sink_id` that the target must prove again."""
        ...

    def as_decided(self, committable: Committable) -> Committable:
        """Return `committable` as its decision has it, or itself if that is not remembered."""
        ...


class Standing(Enum):
    """The verdict of the decisions on one transaction; see the module."""

    FOREIGN = "foreign"
    LISTED = "listed"
    LIVE = "live"
    COMMITTED = "committed"
    UNDECIDED = "undecided"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """The actions for the transactions of a sink, in the order given.

    Every transaction in doubt is in one of the four, and none is in both `commit` and `abort`.
    """

    commit: tuple[Committable, ...] = ()
    """The decided transactions. Commit them even if the target does not list them: its answer to
    the commit then proves why.

    They include the last committed ones, whose proof shows that the target has not gone back.
    """
    abort: tuple[Committable, ...] = ()
    """The undecided transactions of ended attempts: their records will be, or were, sent again."""
    keep: tuple[Committable, ...] = ()
    """The transactions of other sinks, and of attempts that may still decide them: never
    touched."""
    refuse: tuple[Committable, ...] = ()
    """The transactions of attempts that are no longer remembered. Only a person may touch them."""
    returned: tuple[Committable, ...] = ()
    """Those of `commit` that were committed once and are in doubt again.

    The target has gone back to an older copy.
    """


def plan_commits(
    listed: Iterable[Committable],
    in_doubt: Sequence[Committable],
    *,
    sink_ids: Collection[str],
    attempt: AttemptId,
    memory: DecisionMemory = NOTHING_REMEMBERED,
) -> CommitPlan:
    """Return the plan for the transactions of `sink_ids`.

    All attempts before `attempt` must be over: the caller must ensure that they decide nothing
    more. `listed` are the transactions that decisions name and that are not known to be committed;
    those of all sinks may be passed. `in_doubt` are the transactions that the target holds.
    `memory` are the other facts that the decisions remember. Idempotent.

    A decided transaction was committed once, or will be. It is committed again and never rolled
    back, because its records are not sent again.

    Going back to an *older* decision than the last revokes decisions. The stream continues from
    there, so rows that later decisions contained are sent again. If the transactions of these
    decisions are still in doubt, they are aborted here, and their rows are written once. If they
    are already committed, their rows will be written a second time. The target cannot distinguish
    these cases, so only an operator who knows this may choose it.
    """
    own = {c.transaction: c for c in listed if c.transaction.sink_id in sink_ids}
    by_standing: dict[Standing, list[Committable]] = {standing: [] for standing in Standing}
    for committable in in_doubt:
        transaction = committable.transaction
        standing = judge_transaction(
            transaction, own, sink_ids=sink_ids, attempt=attempt, memory=memory
        )
        by_standing[standing].append(committable)
    returned = [memory.as_decided(c) for c in by_standing[Standing.COMMITTED]]
    proven = [c for sink_id in sink_ids for c in memory.of_sink(sink_id)]
    # The same transaction may be in all three. The last entry wins: a decision's list has the rows
    # and the payload that the writer noted, which a target's own list lacks.
    commit = {c.transaction: c for c in (*returned, *proven, *own.values())}
    return CommitPlan(
        commit=to_commit_order(commit.values()),
        abort=to_commit_order(by_standing[Standing.UNDECIDED]),
        keep=(*by_standing[Standing.FOREIGN], *by_standing[Standing.LIVE]),
        refuse=to_commit_order(by_standing[Standing.FORGOTTEN]),
        returned=to_commit_order(returned),
    )


def judge_transaction(
    transaction: TransactionId,
    listed: Collection[TransactionId],
    *,
    sink_ids: Collection[str],
    attempt: AttemptId,
    memory: DecisionMemory,
) -> Standing:
    """Return the decisions' verdict on `transaction`; arguments as for `plan_commits`."""
    if transaction.sink_id not in sink_ids:
        return Standing.FOREIGN
    # Check this before attempts: a decision is valid for every caller, even if the transaction is
    # of the caller's own attempt.
    if transaction in listed:
        return Standing.LISTED
    # Check this before the memory: the lack of a decision proves nothing while the attempt may
    # still decide.
    if transaction.attempt >= attempt:
        return Standing.LIVE
    match memory.coverage(transaction):
        case Coverage.DECIDED:
            return Standing.COMMITTED
        case Coverage.UNDECIDED:
            return Standing.UNDECIDED
        case Coverage.FORGOTTEN:
            return Standing.FORGOTTEN


def to_commit_order(committables: Iterable[Committable]) -> tuple[Committable, ...]:
    """Return `committables` in the order of their commits."""
    return tuple(sorted(committables, key=commit_order))


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """The decisions that a claim remembers. Each lists only its own attempt's transactions.

    A transaction that no decision lists is undecided, however old it is: the next attempt settles
    it.
    """

    decided: Mapping[TransactionId, Committable]

    @classmethod
    def from_claim(cls, claim: BatchClaim) -> BatchMemory:
        """Return the memory of `claim`."""
        return cls(
            {c.transaction: c for decision in claim.decisions for c in decision.committables}
        )

    def coverage(self, transaction: TransactionId) -> Coverage:
        """Return DECIDED if a decision lists `transaction`, otherwise UNDECIDED."""
        return Coverage.DECIDED if transaction in self.decided else Coverage.UNDECIDED

    def of_sink(self, sink_id: str) -> tuple[Committable, ...]:
        """Return no transactions: not every batch must prove the known commits."""
        del sink_id
        return ()

    def as_decided(self, committable: Committable) -> Committable:
        """Return `committable` as its decision lists it."""
        return self.decided.get(committable.transaction, committable)


def plan_claimed(
    claim: BatchClaim, in_doubt: Sequence[Committable], *, sink_ids: Collection[str]
) -> CommitPlan:
    """Return the plan of the new owner before its tasks write: they may wait for locks held here.

    `sink_ids` are the sink ids of all sinks that are written. If a decision lists a transaction of
    another sink, the plan commits it, too: the committing code reports that its sink is missing.
    """
    listed = tuple(
        c
        for decision in claim.decisions
        if not decision.is_committed
        for c in decision.committables
    )
    return plan_commits(
        listed,
        in_doubt,
        sink_ids={*sink_ids, *(c.transaction.sink_id for c in listed)},
        attempt=claim.attempt,
        memory=BatchMemory.from_claim(claim),
    )


def plan_sweep(
    decision: BatchDecision, in_doubt: Sequence[Committable], *, sink_ids: Collection[str]
) -> tuple[Committable, ...]:
    """Return the prepared transactions to roll back once `decision` is committed.

    They belong to tries that did not count. Older transactions were settled when this attempt was
    claimed, so any that are left were prepared late. The attempt of `decision` is over, too: it
    decides once.
    """
    over = AttemptId(decision.attempt + 1)
    plan = plan_commits(decision.committables, in_doubt, sink_ids=sink_ids, attempt=over)
    return plan.abort


def around_roll_backs(
    decided: Sequence[Committable], *, staged: Callable[[Committable], bool]
) -> tuple[tuple[Committable, ...], tuple[Committable, ...]]:
    """Return the transactions to commit before others are rolled back, and those after it.

    Those that are `staged` come last: applying them may wait for rows that a twin has locked.
    """
    return (
        tuple(committable for committable in decided if not staged(committable)),
        tuple(committable for committable in decided if staged(committable)),
    )
