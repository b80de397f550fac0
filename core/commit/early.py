"""The rules for a commit that begins before its decision, and for undoing such a commit.

A commit may begin once its transaction is durable and everything before it is committed. Then
little is left to do when the decision arrives. A begun commit may block readers of the target, so
it is undone if the decision is late. The transaction itself stays pre-committed.

    begun => everything before it is committed, and it is not decided
    begun for at most `HELD_MAX_S` after its pre-commit, plus the time of one call
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.commit.queue import WaitUntil
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, CheckpointId, TransactionId

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
