"""The commits of one sink subtask: which transaction is next, and what its outcome means.

    pre-committed -> decided (a completed checkpoint at or after it) -> committed
    committed_through <= decided through;  checkpoint n is committed whole before n + 1 begins

What an aborted checkpoint pre-committed stays pending: the stream before n is also before n + 1, so
the next completed checkpoint decides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from onceflow.core.protocol.committables import (
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import GENESIS, CheckpointId
from onceflow.core.protocol.invariant import require, unreachable
from onceflow.core.protocol.recovery import commit_order


@dataclass(frozen=True, slots=True)
class CommitRetryPolicy:
    """How long a commit that did not succeed is asked again."""

    initial_delay_s: float = 0.05
    multiplier: float = 2.0
    max_delay_s: float = 5.0
    deadline_s: float = 120.0
    """From the first try of one transaction to the last; the attempt fails after it."""

    def __post_init__(self) -> None:
        if self.initial_delay_s <= 0 or self.max_delay_s < self.initial_delay_s:
            raise ValueError(
                f"initial_delay_s={self.initial_delay_s} must be over 0 and at most "
                f"max_delay_s={self.max_delay_s}"
            )
        if self.multiplier < 1:
            raise ValueError(f"multiplier={self.multiplier} must be 1 or more")
        if self.deadline_s < 0:
            raise ValueError(f"deadline_s={self.deadline_s} must be 0 or more")

    def delay_s(self, tries: int) -> float:
        """Return how long to wait after `tries` failed tries, 1 or more."""
        # The exponent is bounded so that the power cannot overflow; the maximum is long reached.
        return min(self.initial_delay_s * self.multiplier ** min(tries - 1, 64), self.max_delay_s)


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """The next transaction is known, and is not tried again before `at_s`."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """The transaction is committed; `already` when an earlier try or an earlier attempt did it."""

    committable: Committable
    already: bool


@dataclass(frozen=True, slots=True)
class RetryAt:
    """The same transaction is to be committed again, not before `at_s`."""

    at_s: float
    reason: str
    tries: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The attempt must fail; the transaction stays first in the queue."""

    kind: Literal["lost", "unknown", "failed"]
    """lost: its rows are gone for good. unknown: nobody can tell. failed: it is still prepared."""
    message: str


CommitStep: TypeAlias = Done | RetryAt | GiveUp


@dataclass(slots=True)
class _Tries:
    """Tries of the transaction at the head of the queue."""

    count: int
    first_at_s: float
    next_at_s: float


