"""Commits the pre-committed transactions of a slot's sinks, on separate threads.

A later transaction of the same subtask may wait for a row lock that a commit releases, so each
committer has its own thread and connection. `commit.queue` decides which transaction is committed
when, and the step after each outcome; the threads carry that out.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from onceflow.core.commit import loop
from onceflow.core.commit.loop import advise
from onceflow.core.commit.queue import (
    HELD_MAX_S,
    Begin,
    C,
    CommitQueue,
    CommitRetryPolicy,
    Done,
    EarlyCommits,
    OrderedCommits,
    RetryAt,
    StepEnd,
    StepFailed,
    WaitUntil,
    Withdraw,
)
from onceflow.core.commit.whole_checkpoints import PreCommits
from onceflow.core.crash_points import reach
from onceflow.core.errors import SinkError
from onceflow.core.plan.graph import Operator
from onceflow.core.plan.work import WriteTo
from onceflow.core.protocol import messages
from onceflow.core.protocol.committables import CommitOutcome, Committable
from onceflow.core.protocol.ids import GENESIS, CheckpointId, SubtaskRef
from onceflow.core.runtime.dataflow.sink_operator import SinkMetricGroup
from onceflow.core.runtime.slot.context import SlotContext
from onceflow.core.spi import CommittedBy, Committer, CommitterContext
from onceflow.core.traces import NO_TRACE, Trace

_PATIENCE_S = 1.0
"""The longest wait of a pre-commit for commits: longer than most commits take, and short compared
with a checkpoint's timeout."""


