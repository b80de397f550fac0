"""Each staged record is in the topic once, whoever commits, withdraws or aborts it in which order.

The broker is a double in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from tests.support import kafka_double
from tests.support.failing_once import Calls
from tests.support.kafka_double import KafkaDouble

from onceflow.core.errors import StorageError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import CommitterContext
from onceflow.core.storage import FileStagingArea
from onceflow.core.storage.memory_storage import MemoryFiles
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka import preflight
from onceflow.sinks.kafka.committer import KafkaCommitter
from onceflow.sinks.kafka.records import KEY, TOPIC, TOPIC_TYPE, VALUE, stamp
from onceflow.sinks.kafka.transactional_lane import CommitRecords, TransactionalLane

SINK_ID = "job.ledger"
DAYS_S = 30 * 24 * 3600.0


class Target:
    """The committers of one sink id, over one broker and one staging area."""

    def __init__(self, kafka: KafkaDouble) -> None:
        self.kafka = kafka
        self.area = FileStagingArea(MemoryFiles(), "staged", SINK_ID)

    def stage(
        self,
        checkpoint: int,
        *,
        subtask: int = 0,
        attempt: int = 1,
        topics: tuple[str, ...] = ("ledger",),
    ) -> Committable:
        """Stage one record for each of `topics`, with the checkpoint as its value."""
        values = pa.array([b"%d" % checkpoint] * len(topics))
        columns = {KEY: pa.array([b"k"] * len(topics)), VALUE: values}
        if len(topics) > 1:
            columns[TOPIC] = pa.array(topics).dictionary_encode().cast(TOPIC_TYPE)
        staged = self.area.open()
        staged.write(stamp(pa.record_batch(columns), topics), part="0")
        return staged.seal(TransactionId(SINK_ID, attempt, checkpoint, subtask))

    def committer(
        self,
        attempt: int = 1,
        *,
        log_id: str = "log",
        stale_rows: str = "fail",
        deadline_s: float = 5.0,
    ) -> KafkaCommitter:
        sink = KafkaSink(
            "localhost:1", topic="ledger", deadline_s=deadline_s, stale_rows=stale_rows
        )
        committer = sink.committer(
            CommitterContext("job", "ledger", SINK_ID, AttemptId(attempt), log_id, self.area)
        )
        assert isinstance(committer, KafkaCommitter)
        return committer

    @property
    def staged(self) -> list[tuple[int, int]]:
        """The checkpoint and subtask of each transaction whose rows are staged."""
        return [(one.checkpoint, one.subtask) for one in self._list() if one.sequence < 9000]

    @property
    def recorded(self) -> list[tuple[int, int]]:
        """The checkpoint and subtask of each transaction that has a commit record."""
        return [(one.checkpoint, one.subtask) for one in self._list() if one.sequence >= 9000]

    def _list(self) -> list[TransactionId]:
        return list(self.area.transactions())


def do_not_wait(_: float) -> None:
    """Let the next try come at once."""


def do_not_connect(_: object) -> None:
    """Return no client."""


def keep_proofs_a_week(_: object) -> float:
    return 7 * 24 * 60.0


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    kafka = KafkaDouble(Calls())
    kafka.install(monkeypatch)
    monkeypatch.setattr(time, "sleep", do_not_wait)
    return Target(kafka)


def refuse_deletions(target: Target, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let storage delete nothing, until the returned function is called."""
    delete = MemoryFiles.delete

    def refuse(self: MemoryFiles, path: str) -> None:
        raise StorageError("storage deletes nothing now")

    monkeypatch.setattr(MemoryFiles, "delete", refuse)
    return lambda: monkeypatch.setattr(MemoryFiles, "delete", delete)


# --- early commits ----------------------------------------------------------------------------


def test_records_are_begun_early_in_an_open_lane_alone(target: Target) -> None:
    committer = target.committer()
    first, second = target.stage(1), target.stage(2)
    assert not committer.begin_commit(first), "no decision has taken the lane"
    assert committer.commit(first) == Committed()
    assert committer.begin_commit(second)
    assert target.kafka.values == [b"1"]
    assert committer.commit(second) == Committed()
    assert target.kafka.values == [b"1", b"2"]
    assert target.staged == []
    assert not committer.begin_commit(second), "it is committed"


def test_one_transaction_of_a_lane_is_begun_at_a_time(target: Target) -> None:
    committer = target.committer()
    committer.commit(target.stage(1))
    second, third = target.stage(2), target.stage(3)
    assert committer.begin_commit(second)
    assert not committer.begin_commit(third)
    assert committer.commit(second) == Committed()
    assert committer.commit(third) == Committed()
    assert target.kafka.values == [b"1", b"2", b"3"]


