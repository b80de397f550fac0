"""Commits what the sinks of a slot have pre-committed, beside the stream.

A later transaction of the same subtask may be waiting for a row lock that a commit releases, so
committing has a thread and a connection of its own. What to commit, in which order and what an
outcome means is decided by `protocol.commits.CommitQueue`; the thread only carries it out.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from onceflow.core.crash_points import reach
from onceflow.core.errors import (
    CommitFailed,
    CommitOutcomeUnknown,
    PreparedTransactionLost,
    SinkError,
)
from onceflow.core.graph import Operator, WriteTo
from onceflow.core.protocol.commits import (
    CommitQueue,
    CommitRetryPolicy,
    Done,
    GiveUp,
    RetryAt,
    WaitUntil,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, CheckpointId, SubtaskRef
from onceflow.core.runtime.dataflow.operators import SinkMetricGroup
from onceflow.core.runtime.messages import (
    CommittedThrough,
    Complete,
    CompletionHeard,
    SinkCommitted,
    SinkMetrics,
)
from onceflow.core.runtime.slot.context import SlotContext
from onceflow.core.spi import Committer, CommitterContext


class CommitWorker:
    """The commit queue of one sink subtask and the thread that empties it."""

    def __init__(
        self,
        name: str,
        queue: CommitQueue,
        committer: Committer,
        *,
        committed: Callable[[CheckpointId, float], None],
        failed: Callable[[BaseException], None],
        metrics: SinkMetricGroup | None = None,
    ) -> None:
        self.metrics = metrics or SinkMetricGroup(name, "", 0)
        self._queue = queue
        self._committer = committer
        self._committed = committed
        self._failed = failed
        self._condition = threading.Condition()
        self._closing = False
        self._prune_before: CheckpointId | None = None
        self._reported: CheckpointId | None = None
        self._thread = threading.Thread(target=self._run, name=f"commit {name}", daemon=True)
        self._thread.start()

    def pre_committed(
        self, checkpoint: CheckpointId, committable: Committable | None
    ) -> tuple[Committable, ...]:
        """Take note of a pre-commit; return all that the ack of `checkpoint` must list."""
        with self._condition:
            self._queue.pre_committed(checkpoint, committable)
            self.metrics.pre_committed(committable)
            return self._queue.pending_through(checkpoint)

    def completed(self, checkpoint: CheckpointId, retain_ledger_from: CheckpointId) -> None:
        """Commit everything up to `checkpoint`, soon. Late or repeated calls change nothing."""
        with self._condition:
            self._queue.completed(checkpoint)
            self.metrics.decided(checkpoint)
            self._prune_before = retain_ledger_from
            self._condition.notify()

    def close(self, timeout_s: float) -> bool:
        """Stop after the commit under way; return whether it ended within `timeout_s`.

        If not, its thread goes on, and so the process must not: what it sends may arrive when the
        next attempt has committed the same transaction and forgotten the proof.
        """
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._committer.close()
        return True

    def _run(self) -> None:
        try:
            while True:
                committable = self._next()
                if committable is None:
                    return
                began = time.monotonic()
                reach("commit")
                outcome = self._committer.commit(committable)
                reach("committed")
                now_s = time.monotonic()
                with self._condition:
                    step = self._queue.outcome(committable, outcome, now_s)
                match step:
                    case Done() | RetryAt():
                        if isinstance(step, Done):
                            self.metrics.committed(committable)
                        else:
                            self.metrics.retried()
                        self._report((time.monotonic() - began) * 1000)
                    case GiveUp():
                        raise _error_of(step, committable)
        except BaseException as error:
            self._failed(error)

    def _next(self) -> Committable | None:
        """Wait for the next committable; prune and report while idle; None when closing."""
        while True:
            with self._condition:
                if self._closing:
                    return None
                step = self._queue.next_commit(time.monotonic())
                if isinstance(step, Committable):
                    return step
                prune_before, self._prune_before = self._prune_before, None
                if prune_before is None and not self._unreported():
                    wait_s = step.at_s - time.monotonic() if isinstance(step, WaitUntil) else 1.0
                    self._condition.wait(max(0.001, min(wait_s, 1.0)))
                    continue
            self._report(0.0)
            if prune_before is not None:
                self._committer.prune(prune_before)

    def _unreported(self) -> bool:
        return self._queue.committed_through != self._reported

    def _report(self, commit_ms: float) -> None:
        with self._condition:
            through = self._queue.committed_through
            if through == self._reported:
                return
            self._reported = through
        self._committed(through, commit_ms)
        if commit_ms:
            reach("replied")


@dataclass(slots=True)
class _Progress:
    """How far one subtask and its sinks have come.

    Shared state files may go when all have confirmed a later decision, so nothing is confirmed that
    the subtask's state has not heard of, however far its committers are.
    """

    heard: CheckpointId = GENESIS
    decided: CheckpointId = GENESIS
    by_sink: dict[str, CheckpointId] = field(default_factory=dict[str, CheckpointId])
    told: tuple[CheckpointId, CheckpointId] = (GENESIS, GENESIS)

    @property
    def committed(self) -> CheckpointId:
        """What all sinks have committed: everything decided, where there is none."""
        return min(self.by_sink.values(), default=self.decided)


class SlotCommits:
    """A committer, on a thread of its own, for each sink of each subtask, and how far they are.

    Built while the chains are; from then on used by the thread of the slot's control alone. What it
    returns is to be told to the driver.
    """

    def __init__(self, context: SlotContext) -> None:
        self._context = context
        self._workers: list[CommitWorker] = []
        self._progress: defaultdict[SubtaskRef, _Progress] = defaultdict(_Progress)

    def worker(self, ref: SubtaskRef, operator: Operator, work: WriteTo) -> CommitWorker:
        """Return the running committer of one sink of subtask `ref`."""
        slot, uid = self._context, operator.uid
        self._progress[ref].by_sink[uid] = GENESIS
        worker = CommitWorker(
            f"{uid}[{ref.index}]",
            CommitQueue(CommitRetryPolicy(deadline_s=slot.plan.settings.commit_deadline_s)),
            work.sink.committer(
                CommitterContext(
                    job=slot.plan.job,
                    uid=uid,
                    sink_id=work.sink_id,
                    attempt=slot.plan.attempt,
                    log_id=slot.log_id,
                    staging=slot.storage.staging(work.sink_id),
                )
            ),
            committed=lambda through, ms: slot.post(SinkCommitted(ref, uid, through, ms)),
            failed=slot.fail,
            metrics=SinkMetricGroup(uid, work.sink_id, ref.index),
        )
        self._workers.append(worker)
        return worker

    def completed(
        self, complete: Complete, subtasks: Iterable[SubtaskRef]
    ) -> list[CommittedThrough]:
        """Let every committer commit what is decided; `subtasks` are all of the slot."""
        for worker in self._workers:
            retain_from = complete.retain_ledger_from[worker.metrics.sink_id]
            worker.completed(complete.checkpoint, retain_from)
        told: list[CommittedThrough] = []
        for ref in subtasks:
            progress = self._progress[ref]
            progress.decided = max(progress.decided, complete.checkpoint)
            told += self._come(ref)
        return told

    def progressed(self, by: CompletionHeard | SinkCommitted) -> list[CommittedThrough]:
        """Take in that a subtask has heard of a decision, or that a sink of it has committed."""
        progress = self._progress[by.subtask]
        match by:
            case CompletionHeard(_, checkpoint):
                progress.heard = max(progress.heard, checkpoint)
                return self._come(by.subtask)
            case SinkCommitted(_, uid, through, commit_ms):
                progress.by_sink[uid] = max(progress.by_sink[uid], through)
                return self._come(by.subtask, commit_ms)

    def metrics(self) -> tuple[SinkMetrics, ...]:
        """Return what each sink's transactions have gone through."""
        return tuple(worker.metrics.read() for worker in self._workers)

    def close(self, left_s: Callable[[], float]) -> bool:
        """End every committer; return whether all ended within the seconds that are left."""
        return min([worker.close(left_s()) for worker in self._workers], default=True)

    def _come(self, ref: SubtaskRef, commit_ms: float = 0.0) -> list[CommittedThrough]:
        """Return how far `ref` has come, if that is further than was told before."""
        progress = self._progress[ref]
        committed = progress.committed
        confirmed = min(progress.heard, committed)
        if (confirmed, committed) == progress.told:
            return []
        progress.told = (confirmed, committed)
        return [CommittedThrough(ref, confirmed, round(commit_ms, 3), committed)]


def _error_of(step: GiveUp, committable: Committable) -> SinkError:
    classes: dict[str, type[SinkError]] = {
        "lost": PreparedTransactionLost,
        "unknown": CommitOutcomeUnknown,
        "failed": CommitFailed,
    }
    return classes[step.kind](
        f"transaction {committable.transaction} ({committable.rows} rows): {step.message}."
        f" `onceflow txn show {committable.transaction}` tells more, docs/operations.md what to do"
    )