class CommitQueue:
    """What one sink subtask has pre-committed and not committed yet. Used by one thread at a time.

    `pending` are transactions that a completed checkpoint had decided before this attempt and that
    this subtask is to commit first (none, if the driver committed them during recovery).
    """

    def __init__(self, retry: CommitRetryPolicy, pending: Sequence[Committable] = ()) -> None:
        self._retry = retry
        self._waiting = sorted(pending, key=commit_order)
        self._prepared_last = CheckpointId(max((_of(c) for c in self._waiting), default=-1))
        self._decided_last = CheckpointId(max(self._prepared_last, GENESIS))
        self._decided: list[CheckpointId] = []
        self._committed_through = GENESIS
        self._tries: _Tries | None = None

    def pre_committed(self, checkpoint: CheckpointId, committable: Committable | None) -> None:
        """Take in what `pre_commit(checkpoint)` returned; None when there was nothing to commit.

        A transaction that must be named when it is begun is named for the checkpoint expected next.
        If that one is given up before its barrier comes, the name stays: no checkpoint between the
        two was acknowledged by this subtask, so none of them can be decided.

        Raises:
            InvariantViolation: Out of order, already decided, or named for a checkpoint that is not
                after the one before or is after `checkpoint`.
        """
        before = max(self._prepared_last, self._decided_last)
        require(
            checkpoint > before,
            f"pre-committed {checkpoint} after {self._prepared_last}, decided {self._decided_last}",
        )
        self._prepared_last = checkpoint
        if committable is not None:
            require(
                before < _of(committable) <= checkpoint,
                f"{committable.transaction} is not of checkpoint {checkpoint}, nor of one that was "
                f"given up since {before}",
            )
            self._waiting.append(committable)

    def pending_through(self, checkpoint: CheckpointId) -> tuple[Committable, ...]:
        """Return all up to `checkpoint` not known to be committed: what its ack must list.

        That includes those of aborted checkpoints, and those decided whose commit is under way: a
        crash now leaves it to the next attempt to ask.
        """
        return tuple(c for c in self._waiting if _of(c) <= checkpoint)

    def completed(self, checkpoint: CheckpointId) -> None:
        """Take in that the decision log holds `checkpoint`; again, late or out of order is fine."""
        if checkpoint not in self._decided and checkpoint > self._committed_through:
            self._decided = sorted([*self._decided, checkpoint])
        self._decided_last = max(self._decided_last, checkpoint)
        self._advance()

    def next_commit(self, now_s: float) -> Committable | WaitUntil | None:
        """Return what to commit now; None when nothing decided is left.

        Always the oldest, until its outcome is reported: asked twice, it says the same.
        """
        head = self._head()
        if head is None:
            return None
        if self._tries is not None and now_s < self._tries.next_at_s:
            return WaitUntil(self._tries.next_at_s)
        return head

    def outcome(self, committable: Committable, outcome: CommitOutcome, now_s: float) -> CommitStep:
        """Take in how the commit of `committable` ended and return what follows.

        An unknown outcome is asked again like a refused one: the target then proves that the first
        try landed, or applies it. It is never taken for success.

        Raises:
            InvariantViolation: `committable` is not what `next_commit` returned.
        """
        require(
            committable == self._head(),
            f"outcome of {committable.transaction}, which was not to be committed",
        )
        match outcome:
            case Committed():
                return self._done(committable, already=False)
            case AlreadyCommitted():
                return self._done(committable, already=True)
            case Lost():
                return GiveUp(
                    "lost",
                    f"transaction {committable.transaction} ({committable.rows} rows) was decided "
                    f"and is gone from the target: {outcome.reason}",
                )
            case RetryLater():
                return self._again(committable, "failed", outcome.reason, now_s)
            case Unknown():
                return self._again(committable, "unknown", outcome.reason, now_s)
            case _:
                return unreachable(outcome)

    @property
    def committed_through(self) -> CheckpointId:
        """The highest decided checkpoint up to which nothing is left to commit; 0 before any."""
        return self._committed_through

    def _head(self) -> Committable | None:
        if self._waiting and _of(self._waiting[0]) <= self._decided_last:
            return self._waiting[0]
        return None

    def _done(self, committable: Committable, *, already: bool) -> Done:
        self._waiting.pop(0)
        self._tries = None
        self._advance()
        return Done(committable, already)

    def _again(
        self,
        committable: Committable,
        kind: Literal["unknown", "failed"],
        reason: str,
        now_s: float,
    ) -> RetryAt | GiveUp:
        tries = self._tries or _Tries(0, now_s, now_s)
        tries.count += 1
        at_s = now_s + self._retry.delay_s(tries.count)
        if at_s - tries.first_at_s > self._retry.deadline_s:
            return GiveUp(
                kind,
                f"transaction {committable.transaction} ({committable.rows} rows) is not known to "
                f"be committed after {tries.count} tries in {now_s - tries.first_at_s:.1f} s "
                f"(deadline {self._retry.deadline_s} s): {reason}",
            )
        tries.next_at_s = at_s
        self._tries = tries
        return RetryAt(at_s, reason, tries.count)

    def _advance(self) -> None:
        left = _of(self._waiting[0]) if self._waiting else None
        while self._decided and (left is None or self._decided[0] < left):
            self._committed_through = self._decided.pop(0)


def _of(committable: Committable) -> CheckpointId:
    return CheckpointId(committable.transaction.checkpoint)
