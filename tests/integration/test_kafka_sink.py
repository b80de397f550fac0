"""The contract of a Kafka sink on a real broker: seen once, after its commit, whoever asks."""

from __future__ import annotations

import datetime as dt
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.kafka_feed import read_to_end, reading
from tests.integration.kafka_sink_kit import (
    KafkaJob,
    commit_offset,
    committable_of,
    delete_group,
    ids_in,
    messages,
    open_transaction_blocks,
    values_of,
)
from tests.integration.sink_kit import committables, rows

from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    CommitOutcome,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.storage import FileStagingArea
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka.transactional_lane import CommitRecords, TransactionalLane
from onceflow.sources import KafkaSource


@pytest.fixture
def topic(kafka_topic: TopicFactory) -> str:
    return kafka_topic(2)


@pytest.fixture
def job(servers: str, topic: str, tmp_path: Path) -> KafkaJob:
    # Every test has its own lanes: transactional ids are the cluster's.
    return KafkaJob(
        KafkaSink(servers, topic=topic, key="account"),
        directory=tmp_path,
        sink_id=f"j.{topic[-16:]}",
    )


def test_rows_are_seen_after_their_commit_and_never_before(
    job: KafkaJob, servers: str, topic: str
) -> None:
    """S13, S14: at each point before the commit nothing is visible, and nobody waits for it."""
    with job:
        job.check()
        writer = job.writer()
        writer.write(rows(range(10)))
        assert messages(servers, topic, isolation="read_uncommitted") == []
        (committable,) = writer.pre_commit(CheckpointId(1))
        writer.close()
        assert messages(servers, topic, isolation="read_uncommitted") == []
        assert not open_transaction_blocks(servers, topic)
        committer = job.committer()
        assert committables(committer.in_doubt()) == [f"{job.sink_id}/1/1/0/0"]
        assert committer.commit(committable) == Committed()
        assert ids_in(servers, topic) == list(range(10))
        assert committer.in_doubt() == ()
        assert job.staged() == []
        group = f"onceflow/{job.sink_id}/0"
        assert commit_offset(servers, group, topic) == (1, f"{job.sink_id}/1/1/0/0 log-1")


def test_a_commit_asked_again_by_anybody_is_already_committed(
    job: KafkaJob, servers: str, topic: str
) -> None:
    """S2, S21."""
    with job:
        committable = job.prepare(1, range(5))
        first, second = job.committer(), job.committer(attempt=2)
        assert first.commit(committable) == Committed()
        assert first.commit(committable) == AlreadyCommitted()
        assert second.commit(committable) == AlreadyCommitted()
        later = job.prepare(2, range(5, 10))
        assert second.commit(later) == Committed()
        assert first.commit(committable) == AlreadyCommitted()
        assert first.commit(later) == AlreadyCommitted()
        assert ids_in(servers, topic) == list(range(10))


def test_commits_out_of_order_lose_and_double_nothing(
    job: KafkaJob, servers: str, topic: str
) -> None:
    """S20: the commit offset of the later one says nothing about the earlier one."""
    with job:
        prepared = [job.prepare(number, range(number * 5, number * 5 + 5)) for number in (1, 2, 3)]
        committer = job.committer()
        for number in (2, 0, 2, 1, 0, 1):
            committer.commit(prepared[number])
            committer = job.committer()
        assert ids_in(servers, topic) == list(range(5, 20))
        assert job.staged() == []


def test_an_aborted_transaction_is_never_seen_and_then_lost(
    job: KafkaJob, servers: str, topic: str
) -> None:
    with job:
        committable = job.prepare(1, range(5))
        committer = job.committer()
        assert committer.abort(committable) == Aborted()
        assert committer.abort(committable) == Aborted()
        assert committer.in_doubt() == ()
        assert isinstance(committer.commit(committable), Lost)
        assert isinstance(job.committer().commit(committable), Lost)
        assert messages(servers, topic, isolation="read_uncommitted") == []