def test_what_is_begun_gives_way_to_the_transaction_that_is_decided(target: Target) -> None:
    committer = target.committer()
    committer.commit(target.stage(1))
    second, third = target.stage(2), target.stage(3)
    assert committer.begin_commit(third)
    assert committer.commit(second) == Committed()
    assert target.kafka.values == [b"1", b"2"]
    assert committer.commit(third) == Committed()
    assert target.kafka.values == [b"1", b"2", b"3"]


def test_withdrawn_records_stay_staged_and_are_committed_later(target: Target) -> None:
    committer = target.committer()
    committer.commit(target.stage(1))
    second, third = target.stage(2), target.stage(3)
    committer.withdraw_commit(second)
    assert committer.begin_commit(second)
    committer.withdraw_commit(third)
    committer.withdraw_commit(second)
    assert target.staged == [(2, 0), (3, 0)]
    assert committer.begin_commit(third), "the lane is free again"
    committer.withdraw_commit(third)
    assert committer.commit(second) == Committed()
    assert committer.commit(third) == Committed()
    assert target.kafka.values == [b"1", b"2", b"3"]


def fail_to_abort(self: object, timeout_s: float) -> None:
    raise KafkaException(KafkaError(KafkaError.NETWORK_EXCEPTION, "connection lost"))


