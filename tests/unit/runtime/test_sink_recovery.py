"""Recovery commits what the log decided, rolls back what it did not, and touches nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.counting_source import SCHEMA

from onceflow.core import spi
from onceflow.core.errors import (
    CommitFailed,
    DecisionForgotten,
    PreparedTransactionLost,
    StorageBehind,
)
from onceflow.core.plan.graph import Graph, Operator
from onceflow.core.plan.work import WriteTo
from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitInterval,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.log.target_records import TargetRecord, to_record
from onceflow.core.runtime.driver.sink_recovery import SinkRecovery
from onceflow.core.runtime.events.job_events import CommitRefused, RecoveredSink
from onceflow.core.storage import ClaimedLog, FileSystemStorage


@dataclass
class _Target:
    """The tables of a target, and what was asked of it."""

    prepared: list[TransactionId] = field(default_factory=list[TransactionId])
    proofs: set[TransactionId] = field(default_factory=set[TransactionId])
    through: int = 0
    refusals: int = 0
    """How many commits it refuses before it takes one."""
    refuses_aborts: bool = False
    asked: list[str] = field(default_factory=list[str])

    def commit(self, transaction: TransactionId) -> CommitOutcome:
        self.asked.append(f"commit {transaction}")
        if self.refusals:
            self.refusals -= 1
            return RetryLater("it is read-only")
        if transaction in self.proofs:
            return AlreadyCommitted()
        if transaction not in self.prepared:
            return Lost("nothing is prepared")
        self.prepared.remove(transaction)
        self.proofs.add(transaction)
        return Committed()

    def abort(self, transaction: TransactionId) -> AbortOutcome:
        self.asked.append(f"abort {transaction}")
        if self.refuses_aborts:
            return RetryLater("it is read-only")
        if transaction in self.proofs:
            return AlreadyCommitted()
        self.prepared.remove(transaction)
        return Aborted()


@dataclass(frozen=True)
class _Sink(spi.Sink):
    target: _Target
    by: spi.CommittedBy = spi.CommittedBy.SLOTS
    gathers: bool = False

    @property
    def gathering(self) -> CommitInterval | None:
        return CommitInterval(seconds=60.0) if self.gathers else None

    @property
    def committed_by(self) -> spi.CommittedBy:
        return self.by

    def validate(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        self.target.asked.append(f"validate {context.sink_id}")

    def open(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        self.target.asked.append(f"open {context.sink_id}")

    def writer(self, context: spi.WriterContext) -> spi.SinkWriter:
        raise NotImplementedError

    def committer(self, context: spi.CommitterContext) -> spi.Committer:
        kind = _Committer if self.by is spi.CommittedBy.SLOTS else _GlobalCommitter
        return kind(self.target)


class _Committer(spi.Committer):
    def __init__(self, target: _Target) -> None:
        self._target = target

    def commit(self, committable: Committable) -> CommitOutcome:
        return self._target.commit(committable.transaction)

    def abort(self, committable: Committable) -> AbortOutcome:
        return self._target.abort(committable.transaction)

    def in_doubt(self) -> Sequence[Committable]:
        return [Committable(transaction, 0) for transaction in self._target.prepared]

    def close(self) -> None:
        self._target.asked.append("close")


class _GlobalCommitter(_Committer, spi.GlobalCommitter):
    def commit_checkpoint(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> CommitOutcome:
        for committable in committables:
            self._target.prepared.remove(committable.transaction)
        self._target.asked.append(f"commit {len(committables)} of {checkpoint}")
        self._target.through = checkpoint
        return Committed()

    def read_committed_through(self) -> CheckpointId:
        return CheckpointId(self._target.through)


def _tx(checkpoint: int, subtask: int = 0, *, attempt: int = 1, sink: str = "a") -> TransactionId:
    return TransactionId(sink, attempt, checkpoint, subtask)


def _decide(
    checkpoint: int, *listed: TransactionId, attempt: int = 1, delivered_through: int = 0
) -> snapshots.CompletedCheckpoint:
    """Return a decision of `listed`, of 3 rows each."""
    committables = tuple(Committable(transaction, 3) for transaction in listed)
    snapshot = snapshots.SubtaskSnapshot(
        SubtaskRef("a", 0),
        (snapshots.OperatorSnapshot("a", committables=committables),),
        snapshots.SnapshotTimings(0.0, 0.0, 0.0, 0.0, 0),
    )
    return snapshots.CompletedCheckpoint(
        CheckpointId(checkpoint), AttemptId(attempt), 1, 128, (snapshot,), 1, 2,
        delivered_through=CheckpointId(delivered_through),
    )  # fmt: skip


class _Job:
    """A job with a log, whose second attempt recovers."""

    def __init__(self, directory: Path, *sink_ids: str) -> None:
        self._storage = FileSystemStorage(str(directory)).open("job")
        self.log: ClaimedLog = self._storage.log.claim("driver", sink_ids or ("a",))
        self.refusals: list[CommitRefused] = []
        self.deadline_s = 5.0

    def decide(self, *decisions: snapshots.CompletedCheckpoint) -> None:
        """Append `decisions`, then claim the log for the next attempt."""
        for decision in (_decide(0), *decisions):
            self.log.append(decision)
        self.log = self.log.claim_again()

    def begin(
        self, retired: dict[str, spi.Sink | None] | None = None, **sinks: spi.Sink
    ) -> SinkRecovery:
        operators = [
            Operator(f"uid-{sink_id}", WriteTo(sink, sink_id), (), SCHEMA)
            for sink_id, sink in sinks.items()
        ]
        return SinkRecovery(
            Graph(tuple(operators)), retired or {}, "job", self.log, self._storage,
            self.deadline_s, self.refusals.append,
        )  # fmt: skip

    def recover(self, recovery: SinkRecovery) -> tuple[RecoveredSink, ...]:
        return recovery.recover(self.log.view.completed[-1])


@pytest.fixture
def job(tmp_path: Path) -> _Job:
    return _Job(tmp_path)


def test_each_sink_has_decided_rows_committed_and_the_others_rolled_back(tmp_path: Path) -> None:
    job = _Job(tmp_path, "a", "b", "c")
    a, b = _Target([_tx(1), _tx(1, 1), _tx(2)]), _Target([_tx(2, sink="b")])
    whole = _Target([_tx(1, sink="c"), _tx(1, 1, sink="c"), _tx(2, sink="c")])
    job.decide(_decide(1, _tx(1), _tx(1, 1), _tx(1, sink="c"), _tx(1, 1, sink="c")))
    recovery = job.begin(c=_Sink(whole, spi.CommittedBy.DRIVER), a=_Sink(a), b=_Sink(b))
    assert job.recover(recovery) == (
        RecoveredSink("uid-c", "c", committed=2, rows_committed=6, aborted=1),
        RecoveredSink("uid-a", "a", committed=2, rows_committed=6, aborted=1),
        RecoveredSink("uid-b", "b", committed=0, rows_committed=0, aborted=1),
    )
    assert a.asked == [*(f"commit {one}" for one in (_tx(1), _tx(1, 1))), f"abort {_tx(2)}"]
    assert b.asked == [f"abort {_tx(2, sink='b')}"]
    assert whole.asked == ["commit 2 of 1", f"abort {_tx(2, sink='c')}"]


def test_rows_that_are_committed_already_are_not_counted_as_recovered(job: _Job) -> None:
    target = _Target([_tx(1, 1)], {_tx(1)})
    job.decide(_decide(1, _tx(1), _tx(1, 1)))
    recovery = job.begin(a=_Sink(target))
    assert job.recover(recovery) == (
        RecoveredSink("uid-a", "a", committed=1, rows_committed=3, aborted=0),
    )
    assert job.refusals == []


def test_every_refused_commit_is_published_and_its_end_once(job: _Job) -> None:
    target = _Target([_tx(1), _tx(1, 1)], refusals=2)
    job.decide(_decide(1, _tx(1), _tx(1, 1)))
    job.recover(job.begin(a=_Sink(target)))
    texts = [
        (refusal.uid, refusal.refusal.partition(", ")[0], refusal.is_stuck)
        for refusal in job.refusals
    ]
    refused = ("uid-a", f"{Committable(_tx(1), 3)}", False)
    assert texts == [refused, refused, ("uid-a", "", False)]
    assert "after 2 tries: it is read-only" in job.refusals[1].refusal


def test_decided_rows_that_are_gone_end_the_job_by_their_transaction(job: _Job) -> None:
    job.decide(_decide(1, _tx(1)))
    with pytest.raises(PreparedTransactionLost, match=r"a/1/1/0/0 .*nothing is prepared"):
        job.recover(job.begin(a=_Sink(_Target())))


def test_a_target_that_takes_no_commit_within_the_deadline_ends_the_attempt(job: _Job) -> None:
    job.decide(_decide(1, _tx(1)))
    job.deadline_s = 0.05
    target = _Target([_tx(1)], refusals=1_000)
    with pytest.raises(
        CommitFailed, match="is decided, but could not be committed: it is read-onl"
    ):
        job.recover(job.begin(a=_Sink(target)))
    assert target.prepared == [_tx(1)]


def test_undecided_rows_that_are_in_the_target_are_not_written_again(job: _Job) -> None:
    job.decide(_decide(1))
    target = _Target([_tx(2)], {_tx(2)})
    with pytest.raises(CommitFailed, match="not decided by the log in .*, and its rows are in"):
        job.recover(job.begin(a=_Sink(target)))


@dataclass(frozen=True)
class _SharedSink(_Sink):
    """A sink whose target a slot of a job in other storage still writes.

    The slot commits its transaction as soon as one question about the target is answered.
    """

    late: list[TransactionId] = field(default_factory=list[TransactionId])

    def commit_late(self) -> None:
        while self.late:
            self.target.commit(self.late.pop())

    def target_record(self, context: spi.CommitterContext) -> TargetRecord | None:
        record = to_record(context.sink_id, 1, list(self.target.proofs))
        self.commit_late()
        return record

    def committer(self, context: spi.CommitterContext) -> spi.Committer:
        return _SharedCommitter(self)


class _SharedCommitter(_Committer):
    def __init__(self, sink: _SharedSink) -> None:
        super().__init__(sink.target)
        self._sink = sink

    def in_doubt(self) -> Sequence[Committable]:
        answer = super().in_doubt()
        self._sink.commit_late()
        return answer


def test_a_commit_of_a_job_in_other_storage_during_recovery_ends_the_job(job: _Job) -> None:
    """Otherwise the rows of the commit would be sent a second time."""
    job.decide(_decide(1))
    target = _Target([_tx(2)])
    with pytest.raises(StorageBehind, match="has committed checkpoint 2 of attempt 1"):
        job.recover(job.begin(a=_SharedSink(target, late=[_tx(2)])))
    assert target.proofs == {_tx(2)}


def test_rows_of_a_forgotten_attempt_are_neither_committed_nor_rolled_back(job: _Job) -> None:
    job.decide(_decide(1))
    target = _Target([_tx(9, attempt=0)])
    recovery = job.begin(a=_Sink(target))
    for ask in (recovery.recover, recovery.sweep):
        with pytest.raises(DecisionForgotten, match=r"1 transactions are in doubt, the first a/0/"):
            ask(job.log.view.completed[-1])
    assert target.asked == []


def test_a_sweep_rolls_back_what_an_older_attempt_prepared_late_in_every_sink(
    tmp_path: Path,
) -> None:
    job = _Job(tmp_path, "a", "b")
    job.decide(_decide(1))
    whole, single = _Target(), _Target()
    recovery = job.begin(b=_Sink(whole, spi.CommittedBy.DRIVER), a=_Sink(single))
    job.recover(recovery)
    single.prepared += [_tx(2), _tx(2, attempt=2)]
    whole.prepared += [_tx(2, sink="b"), _tx(2, attempt=2, sink="b")]
    decision = _decide(2, _tx(2, attempt=2), _tx(2, attempt=2, sink="b"), attempt=2)
    job.log.append(decision)
    single.prepared.remove(_tx(2, attempt=2))
    single.proofs.add(_tx(2, attempt=2))
    assert recovery.sweep(decision) == (
        RecoveredSink("uid-b", "b", aborted=1),
        RecoveredSink("uid-a", "a", aborted=1),
    )
    assert whole.prepared == [_tx(2, attempt=2, sink="b")]
    assert single.prepared == []


def test_a_sweep_commits_again_what_a_target_has_lost_since_the_recovery(job: _Job) -> None:
    """The target was set back to an older copy, in which the transaction is prepared."""
    job.decide(_decide(1, _tx(1)), _decide(2))
    target = _Target()
    target.proofs.add(_tx(1))
    recovery = job.begin(a=_Sink(target))
    job.recover(recovery)
    target.proofs.discard(_tx(1))
    target.prepared += [_tx(1), _tx(3)]
    decision = _decide(3, attempt=2)
    job.log.append(decision)
    assert recovery.sweep(decision) == (RecoveredSink("uid-a", "a", aborted=1),)
    assert (target.prepared, target.proofs) == ([], {_tx(1)})


def test_a_retired_sink_is_recovered_and_forgotten_and_never_opened(tmp_path: Path) -> None:
    job = _Job(tmp_path, "a", "old")
    old, kept = _tx(1, sink="old"), _tx(1)
    job.decide(_decide(1, kept, old))
    target, retired = _Target([kept]), _Target([old])
    recovery = job.begin({"old": _Sink(retired), "never": _Sink(_Target())}, a=_Sink(target))
    assert recovery.target_count == 2
    recovery.open()
    assert (target.asked, retired.asked) == (["validate a", "open a"], [])
    assert [one.sink_id for one in job.recover(recovery)] == ["a", "old"]
    assert old in retired.proofs
    assert [context.sink_id for _, context in recovery.list_written_sinks()] == ["a"]
    decision = _decide(2, attempt=2)
    recovery.sweep(decision)
    job.log.append(decision)
    assert job.log.view.sinks == {"a"}


def test_a_retired_sink_is_not_forgotten_before_its_sweep_has_ended(tmp_path: Path) -> None:
    """If the sweep fails, the next attempt must ask for its transactions in doubt once more."""
    job = _Job(tmp_path, "a", "old")
    job.decide(_decide(1))
    job.deadline_s = 0.0
    retired = _Target()
    recovery = job.begin({"old": _Sink(retired)}, a=_Sink(_Target()))
    job.recover(recovery)
    late = _tx(2, sink="old")
    retired.prepared.append(late)
    retired.refuses_aborts = True
    decision = _decide(2, attempt=2)
    with pytest.raises(CommitFailed, match="could not be rolled back"):
        recovery.sweep(decision)
    job.log.append(decision)
    assert job.log.view.sinks == {"a", "old"}


def test_what_is_in_doubt_is_listed_for_the_sinks_that_are_asked_for(tmp_path: Path) -> None:
    job = _Job(tmp_path, "a", "b", "c")
    job.decide(
        _decide(1, _tx(1, sink="c")), _decide(2, _tx(2, sink="c"), delivered_through=1)
    )  # fmt: skip
    in_c = [_tx(checkpoint, sink="c") for checkpoint in (1, 2, 3)]
    recovery = job.begin(
        a=_Sink(_Target([_tx(3)])),
        b=_Sink(_Target([_tx(3, sink="b"), _tx(0, sink="b")])),
        c=_Sink(_Target(in_c, through=1), spi.CommittedBy.DRIVER),
    )
    assert recovery.list_in_doubt(("b", "c")) == {_tx(3, sink="b"), *in_c[1:]}


def test_a_target_tells_how_far_its_checkpoints_are_committed_once_it_was_opened(
    tmp_path: Path,
) -> None:
    job = _Job(tmp_path, "a")
    sink = _Sink(_Target(through=1), spi.CommittedBy.DRIVER)
    assert job.begin(a=sink).ask_targets() == ()
    job.decide(_decide(1))
    assert job.begin(a=sink).ask_targets() == (TargetRecord("a", through=CheckpointId(1)),)
    # A sink id that is new in the log was never opened.
    assert job.begin(new=sink).ask_targets() == ()


def test_a_target_that_is_ahead_of_the_log_has_nothing_written(job: _Job) -> None:
    job.decide(_decide(1))
    target = _Target([_tx(2)], through=2)
    with pytest.raises(StorageBehind, match="has committed checkpoint 2"):
        job.recover(job.begin(a=_Sink(target, spi.CommittedBy.DRIVER)))
    assert target.asked == []


def test_a_new_sink_id_whose_target_is_ahead_of_the_log_has_nothing_written(job: _Job) -> None:
    job.decide(_decide(1))
    target = _Target([_tx(1, sink="new")], through=2)
    with pytest.raises(StorageBehind, match="checkpoint 2 of sink new, but the last decision .* 1"):
        job.recover(job.begin(new=_Sink(target, spi.CommittedBy.DRIVER)))
    assert target.asked == []


@pytest.mark.parametrize(
    ("gathers", "asked"), [(False, ["commit 1 of 1", "commit 1 of 2"]), (True, ["commit 2 of 2"])]
)
def test_decisions_are_committed_as_one_version_if_the_sink_gathers_them(
    job: _Job, gathers: bool, asked: list[str]
) -> None:
    first, second = _tx(1), _tx(2)
    last = replace(_decide(2, first, second), undelivered=(CheckpointId(1),))
    job.decide(_decide(1, first), last)
    target = _Target([first, second])
    job.recover(job.begin(a=_Sink(target, spi.CommittedBy.DRIVER, gathers)))
    assert target.asked == asked


def test_the_driver_commits_for_sinks_of_whole_checkpoints_that_are_not_retired(
    tmp_path: Path,
) -> None:
    job = _Job(tmp_path, "a", "b", "old")
    job.decide(_decide(1))
    whole, old = (_Sink(_Target(), spi.CommittedBy.DRIVER) for _ in range(2))
    recovery = job.begin({"old": old}, a=_Sink(_Target()), b=whole)
    ((uid, sink_id, sink, committer),) = recovery.global_committers()
    assert (uid, sink_id, sink) == ("uid-b", "b", whole)
    assert isinstance(committer, spi.GlobalCommitter)


def test_a_target_that_has_gone_back_behind_a_delivered_checkpoint_is_refused(job: _Job) -> None:
    job.decide(_decide(1, _tx(1)), _decide(2, _tx(1), delivered_through=1))
    target = _Target([_tx(1)])
    with pytest.raises(PreparedTransactionLost, match="checkpoint 1 of sink a was committed"):
        job.recover(job.begin(a=_Sink(target, spi.CommittedBy.DRIVER)))
    assert target.asked == []


def test_every_committer_is_opened_once_and_closed(tmp_path: Path) -> None:
    job = _Job(tmp_path, "a", "b")
    job.decide(_decide(1))
    single, whole = _Target(), _Target()
    recovery = job.begin(a=_Sink(single), b=_Sink(whole, spi.CommittedBy.DRIVER))
    job.recover(recovery)
    recovery.sweep(_decide(1))
    for _ in range(2):
        recovery.close()
        assert (single.asked, whole.asked) == (["close"], ["close"])


@dataclass(frozen=True)
class _Watching(_Sink):
    """Notes what people read about recovery while the sink is asked."""

    recoveries: list[SinkRecovery] = field(default_factory=list[SinkRecovery])
    seen: list[str] = field(default_factory=list[str])

    def note(self) -> None:
        self.seen.append(self.recoveries[0].step.text)

    def target_record(self, context: spi.CommitterContext) -> TargetRecord | None:
        self.note()
        return super().target_record(context)

    def validate(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        self.note()

    def open(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        self.note()

    def committer(self, context: spi.CommitterContext) -> spi.Committer:
        return _WatchingCommitter(self)


class _WatchingCommitter(_GlobalCommitter):
    def __init__(self, sink: _Watching) -> None:
        super().__init__(sink.target)
        self._sink = sink

    def commit(self, committable: Committable) -> CommitOutcome:
        self._sink.note()
        return super().commit(committable)

    def abort(self, committable: Committable) -> AbortOutcome:
        self._sink.note()
        return super().abort(committable)

    def in_doubt(self) -> Sequence[Committable]:
        self._sink.note()
        return super().in_doubt()


@pytest.mark.parametrize("by", spi.CommittedBy)
def test_people_read_which_question_recovery_waits_for(job: _Job, by: spi.CommittedBy) -> None:
    sink = _Watching(_Target([_tx(1), _tx(2)]), by)
    job.decide(_decide(1, _tx(1)))
    recovery = job.begin(a=sink)
    assert recovery.step.text == "its turn"
    sink.recoveries.append(recovery)
    recovery.open()
    job.recover(recovery)
    recovery.sweep(_decide(1))
    recovery.list_in_doubt(["a"])
    aborted = f"the rollback of {Committable(_tx(2), 0)}"
    has_committed = "what the target of sink uid-a has committed"
    holds = "what sink uid-a holds in doubt"
    assert sink.seen == [
        "the validation of sink uid-a",
        "the opening of sink uid-a",
        holds,
        has_committed,
        *([f"the commit of {Committable(_tx(1), 3)}"] if by is spi.CommittedBy.SLOTS else []),
        aborted,
        holds,
        holds,
    ]
