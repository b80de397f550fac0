"""Commits what the sinks of a slot have pre-committed, beside the stream.

A later transaction of the same subtask may be waiting for a row lock that a commit releases, so
committing has a thread and a connection of its own. What to commit, in which order and what an
outcome means is decided by `protocol.commits.CommitQueue`; the thread only carries it out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

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
from onceflow.core.runtime.messages import SinkMetrics
from onceflow.core.runtime.slot.context import SlotPlan
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.storage import JobStorage


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


_HEARD, _NO_SINK = "", "no sink"
"""Beside the uids of a subtask's sinks: the subtask itself, and what stands for none."""


class Committed(Protocol):
    """Hears how far a subtask has come, on the thread that has brought it there."""

    def __call__(
        self, ref: SubtaskRef, confirmed: CheckpointId, committed: CheckpointId, commit_ms: float
    ) -> None:
        """All sinks of `ref` have committed up to `committed`; up to `confirmed` it knows, too."""
        ...


class SlotCommits:
    """One committer, on a thread of its own, for each sink of each subtask."""

    def __init__(
        self,
        plan: SlotPlan,
        storage: JobStorage,
        log_id: str,
        *,
        committed: Committed,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._plan = plan
        self._storage = storage
        self._log_id = log_id
        self._report = committed
        self._failed = failed
        self._workers: list[CommitWorker] = []
        self._through: dict[SubtaskRef, dict[str, CheckpointId]] = {}
        self._lock = threading.Lock()

    def worker(self, ref: SubtaskRef, operator: Operator, work: WriteTo) -> CommitWorker:
        """Return the running committer of one sink of subtask `ref`."""
        context = CommitterContext(
            job=self._plan.job,
            uid=operator.uid,
            sink_id=work.sink_id,
            attempt=self._plan.attempt,
            log_id=self._log_id,
            staging=self._storage.staging(work.sink_id),
        )
        with self._lock:
            self._through.setdefault(ref, {_HEARD: GENESIS})[operator.uid] = GENESIS

        def committed(through: CheckpointId, commit_ms: float) -> None:
            self._come(ref, operator.uid, through, commit_ms)

        worker = CommitWorker(
            f"{operator.uid}[{ref.index}]",
            CommitQueue(CommitRetryPolicy(deadline_s=self._plan.settings.commit_deadline_s)),
            work.sink.committer(context),
            committed=committed,
            failed=self._failed,
            metrics=SinkMetricGroup(operator.uid, work.sink_id, ref.index),
        )
        self._workers.append(worker)
        return worker

    def heard(self, ref: SubtaskRef, checkpoint: CheckpointId) -> None:
        """Take in that subtask `ref` knows `checkpoint` to be decided. Its own thread.

        Shared state files may go when all have confirmed a later decision, so a committer must not
        confirm one that the subtask's state has not heard of.
        """
        self._come(ref, _HEARD, checkpoint, 0.0)

    def _come(self, ref: SubtaskRef, who: str, through: CheckpointId, commit_ms: float) -> None:
        with self._lock:
            known = self._through.setdefault(ref, {_HEARD: GENESIS, _NO_SINK: GENESIS})
            before = _lowest(known)
            known[who] = max(known[who], through)
            confirmed, committed = _lowest(known)
        if (confirmed, committed) != before:
            self._report(ref, confirmed, committed, round(commit_ms, 3))

    def completed(
        self,
        checkpoint: CheckpointId,
        retain_ledger_from: Mapping[str, CheckpointId],
        subtasks: Iterable[SubtaskRef],
    ) -> None:
        """Let every committer commit what `checkpoint` decided; `subtasks` are all of the slot."""
        for worker in self._workers:
            worker.completed(checkpoint, retain_ledger_from[worker.metrics.sink_id])
        for ref in subtasks:
            if _NO_SINK in self._through.get(ref, {_NO_SINK: GENESIS}):
                self._come(ref, _NO_SINK, checkpoint, 0.0)

    def metrics(self) -> tuple[SinkMetrics, ...]:
        """Return what each sink's transactions have gone through."""
        return tuple(worker.metrics.read() for worker in self._workers)

    def close(self, left_s: Callable[[], float]) -> bool:
        """End every committer; return whether all ended within the seconds that are left."""
        return min([worker.close(left_s()) for worker in self._workers], default=True)


def _lowest(known: dict[str, CheckpointId]) -> tuple[CheckpointId, CheckpointId]:
    """Return (what the subtask and its sinks have come to, what its sinks have)."""
    committed = min(through for who, through in known.items() if who != _HEARD)
    return min(known[_HEARD], committed), committed