def test_a_lane_whose_withdrawal_failed_is_taken_anew(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = target.committer()
    committer.commit(target.stage(1))
    second = target.stage(2)
    assert committer.begin_commit(second)
    with monkeypatch.context() as patch:
        patch.setattr(kafka_double.Producer, "abort_transaction", fail_to_abort)
        committer.withdraw_commit(second)
        patch.setattr(TransactionalLane, "begin", fail_to_begin)
        assert not committer.begin_commit(second), "its transaction may be open still"
    assert committer.commit(second) == Committed()
    assert target.kafka.values == [b"1", b"2"]
    assert target.kafka.begun == set()


def test_a_withdrawal_of_another_transaction_leaves_what_is_begun(target: Target) -> None:
    committer = target.committer()
    committer.commit(target.stage(1))
    second, third = target.stage(2), target.stage(3)
    assert committer.begin_commit(second)
    committer.withdraw_commit(third)
    assert not committer.begin_commit(third)
    assert committer.commit(second) == Committed()
    assert target.kafka.values == [b"1", b"2"]


def test_records_for_a_topic_whose_commit_offsets_are_not_read_are_not_begun(
    target: Target,
) -> None:
    committer = target.committer()
    committer.commit(target.stage(1))
    second = target.stage(2, topics=("older",))
    assert not committer.begin_commit(second)
    assert committer.commit(second) == Committed()
    assert committer.begin_commit(target.stage(3, topics=("older",)))


def fail_to_begin(self: TransactionalLane, *_: object) -> None:
    raise AssertionError("the lane has failed before, and is used again")


def test_records_that_are_gone_or_whose_beginning_failed_are_not_begun(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = target.committer()
    committer.commit(target.stage(1))
    gone, third = target.stage(2), target.stage(3)
    target.area.discard(gone.transaction)
    assert not committer.begin_commit(gone)
    monkeypatch.setattr(target.kafka, "calls", Calls(1))
    assert not committer.begin_commit(third)
    with monkeypatch.context() as patch:
        patch.setattr(TransactionalLane, "begin", fail_to_begin)
        assert not committer.begin_commit(third)
    assert committer.commit(third) == Committed()
    assert target.kafka.values == [b"1", b"3"]


def test_what_is_begun_is_not_committed_by_a_committer_that_was_overtaken(target: Target) -> None:
    slot = target.committer()
    slot.commit(target.stage(1))
    second = target.stage(2)
    assert slot.begin_commit(second)
    driver = target.committer(2)
    assert driver.commit(second) == Committed()
    assert slot.commit(second) == AlreadyCommitted()
    assert target.kafka.values == [b"1", b"2"]


def test_an_overtaken_committer_does_not_take_the_lane_back(target: Target) -> None:
    slot = target.committer()
    slot.commit(target.stage(1))
    driver = target.committer(2)
    driver.commit(target.stage(2))
    third = target.stage(3)
    outcome = slot.commit(third)
    assert isinstance(outcome, RetryLater)
    assert "another committer has taken over" in outcome.reason
    assert driver.commit(third) == Committed()
    assert slot.commit(third) == AlreadyCommitted()
    assert target.kafka.values == [b"1", b"2", b"3"]


@pytest.mark.parametrize("after", [False, True])
def test_one_call_of_a_commit_outlives_one_request_that_fails(
    monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    monkeypatch.setattr(time, "sleep", do_not_wait)
    fails, count = 0, 0
    while fails <= count:
        calls = Calls(fails, after=after)
        kafka = KafkaDouble(calls)
        kafka.install(monkeypatch)
        target = Target(kafka)
        committer = target.committer()
        assert committer.commit(target.stage(1)) == Committed()
        assert committer.commit(target.stage(2)) == Committed()
        committer.close()
        assert kafka.values == [b"1", b"2"]
        assert kafka.begun == set()
        count = count or calls.count
        fails += 1
    assert count > 5


# --- commit records ---------------------------------------------------------------------------


def test_a_lane_records_the_commit_of_its_former_owner_before_it_goes_on(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own commit overwrites the proof."""
    first, second = target.stage(1), target.stage(2)
    with monkeypatch.context() as patch:
        patch.setattr(CommitRecords, "settle", fail_to_settle)
        dead = target.committer()
        assert dead.commit(first) == Committed()
    assert target.recorded == []
    committer = target.committer(2)
    assert committer.commit(second) == Committed()
    assert target.recorded == [(1, 0), (2, 0)]
    assert target.staged == []
    assert target.committer(3).commit(first) == AlreadyCommitted()
    assert target.kafka.values == [b"1", b"2"]


def fail_to_settle(self: CommitRecords, transaction: TransactionId) -> None:
    raise StorageError("storage is away")


def test_a_commit_whose_record_is_due_is_recorded_before_the_next_one_of_its_lane(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, other = target.stage(1), target.stage(2), target.stage(2, subtask=1)
    committer = target.committer(deadline_s=0.05)
    with monkeypatch.context() as patch:
        patch.setattr(CommitRecords, "settle", fail_to_settle)
        assert committer.commit(first) == Committed()
        outcome = committer.commit(second)
        assert isinstance(outcome, RetryLater)
        assert not committer.begin_commit(second)
    assert target.kafka.values == [b"1"]
    assert committer.commit(other) == Committed()
    assert target.recorded == [(2, 1)], "the record of another lane is not due here"
    assert committer.commit(second) == Committed()
    assert target.recorded == [(1, 0), (2, 0), (2, 1)]
    assert target.kafka.values == [b"1", b"2", b"2"]


def test_a_lane_deletes_the_rows_that_its_former_owner_left_and_no_others(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    committables = [target.stage(1), target.stage(1, subtask=1)]
    slot = target.committer()
    repair = refuse_deletions(target, monkeypatch)
    for committable in committables:
        slot.commit(committable)
    repair()
    assert target.staged == target.recorded == [(1, 0), (1, 1)]
    assert target.committer(2).commit(target.stage(2)) == Committed()
    assert target.staged == [(1, 1)]
    assert target.committer(3).in_doubt() == ()
    assert target.staged == []


def test_a_commit_that_is_proven_in_a_former_topic_is_recorded_before_the_proof_is_overwritten(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (target.stage(checkpoint, topics=("older",)) for checkpoint in (1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(CommitRecords, "settle", fail_to_settle)
        assert target.committer().commit(first) == Committed()
    committer = target.committer(2)
    assert committer.commit(first) == AlreadyCommitted()
    assert target.recorded == [(1, 0)]
    assert committer.commit(second) == Committed()
    assert committer.commit(first) == AlreadyCommitted()
    assert target.kafka.values == [b"1", b"2"]


def test_rows_that_are_left_beside_their_commit_record_are_deleted_without_a_lane(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    committable = target.stage(1)
    repair = refuse_deletions(target, monkeypatch)
    target.committer().commit(committable)
    repair()
    epochs = target.kafka.epochs.total()
    assert target.committer(2).commit(committable) == AlreadyCommitted()
    assert target.staged == []
    assert target.kafka.epochs.total() == epochs, "the lane was taken from its owner"


def test_transactions_in_doubt_are_those_that_no_commit_offset_and_no_record_names(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = target.stage(1), target.stage(2)
    undecided = [target.stage(3), target.stage(3, subtask=1)]
    slot = target.committer()
    slot.commit(first)
    with monkeypatch.context() as patch:
        patch.setattr(CommitRecords, "settle", fail_to_settle)
        slot.commit(second)
    driver = target.committer(2)
    in_doubt = [one.transaction for one in driver.in_doubt()]
    assert in_doubt == [one.transaction for one in undecided]
    assert target.staged == [(3, 0), (3, 1)]
    assert target.recorded == [(1, 0), (2, 0)]


def test_commit_records_of_older_checkpoints_are_pruned_and_no_younger_ones(
    target: Target,
) -> None:
    committer = target.committer()
    for checkpoint in (1, 2, 3):
        committer.commit(target.stage(checkpoint))
    other = target.committer(2)
    other.prune(CheckpointId(2))
    assert target.recorded == [(2, 0), (3, 0)]
    other.commit(target.stage(4))
    other.prune(CheckpointId(4))
    assert target.recorded == [(4, 0)]


# --- aborts -----------------------------------------------------------------------------------


def test_aborted_records_are_never_produced(target: Target) -> None:
    undecided = target.stage(1)
    committer = target.committer(2)
    assert committer.abort(undecided) == Aborted()
    assert target.staged == []
    assert isinstance(target.committer(3).commit(undecided), Lost)
    assert target.kafka.values == []


def test_an_abort_fences_the_committer_that_has_begun_the_records(target: Target) -> None:
    slot = target.committer()
    slot.commit(target.stage(1))
    undecided = target.stage(2)
    assert slot.begin_commit(undecided)
    assert target.committer(2).abort(undecided) == Aborted()
    assert isinstance(slot.commit(undecided), RetryLater)
    assert target.kafka.values == [b"1"]


def test_an_abort_in_the_committer_that_has_begun_the_records_ends_them(target: Target) -> None:
    committer = target.committer()
    committer.commit(target.stage(1))
    undecided = target.stage(2)
    assert committer.begin_commit(undecided)
    assert committer.abort(undecided) == Aborted()
    assert isinstance(committer.commit(undecided), Lost)
    assert target.kafka.values == [b"1"]


def test_an_abort_of_committed_records_says_so_though_they_went_to_a_former_topic(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process died right after the commit; the sink's settings name another topic since."""
    recorded, unrecorded = target.stage(1), target.stage(2, topics=("older",))
    slot = target.committer()
    slot.commit(recorded)
    with monkeypatch.context() as patch:
        patch.setattr(CommitRecords, "settle", fail_to_settle)
        assert slot.commit(unrecorded) == Committed()
    driver = target.committer(2)
    assert driver.abort(recorded) == AlreadyCommitted()
    assert driver.abort(unrecorded) == AlreadyCommitted()
    assert driver.commit(target.stage(3)) == Committed(), "this overwrites the proof of the broker"
    assert target.committer(3).commit(unrecorded) == AlreadyCommitted()
    assert target.kafka.values == [b"1", b"2", b"3"]


def test_an_abort_that_the_broker_does_not_answer_deletes_nothing(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    undecided = target.stage(1)
    broken = KafkaDouble(AllFail())
    broken.install(monkeypatch)
    committer = target.committer(2)
    monkeypatch.setattr(time, "monotonic", make_clock())
    assert isinstance(committer.abort(undecided), RetryLater)
    assert target.staged == [(1, 0)]


class AllFail(Calls):
    """Each call fails before its work."""

    def next(self) -> tuple[bool, bool]:
        return True, False


def make_clock() -> Callable[[], float]:
    """Return a clock on which a second passes with each look."""
    begun, step = time.monotonic(), iter(range(1_000_000))
    return lambda: begun + next(step)


# --- rows that are gone or old ------------------------------------------------------------------


def test_records_that_nobody_proves_are_lost_or_counted_as_the_user_says(target: Target) -> None:
    gone, other = target.stage(1), target.stage(2)
    for committable in (gone, other):
        target.area.discard(committable.transaction)
    assert isinstance(target.committer().commit(gone), Lost)
    trusting = target.committer(stale_rows=f"discard {gone.transaction}")
    assert trusting.commit(gone) == AlreadyCommitted()
    assert isinstance(trusting.commit(other), Lost)
    assert target.committer().commit(gone) == AlreadyCommitted(), "a record remains"
    assert target.kafka.values == []


def test_records_whose_rows_an_abort_deleted_while_they_were_committed_are_committed(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    committable = target.stage(1)
    with monkeypatch.context() as patch:
        patch.setattr(CommitRecords, "settle", fail_to_settle)
        target.committer().commit(committable)
    target.area.discard(committable.transaction)
    assert target.committer(2).commit(committable) == AlreadyCommitted()


@pytest.mark.parametrize("rule", ["fail", "produce", "discard {}", "produce {}", "discard other"])
def test_old_records_are_produced_or_not_as_the_user_says(
    target: Target, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    committable = target.stage(1)
    expire(monkeypatch)
    rule = rule.format(committable.transaction)
    rule = rule.replace("other", str(replace(committable.transaction, checkpoint=7)))
    committer = target.committer(stale_rows=rule)
    outcome = committer.commit(committable)
    if rule.startswith("produce"):
        assert outcome == Committed()
        assert target.kafka.values == [b"1"]
    elif rule.endswith("/1/1/0/0"):
        assert outcome == Committed()
        assert target.kafka.values == []
        assert target.recorded == [(1, 0)]
        # The commit offset now shows that later ones are not committed.
        assert committer.commit(target.stage(2)) == Committed()
        assert target.kafka.values == [b"2"]
    else:
        assert isinstance(outcome, Unknown)
        assert outcome.until_fixed
        assert target.staged == [(1, 0)]
        assert target.kafka.values == []


def test_old_records_are_produced_if_an_older_commit_of_their_subtask_is_still_proven(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = target.committer()
    committer.commit(target.stage(1))
    second, third = target.stage(2), target.stage(3)
    expire(monkeypatch)
    assert committer.commit(second) == Committed()
    # A proof of another log proves nothing of this one.
    outcome = target.committer(log_id="another").commit(third)
    assert isinstance(outcome, Unknown)
    assert target.kafka.values == [b"1", b"2"]


def test_old_records_without_any_proof_are_not_begun_early(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = target.committer()
    committer.abort(target.stage(1))
    second = target.stage(2)
    assert committer.begin_commit(second)
    committer.withdraw_commit(second)
    expire(monkeypatch)
    assert not committer.begin_commit(second)
    assert target.kafka.begun == set()


def expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a month pass since everything was staged, at a broker that keeps proofs for a week."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + DAYS_S)
    monkeypatch.setattr(preflight, "open_brokers", do_not_connect)
    monkeypatch.setattr(preflight, "retention_minutes", keep_proofs_a_week)


# --- rows from a savepoint ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "later", "is_produced"), [(1, 2, False), (1, 1, True), (2, 2, True)]
)
def test_rows_from_a_savepoint_count_as_committed_if_their_attempt_committed_later_ones(
    target: Target, attempt: int, later: int, is_produced: bool
) -> None:
    """The job that took the savepoint wrote its commit records into its own storage."""
    former = Target(target.kafka)
    former.committer().commit(former.stage(later, attempt=attempt))
    source = FileStagingArea(MemoryFiles(), "savepoint", SINK_ID)
    staged = source.open()
    record = pa.record_batch({KEY: pa.array([b"k"]), VALUE: pa.array([b"old"])})
    staged.write(stamp(record, ("ledger",)), part="0")
    imported = staged.seal(TransactionId(SINK_ID, 1, 1, 0, sequence=1 if later == 1 else 0))
    if is_produced and later == 1:
        # It comes after what is proven.
        assert imported.transaction > TransactionId(SINK_ID, 1, 1, 0)
    target.area.import_from(source)
    outcome = target.committer(3).commit(imported)
    assert outcome == (Committed() if is_produced else AlreadyCommitted())
    assert (b"old" in target.kafka.values) == is_produced


def test_rows_that_were_staged_here_are_produced_though_later_ones_are_committed(
    target: Target,
) -> None:
    committer = target.committer()
    first, second = target.stage(1), target.stage(2)
    assert committer.commit(second) == Committed()
    assert committer.commit(first) == Committed()
    assert target.kafka.values == [b"2", b"1"]


# --- lanes --------------------------------------------------------------------------------------


def test_closed_committers_leave_no_transaction_open(target: Target) -> None:
    committer = target.committer()
    for subtask in range(6):
        committer.commit(target.stage(1, subtask=subtask))
    assert not committer.begin_commit(target.stage(2, subtask=0)), "it was used longest ago"
    assert committer.begin_commit(target.stage(2, subtask=5))
    assert committer.begin_commit(target.stage(2, subtask=2))
    committer.close()
    assert target.kafka.begun == set()


def test_records_of_several_topics_are_proven_in_each(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    committable = target.stage(1, topics=("ledger", "alerts"))
    with monkeypatch.context() as patch:
        patch.setattr(CommitRecords, "settle", fail_to_settle)
        assert target.committer().commit(committable) == Committed()
    proofs = {topic: text for (_, topic), text in target.kafka.offsets.items()}
    assert proofs == dict.fromkeys(("ledger", "alerts"), f"{committable.transaction} log")
    assert target.committer(2).commit(committable) == AlreadyCommitted()
