"""The queues of commits: the next commit, its early begin, its retries, and what follows from it.

    pre-committed -> decided (a completed checkpoint at or after it) -> committed
    committed_through <= decided through;  checkpoint n is committed whole before n + 1 begins

A `CommitQueue` belongs to one sink subtask and commits each transaction separately.
`whole_checkpoints` contains the commits of all subtasks' rows of a checkpoint, which follow the
same rules.

The transactions of an aborted checkpoint n stay pending: the stream before n is also before n + 1,
so the next completed checkpoint decides them.

Early begin:

A commit may begin once its transaction is durable and everything before it is committed. Then
little is left to do when the decision arrives. A begun commit may block readers of the target, so
it is undone if the decision is late. The transaction itself stays pre-committed.

    begun => everything before it is committed, and it is not decided
    begun for at most `HELD_MAX_S` after its pre-commit, plus the time of one call

Retries:

`CommitRetryPolicy` holds the numbers. The queues of `queue`, `steps` and `whole_checkpoints` apply
them. While a job runs, slots and the driver use the defaults with the deadline of the settings.
Recovery and batches of Spark use `recovery_retries`. `onceflow txn` tries once: its user repeats
the command.

    initial_delay_s <= pause <= max_delay_s;  last try <= first try + deadline_s
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from onceflow.core.errors import require, unreachable
from onceflow.core.protocol.checkpoints.snapshots import commit_order
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
from onceflow.core.protocol.failures import RefusalCount
from onceflow.core.protocol.ids import GENESIS, CheckpointId, TransactionId


@dataclass(frozen=True, slots=True)
class CommitRetryPolicy:
    """The time for which an unsuccessful commit is retried, and the pauses in between."""

    initial_delay_s: float = 0.05
    multiplier: float = 2.0
    max_delay_s: float = 5.0
    deadline_s: float = 120.0
    """The time from the first try of one transaction to the last. The attempt fails after it."""
    waits_for_people: bool = True
    """True if a commit is also retried when a person must first fix a row or a constraint."""

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
        """Return the pause after `tries` failed tries, 1 or more."""
        # Bound the exponent so that the power cannot overflow. The maximum is reached long before.
        return min(self.initial_delay_s * self.multiplier ** min(tries - 1, 64), self.max_delay_s)


def recovery_retries(deadline_s: float, *, waits_for_people: bool = True) -> CommitRetryPolicy:
    """Return the policy of recovery and batches: short pauses, up to `deadline_s`."""
    return CommitRetryPolicy(
        # Use shorter pauses than in a running job: nothing is written before recovery ends, so each
        # pause delays the job.
        initial_delay_s=0.02,
        max_delay_s=1.0,
        deadline_s=deadline_s,
        waits_for_people=waits_for_people,
    )


HELD_MAX_S = 1.0
"""The maximum time that a commit stays begun. It is many times the usual duration of a decision,
and short for a reader who waits."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin the commit of `committable`."""

    committable: Committable


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Undo the begun part of the commit of `committable`."""

    committable: Committable


EarlyStep: TypeAlias = Begin | Withdraw


class EarlyCommits:
    """The early commits of one sink subtask: which to begin and which to withdraw.

    Used by one thread at a time.
    """

    def __init__(self, held_max_s: float) -> None:
        self._held_max_s = held_max_s
        self._prepared = GENESIS
        self._prepared_at_s = 0.0
        self._aborted = GENESIS
        self._is_in_time = True
        """True if the last decision came in time. If not, a begun commit would be undone again."""
        self._tried: TransactionId | None = None
        self._begun: Committable | None = None
        self._held_until_s = 0.0

    def record_pre_commit(self, checkpoint: CheckpointId, now_s: float) -> None:
        """Record that `checkpoint` is pre-committed."""
        self._prepared, self._prepared_at_s = checkpoint, now_s

    def record_decision(self, checkpoint: CheckpointId, now_s: float) -> None:
        """Record that `checkpoint` is decided."""
        if checkpoint == self._prepared:
            self._is_in_time = now_s <= self._prepared_at_s + self._held_max_s

    def record_abort(self, checkpoint: CheckpointId) -> None:
        """Record that `checkpoint` will not be decided."""
        self._aborted = max(self._aborted, checkpoint)

    def next_step(self, first: Committable | None, now_s: float) -> EarlyStep | WaitUntil | None:
        """Return the next step, or the time to ask again; None if nothing is due before an event.

        `first` is the first transaction that the next decision commits. It is None while a decided
        one waits.
        """
        if first is None:
            return None
        if self._begun is not None:
            if self._begun.checkpoint <= self._aborted or now_s >= self._held_until_s:
                return Withdraw(self._begun)
            return WaitUntil(self._held_until_s)
        is_new = first.transaction != self._tried and first.checkpoint > self._aborted
        return Begin(first) if is_new and self._is_in_time else None

    def record_begin(self, committable: Committable, *, is_begun: bool) -> None:
        """Record that `committable` was tried; it is not tried again."""
        self._tried = committable.transaction
        self._begun = committable if is_begun else None
        # Store the time now, because a later pre-commit must not extend it.
        self._held_until_s = self._prepared_at_s + self._held_max_s

    def record_end(self) -> None:
        """Record that the begun commit is committed or withdrawn, or has failed."""
        self._begun = None


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """The answer that the next commit is known, and must not be tried before `at_s`."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """The answer that the step is done; `already` if an earlier try or attempt did it."""

    already: bool


@dataclass(frozen=True, slots=True)
class RetryAt:
    """The answer that the same step is to be retried, not before `at_s`."""

    at_s: float
    reason: str
    tries: int
    is_stuck: bool = False
    """True if the target refuses the transaction until a person changes something."""


FailureKind: TypeAlias = Literal["lost", "unknown", "failed", "committed"]
"""lost: the rows are gone for good. unknown: the outcome is not known. failed: the transaction is
still prepared. committed: the transaction was to be aborted, and its rows are visible."""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The answer that the step is given up and the attempt must fail.

    It stays first in the queue.
    """

    kind: FailureKind
    message: str
    outcome: CommitOutcome | AbortOutcome
    """The outcome of the last try."""


