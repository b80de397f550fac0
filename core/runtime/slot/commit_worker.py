"""Commits what a sink subtask has pre-committed, beside the stream and on its own connection.

A later transaction of the same subtask may be waiting for a row lock that a commit releases, so
committing never shares a thread with writing. What to commit, in which order and what an outcome
means is decided by `protocol.commits.CommitQueue`; this thread only carries it out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from onceflow.core.crash_points import reach
from onceflow.core.errors import (
    CommitFailed,
    CommitOutcomeUnknown,
    PreparedTransactionLost,
    SinkError,
)
from onceflow.core.protocol.commits import CommitQueue, Done, GiveUp, RetryAt, WaitUntil
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.runtime.dataflow.sink_metric_group import SinkMetricGroup
from onceflow.core.spi import Committer


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
