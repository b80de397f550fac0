"""The committers of one slot, one a sink, each a thread, and the driver's. Mirrors CommitThread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.clock import Gone, Process, Steps
from tests.simulation.targets import Target, Versioned

from onceflow.core.commit.queue import CommitRetryPolicy, Done, RetryAt, StepFailed, WaitUntil
from onceflow.core.commit.whole_checkpoints import GlobalCommit, GlobalCommitQueue
from onceflow.core.errors import CommitFailed, OnceflowError, PreparedTransactionLost
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.committables import Committable, Committed, Lost, Unknown
from onceflow.core.protocol.ids import GENESIS, CheckpointId

if TYPE_CHECKING:
    from tests.simulation.slots import Slot
    from tests.simulation.world import World

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
        self.queue.note_decision(checkpoint)
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
            case StepFailed(kind, message, _):
                self.slot.fail(message, for_good=kind == "lost")

    def _prune(self, before: CheckpointId) -> Steps[None]:
        try:
            yield from self.target.prune(before)
        except Gone:
            self.world.clock.say(f"{self.target.sink_id}: old proofs are not deleted")


class PreCommitter:
    """Confirms what the subtask has received, in place of a committer, where the driver commits."""

    def __init__(self, slot: Slot, target: Versioned, committed: Callable[[CheckpointId], None]):
        self.target = target
        self.queue = slot.world.variant.pre_commits()
        self._drops_decided = slot.world.variant.drops_decided
        self._committed = committed

    def completed(self, checkpoint: CheckpointId, retain_ledger_from: CheckpointId) -> None:
        del retain_ledger_from
        if self._drops_decided:
            self.queue.take_committed(checkpoint)
        self._committed(checkpoint)


class GlobalCommitter:
    """The driver's committer of one sink, for one attempt. Mirrors GlobalCommits."""

    def __init__(
        self,
        world: World,
        driver: Process,
        queue: GlobalCommitQueue,
        target: Versioned,
        committed: Callable[[CheckpointId], None],
        failed: Callable[[OnceflowError], None],
    ) -> None:
        self.world, self.driver, self.queue, self.target = world, driver, queue, target
        self._committed, self._failed = committed, failed
        self._closing = self._busy = False

    def decided(self, completed: CompletedCheckpoint) -> None:
        self.queue.add_decision(completed, self.world.clock.now_s)
        if not self._busy:
            self._busy = True
            self.driver.begin(self._work())

    def close(self) -> None:
        self._closing = True

    def _work(self) -> Steps[None]:
        yield 0.005
        while not self._closing:
            step = self.queue.next_commit(self.world.clock.now_s)
            if isinstance(step, WaitUntil):
                # A decision that comes meanwhile may make it due earlier.
                yield max(0.001, min(step.at_s - self.world.clock.now_s, 0.05))
            elif step is None:
                self._committed(self.queue.committed_through)
                break
            elif (yield from self._commit(step)):
                return
        self._busy = False

    def _commit(self, commit: GlobalCommit) -> Steps[bool]:
        """Return whether it is the last that this committer does."""
        if self._crashes("before a global commit"):
            return True
        outcome = yield from self.target.commit_whole(commit)
        if self._crashes("after a global commit"):
            return True
        if self.world.variant.lost_is_committed and isinstance(outcome, Lost):
            outcome = Committed()
        if self.world.variant.unknown_is_committed and isinstance(outcome, Unknown):
            outcome = Committed()
        step = self.queue.outcome(commit, outcome, self.world.clock.now_s)
        if isinstance(step, StepFailed):
            if not self._closing:
                lost = PreparedTransactionLost if step.kind == "lost" else CommitFailed
                self._failed(lost(step.message))
            return True
        if not self._closing:
            self._committed(self.queue.committed_through)
        return False

    def _crashes(self, where: str) -> bool:
        if self.driver.alive and self.world.draws_crash():
            self.driver.kill(where)
        return not self.driver.alive


class Confirmations:
    """The progress of a subtask's commits: the completions that it has received and committed."""

    def __init__(self, sinks: int, report: Callable[[CheckpointId], None]) -> None:
        self._through = [GENESIS] * (sinks + 1)
        self._report = report

    def come(self, who: int, through: CheckpointId) -> None:
        """Take in how far sink `who` is; the last one is the subtask's own thread."""
        self._through[who] = max(self._through[who], through)
        # Again also when it says nothing new: the message may have been lost.
        self._report(min(self._through))