StepEnd: TypeAlias = Done | RetryAt | StepFailed


@dataclass(slots=True)
class Tries:
    """The tries of the commit at the head of the queue."""

    count: int
    first_at_s: float
    next_at_s: float
    refusals: RefusalCount = field(default_factory=RefusalCount)
    """The refusals in a row that only a person can end."""


class Commit(Protocol):
    """The unit that one call of a committer commits: a transaction, or a whole checkpoint.

    Its text is for people.
    """

    @property
    def checkpoint(self) -> CheckpointId:
        """The checkpoint whose decision, or a later one, allows this commit."""
        ...

    @property
    def transaction(self) -> TransactionId:
        """The transaction that names this commit in messages: the first one of several."""
        ...


C = TypeVar("C", bound=Commit)
S = TypeVar("S")


class StepQueue(ABC, Generic[S]):
    """A queue of steps in the order of execution.

    Each stays until it is done. Used by one thread.
    """

    def __init__(self, retry: CommitRetryPolicy) -> None:
        self._retry = retry
        self._waiting: list[S] = []
        self._tries: Tries | None = None

    def next_commit(self, now_s: float) -> S | WaitUntil | None:
        """Return the step to carry out now, or None if no decided one is left.

        This is always the oldest step, until its outcome is reported. Repeated calls return the
        same step.
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
                    f"{step} was decided, but is gone from the target: {outcome.reason}",
                    outcome,
                )
            case RetryLater() | Unknown():
                return self._retry_or_give_up(step, outcome, now_s)
            case _:
                return unreachable(outcome)

    def _retry_or_give_up(self, step: S, outcome: RetryLater | Unknown, now_s: float) -> StepEnd:
        kind: Literal["unknown", "failed"] = "unknown" if isinstance(outcome, Unknown) else "failed"
        if outcome.until_fixed and not self._retry.waits_for_people:
            return StepFailed(kind, f"{step} needs a person: {outcome.reason}", outcome)
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
        # Compare the time of the next try with the deadline, not the current time: a pause that
        # ends after the deadline would delay the error and change nothing.
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
            tries.refusals.add(outcome.reason) if outcome.until_fixed else RefusalCount()
        )
        self._tries = tries
        return RetryAt(at_s, outcome.reason, tries.count, tries.refusals.is_stuck)


class OrderedCommits(StepQueue[C]):
    """The pre-committed and not yet committed transactions, oldest first.

    Used by one thread at a time.
    """

    def __init__(self, retry: CommitRetryPolicy, decided_last: CheckpointId = GENESIS) -> None:
        super().__init__(retry)
        self._decided_last = decided_last
        self._decided: list[CheckpointId] = []
        self._committed_through = decided_last

    def note_decision(self, checkpoint: CheckpointId) -> None:
        """Record that the decision log holds `checkpoint`.

        Calls may be repeated, late or out of order.
        """
        if checkpoint not in self._decided and checkpoint > self._committed_through:
            self._decided = sorted([*self._decided, checkpoint])
        self._decided_last = max(self._decided_last, checkpoint)
        self._advance()

    def outcome(self, commit: C, outcome: CommitOutcome, now_s: float) -> StepEnd:
        """Record the outcome of `commit` and return what follows.

        After an unknown outcome the commit is retried, as after a refusal. The target then proves
        that the first try succeeded, or applies the commit. An unknown outcome is never taken for
        success.

        Raises:
            InvariantViolation: `commit` is not the one that `next_commit` returned.
        """
        require(commit == self._head(), f"outcome of {commit}, which was not to be committed")
        return self._judge_commit(commit, outcome, now_s)

    @property
    def committed_through(self) -> CheckpointId:
        """The highest decided checkpoint up to which nothing is left to commit."""
        return self._committed_through

    def _head(self) -> C | None:
        # A transaction need not have a decision of its own number. A transaction of an aborted
        # checkpoint waits for the next completed one, which includes everything before it.
        if self._waiting and self._waiting[0].checkpoint <= self._decided_last:
            return self._waiting[0]
        return None

    def _finish(self, *, already: bool) -> Done:
        done = super()._finish(already=already)
        self._advance()
        return done

    def _advance(self) -> None:
        # Look only at the oldest: commits are carried out in order, so all decisions below it are
        # committed.
        left = self._waiting[0].checkpoint if self._waiting else None
        while self._decided and (left is None or self._decided[0] < left):
            self._committed_through = self._decided.pop(0)


class CommitQueue(OrderedCommits[Committable]):
    """The pre-committed transactions of one sink subtask, to be committed one after the other."""

    def __init__(self, retry: CommitRetryPolicy) -> None:
        super().__init__(retry)
        self._prepared_last = CheckpointId(-1)

    def pre_committed(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> None:
        """Record the result of `pre_commit(checkpoint)`: no, one or several committables.

        Raises:
            InvariantViolation: See `require_named`.
        """
        require_named(checkpoint, committables, max(self._prepared_last, self._decided_last))
        self._prepared_last = checkpoint
        self._waiting += committables

    def pending_through(self, checkpoint: CheckpointId) -> tuple[Committable, ...]:
        """Return all up to `checkpoint` not known to be committed, which its ack must list.

        They include those of aborted checkpoints, and decided ones whose commit is running: after a
        crash now, the next attempt must ask for their outcome.
        """
        return tuple(c for c in self._waiting if c.checkpoint <= checkpoint)

    @property
    def first_undecided(self) -> Committable | None:
        """The first transaction that the next decision commits; None while a decided one waits."""
        return self._waiting[0] if self._waiting and self._head() is None else None

    @property
    def is_behind(self) -> bool:
        """True if decided transactions wait besides the one whose commit may be running."""
        return len(self.pending_through(self._decided_last)) > 1


def require_named(
    checkpoint: CheckpointId, committables: Sequence[Committable], before: CheckpointId
) -> None:
    """Raise InvariantViolation unless the pre-commit of `checkpoint` may name `committables` so.

    `before` is the last checkpoint that was pre-committed or decided. A transaction that needs its
    name when it begins is named for the checkpoint expected next. If that checkpoint is aborted
    before its barrier arrives, the name stays. This subtask acknowledged no checkpoint between the
    two, so none of them can be decided.

    Raises:
        InvariantViolation: The pre-commit is out of order, or a committable is already decided,
            named twice, or named for a checkpoint that is not after `before` or is after
            `checkpoint`.
    """
    require(checkpoint > before, f"pre-committed {checkpoint} after {before}")
    for committable in committables:
        require(
            before < committable.checkpoint <= checkpoint,
            f"{committable.transaction} was pre-committed for checkpoint {checkpoint}; its name"
            f" must hold a checkpoint after {before}, up to {checkpoint}",
        )
    for committable, later in pairwise(committables):
        require(
            commit_order(committable) < commit_order(later),
            f"{later.transaction} stands after {committable.transaction}: several committables of"
            " one pre-commit need names of their own, in the order of their commits",
        )
