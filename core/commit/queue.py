"""What is to be committed next, and what its outcome means.

    pre-committed -> decided (a completed checkpoint at or after it) -> committed
    committed_through <= decided through;  checkpoint n is committed whole before n + 1 begins

A `CommitQueue` is of one sink subtask, and commits each transaction by itself. What one commit for
all subtasks of a checkpoint needs is in `whole_checkpoints`, and goes by the same rules.

What an aborted checkpoint pre-committed stays pending: the stream before n is also before n + 1, so
the next completed checkpoint decides it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from onceflow.core.commit.retries import CommitRetryPolicy
from onceflow.core.protocol.committables import (
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import GENESIS, CheckpointId, TransactionId
from onceflow.core.protocol.invariant import require, unreachable
from onceflow.core.protocol.recovery import commit_order
from onceflow.core.protocol.refusals import RefusalCount


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """The next commit is known, and is not tried again before `at_s`."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """It is committed; `already` when an earlier try or an earlier attempt did it."""

    already: bool


@dataclass(frozen=True, slots=True)
class RetryAt:
    """The same commit is to be tried again, not before `at_s`."""

    at_s: float
    reason: str
    tries: int
    is_stuck: bool = False
    """True if the target refuses the transaction until a person changes something."""


FailureKind: TypeAlias = Literal["lost", "unknown", "failed", "committed"]
"""lost: its rows are gone for good. unknown: nobody can tell. failed: it is still prepared.
committed: it was to be aborted, and its rows are visible."""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """It is given up: the attempt must fail. What was to be done stays first in the queue."""

    kind: FailureKind
    message: str
    outcome: CommitOutcome | AbortOutcome
    """How the last try ended."""


StepEnd: TypeAlias = Done | RetryAt | StepFailed


@dataclass(slots=True)
class Tries:
    """Tries of the commit at the head of the queue."""

    count: int
    first_at_s: float
    next_at_s: float
    refusals: RefusalCount = field(default_factory=RefusalCount)
    """Those in a row that only a person can end."""


class Commit(Protocol):
    """What one call of a committer commits: a transaction, or a whole checkpoint. Prints itself."""

    @property
    def checkpoint(self) -> CheckpointId:
        """The checkpoint that it waits for: it is decided with this one, or a later one."""
        ...

    @property
    def transaction(self) -> TransactionId:
        """The name by which people ask for it: the first one, if it has several."""
        ...


C = TypeVar("C", bound=Commit)
S = TypeVar("S")


class StepQueue(ABC, Generic[S]):
    """Steps in the order in which they are carried out, each until it is done. One thread."""

    def __init__(self, retry: CommitRetryPolicy) -> None:
        self._retry = retry
        self._waiting: list[S] = []
        self._tries: Tries | None = None

    def next_commit(self, now_s: float) -> S | WaitUntil | None:
        """Return what to carry out now; None when nothing decided is left.

        Always the oldest, until its outcome is reported: asked twice, it says the same.
        """
        head = self._head()
        if head is None:
            return None
        if self._tries is not None and now_s < self._tries.next_at_s:
            return WaitUntil(self._tries.next_at_s)
        return head

    @abstractmethod
    def _head(self) -> S | None: ...

    def _finish(self, *, already: bool) -> Done:
        self._waiting.pop(0)
        self._tries = None
        return Done(already)

    def _judge_commit(self, step: S, outcome: CommitOutcome, now_s: float) -> StepEnd:
        match outcome:
            case Committed():
                return self._finish(already=False)
            case AlreadyCommitted():
                return self._finish(already=True)
            case Lost():
                return StepFailed(
                    "lost",
                    f"{step} was decided and is gone from the target: {outcome.reason}",
                    outcome,
                )
            case RetryLater() | Unknown():
                return self._retry_or_give_up(step, outcome, now_s)
            case _:
                return unreachable(outcome)

    def _retry_or_give_up(self, step: S, outcome: RetryLater | Unknown, now_s: float) -> StepEnd:
        kind: Literal["unknown", "failed"] = "unknown" if isinstance(outcome, Unknown) else "failed"
        if outcome.until_mended and not self._retry.waits_for_people:
            return StepFailed(kind, f"{step} waits for a person: {outcome.reason}", outcome)
        return self._again(step, kind, outcome, now_s)

    def _again(
        self,
        step: S,
        kind: Literal["unknown", "failed"],
        outcome: RetryLater | Unknown,
        now_s: float,
    ) -> StepEnd:
        tries = self._tries or Tries(0, now_s, now_s)
        tries.count += 1
        # Judged by when the next try would begin, and not by now: a pause that ends after the
        # deadline would delay the error and change nothing.
        at_s = now_s + self._retry.delay_s(tries.count)
        if at_s - tries.first_at_s > self._retry.deadline_s:
            return StepFailed(
                kind,
                f"{step} is not known to be committed after {tries.count} tries in"
                f" {now_s - tries.first_at_s:.1f} s (deadline {self._retry.deadline_s} s):"
                f" {outcome.reason}",
                outcome,
            )
        tries.next_at_s = at_s
        tries.refusals = (
            tries.refusals.add(outcome.reason) if outcome.until_mended else RefusalCount()
        )
        self._tries = tries
        return RetryAt(at_s, outcome.reason, tries.count, tries.refusals.is_stuck)


class OrderedCommits(StepQueue[C]):
    """What has been pre-committed and not committed yet, oldest first. One thread at a time."""

    def __init__(self, retry: CommitRetryPolicy, decided_last: CheckpointId = GENESIS) -> None:
        super().__init__(retry)
        self._decided_last = decided_last
        self._decided: list[CheckpointId] = []
        self._committed_through = decided_last

    def note_decision(self, checkpoint: CheckpointId) -> None:
        """Record that the decision log holds `checkpoint`; again, late or out of order is fine."""
        if checkpoint not in self._decided and checkpoint > self._committed_through:
            self._decided = sorted([*self._decided, checkpoint])
        self._decided_last = max(self._decided_last, checkpoint)
        self._advance()

    def outcome(self, commit: C, outcome: CommitOutcome, now_s: float) -> StepEnd:
        """Record how `commit` ended and return what follows.

        An unknown outcome is asked again like a refused one: the target then proves that the first
        try landed, or applies it. It is never taken for success.

        Raises:
            InvariantViolation: `commit` is not what `next_commit` returned.
        """
        require(commit == self._head(), f"outcome of {commit}, which was not to be committed")
        return self._judge_commit(commit, outcome, now_s)

    @property
    def committed_through(self) -> CheckpointId:
        """The highest decided checkpoint up to which nothing is left to commit."""
        return self._committed_through

    def _head(self) -> C | None:
        # A transaction need not have a decision of its own number: one of an aborted checkpoint
        # waits for the next that completes, which holds all before it.
        if self._waiting and self._waiting[0].checkpoint <= self._decided_last:
            return self._waiting[0]
        return None

    def _finish(self, *, already: bool) -> Done:
        done = super()._finish(already=already)
        self._advance()
        return done

    def _advance(self) -> None:
        # Only the oldest matters: commits go in order, so all that is decided below it is
        # committed.
        left = self._waiting[0].checkpoint if self._waiting else None
        while self._decided and (left is None or self._decided[0] < left):
            self._committed_through = self._decided.pop(0)


class CommitQueue(OrderedCommits[Committable]):
    """What one sink subtask has pre-committed, to be committed one transaction after the other."""

    def __init__(self, retry: CommitRetryPolicy) -> None:
        super().__init__(retry)
        self._prepared_last = CheckpointId(-1)

    def pre_committed(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> None:
        """Record what `pre_commit(checkpoint)` returned: none, one or several.

        Raises:
            InvariantViolation: See `require_named`.
        """
        require_named(checkpoint, committables, max(self._prepared_last, self._decided_last))
        self._prepared_last = checkpoint
        self._waiting += committables

    def pending_through(self, checkpoint: CheckpointId) -> tuple[Committable, ...]:
        """Return all up to `checkpoint` not known to be committed: what its ack must list.

        That includes those of aborted checkpoints, and those decided whose commit is under way: a
        crash now leaves it to the next attempt to ask.
        """
        return tuple(c for c in self._waiting if c.checkpoint <= checkpoint)

    @property
    def first_undecided(self) -> Committable | None:
        """What the next decision commits first; None while something decided waits."""
        return self._waiting[0] if self._waiting and self._head() is None else None

    @property
    def is_behind(self) -> bool:
        """Whether decided transactions wait besides the one whose commit may be under way."""
        return len(self.pending_through(self._decided_last)) > 1


def require_named(
    checkpoint: CheckpointId, committables: Sequence[Committable], before: CheckpointId
) -> None:
    """Raise InvariantViolation unless the pre-commit of `checkpoint` may name `committables` so.

    `before` is the last checkpoint that was pre-committed, or decided. A transaction that must be
    named when it is begun is named for the checkpoint expected next. If that one is given up before
    its barrier comes, the name stays: no checkpoint between the two was acknowledged by this
    subtask, so none of them can be decided.

    Raises:
        InvariantViolation: Out of order, already decided, named twice, or named for a checkpoint
            that is not after `before` or is after `checkpoint`.
    """
    require(checkpoint > before, f"pre-committed {checkpoint} after {before}")
    for one in committables:
        require(
            before < one.checkpoint <= checkpoint,
            f"{one.transaction} was pre-committed for checkpoint {checkpoint}; its name must hold"
            f" a checkpoint after {before}, up to {checkpoint}",
        )
    for one, later in pairwise(committables):
        require(
            commit_order(one) < commit_order(later),
            f"{later.transaction} stands after {one.transaction}: several committables of one"
            " pre-commit need names of their own, in the order of their commits",
        )