def test_what_is_aborted_is_never_seen_though_another_process_takes_the_lane_meanwhile(
    job: KafkaJob, servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot of an older attempt may still commit, right before the abort has ended."""
    look_at = TransactionalLane.look_at
    outcomes: list[CommitOutcome] = []

    def look_and_be_overtaken(lane: TransactionalLane, *topics: Any, **until: Any) -> None:
        look_at(lane, *topics, **until)
        if not outcomes:
            outcomes.append(Lost("the other process has not answered yet"))
            outcomes[:] = [job.committer().commit(committable)]

    with job:
        committable = job.prepare(1, range(5))
        monkeypatch.setattr(TransactionalLane, "look_at", look_and_be_overtaken)
        aborted = job.committer(2).abort(committable)
        assert outcomes != [Committed()] or aborted != Aborted()
        assert ids_in(servers, topic) == []


def test_abort_of_what_was_committed_says_so(job: KafkaJob, servers: str, topic: str) -> None:
    with job:
        committable = job.prepare(1, range(5))
        assert job.committer().commit(committable) == Committed()
        assert job.committer(2).abort(committable) == AlreadyCommitted()
        assert ids_in(servers, topic) == list(range(5))


def test_abort_of_what_was_committed_by_a_process_that_then_died_says_so(
    job: KafkaJob, servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left no commit record, and its rows are still staged: the commit offset alone tells."""

    def die_before_it(records: CommitRecords, transaction: TransactionId) -> None:
        pass

    with job:
        committable = job.prepare(1, range(5))
        with monkeypatch.context() as dies:
            dies.setattr(CommitRecords, "settle", die_before_it)
            assert job.committer().commit(committable) == Committed()
        assert job.staged() != []
        assert job.committer(2).abort(committable) == AlreadyCommitted()
        assert ids_in(servers, topic) == list(range(5))


def test_rows_staged_and_deleted_behind_our_back_are_lost_and_not_called_committed(
    job: KafkaJob, servers: str, topic: str
) -> None:
    with job:
        committable = job.prepare(1, range(5))
        job.area.discard(committable.transaction)
        outcome = job.committer().commit(committable)
        assert isinstance(outcome, Lost)
        assert str(committable.transaction) in outcome.reason
        assert ids_in(servers, topic) == []


def test_an_empty_checkpoint_has_nothing_to_commit(job: KafkaJob) -> None:
    """S19."""
    with job:
        writer = job.writer()
        assert writer.pre_commit(CheckpointId(1)) == ()
        writer.write(rows([]))
        assert writer.pre_commit(CheckpointId(2)) == ()
        writer.write(rows([1]))
        assert writer.pre_commit(CheckpointId(3)) != ()
        assert committables(job.committer().in_doubt()) == [f"{job.sink_id}/1/3/0/0"]


def test_two_committers_at_once_commit_each_transaction_once(
    job: KafkaJob, servers: str, topic: str
) -> None:
    with job:
        prepared = [
            job.prepare(number, range(number * 100, number * 100 + 50)) for number in range(1, 9)
        ]
        committers = [job.committer(attempt) for attempt in (1, 2)]
        failures: list[BaseException] = []

        def commit_all(which: int) -> None:
            try:
                for committable in prepared:
                    while isinstance(committers[which].commit(committable), RetryLater):
                        pass
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=commit_all, args=(which,)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert failures == []
        expected = [n for number in range(1, 9) for n in range(number * 100, number * 100 + 50)]
        assert ids_in(servers, topic) == expected
        assert not open_transaction_blocks(servers, topic)


def test_a_key_keeps_the_order_of_its_records(job: KafkaJob, servers: str, topic: str) -> None:
    with job:
        committer = job.committer()
        for checkpoint in range(1, 4):
            committer.commit(
                job.prepare(checkpoint, range(checkpoint * 100, checkpoint * 100 + 100))
            )
        seen: dict[str, list[int]] = {}
        for value in values_of(messages(servers, topic)):
            seen.setdefault(value["account"], []).append(value["id"])
        assert len(seen) == 7
        assert all(ids == sorted(ids) for ids in seen.values())


def test_recovery_at_another_parallelism_commits_what_every_subtask_staged(
    job: KafkaJob, servers: str, topic: str
) -> None:
    """S7, S33: three subtasks die decided; one driver commits all, then one, then four go on."""
    with job:
        for subtask in range(3):
            job.prepare(1, range(subtask * 10, subtask * 10 + 10), subtask=subtask)
        driver = job.committer(2)
        found = driver.in_doubt()
        assert len(found) == 3
        assert [driver.commit(one) for one in found] == [Committed()] * 3
        one = job.prepare(2, range(30, 40), attempt=2)
        assert job.committer(2).commit(one) == Committed()
        for subtask in range(4):
            first = 40 + subtask * 10
            four = job.prepare(3, range(first, first + 10), attempt=3, subtask=subtask)
            assert job.committer(3).commit(four) == Committed()
        assert ids_in(servers, topic) == list(range(80))


def test_a_job_stopped_for_so_long_that_kafka_forgot_its_commit_offset_starts_again(
    job: KafkaJob, servers: str, topic: str
) -> None:
    """The commit offset is deleted, as the broker does after offsets.retention.minutes."""
    with job:
        committable = job.prepare(1, range(5))
        committer = job.committer()
        assert committer.commit(committable) == Committed()
        committer.close()
        delete_group(servers, f"onceflow/{job.sink_id}/0")
        assert job.committer(2).commit(committable) == AlreadyCommitted()
        assert ids_in(servers, topic) == list(range(5))


def test_commit_records_are_pruned_and_younger_ones_kept(job: KafkaJob) -> None:
    with job:
        committer = job.committer()
        for checkpoint in range(1, 5):
            committer.commit(job.prepare(checkpoint, [checkpoint]))
        other = job.committer()
        other.prune(CheckpointId(3))
        assert job.commit_records() == [f"{job.sink_id}/1/{number}/0/0" for number in (3, 4)]
        other.commit(job.prepare(5, [5]))
        other.prune(CheckpointId(6))
        assert f"{job.sink_id}/1/5/0/0" not in job.commit_records()


def test_a_new_job_with_the_same_names_but_another_log_is_not_taken_for_the_old_one(
    job: KafkaJob, servers: str, topic: str, tmp_path: Path
) -> None:
    """A deleted checkpoint directory: attempts and checkpoints count from 1 again."""
    with job:
        assert job.committer().commit(job.prepare(1, [1])) == Committed()
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    with KafkaJob(job.sink, directory=fresh, sink_id=job.sink_id, log_id="log-2") as second:
        assert second.committer().commit(second.prepare(1, [2])) == Committed()
    assert ids_in(servers, topic) == [1, 2]


def test_transactions_of_other_sinks_are_left_alone(job: KafkaJob, tmp_path: Path) -> None:
    with job, KafkaJob(job.sink, directory=tmp_path, sink_id=f"{job.sink_id}x") as other:
        job.prepare(1, [1])
        assert other.committer().in_doubt() == ()
        assert len(job.committer().in_doubt()) == 1


def test_a_committable_of_nothing_is_lost(job: KafkaJob) -> None:
    with job:
        outcome = job.committer().commit(committable_of(f"{job.sink_id}/1/7/0/0"))
        assert isinstance(outcome, Lost)


def test_a_kafka_source_reads_back_what_the_sink_has_written(
    servers: str, topic: str, tmp_path: Path
) -> None:
    when = dt.datetime(2026, 1, 2, 3, 4, 5, 678_901)
    kinds: dict[str, tuple[pa.DataType, list[Any]]] = {
        "i": (pa.int64(), [-(2**63), 2**63 - 1, None]),
        "f": (pa.float64(), [1e-300, -0.1, None]),
        "s": (pa.string(), ["", 'ü\u2028\\"\n', None]),
        "b": (pa.binary(), [b"", bytes(range(256)), None]),
        "n": (pa.decimal128(38, 10), [Decimal("-1.0000000001"), Decimal("9" * 28), None]),
        "d": (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
        "t": (pa.timestamp("us"), [when, dt.datetime(1, 1, 1), None]),
        "z": (pa.timestamp("us", "UTC"), [when.replace(tzinfo=dt.timezone.utc), None, None]),
        "l": (pa.list_(pa.int32()), [[], [1, None], None]),
        "r": (pa.struct([("x", pa.int64())]), [{"x": 1}, {"x": None}, None]),
        "m": (pa.map_(pa.string(), pa.int64()), [[("k", 1)], [], None]),
        "o": (pa.bool_(), [True, False, None]),
    }
    schema = pa.schema([(name, kind) for name, (kind, _) in kinds.items()])
    batch = pa.record_batch(
        [pa.array(values, kind) for kind, values in kinds.values()], schema=schema
    )
    sink = KafkaSink(servers, topic=topic)
    with KafkaJob(sink, directory=tmp_path, sink_id=f"r.{topic[-16:]}", schema=schema) as job:
        assert job.committer().commit(job.prepare(1, batch)) == Committed()
    described = KafkaSource(servers, topic=topic, schema=schema, ending_offsets="latest")
    with reading(described) as reader:
        found = read_to_end(reader)
    expected = batch.to_pylist()
    assert sorted(map(repr, found)) == sorted(map(repr, expected))


def test_rows_of_a_savepoint_that_its_job_committed_meanwhile_are_not_produced_again(
    job: KafkaJob, servers: str, topic: str, tmp_path: Path
) -> None:
    """The topic proves the last commit alone, and the first job's records are in its storage."""
    moved = KafkaJob(job.sink, directory=tmp_path / "elsewhere", sink_id=job.sink_id)
    with job, moved:
        first, second, third = (
            job.prepare(number, range(10 * number, 10 * number + 10)) for number in (0, 1, 2)
        )
        _move_staged(job, moved, through=1)
        committer = job.committer()
        assert [committer.commit(one) for one in (first, second, third)] == [Committed()] * 3
        committer = moved.committer(attempt=2)
        assert committer.commit(first) == AlreadyCommitted()
        assert committer.commit(second) == AlreadyCommitted()
        assert committer.in_doubt() == ()
        assert ids_in(servers, topic) == list(range(30))


def test_rows_of_a_savepoint_that_nobody_committed_are_produced(
    job: KafkaJob, servers: str, topic: str, tmp_path: Path
) -> None:
    moved = KafkaJob(job.sink, directory=tmp_path / "elsewhere", sink_id=job.sink_id)
    with job, moved:
        first, second = (
            job.prepare(number, range(10 * number, 10 * number + 10)) for number in (0, 1)
        )
        assert job.committer().commit(first) == Committed()
        _move_staged(job, moved, through=1)
        committer = moved.committer(attempt=2)
        assert committer.commit(first) == AlreadyCommitted()
        assert committer.commit(second) == Committed()
        assert ids_in(servers, topic) == list(range(20))


def test_rows_of_a_savepoint_are_produced_though_a_later_attempt_has_committed_later_rows(
    job: KafkaJob, servers: str, topic: str, tmp_path: Path
) -> None:
    """Only the attempt that prepared the rows commits its transactions in order."""
    moved = KafkaJob(job.sink, directory=tmp_path / "elsewhere", sink_id=job.sink_id)
    with job, moved:
        first = job.prepare(1, range(10))
        _move_staged(job, moved, through=1)
        assert job.committer(2).commit(job.prepare(2, range(10, 20), attempt=2)) == Committed()
        assert moved.committer(attempt=3).commit(first) == Committed()
        assert ids_in(servers, topic) == list(range(20))


def _move_staged(job: KafkaJob, moved: KafkaJob, *, through: int) -> None:
    """Copy what `job` has staged through a checkpoint to `moved`, as a savepoint does."""
    kept = FileStagingArea.in_directory(str(job.directory / "savepoint"), job.sink_id)
    source, target = job.area, moved.area
    assert isinstance(source, FileStagingArea)
    assert isinstance(target, FileStagingArea)
    assert source.copy_to(kept, lambda one: one.checkpoint <= through)
    target.import_from(kept)
