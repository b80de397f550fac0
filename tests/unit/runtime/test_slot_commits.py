"""Commits beside the stream: what a subtask confirms, and when its next pre-commit waits.

A subtask confirms a checkpoint when it has heard of it and all its sinks have committed it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.support.counting_source import SCHEMA
from tests.support.directory_sink import DirectorySink
from tests.support.scripted_sink import ScriptedSink, Wait, released_in
from tests.unit.runtime.slot_parts import slot_context

from onceflow.core.commit.queue import HELD_MAX_S, CommitQueue, CommitRetryPolicy
from onceflow.core.errors import ConfigError, PreparedTransactionLost
from onceflow.core.plan.graph import Operator
from onceflow.core.plan.work import WriteTo
from onceflow.core.protocol import committables, ids, messages
from onceflow.core.runtime.dataflow.sink_operator import SinkOperator
from onceflow.core.runtime.slot import commits as slot_commits
from onceflow.core.runtime.slot.commits import CommitWorker, GlobalPreCommits, SlotCommits
from onceflow.core.runtime.slot.context import SlotMail
from onceflow.core.spi import CommittedBy, Committer, CommitterContext, SinkWriter, WriterContext

SUBTASK, SINKLESS = ids.SubtaskRef("balance", 0), ids.SubtaskRef("records", 0)
FIRST, SECOND, THIRD = ids.CheckpointId(1), ids.CheckpointId(2), ids.CheckpointId(3)
CONTEXT = WriterContext(
    job="job", uid="ledger", sink_id="out", subtask=0, parallelism=1, attempt=ids.AttemptId(1),
    first_checkpoint=FIRST,
)  # fmt: skip


def test_nothing_is_confirmed_that_the_subtask_has_not_heard_of(tmp_path: Path) -> None:
    """Shared state files are deleted on the strength of it; see `protocol.state_files`."""
    mail: queue.SimpleQueue[SlotMail] = queue.SimpleQueue()
    commits = SlotCommits(slot_context(tmp_path / "checkpoints", mail.put))
    needed = {"ledger": FIRST, "audit": FIRST}
    for uid in needed:
        sink = DirectorySink(str(tmp_path / uid))
        commits.worker(SUBTASK, Operator(uid, WriteTo(sink, uid), (), SCHEMA), WriteTo(sink, uid))

    def said(
        told: list[messages.CommittedThrough],
    ) -> list[tuple[ids.SubtaskRef, ids.CheckpointId, ids.CheckpointId]]:
        return [(one.subtask, one.checkpoint, one.committed) for one in told]

    def committed(through: ids.CheckpointId) -> list[messages.CommittedThrough]:
        """Return what is told when both sinks have committed `through`."""
        told: list[messages.CommittedThrough] = []
        behind = set(needed)
        while behind:
            report = mail.get(timeout=60)
            assert isinstance(report, messages.SinkCommitted)
            told += commits.record_progress(report)
            if report.through == through:
                behind.remove(report.uid)
        return told

    told = commits.commit_through(messages.Complete(FIRST, needed), [SUBTASK, SINKLESS])
    assert said(told) == [(SINKLESS, ids.GENESIS, FIRST)]
    assert said(committed(FIRST)) == [(SUBTASK, ids.GENESIS, FIRST)]
    told = commits.record_progress(messages.CompletionHeard(SINKLESS, FIRST))
    assert said(told) == [(SINKLESS, FIRST, FIRST)]
    told = commits.record_progress(messages.CompletionHeard(SUBTASK, FIRST))
    assert said(told) == [(SUBTASK, FIRST, FIRST)]
    assert commits.record_progress(messages.CompletionHeard(SUBTASK, SECOND)) == []
    assert commits.commit_through(messages.Complete(SECOND, needed), [SUBTASK]) == []
    assert said(committed(SECOND)) == [(SUBTASK, SECOND, SECOND)]
    assert commits.close(lambda: 5.0)
    assert mail.empty()


def test_a_subtask_confirms_no_more_than_the_slowest_of_its_sinks_has_committed(
    tmp_path: Path,
) -> None:
    mail: queue.SimpleQueue[SlotMail] = queue.SimpleQueue()
    commits = SlotCommits(slot_context(tmp_path / "checkpoints", mail.put))
    released = Wait(released_in(tmp_path / "slow"))
    fast = DirectorySink(str(tmp_path / "fast"))
    slow = ScriptedSink(str(tmp_path / "slow"), {"commit": released})
    for uid, sink in (("fast", fast), ("slow", slow)):
        context = replace(CONTEXT, sink_id=uid, schema=SCHEMA)
        sink.open(CommitterContext("job", uid, uid, ids.AttemptId(1), "log"), SCHEMA)
        work = WriteTo(sink, uid)
        worker = commits.worker(SUBTASK, Operator(uid, work, (), SCHEMA), work)
        writer = sink.writer(context)
        writer.write(pa.RecordBatch.from_pylist([], SCHEMA))
        worker.record_pre_commit(FIRST, writer.pre_commit(FIRST))
    complete = messages.Complete(FIRST, {"fast": FIRST, "slow": FIRST})
    assert commits.record_progress(messages.CompletionHeard(SUBTASK, FIRST)) == []
    assert commits.commit_through(complete, [SUBTASK]) == []
    report = mail.get(timeout=60)
    assert isinstance(report, messages.SinkCommitted)
    assert report.uid == "fast"
    assert commits.record_progress(report) == []
    slow.release()
    report = mail.get(timeout=60)
    assert isinstance(report, messages.SinkCommitted)
    assert report.uid == "slow"
    (told,) = commits.record_progress(report)
    assert (told.checkpoint, told.committed) == (FIRST, FIRST)
    assert (slow.prepared(), fast.prepared()) == ([], [])
    assert commits.close(lambda: 5.0)


class GatedCommitter(Committer):
    """Commits what the test lets through, one after the other."""

    def __init__(self) -> None:
        self.committed: list[ids.CheckpointId] = []
        self.early: queue.SimpleQueue[tuple[str, ids.CheckpointId]] = queue.SimpleQueue()
        self.passes = threading.Semaphore(0)
        self.is_down = False
        self.is_closed = False
        self.is_committing = threading.Event()
        self.pruned: queue.SimpleQueue[tuple[ids.CheckpointId, tuple[ids.CheckpointId, ...]]] = (
            queue.SimpleQueue()
        )

    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        if self.is_down:
            return committables.RetryLater("the target is down")
        self.is_committing.set()
        assert self.passes.acquire(timeout=60)
        self.committed.append(committable.checkpoint)
        return committables.Committed()

    def await_commits(self, checkpoints: Sequence[ids.CheckpointId]) -> None:
        """Return once `checkpoints` are committed, in their order."""
        deadline = time.monotonic() + 60
        while self.committed != checkpoints:
            assert time.monotonic() < deadline, self.committed
            time.sleep(0.005)

    def begin_commit(self, committable: committables.Committable) -> bool:
        self.early.put(("begin", committable.checkpoint))
        return True

    def withdraw_commit(self, committable: committables.Committable) -> None:
        self.early.put(("withdraw", committable.checkpoint))

    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        raise NotImplementedError

    def in_doubt(self) -> Sequence[committables.Committable]:
        return ()

    def prune(self, before: ids.CheckpointId) -> None:
        self.pruned.put((before, tuple(self.committed)))

    def close(self) -> None:
        self.is_closed = True


def prepare(worker: CommitWorker, checkpoint: ids.CheckpointId) -> None:
    """Record a transaction of `checkpoint`."""
    transaction = ids.TransactionId("out", ids.AttemptId(1), checkpoint, 0)
    worker.record_pre_commit(checkpoint, [committables.Committable(transaction, 1)])


@contextmanager
def open_worker_behind(committer: GatedCommitter, decided: int) -> Generator[CommitWorker]:
    """Yield a worker with a transaction to commit of each of `decided` checkpoints."""
    failures: list[BaseException] = []
    worker = CommitWorker(
        "out[0]",
        CommitQueue(CommitRetryPolicy()),
        committer,
        committed=lambda through, ms: None,
        failed=failures.append,
    )
    for number in range(1, decided + 1):
        checkpoint = ids.CheckpointId(number)
        prepare(worker, checkpoint)
        worker.commit_through(checkpoint, FIRST)
    yield worker
    committer.is_down = False
    committer.passes.release(max(decided, 1))
    assert worker.close(60)
    assert not failures


def test_a_pre_commit_waits_until_one_decided_transaction_is_left_to_commit() -> None:
    committer = GatedCommitter()
    committed_then: list[int] = []
    with open_worker_behind(committer, decided=3) as worker:

        def await_commits() -> None:
            worker.await_commits()
            committed_then.append(len(committer.committed))

        thread = threading.Thread(target=await_commits, daemon=True)
        thread.start()
        committer.passes.release(2)
        thread.join(60)
        assert committed_then == [2]


def test_commits_that_are_not_behind_hold_up_no_pre_commit() -> None:
    with open_worker_behind(GatedCommitter(), decided=1) as worker:
        began = time.monotonic()
        for _ in range(100):
            worker.await_commits()
        assert time.monotonic() - began < 30.0


def test_a_target_that_is_down_holds_up_one_pre_commit_and_no_further_one() -> None:
    committer = GatedCommitter()
    committer.is_down = True
    with open_worker_behind(committer, decided=3) as worker:
        worker.await_commits()
        began = time.monotonic()
        for _ in range(100):
            worker.await_commits()
        assert time.monotonic() - began < 30.0


def test_a_target_that_commits_again_holds_up_pre_commits_again() -> None:
    committer = GatedCommitter()
    committer.is_down = True
    committed_then: list[int] = []
    with open_worker_behind(committer, decided=4) as worker:
        worker.await_commits()
        committer.is_down = False
        committer.passes.release(1)
        # A commit is counted after the target has it, and once pre-commits may wait again.
        _await_count(worker, 1)

        def await_commits() -> None:
            worker.await_commits()
            committed_then.append(len(committer.committed))

        thread = threading.Thread(target=await_commits, daemon=True)
        thread.start()
        committer.passes.release(2)
        thread.join(60)
        assert committed_then == [3]


def test_a_committer_without_work_does_not_ask_for_it_in_a_tight_loop() -> None:
    class Counting(CommitQueue):
        asked = 0

        def next_commit(self, now_s: float) -> Any:
            self.asked += 1
            return super().next_commit(now_s)

    commits = Counting(CommitRetryPolicy())
    worker = CommitWorker(
        "out[0]", commits, GatedCommitter(), committed=lambda through, ms: None, failed=_fail
    )
    time.sleep(0.2)
    assert worker.close(60)
    assert commits.asked < 20


def test_the_time_from_a_decision_to_its_commit_is_told() -> None:
    committer = GatedCommitter()
    with open_worker_behind(committer, decided=1) as worker:
        time.sleep(0.02)
        committer.passes.release(1)
        _await_count(worker, 1)
        assert 10.0 <= worker.metrics.read().last_commit_ms < 60_000.0


def _await_count(worker: CommitWorker, committed: int) -> None:
    """Return once `worker` has counted `committed` commits."""
    deadline = time.monotonic() + 60
    while worker.metrics.read().committed < committed:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _fail(error: BaseException) -> None:
    raise AssertionError from error


def test_the_next_commit_is_begun_once_all_before_it_are_committed() -> None:
    committer = GatedCommitter()
    with open_worker_behind(committer, decided=1) as worker:
        prepare(worker, SECOND)
        assert committer.early.empty(), "the first one is not committed yet"
        committer.passes.release()
        assert committer.early.get(timeout=60) == ("begin", SECOND)
        assert committer.committed == [FIRST], "it is not decided"
        worker.commit_through(SECOND, FIRST)
        committer.passes.release()
        committer.await_commits([FIRST, SECOND])
    assert committer.early.empty()


class UnbegunCommitter(GatedCommitter):
    """Commits at the decision alone, as most sinks do."""

    def begin_commit(self, committable: committables.Committable) -> bool:
        super().begin_commit(committable)
        return False


def test_a_commit_that_cannot_be_begun_is_not_tried_in_a_tight_loop() -> None:
    committer = UnbegunCommitter()
    with open_worker_behind(committer, decided=0) as worker:
        prepare(worker, FIRST)
        assert committer.early.get(timeout=60) == ("begin", FIRST)
        with pytest.raises(queue.Empty):
            committer.early.get(timeout=0.2)
        worker.commit_through(FIRST, FIRST)
        committer.passes.release()
        committer.await_commits([FIRST])
    assert committer.early.empty()


def test_what_is_begun_is_withdrawn_at_once_when_its_checkpoint_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that it is not withdrawn for a decision that is late.
    monkeypatch.setattr(slot_commits, "HELD_MAX_S", 3600.0)
    committer, work = GatedCommitter(), WriteTo(DirectorySink(str(tmp_path)), "ledger")
    with open_worker_behind(committer, decided=1) as worker:
        committer.passes.release()
        prepare(worker, SECOND)
        assert committer.early.get(timeout=60) == ("begin", SECOND)
        # As a subtask tells each of its operators; no row is written.
        sink = SinkOperator("ledger", work, cast("SinkWriter", None), worker, CONTEXT)
        sink.on_aborted(SECOND)
        assert committer.early.get(timeout=60) == ("withdraw", SECOND)
        prepare(worker, THIRD)
        worker.commit_through(THIRD, FIRST)
        committer.passes.release(2)
        committer.await_commits([FIRST, SECOND, THIRD])
    assert committer.early.empty()


class MisnamingWriter(SinkWriter):
    """Names what it pre-commits for checkpoint 2 as it is told."""

    def __init__(self, **names: Any) -> None:
        self.transaction = replace(ids.TransactionId("out", 1, SECOND, 0), **names)

    def write(self, batch: object) -> None:
        """Write nothing."""

    def pre_commit(self, checkpoint: ids.CheckpointId) -> Sequence[committables.Committable]:
        return [committables.Committable(self.transaction, 1)]

    def close(self) -> None:
        """Release nothing."""


@pytest.mark.parametrize("names", [{"sink_id": "other"}, {"attempt": 2}, {"subtask": 1}], ids=str)
def test_committable_that_is_not_named_for_its_own_subtask_ends_the_job_and_is_never_decided(
    tmp_path: Path, names: dict[str, Any]
) -> None:
    committer, work = GatedCommitter(), WriteTo(DirectorySink(str(tmp_path)), "ledger")
    with open_worker_behind(committer, decided=1) as worker:
        writer = MisnamingWriter(**names)
        sink = SinkOperator("ledger", work, writer, worker, CONTEXT)
        with pytest.raises(ConfigError, match=f"{writer.transaction}.* must be named out/1/2/0/0"):
            sink.snapshot(SECOND)
        listed = worker.record_pre_commit(THIRD, [])
        assert [one.checkpoint for one in listed] == [FIRST], "the next ack does not list it"


def test_what_is_begun_is_withdrawn_when_its_decision_is_late() -> None:
    committer = GatedCommitter()
    with open_worker_behind(committer, decided=1) as worker:
        committer.passes.release()
        committer.await_commits([FIRST])
        began = time.monotonic()
        prepare(worker, SECOND)
        assert committer.early.get(timeout=60) == ("begin", SECOND)
        assert committer.early.get(timeout=60) == ("withdraw", SECOND)
        assert time.monotonic() - began >= HELD_MAX_S
        worker.commit_through(SECOND, FIRST)
        committer.passes.release()
        committer.await_commits([FIRST, SECOND])


def test_proofs_of_commits_are_deleted_once_nothing_decided_is_left_to_commit() -> None:
    """And only those before the checkpoint that the driver names with the decision."""
    committer = GatedCommitter()
    with open_worker_behind(committer, decided=0) as worker:
        for checkpoint in (FIRST, SECOND):
            prepare(worker, checkpoint)
        committer.passes.release(2)
        worker.commit_through(SECOND, SECOND)
        assert committer.pruned.get(timeout=60) == (SECOND, (FIRST, SECOND))
    assert committer.pruned.empty(), "once for each decision"


def test_a_lost_transaction_fails_the_attempt_by_its_name_and_nothing_later_is_committed() -> None:
    class Losing(GatedCommitter):
        def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
            self.committed.append(committable.checkpoint)
            return committables.Lost("rolled back by hand")

    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    committer, commits = Losing(), CommitQueue(CommitRetryPolicy())
    worker = CommitWorker(
        "out[0]", commits, committer, committed=lambda through, ms: None, failed=failures.put
    )
    for checkpoint in (FIRST, SECOND):
        prepare(worker, checkpoint)
    worker.commit_through(SECOND, FIRST)
    failure = failures.get(timeout=60)
    assert isinstance(failure, PreparedTransactionLost)
    assert "out/1/1/0/0" in str(failure)
    assert worker.close(60)
    assert committer.committed == [FIRST]
    assert failures.empty()


def test_a_committer_is_not_closed_under_its_commit_and_the_slot_is_told() -> None:
    committer = GatedCommitter()
    with open_worker_behind(committer, decided=1) as worker:
        assert committer.is_committing.wait(60)
        assert not worker.close(0.05), "its commit is under way"
        assert not committer.is_closed
    assert committer.is_closed


@dataclass(frozen=True)
class GatedSink(DirectorySink):
    """A sink with a committer that a test lets through."""

    gated: GatedCommitter

    def committer(self, context: CommitterContext) -> Committer:
        return self.gated


def test_a_committer_that_hangs_keeps_no_other_one_from_ending(tmp_path: Path) -> None:
    """A committer that goes on would commit beside those of the next attempt."""
    commits = SlotCommits(slot_context(tmp_path, lambda mail: None))
    hanging, idle = GatedCommitter(), GatedCommitter()
    for sink_id, committer in (("hanging", hanging), ("idle", idle)):
        work = WriteTo(GatedSink(str(tmp_path / sink_id), committer), sink_id)
        worker = commits.worker(SUBTASK, Operator(sink_id, work, (), SCHEMA), work)
        if committer is hanging:
            transaction = ids.TransactionId(sink_id, ids.AttemptId(1), FIRST, 0)
            worker.record_pre_commit(FIRST, [committables.Committable(transaction, 1)])
    commits.commit_through(messages.Complete(FIRST, {"hanging": FIRST, "idle": FIRST}), [SUBTASK])
    assert hanging.is_committing.wait(60)
    left_s = iter([0.05, 60.0])
    assert not commits.close(lambda: next(left_s))
    assert idle.is_closed
    hanging.passes.release()
    assert commits.close(lambda: 60.0)


def test_a_commit_of_the_driver_counts_for_its_own_sink_alone(tmp_path: Path) -> None:
    """An ack that leaves out what another sink has not committed would lose its rows."""

    class CommittedByDriver(DirectorySink):
        @property
        def committed_by(self) -> CommittedBy:
            return CommittedBy.DRIVER

    commits = SlotCommits(slot_context(tmp_path, lambda mail: None))
    listed: dict[str, int] = {}
    pre_commits: dict[str, GlobalPreCommits] = {}
    for sink_id in ("out", "other"):
        work = WriteTo(CommittedByDriver(str(tmp_path / sink_id)), sink_id)
        group = commits.worker(SUBTASK, Operator(sink_id, work, (), SCHEMA), work)
        assert isinstance(group, GlobalPreCommits)
        transaction = ids.TransactionId(sink_id, ids.AttemptId(1), FIRST, 0)
        group.record_pre_commit(FIRST, [committables.Committable(transaction, 1)])
        pre_commits[sink_id] = group
    commits.commit_through(messages.Complete(FIRST, {"out": FIRST, "other": FIRST}), [SUBTASK])
    time.sleep(0.02)
    commits.record_global_commit(messages.GloballyCommitted("out", FIRST))
    assert [metric.last_commit_ms >= 10.0 for metric in commits.metrics()] == [True, False]
    for sink_id, group in pre_commits.items():
        listed[sink_id] = len(group.record_pre_commit(SECOND, []))
    assert listed == {"out": 0, "other": 1}
    assert commits.close(lambda: 0.0)
