"""A plan as steps, each of which is carried out until it is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.commit.queue import StepEnd, StepFailed, StepQueue, Tries, WaitUntil
from onceflow.core.commit.retries import CommitRetryPolicy
from onceflow.core.commit.whole_checkpoints import GlobalCommit
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
from onceflow.core.protocol.invariant import require, unreachable


@dataclass(frozen=True, slots=True)
class CommitOne:
    """One transaction is to be committed."""

    committable: Committable

    def __str__(self) -> str:
        return str(self.committable)


@dataclass(frozen=True, slots=True)
class CommitWhole:
    """All transactions of a checkpoint are to be committed at once."""

    commit: GlobalCommit

    def __str__(self) -> str:
        return str(self.commit)


@dataclass(frozen=True, slots=True)
class AbortOne:
    """One transaction is to be rolled back."""

    committable: Committable

    def __str__(self) -> str:
        return str(self.committable)


Step: TypeAlias = CommitOne | CommitWhole | AbortOne


class PlannedSteps(StepQueue[Step]):
    """Steps that are all known from the beginning; each has its deadline from its first try on."""

    def __init__(self, steps: Iterable[Step], retry: CommitRetryPolicy) -> None:
        super().__init__(retry)
        self._waiting += steps

    def next_commit(self, now_s: float) -> Step | WaitUntil | None:
        """Return what to carry out now, as `StepQueue` does; None when all is done."""
        if self._waiting and self._tries is None:
            # Before the try, and not with its outcome: a first try that waits for a lock or for a
            # server uses up its own deadline.
            self._tries = Tries(0, now_s, now_s)
        return super().next_commit(now_s)

    def outcome(self, step: Step, outcome: CommitOutcome | AbortOutcome, now_s: float) -> StepEnd:
        """Record how `step` ended and return what follows.

        What was to be aborted and is committed contradicts the decisions: it is given up.

        Raises:
            InvariantViolation: `step` is not what `next_commit` returned.
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
    """Return what `step` is about; never empty."""
    return step.commit.committables if isinstance(step, CommitWhole) else (step.committable,)


def to_commits(committables: Iterable[Committable]) -> Sequence[Step]:
    """Return a step that commits each of `committables`, in their order."""
    return [CommitOne(committable) for committable in committables]


def to_aborts(committables: Iterable[Committable]) -> Sequence[Step]:
    """Return a step that rolls back each of `committables`, in their order."""
    return [AbortOne(committable) for committable in committables]