class CommitThread(loop.StepSource[C, CommitOutcome]):
    """A queue of commits and the thread that empties it. Subclasses start the thread."""

    def __init__(
        self,
        name: str,
        queue: OrderedCommits[C],
        *,
        committed: Callable[[CheckpointId, float], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._commits = queue
        self._committed = committed
        self._failed = failed
        self._condition = threading.Condition()
        self._closing = False
        self._prune_before: CheckpointId | None = None
        self._reported = queue.committed_through
        self._began_s = 0.0
        # Subclasses start the thread at the end of `__init__`, because it calls their methods.
        self._thread = threading.Thread(target=self._run, name=f"commit {name}", daemon=True)

    @abstractmethod
    def _commit(self, commit: C) -> CommitOutcome: ...

    @abstractmethod
    def _record_end(self, commit: C, step: Done | RetryAt) -> None: ...

    @abstractmethod
    def _release(self) -> None: ...

    def _prune(self, before: CheckpointId) -> None:
        """Delete the proofs of commits before `before`, if there are any."""

    def _find_early_work(self, now_s: float) -> Callable[[], None] | WaitUntil | None:
        """Return work to do before the next decision, or when to ask again.

        The caller has the lock.
        """
        del now_s
        return None

    def close(self, timeout_s: float) -> bool:
        """Stop after the current commit; return True if the thread ended within `timeout_s`.

        If this returns False, the slot's process must exit. Otherwise the thread's commit could
        arrive after the next attempt has committed the same transaction and deleted the proof.
        """
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._release()
        return True

    def _run(self) -> None:
        try:
            for commit, ended in loop.settle(self, self._try_commit):
                if isinstance(ended, StepFailed):
                    raise self._make_error(ended, commit)
                self._record_end(commit, ended)
                self._report((time.monotonic() - self._began_s) * 1000)
        except BaseException as error:
            self._failed(error)

    def _try_commit(self, commit: C) -> CommitOutcome:
        self._began_s = time.monotonic()
        reach("commit")
        outcome = self._commit(commit)
        reach("committed")
        return outcome

    def end(self, step: C, outcome: CommitOutcome) -> StepEnd:
        """Record the outcome of a try of `step`; return the next step."""
        with self._condition:
            end = self._commits.outcome(step, outcome, time.monotonic())
            self._condition.notify_all()
            return end

    def take(self) -> C | None:
        """Wait for the next commit and return it, or None when closing.

        Prune and report while idle.
        """
        while True:
            with self._condition:
                # Check before taking the next commit: the others are decided, and the next attempt
                # commits them.
                if self._closing:
                    return None
                now_s = time.monotonic()
                step = self._commits.next_commit(now_s)
                if step is not None and not isinstance(step, WaitUntil):
                    return step
                work = self._find_early_work(now_s)
                is_reported = self._commits.committed_through == self._reported
                if not callable(work) and self._prune_before is None and is_reported:
                    # `_condition` wakes the thread when there is a commit. The limit of 1 s bounds
                    # the delay of a missed wake-up; 1 ms prevents a busy loop if a time has just
                    # come.
                    until_s = [
                        next_step.at_s
                        for next_step in (step, work)
                        if isinstance(next_step, WaitUntil)
                    ]
                    wait_s = min([*until_s, now_s + 1.0]) - now_s
                    self._condition.wait(max(0.001, wait_s))
                    continue
                if not callable(work):
                    # One at a time: a commit that is decided meanwhile waits for at most one of
                    # them.
                    work = self._take_pruning()
            # Without the lock: both may wait for other processes, and `record_pre_commit` must not.
            self._report(0.0)
            work()

    def _take_pruning(self) -> Callable[[], None]:
        before, self._prune_before = self._prune_before, None
        return (lambda: None) if before is None else partial(self._prune, before)

    def _report(self, commit_ms: float) -> None:
        with self._condition:
            through = self._commits.committed_through
            if through == self._reported:
                return
            self._reported = through
        self._committed(through, commit_ms)
        if commit_ms:
            reach("replied")

    def _make_error(self, step: StepFailed, commit: C) -> SinkError:
        return loop.error_class(step)(f"{step.message}. {advise(commit.transaction)}")


class CommitWorker(CommitThread[Committable]):
    """The commits of one sink subtask, one transaction after the other."""

    def __init__(
        self,
        name: str,
        queue: CommitQueue,
        committer: Committer,
        *,
        committed: Callable[[CheckpointId, float], None],
        failed: Callable[[BaseException], None],
        metrics: SinkMetricGroup | None = None,
        trace: Trace = NO_TRACE,
    ) -> None:
        super().__init__(name, queue, committed=committed, failed=failed)
        self._trace = trace
        self.metrics = metrics or SinkMetricGroup(name, "", 0)
        self._queue = queue
        self._committer = committer
        self._is_patient = True
        """True if a pre-commit may wait: a commit has succeeded since the last wait timed out."""
        self._early = EarlyCommits(HELD_MAX_S)
        self._thread.start()

    def await_commits(self) -> None:
        """Wait, before a pre-commit, while several decided transactions are not committed.

        If commits take longer than a checkpoint interval, the backlog would grow with each
        checkpoint. Waiting delays the next checkpoint, whose transaction then has more rows. The
        wait is at most `_PATIENCE_S` and is not repeated before a commit succeeds, so a target that
        is down does not block the stream.
        """
        with self._condition:
            if self._is_patient:
                self._is_patient = self._condition.wait_for(self._may_prepare, _PATIENCE_S)

    def record_pre_commit(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> tuple[Committable, ...]:
        """Record a pre-commit; return all committables that the ack of `checkpoint` must list."""
        _record_pre_commit(self._trace, checkpoint, committables)
        with self._condition:
            # Recorded before the ack is sent, so that a decision finds only known
            # transactions.
            self._queue.pre_committed(checkpoint, committables)
            self.metrics.pre_committed(committables)
            self._early.record_pre_commit(checkpoint, time.monotonic())
            self._condition.notify_all()
            return self._queue.pending_through(checkpoint)

    def record_abort(self, checkpoint: CheckpointId) -> None:
        """Record that `checkpoint` was aborted. A later checkpoint decides its transactions."""
        with self._condition:
            self._early.record_abort(checkpoint)
            self._condition.notify_all()

    def commit_through(self, checkpoint: CheckpointId, retain_ledger_from: CheckpointId) -> None:
        """Queue the commit of everything up to `checkpoint`.

        Late or repeated calls have no effect.
        """
        with self._condition:
            self._queue.note_decision(checkpoint)
            self._early.record_decision(checkpoint, time.monotonic())
            self.metrics.note_decided(checkpoint)
            # Keep only the newest limit, which includes older ones. Pruning waits until there is
            # nothing left to commit.
            self._prune_before = retain_ledger_from
            self._condition.notify_all()

    def _commit(self, commit: Committable) -> CommitOutcome:
        # All tries until a success count as one call.
        self.metrics.calls.begin("commit")
        call = partial(loop.ask_committer, partial(self._committer.commit, commit))
        outcome = self._trace.record_commit((commit.transaction,), call, by="slot")
        with self._condition:
            self._early.record_end()
        return outcome

    def _find_early_work(self, now_s: float) -> Callable[[], None] | WaitUntil | None:
        match self._early.next_step(self._queue.first_undecided, now_s):
            case Begin(committable):
                return partial(self._begin, committable)
            case Withdraw(committable):
                return partial(self._withdraw, committable)
            case None | WaitUntil() as wait:
                return wait

    def _begin(self, committable: Committable) -> None:
        is_begun = self._committer.begin_commit(committable)
        if is_begun:
            reach("begun")
        with self._condition:
            self._early.record_begin(committable, is_begun=is_begun)

    def _withdraw(self, committable: Committable) -> None:
        self._committer.withdraw_commit(committable)
        with self._condition:
            self._early.record_end()

    def _record_end(self, commit: Committable, step: Done | RetryAt) -> None:
        if isinstance(step, Done):
            self._is_patient = True
            self.metrics.calls.end("commit")
            self.metrics.note_committed(commit)
        else:
            self.metrics.calls.fail("commit")
            self.metrics.note_retry(loop.describe_refusal(commit, step), is_stuck=step.is_stuck)

    def _may_prepare(self) -> bool:
        return self._closing or not self._queue.is_behind

    def _prune(self, before: CheckpointId) -> None:
        self._committer.prune(before)

    def _release(self) -> None:
        self._committer.close()


def _record_pre_commit(
    trace: Trace, checkpoint: CheckpointId, committables: Sequence[Committable]
) -> None:
    transactions = (committable.transaction for committable in committables)
    trace.record("prepared", checkpoint=checkpoint, transactions=transactions)


class GlobalPreCommits:
    """The pre-commits of one subtask that the driver will commit. Any thread."""

    def __init__(self, metrics: SinkMetricGroup, trace: Trace = NO_TRACE) -> None:
        self.metrics = metrics
        self._trace = trace
        self._waiting = PreCommits()
        self._lock = threading.Lock()

    def await_commits(self) -> None:
        """Do nothing: the driver reports its commits, and no slot waits for them."""

    def record_pre_commit(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> tuple[Committable, ...]:
        """Record a pre-commit; return all committables that the ack of `checkpoint` must list."""
        _record_pre_commit(self._trace, checkpoint, committables)
        with self._lock:
            self._waiting.pre_committed(checkpoint, committables)
            self.metrics.pre_committed(committables)
            return self._waiting.pending_through(checkpoint)

    def record_abort(self, checkpoint: CheckpointId) -> None:
        """Do nothing: the driver knows which checkpoints it has aborted."""

    def record_commits(self, through: CheckpointId) -> None:
        """Record that all decided rows up to `through` are visible."""
        with self._lock:
            for committable in self._waiting.take_committed(through):
                self.metrics.note_committed(committable)


@dataclass(slots=True)
class _Progress:
    """The progress of one subtask's state and sinks.

    Shared state files are deleted once all subtasks have confirmed a later decision. So a decision
    is confirmed only after the subtask's state has seen it, even if the sinks are further ahead.
    """

    heard: CheckpointId = GENESIS
    decided: CheckpointId = GENESIS
    by_sink: dict[str, CheckpointId] = field(default_factory=dict[str, CheckpointId])
    reported: tuple[CheckpointId, CheckpointId] = (GENESIS, GENESIS)

    @property
    def record_commits(self) -> CheckpointId:
        """The checkpoint up to which all sinks have committed; without sinks, the last decision."""
        # The minimum: state files may be deleted only when no sink needs an earlier decision.
        return min(self.by_sink.values(), default=self.decided)


class SlotCommits:
    """The committers of a slot, one thread for each sink of each subtask, and their progress.

    For sinks that commit whole checkpoints, the driver commits and confirms.

    Created while the chains are built; afterwards only the thread of the slot's control uses it.
    The caller must send the returned messages to the driver.
    """

    def __init__(self, context: SlotContext) -> None:
        self._context = context
        self._workers: list[CommitWorker] = []
        self._global: list[GlobalPreCommits] = []
        self._progress: defaultdict[SubtaskRef, _Progress] = defaultdict(_Progress)

    def worker(
        self, ref: SubtaskRef, operator: Operator, work: WriteTo
    ) -> CommitWorker | GlobalPreCommits:
        """Return the running committer of one sink of subtask `ref`, or its stand-in."""
        slot, uid = self._context, operator.uid
        metrics = SinkMetricGroup(uid, work.sink_id, ref.index, work.sink.describe_target())
        if work.sink.committed_by is CommittedBy.DRIVER:
            pre_commits = GlobalPreCommits(metrics, slot.trace)
            self._global.append(pre_commits)
            return pre_commits
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
                    log_id=slot.plan.log_id,
                    staging=slot.storage.staging(work.sink_id),
                )
            ),
            committed=lambda through, ms: slot.post(messages.SinkCommitted(ref, uid, through, ms)),
            failed=slot.fail,
            metrics=metrics,
            trace=slot.trace,
        )
        self._workers.append(worker)
        return worker

    def commit_through(
        self, complete: messages.Complete, subtasks: Iterable[SubtaskRef]
    ) -> list[messages.CommittedThrough]:
        """Queue the decided commits; return the progress to report to the driver.

        `subtasks` are all subtasks of the slot.
        """
        for worker in self._workers:
            retain_from = complete.retain_ledger_from[worker.metrics.sink_id]
            worker.commit_through(complete.checkpoint, retain_from)
        for pre_commits in self._global:
            pre_commits.metrics.note_decided(complete.checkpoint)
        progress_reports: list[messages.CommittedThrough] = []
        for ref in subtasks:
            progress = self._progress[ref]
            progress.decided = max(progress.decided, complete.checkpoint)
            progress_reports += self._report_progress(ref)
        return progress_reports

    def record_progress(
        self, by: messages.CompletionHeard | messages.SinkCommitted
    ) -> list[messages.CommittedThrough]:
        """Record that a subtask has seen a decision, or that one of its sinks has committed."""
        progress = self._progress[by.subtask]
        match by:
            case messages.CompletionHeard(_, checkpoint):
                progress.heard = max(progress.heard, checkpoint)
                return self._report_progress(by.subtask)
            case messages.SinkCommitted(_, uid, through, commit_ms):
                progress.by_sink[uid] = max(progress.by_sink[uid], through)
                return self._report_progress(by.subtask, commit_ms)

    def record_global_commit(self, commit: messages.GloballyCommitted) -> None:
        """Record a commit of the driver for a sink."""
        for pre_commits in self._global:
            if pre_commits.metrics.sink_id == commit.sink_id:
                pre_commits.record_commits(commit.checkpoint)

    def metrics(self) -> tuple[messages.SinkMetrics, ...]:
        """Return the counters of each sink's transactions."""
        groups = (sink.metrics for some in (self._workers, self._global) for sink in some)
        return tuple(group.read() for group in groups)

    def close(self, left_s: Callable[[], float]) -> bool:
        """Stop all committers; return True if all ended within the remaining seconds."""
        # A list, so that every worker is closed, also after one that hangs.
        return min([worker.close(left_s()) for worker in self._workers], default=True)

    def _report_progress(
        self, ref: SubtaskRef, commit_ms: float = 0.0
    ) -> list[messages.CommittedThrough]:
        """Return the progress of `ref`, if it has changed since the last report."""
        progress = self._progress[ref]
        committed = progress.record_commits
        # The minimum: a state file may be deleted when the subtask has seen the decision and no
        # sink needs an earlier one.
        confirmed = min(progress.heard, committed)
        if (confirmed, committed) == progress.reported:
            return []
        progress.reported = (confirmed, committed)
        return [messages.CommittedThrough(ref, confirmed, round(commit_ms, 3), committed)]
