"""Commits of whole checkpoints on the driver: one thread per sink that has a `GlobalCommitter`.

If a newer attempt has started, the threads of the old attempt may go on committing decided
checkpoints. The newer attempt commits the same checkpoints, and the target's ordered proof accepts
only one of the two commits: see `commit.whole_checkpoints`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from onceflow.core.commit.loop import ask_committer, describe_refusal
from onceflow.core.commit.queue import CommitRetryPolicy, Done, RetryAt
from onceflow.core.commit.whole_checkpoints import GlobalCommit, GlobalCommitQueue
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.committables import CommitOutcome, Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.loops.attempt_facts import GlobalCommitEnded
from onceflow.core.runtime.driver.attempt_context import AttemptContext
from onceflow.core.runtime.events.job_events import CommitRefused
from onceflow.core.runtime.slot.commits import CommitThread
from onceflow.core.spi import CommittedBy, GlobalCommitter
from onceflow.core.traces import Trace


class GlobalCommits:
    """The global committers of one attempt.

    Used by the attempt's thread, which they never block.
    """

    def __init__(self, context: AttemptContext, tell: Callable[[GlobalCommitEnded], None]) -> None:
        self._context = context
        self._tell = tell
        self._workers: list[_GlobalWorker] = []

    @property
    def uids(self) -> frozenset[str]:
        """The uids of the sinks whose checkpoints the driver commits."""
        return frozenset(
            operator.uid
            for operator, work in self._context.graph.sinks()
            if work.sink.committed_by is CommittedBy.DRIVER
        )

    def start(self) -> None:
        """Start the threads.

        Recovery has committed everything that the restored checkpoint decides.
        """
        plan, restored = self._context.plan, self._context.restored.checkpoint
        retry = CommitRetryPolicy(deadline_s=plan.settings.commit_deadline_s)
        for uid, sink_id, sink, committer in self._context.recovery.global_committers():
            made = _VersionsMade()
            self._workers.append(
                _GlobalWorker(
                    uid,
                    GlobalCommitQueue(sink_id, retry, restored, sink.gathering),
                    committer,
                    made,
                    self._context.log.trace,
                    committed=partial(self._report_commit, uid, sink_id, made),
                    failed=partial(self._report_failure, uid, sink_id),
                    refused=self._context.publish,
                )
            )

    def commit_decided(self, completed: CompletedCheckpoint) -> None:
        """Queue the commit of `completed` for each sink. Called for each decision, in order."""
        for worker in self._workers:
            worker.commit_decided(completed)

    def close(self, timeout_s: float) -> Iterable[str]:
        """Stop all committers; return the uids of those that do not end within `timeout_s`."""
        return [worker.uid for worker in self._workers if not worker.close(timeout_s)]

    def _report_commit(
        self, uid: str, sink_id: str, made: _VersionsMade, through: CheckpointId, commit_ms: float
    ) -> None:
        del commit_ms
        versions, files = made.take()
        attempt = self._context.plan.attempt
        self._tell(
            GlobalCommitEnded(attempt, uid, sink_id, through, versions=versions, files=files)
        )

    def _report_failure(self, uid: str, sink_id: str, error: BaseException) -> None:
        restored = self._context.restored.checkpoint
        self._tell(GlobalCommitEnded(self._context.plan.attempt, uid, sink_id, restored, error))


class _VersionsMade:
    """The numbers of versions and files that one sink's thread has committed and not yet reported.

    Only that thread uses the object.
    """

    def __init__(self) -> None:
        self._versions = self._files = 0

    def add(self, files: int) -> None:
        self._versions += 1
        self._files += files

    def take(self) -> tuple[int, int]:
        made = self._versions, self._files
        self._versions = self._files = 0
        return made


class _GlobalWorker(CommitThread[GlobalCommit]):
    def __init__(
        self,
        uid: str,
        queue: GlobalCommitQueue,
        committer: GlobalCommitter,
        made: _VersionsMade,
        trace: Trace,
        *,
        committed: Callable[[CheckpointId, float], None],
        failed: Callable[[BaseException], None],
        refused: Callable[[CommitRefused], None],
    ) -> None:
        super().__init__(f"checkpoints of {uid}", queue, committed=committed, failed=failed)
        self.uid = uid
        self._refused = refused
        self._is_refused = False
        self._queue = queue
        self._committer = committer
        self._trace = trace
        self._made = made
        self._thread.start()

    def commit_decided(self, completed: CompletedCheckpoint) -> None:
        with self._condition:
            self._queue.add_decision(completed, time.monotonic())
            self._condition.notify()

    def _commit(self, commit: GlobalCommit) -> CommitOutcome:
        call = partial(self._committer.commit_checkpoint, commit.checkpoint, commit.committables)
        transactions = (committable.transaction for committable in commit.committables)
        outcome = self._trace.record_commit(transactions, partial(ask_committer, call), by="driver")
        if isinstance(outcome, Committed):
            self._made.add(outcome.files)
        return outcome

    def _record_end(self, commit: GlobalCommit, step: Done | RetryAt) -> None:
        # Publish only refusals: the slots count the commits.
        if isinstance(step, RetryAt) or self._is_refused:
            self._is_refused = isinstance(step, RetryAt)
            self._refused(
                CommitRefused(self.uid, describe_refusal(commit, step), step.is_stuck)
                if isinstance(step, RetryAt)
                else CommitRefused(self.uid, "")
            )

    def _release(self) -> None:
        self._committer.close()
