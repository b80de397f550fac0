"""The steps of a plan, each of which is carried out until it is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.commit.queue import (
    CommitRetryPolicy,
    StepEnd,
    StepFailed,
    StepQueue,
    Tries,
    WaitUntil,
)
from onceflow.core.commit.whole_checkpoints import GlobalCommit
from onceflow.core.errors import require, unreachable
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)


@dataclass(frozen=True, slots=True)
class CommitOne:
    """The step that commits one transaction."""

    committable: Committable

    def __str__(self) -> str:
        return str(self.committable)


@dataclass(frozen=True, slots=True)
class CommitWhole:
    """The step that commits all transactions of a checkpoint at once."""

    commit: GlobalCommit

    def __str__(self) -> str:
        return str(self.commit)


@dataclass(frozen=True, slots=True)
class AbortOne:
    """The step that rolls back one transaction."""

    committable: Committable

    def __str__(self) -> str:
        return str(self.committable)


Step: TypeAlias = CommitOne | CommitWhole | AbortOne


class PlannedSteps(StepQueue[Step]):
    """A queue of steps that are all known at the start.

    A step's deadline counts from its first try.
    """

    def __init__(self, steps: Iterable[Step], retry: CommitRetryPolicy) -> None:
        super().__init__(retry)
        self._waiting += steps

    def next_commit(self, now_s: float) -> Step | WaitUntil | None:
        """Return the step to carry out now, as `StepQueue` does, or None when all are done."""
        if self._waiting and self._tries is None:
            # Start the deadline before the first try, not after it: a try that waits for a lock or
            # a server uses up its own deadline.
            self._tries = Tries(0, now_s, now_s)
        return super().next_commit(now_s)

    def outcome(self, step: Step, outcome: CommitOutcome | AbortOutcome, now_s: float) -> StepEnd:
        """Record the outcome of `step` and return what follows.

        If a step was to abort a transaction and it is committed, this contradicts the decisions:
        the step is given up.

        Raises:
            InvariantViolation: `step` is not the one that `next_commit` returned.
        """
        require(step == self._head(), f"outcome of {step}, which was not to be carried out")
        if not isinstance(step, AbortOne):
            require(not isinstance(outcome, Aborted), f"{step} was to be committed: {outcome}")
            assert not isinstance(outcome, Aborted)
            return self._judge_commit(step, outcome, now_s)
        match outcome:
            case Aborted():
                return self._finish(already=False)
            case AlreadyCommitted() | Committed():
                return StepFailed("committed", f"{step} was to be rolled back", outcome)
            case RetryLater() | Unknown():
                return self._retry_or_give_up(step, outcome, now_s)
            case Lost():
                return StepFailed(
                    "failed", f"{step} was to be rolled back: {outcome.reason}", outcome
                )
            case _:
                return unreachable(outcome)

    def _head(self) -> Step | None:
        return self._waiting[0] if self._waiting else None


def to_committables(step: Step) -> tuple[Committable, ...]:
    """Return the committables of `step`; never empty."""
    return step.commit.committables if isinstance(step, CommitWhole) else (step.committable,)


def to_commits(committables: Iterable[Committable]) -> Sequence[Step]:
    """Return a step that commits each of `committables`, in their order."""
    return [CommitOne(committable) for committable in committables]


def to_aborts(committables: Iterable[Committable]) -> Sequence[Step]:
    """Return a step that rolls back each of `committables`, in their order."""
    return [AbortOne(committable) for committable in committables]
