"""Commits what the sinks of a slot have pre-committed, beside the stream.

A later transaction of the same subtask may be waiting for a row lock that a commit releases, so
committing has a thread and a connection of its own. What to commit, in which order and what an
outcome means is decided by `commit.queue`; the threads only carry it out.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from onceflow.core.api.graph import Operator, WriteTo
from onceflow.core.commit.early import HELD_MAX_S, Begin, EarlyCommits, Withdraw
from onceflow.core.commit.loop import (
    StepSource,
    advise,
    ask_committer,
    describe_refusal,
    error_class,
    settle,
)
from onceflow.core.commit.queue import (
    C,
    CommitQueue,
    Done,
    OrderedCommits,
    RetryAt,
    StepEnd,
    StepFailed,
    WaitUntil,
)
from onceflow.core.commit.retries import CommitRetryPolicy
from onceflow.core.commit.whole_checkpoints import PreCommits
from onceflow.core.crash_points import reach
from onceflow.core.errors import SinkError
from onceflow.core.protocol.committables import CommitOutcome, Committable
from onceflow.core.protocol.ids import GENESIS, CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import (
    CommittedThrough,
    Complete,
    CompletionHeard,
    GloballyCommitted,
    SinkCommitted,
    SinkMetrics,
)
from onceflow.core.runtime.dataflow.sink_operator import SinkMetricGroup
from onceflow.core.runtime.slot.context import SlotContext
from onceflow.core.spi import CommittedBy, Committer, CommitterContext

_PATIENCE_S = 1.0
"""How long a pre-commit waits for commits: more than one takes, and little beside a checkpoint's
timeout."""


class CommitThread(StepSource[C, CommitOutcome]):
    """A queue of commits and the thread that empties it; `start` begins."""

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
        # Subclasses start it once they are whole: it calls their methods.
        self._thread = threading.Thread(target=self._run, name=f"commit {name}", daemon=True)

    @abstractmethod
    def _commit(self, commit: C) -> CommitOutcome: ...

    @abstractmethod
    def _record_end(self, commit: C, step: Done | RetryAt) -> None: ...

    @abstractmethod
    def _release(self) -> None: ...

    def _prune(self, before: CheckpointId) -> None:
        """Delete the proofs of commits before `before`, where there are any."""

    def _find_early_work(self, now_s: float) -> Callable[[], None] | WaitUntil | None:
        """Return what to do before the next decision, or when to ask again. Holds the lock."""
        del now_s
        return None

    def close(self, timeout_s: float) -> bool:
        """Stop after the commit under way; return whether it ended within `timeout_s`.

        If not, its thread goes on, and so a slot's process must not: what it sends may arrive when
        the next attempt has committed the same transaction and forgotten the proof.
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
            for commit, ended in settle(self, self._try_commit):
                if isinstance(ended, StepFailed):
                    raise self._error_of(ended, commit)
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
        """Record how a try of `step` ended and return what follows."""
        with self._condition:
            end = self._commits.outcome(step, outcome, time.monotonic())
            self._condition.notify_all()
            return end

    def take(self) -> C | None:
        """Wait for the next commit; begin it, prune and report while idle; None when closing."""
        while True:
            with self._condition:
                # Before the next commit is taken: what is left is decided, and the next attempt
                # commits it.
                if self._closing:
                    return None
                now_s = time.monotonic()
                step = self._commits.next_commit(now_s)
                if step is not None and not isinstance(step, WaitUntil):
                    return step
                work = self._find_early_work(now_s)
                is_reported = self._commits.committed_through == self._reported
                if not callable(work) and self._prune_before is None and is_reported:
                    # Woken by `_condition` when there is something to commit; a second bounds what
                    # a missed wake would cost, and 1 ms keeps a time that has just come from being
                    # waited for in a busy loop.
                    until_s = [one.at_s for one in (step, work) if isinstance(one, WaitUntil)]
                    wait_s = min([*until_s, now_s + 1.0]) - now_s
                    self._condition.wait(max(0.001, wait_s))
                    continue
                if not callable(work):
                    # Not both at once: a commit that is decided meanwhile waits for one of them.
                    work = self._take_pruning()
            # Without the lock: both may wait for others, and `record_pre_commit` must not.
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

    def _error_of(self, step: StepFailed, commit: C) -> SinkError:
        return error_class(step)(f"{step.message}. {advise(commit.transaction)}")


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
    ) -> None:
        super().__init__(name, queue, committed=committed, failed=failed)
        self.metrics = metrics or SinkMetricGroup(name, "", 0)
        self._queue = queue
        self._committer = committer
        self._is_patient = True
        """Whether a pre-commit waits: a commit has succeeded since the last wait in vain."""
        self._early = EarlyCommits(HELD_MAX_S)
        self._thread.start()

    def await_commits(self) -> None:
        """Wait, before a pre-commit, while several decided transactions are not committed.

        Commits that take longer than from one checkpoint to the next would fall behind further with
        each one. So the next checkpoint waits, and has more rows in one transaction. Not for longer
        than `_PATIENCE_S`, and not again before a commit succeeds: a target that is down does not
        hold up the stream.
        """
        with self._condition:
            if self._is_patient:
                self._is_patient = self._condition.wait_for(self._may_prepare, _PATIENCE_S)

    def record_pre_commit(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> tuple[Committable, ...]:
        """Record a pre-commit; return all that the ack of `checkpoint` must list."""
        with self._condition:
            # Recorded before the ack is sent, so a decision never finds a transaction that is
            # unknown here.
            self._queue.pre_committed(checkpoint, committables)
            self.metrics.pre_committed(committables)
            self._early.record_pre_commit(checkpoint, time.monotonic())
            self._condition.notify_all()
            return self._queue.pending_through(checkpoint)

    def record_abort(self, checkpoint: CheckpointId) -> None:
        """Record that `checkpoint` is given up: what it has pre-committed waits for a later one."""
        with self._condition:
            self._early.record_abort(checkpoint)
            self._condition.notify_all()

    def commit_through(self, checkpoint: CheckpointId, retain_ledger_from: CheckpointId) -> None:
        """Commit everything up to `checkpoint`, soon. Late or repeated calls change nothing."""
        with self._condition:
            self._queue.note_decision(checkpoint)
            self._early.record_decision(checkpoint, time.monotonic())
            self.metrics.note_decided(checkpoint)
            # Only the newest is kept. It includes the older ones, and pruning waits until nothing
            # is left to commit.
            self._prune_before = retain_ledger_from
            self._condition.notify_all()

    def _commit(self, commit: Committable) -> CommitOutcome:
        # Until one succeeds, all tries are one wait.
        self.metrics.calls.begin("commit")
        outcome = ask_committer(partial(self._committer.commit, commit))
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
            self.metrics.note_retry(describe_refusal(commit, step), is_stuck=step.is_stuck)

    def _may_prepare(self) -> bool:
        return self._closing or not self._queue.is_behind

    def _prune(self, before: CheckpointId) -> None:
        self._committer.prune(before)

    def _release(self) -> None:
        self._committer.close()


class GlobalPreCommits:
    """What one subtask has pre-committed for commits of the driver's. Any thread."""

    def __init__(self, metrics: SinkMetricGroup) -> None:
        self.metrics = metrics
        self._waiting = PreCommits()
        self._lock = threading.Lock()

    def await_commits(self) -> None:
        """Do nothing: the driver says when it has committed, and no slot waits for it."""

    def record_pre_commit(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> tuple[Committable, ...]:
        """Record a pre-commit; return all that the ack of `checkpoint` must list."""
        with self._lock:
            self._waiting.pre_committed(checkpoint, committables)
            self.metrics.pre_committed(committables)
            return self._waiting.pending_through(checkpoint)

    def record_abort(self, checkpoint: CheckpointId) -> None:
        """Do nothing: the driver knows what it has given up."""

    def record_commits(self, through: CheckpointId) -> None:
        """Record that everything decided up to `through` is visible."""
        with self._lock:
            for committable in self._waiting.take_committed(through):
                self.metrics.note_committed(committable)


@dataclass(slots=True)
class _Progress:
    """How far one subtask and its sinks have committed.

    Shared state files are deleted once all subtasks have confirmed a later decision. So nothing is
    confirmed before the subtask's state has heard of it, however far its committers are.
    """

    heard: CheckpointId = GENESIS
    decided: CheckpointId = GENESIS
    by_sink: dict[str, CheckpointId] = field(default_factory=dict[str, CheckpointId])
    reported: tuple[CheckpointId, CheckpointId] = (GENESIS, GENESIS)

    @property
    def record_commits(self) -> CheckpointId:
        """What all sinks have committed: everything decided, where there is none."""
        # The slowest sink counts: state files may go only when none needs a decision before.
        return min(self.by_sink.values(), default=self.decided)


class SlotCommits:
    """A committer, on a thread of its own, for each sink of each subtask, and how far they are.

    For sinks that commit whole checkpoints the driver does it, and confirms it.

    Built while the chains are; from then on used by the thread of the slot's control alone. What it
    returns is to be told to the driver.
    """

    def __init__(self, context: SlotContext) -> None:
        self._context = context
        self._workers: list[CommitWorker] = []
        self._global: list[GlobalPreCommits] = []
        self._progress: defaultdict[SubtaskRef, _Progress] = defaultdict(_Progress)

    def worker(
        self, ref: SubtaskRef, operator: Operator, work: WriteTo
    ) -> CommitWorker | GlobalPreCommits:
        """Return the running committer of one sink of subtask `ref`, or what stands for it."""
        slot, uid = self._context, operator.uid
        metrics = SinkMetricGroup(uid, work.sink_id, ref.index, work.sink.describe_target())
        if work.sink.committed_by is CommittedBy.DRIVER:
            pre_commits = GlobalPreCommits(metrics)
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
            committed=lambda through, ms: slot.post(SinkCommitted(ref, uid, through, ms)),
            failed=slot.fail,
            metrics=metrics,
        )
        self._workers.append(worker)
        return worker

    def commit_through(
        self, complete: Complete, subtasks: Iterable[SubtaskRef]
    ) -> list[CommittedThrough]:
        """Queue the commits of what is decided; return the progress to report to the driver.

        `subtasks` are all of the slot.
        """
        for worker in self._workers:
            retain_from = complete.retain_ledger_from[worker.metrics.sink_id]
            worker.commit_through(complete.checkpoint, retain_from)
        for pre_commits in self._global:
            pre_commits.metrics.note_decided(complete.checkpoint)
        progress_reports: list[CommittedThrough] = []
        for ref in subtasks:
            progress = self._progress[ref]
            progress.decided = max(progress.decided, complete.checkpoint)
            progress_reports += self._report_progress(ref)
        return progress_reports

    def record_progress(self, by: CompletionHeard | SinkCommitted) -> list[CommittedThrough]:
        """Record that a subtask has heard of a decision, or that a sink of it has committed."""
        progress = self._progress[by.subtask]
        match by:
            case CompletionHeard(_, checkpoint):
                progress.heard = max(progress.heard, checkpoint)
                return self._report_progress(by.subtask)
            case SinkCommitted(_, uid, through, commit_ms):
                progress.by_sink[uid] = max(progress.by_sink[uid], through)
                return self._report_progress(by.subtask, commit_ms)

    def record_global_commit(self, commit: GloballyCommitted) -> None:
        """Record what the driver has committed for a sink."""
        for pre_commits in self._global:
            if pre_commits.metrics.sink_id == commit.sink_id:
                pre_commits.record_commits(commit.checkpoint)

    def metrics(self) -> tuple[SinkMetrics, ...]:
        """Return what each sink's transactions have gone through."""
        groups = (one.metrics for some in (self._workers, self._global) for one in some)
        return tuple(group.read() for group in groups)

    def close(self, left_s: Callable[[], float]) -> bool:
        """End every committer; return whether all ended within the seconds that are left."""
        # A list: every worker is closed, also behind one that hangs.
        return min([worker.close(left_s()) for worker in self._workers], default=True)

    def _report_progress(self, ref: SubtaskRef, commit_ms: float = 0.0) -> list[CommittedThrough]:
        """Return how far `ref` has committed, if that has changed since the last report."""
        progress = self._progress[ref]
        committed = progress.record_commits
        # The lower of the two: a file of state may go when the subtask has heard of the decision,
        # and when no sink needs the one before.
        confirmed = min(progress.heard, committed)
        if (confirmed, committed) == progress.reported:
            return []
        progress.reported = (confirmed, committed)
        return [CommittedThrough(ref, confirmed, round(commit_ms, 3), committed)]
