"""What is done with the transactions of a sink: commit, abort, keep or refuse.

Facts in, a plan out. A transaction is, in this order:

    FOREIGN     of another sink                                             keep
    LISTED      listed by a decision, and perhaps not committed yet         commit
    LIVE        of an attempt that may decide it yet                        keep
    COMMITTED   known to be committed, and in doubt again                   commit
    UNDECIDED   of an attempt that is over and did not decide it            abort
    FORGOTTEN   of an attempt that the decisions do not remember            refuse

Every caller plans here: a job's recovery and its sweep, commits of whole checkpoints, the batches
that Spark writes, and `onceflow txn`, which shows what the next start would do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.protocol.log.memory import NOTHING_REMEMBERED, Coverage
from onceflow.core.protocol.recovery import commit_order


class DecisionMemory(Protocol):
    """What a decision log, or another keeper of decisions, remembers besides what is listed."""

    def coverage(self, transaction: TransactionId) -> Coverage:
        """Return whether the attempt of `transaction`, which is over, has decided it."""
        ...

    def of_sink(self, sink_id: str) -> Sequence[Committable]:
        """Return what was committed under `sink_id` and must be proven by the target again."""
        ...

    def as_decided(self, committable: Committable) -> Committable:
        """Return `committable` as its decision has it; itself where that is not remembered."""
        ...


class Standing(Enum):
    """What decisions say about one transaction; see the module."""

    FOREIGN = "foreign"
    LISTED = "listed"
    LIVE = "live"
    COMMITTED = "committed"
    UNDECIDED = "undecided"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """What to do with the transactions of a sink, each in the order given.

    Everything in doubt is in one of the four, and nothing is in both `commit` and `abort`.
    """

    commit: tuple[Committable, ...] = ()
    """Decided: commit, also when the target does not list them (then it proves why).

    Also those that were committed last, whose proof says that the target has not gone back.
    """
    abort: tuple[Committable, ...] = ()
    """Of attempts that are over, and not decided: their records will be, or were, sent again."""
    keep: tuple[Committable, ...] = ()
    """Of other sinks, and of attempts that may decide them yet: never touched."""
    refuse: tuple[Committable, ...] = ()
    """Of attempts that are no longer remembered: nobody may touch them but a person."""
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
    """Return what is done with the transactions of `sink_ids`, once all before `attempt` are over.

    `listed` is what decisions name and nobody knows to be committed (all sinks' may be passed);
    `in_doubt` is what the target holds; `memory` is what the decisions remember besides. Whoever
    calls has seen to it that no attempt before `attempt` decides anything more. Idempotent.

    What is decided was committed once, or will be: it is committed again, and never rolled back,
    for its records are not sent again.

    Going back to an *older* decision than the last takes decisions back. The stream goes on from
    there, so what later ones had decided is sent again: transactions of theirs that are still in
    doubt are aborted here and come once; those already committed come twice. Nothing in the target
    tells these apart, so only an operator who knows it may choose so.
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
    # The same transaction may be in all three. The last one stays: what a decision lists has the
    # rows and the payload that the writer noted, which a target's own listing lacks.
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
    """Return what the decisions say about `transaction`; arguments as those of `plan_commits`."""
    if transaction.sink_id not in sink_ids:
        return Standing.FOREIGN
    # Before attempts are compared. A decision stands whoever asks, also when the transaction is of
    # the attempt that asks.
    if transaction in listed:
        return Standing.LISTED
    # Before the memory is asked: that nothing lists it proves nothing while its attempt may still
    # decide.
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
