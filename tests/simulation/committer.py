"""The committers of one slot: one a sink, each a thread. Mirrors CommitWorker and SlotCommits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.clock import Gone, Steps
from tests.simulation.targets import Target

from onceflow.core.protocol.commits import (
    CommitRetryPolicy,
    Done,
    GiveUp,
    RetryAt,
    WaitUntil,
)
from onceflow.core.protocol.committables import Committable, Committed, Lost, Unknown
from onceflow.core.protocol.ids import GENESIS, CheckpointId

if TYPE_CHECKING:
    from tests.simulation.slots import Slot

DEADLINE_S = 0.1
"""Two failed tries in a row are given up: that is rare enough, and must be tried."""


class Committer:
    """The commit queue of one sink subtask and the thread that empties it."""

    def __init__(self, slot: Slot, target: Target, committed: Callable[[CheckpointId], None]):
        self.slot, self.target, self.world = slot, target, slot.world
        self.queue = slot.world.variant.queue(CommitRetryPolicy(deadline_s=DEADLINE_S))
        self._committed = committed
        self._prune_before: CheckpointId | None = None
        self._busy = False

    def completed(self, checkpoint: CheckpointId, retain_ledger_from: CheckpointId) -> None:
        self.queue.completed(checkpoint)
        self._prune_before = retain_ledger_from
        if not self._busy:
            self._busy = True
            self.slot.begin(self._work())

    def _work(self) -> Steps[None]:
        yield 0.005
        while self.slot.alive:
            step = self.queue.next_commit(self.world.clock.now_s)
            if isinstance(step, Committable):
                yield from self._commit(step)
            else:
                self._committed(self.queue.committed_through)
                before, self._prune_before = self._prune_before, None
                if before is not None:
                    yield from self._prune(before)
                elif isinstance(step, WaitUntil):
                    yield max(0.001, step.at_s - self.world.clock.now_s)
                else:
                    break
        self._busy = False

    def _commit(self, committable: Committable) -> Steps[None]:
        variant = self.world.variant
        if self.slot.crashes("before commit"):
            return
        self.world.oracle.check_asked(self.slot.deploy.attempt, self.target, committable)
        outcome = yield from self.target.commit(committable)
        if self.slot.crashes("after commit"):
            return
        if variant.lost_is_committed and isinstance(outcome, Lost):
            outcome = Committed()
        if variant.unknown_is_committed and isinstance(outcome, Unknown):
            outcome = Committed()
        match self.queue.outcome(committable, outcome, self.world.clock.now_s):
            case Done() | RetryAt():
                self._committed(self.queue.committed_through)
            case GiveUp(kind, message):
                self.slot.fail(message, for_good=kind == "lost")

    def _prune(self, before: CheckpointId) -> Steps[None]:
        try:
            yield from self.target.prune(before)
        except Gone:
            self.world.clock.say(f"{self.target.sink_id}: old proofs are not deleted")


class Confirmations:
    """How far a subtask has come: what its thread has heard of, and its sinks have committed."""

    def __init__(self, sinks: int, report: Callable[[CheckpointId], None]) -> None:
        self._through = [GENESIS] * (sinks + 1)
        self._report = report

    def come(self, who: int, through: CheckpointId) -> None:
        """Take in how far sink `who` is; the last one is the subtask's own thread."""
        self._through[who] = max(self._through[who], through)
        # Again also when it says nothing new: the message may have been lost.
        self._report(min(self._through))
