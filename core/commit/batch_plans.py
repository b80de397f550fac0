"""The plans for the transactions of batches that Spark writes; see `protocol.batches`.

An attempt claims, and then makes the targets agree with the decisions. Once it has decided, it
rolls back the transactions of tries that did not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from onceflow.core.commit.planner import CommitPlan, plan_commits
from onceflow.core.protocol.batches import BatchClaim, BatchDecision
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.protocol.log.memory import Coverage


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

    `sink_ids` are those of all sinks that are written. If a decision lists a transaction of another
    sink, it is to be committed, too: the committing code reports that its sink is missing.
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
