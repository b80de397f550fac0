"""What is done with the transactions of batches that Spark writes; see `protocol.batches`.

An attempt claims, and then makes the targets agree with what is decided; once it has decided, it
rolls back what tries that did not count have left.
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
    """What a claim remembers of decisions: each lists its own attempt's transactions, and no more.

    What no decision lists is undecided, however old: an attempt is settled by the one after it.
    """

    decided: Mapping[TransactionId, Committable]

    @classmethod
    def from_claim(cls, claim: BatchClaim) -> BatchMemory:
        """Return what `claim` remembers."""
        return cls({c.transaction: c for one in claim.decisions for c in one.committables})

    def coverage(self, transaction: TransactionId) -> Coverage:
        """Return whether a decision lists `transaction`."""
        return Coverage.DECIDED if transaction in self.decided else Coverage.UNDECIDED

    def of_sink(self, sink_id: str) -> tuple[Committable, ...]:
        """Return nothing: what is known to be committed need not be proven by each batch."""
        del sink_id
        return ()

    def as_decided(self, committable: Committable) -> Committable:
        """Return `committable` as its decision lists it."""
        return self.decided.get(committable.transaction, committable)


def plan_claimed(
    claim: BatchClaim, in_doubt: Sequence[Committable], *, sink_ids: Collection[str]
) -> CommitPlan:
    """Return what the new owner does before its tasks write: they may wait for locks held here.

    `sink_ids` are those of all sinks that are written. What a decision lists of another one is to
    be committed, too: whoever commits says that its sink is missing.
    """
    listed = tuple(c for one in claim.decisions if not one.is_committed for c in one.committables)
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
    """Return what tries that did not count have left prepared, once `decision` is committed.

    Everything older was settled when its attempt was claimed, so what is left of it came late. The
    attempt of `decision` is over, too: it decides once.
    """
    over = AttemptId(decision.attempt + 1)
    plan = plan_commits(decision.committables, in_doubt, sink_ids=sink_ids, attempt=over)
    return plan.abort


def around_roll_backs(
    decided: Sequence[Committable], *, staged: Callable[[Committable], bool]
) -> tuple[tuple[Committable, ...], tuple[Committable, ...]]:
    """Return what is committed before others are rolled back, and what after it.

    Rows that are `staged` come last: applying them may wait for what a twin has locked.
    """
    return (
        tuple(one for one in decided if not staged(one)),
        tuple(one for one in decided if staged(one)),
    )
