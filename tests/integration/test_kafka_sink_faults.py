"""Brokers that die, networks that break and replies that never come, in the middle of a commit."""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from tests.integration.kafka_feed import delete_topic
from tests.integration.kafka_sink_kit import (
    KafkaJob,
    decided_ids_in,
    delete_group,
    messages,
    open_transaction_blocks,
)
from tests.integration.sink_kit import rows

from onceflow.core.errors import PreCommitFailed, SinkError, StateCorrupt, StorageError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import Committer
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedKafka
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka import clients

_TOPIC = "ledger"
_ROWS = 150_000


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedKafka]:
    """A broker of this module's own, whose network can be cut; every test leaves it whole."""
    with EmbeddedKafka(proxied=True) as server:
        yield server


@pytest.fixture
def job(broker: EmbeddedKafka, tmp_path: Path) -> Iterator[KafkaJob]:
    topic = broker.create_topic(f"t-{uuid.uuid4().hex[:8]}", 2)
    sink = KafkaSink(broker.bootstrap_servers, topic=topic, key="account", deadline_s=20)
    with KafkaJob(sink, directory=tmp_path, sink_id=topic[:32]) as made:
        yield made


@pytest.fixture
def topic(job: KafkaJob) -> str:
    return str(job.sink.topic)


class Rigged(Producer):
    """A producer around whose commit a test does something."""

    around_commit: Callable[[Callable[[], None]], None]

    def commit_transaction(self, timeout: Any = -1) -> None:
        # The records are there before; what is left is the commit itself.
        self.flush(10)
        type(self).around_commit(lambda: super(Rigged, self).commit_transaction(timeout))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Callable[[], None]], None]], None]:
    """Do something around the first commit, once."""

    def install(around: Callable[[Callable[[], None]], None]) -> None:
        pending = [around]

        def once(commit: Callable[[], None]) -> None:
            if pending:
                pending.pop()(commit)
            else:
                commit()

        monkeypatch.setattr(Rigged, "around_commit", staticmethod(once), raising=False)
        monkeypatch.setattr(clients, "Producer", Rigged)

    return install


def _fails(fatal: bool = True) -> KafkaException:
    return KafkaException(KafkaError(KafkaError._FAIL, "the test says so", fatal=fatal))  # pyright: ignore[reportPrivateUsage]


def settled(
    committer: Committer, committable: Committable, *, timeout_s: float = 90
) -> CommitOutcome:
    """Ask as the engine does, until the outcome is final."""
    deadline = time.monotonic() + timeout_s
    while True:
        outcome = committer.commit(committable)
        if not isinstance(outcome, RetryLater | Unknown) or time.monotonic() > deadline:
            return outcome
        time.sleep(0.05)


def test_commit_that_landed_but_was_reported_failed_is_not_applied_twice(
    job: KafkaJob, broker: EmbeddedKafka, topic: str, rig: Any
) -> None:
    def land_and_fail(commit: Callable[[], None]) -> None:
        commit()
        raise _fails()

    rig(land_and_fail)
    committer = job.committer()
    assert committer.commit(job.prepare(1, range(10))) == Committed()
    assert committer.commit(job.prepare(2, range(10, 20))) == Committed()
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(20))


def test_commit_that_never_landed_is_produced_again(
    job: KafkaJob, broker: EmbeddedKafka, topic: str, rig: Any
) -> None:
    def fail(commit: Callable[[], None]) -> None:
        raise _fails()

    rig(fail)
    committer = job.committer()
    assert committer.commit(job.prepare(1, range(10))) == Committed()
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(10))
    assert len(messages(broker.bootstrap_servers, topic, isolation="read_uncommitted")) == 20


@pytest.mark.only_proof
@pytest.mark.parametrize("lost", ["request", "reply"])
def test_network_cut_at_the_commit_loses_and_doubles_nothing(
    job: KafkaJob, broker: EmbeddedKafka, topic: str, rig: Any, lost: str
) -> None:
    network = broker.network

    def cut(commit: Callable[[], None]) -> None:
        # Held half a second each way: cut before the broker has it, or before we have the answer.
        network.delay(0.5)
        timer = threading.Timer(0.2 if lost == "request" else 0.75, network.cut)
        timer.start()
        try:
            commit()
        finally:
            timer.join()
            network.heal()

    rig(cut)
    committer = job.committer()
    assert settled(committer, job.prepare(1, range(100))) in (Committed(), AlreadyCommitted())
    assert settled(committer, job.prepare(2, range(100, 200))) == Committed()
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(200))


def test_outage_after_the_commit_was_sent_is_unknown_and_solved_when_the_network_is_back(
    job: KafkaJob, broker: EmbeddedKafka, topic: str, rig: Any, tmp_path: Path
) -> None:
    network = broker.network

    def land_and_break(commit: Callable[[], None]) -> None:
        commit()
        network.refuse()
        raise _fails()

    rig(land_and_break)
    sink = KafkaSink(broker.bootstrap_servers, topic=topic, deadline_s=5)
    with KafkaJob(sink, directory=tmp_path, sink_id=job.sink_id) as impatient:
        committer = impatient.committer()
        committable = impatient.prepare(1, range(10))
        try:
            outcome = committer.commit(committable)
        finally:
            network.heal()
        assert isinstance(outcome, Unknown), outcome
        assert str(committable.transaction) in outcome.reason
        assert settled(committer, committable) == AlreadyCommitted()
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(10))


def test_unreachable_broker_is_retry_later_and_nothing_has_changed(
    job: KafkaJob, broker: EmbeddedKafka, topic: str, tmp_path: Path
) -> None:
    sink = KafkaSink(broker.bootstrap_servers, topic=topic, deadline_s=1)
    with KafkaJob(sink, directory=tmp_path, sink_id=job.sink_id) as impatient:
        committer = impatient.committer()
        committable = impatient.prepare(1, range(10))
        broker.network.refuse()
        try:
            assert isinstance(committer.commit(committable), RetryLater)
            assert isinstance(committer.abort(committable), RetryLater)
            with pytest.raises(SinkError, match="in doubt"):
                impatient.committer().in_doubt()
        finally:
            broker.network.heal()
        deadline = time.monotonic() + 90
        while isinstance(aborted := committer.abort(committable), RetryLater):
            # A second may be too short for it, also with a broker that is there.
            assert time.monotonic() < deadline, aborted
        assert aborted == Aborted()
    assert messages(broker.bootstrap_servers, topic, isolation="read_uncommitted") == []


def test_commit_offset_behind_a_transaction_that_never_ends_is_waited_for_and_named(
    job: KafkaJob, broker: EmbeddedKafka, topic: str, tmp_path: Path
) -> None:
    """As a broker leaves it that forgets to end one; here another producer keeps it open."""
    lane = f"onceflow/{job.sink_id}/0"
    quiet = {"bootstrap.servers": broker.bootstrap_servers, "log_level": 2}
    reader: Any = Consumer({**quiet, "group.id": lane})
    group = reader.consumer_group_metadata()
    reader.close()
    other = Producer({**quiet, "transactional.id": "keeps-it-open"})
    other.init_transactions(20)
    other.begin_transaction()
    other.send_offsets_to_transaction([TopicPartition(topic, 0, 9)], group, 20)
    sink = KafkaSink(broker.bootstrap_servers, topic=topic, deadline_s=2)
    with KafkaJob(sink, directory=tmp_path, sink_id=job.sink_id) as impatient:
        committable = impatient.prepare(1, range(10))
        outcome = impatient.committer().commit(committable)
        assert isinstance(outcome, RetryLater)
        assert f"over the offsets of group {lane} stays open" in outcome.reason
        assert "KAFKA-20734" in outcome.reason
        assert messages(broker.bootstrap_servers, topic, isolation="read_uncommitted") == []
        other.abort_transaction(20)
        assert settled(impatient.committer(), committable) == Committed()
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(10))


def _set_message_bytes_max(servers: str, topic: str, size_bytes: int) -> None:
    entry = ConfigEntry("max.message.bytes", str(size_bytes))
    entry.incremental_operation = AlterConfigOpType.SET
    resource = ConfigResource("TOPIC", topic, incremental_configs=[entry])
    admin: Any = AdminClient({"bootstrap.servers": servers})
    admin.incremental_alter_configs([resource])[resource].result(60)


@pytest.mark.servers
def test_records_that_a_topic_takes_no_more_wait_for_a_person_and_are_committed_then(
    job: KafkaJob, broker: EmbeddedKafka, topic: str
) -> None:
    committer, servers = job.committer(), broker.bootstrap_servers
    committable = job.prepare(1, range(10))
    # Larger than the marker of an aborted transaction, which the broker could not write either.
    _set_message_bytes_max(servers, topic, 150)
    for _ in range(2):
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert outcome.until_fixed
        assert "max.message.bytes was lowered" in outcome.reason
    _set_message_bytes_max(servers, topic, 1_000_000)
    assert settled(committer, committable) == Committed()
    assert decided_ids_in(servers, topic) == list(range(10))


@pytest.mark.servers
def test_rows_of_a_deleted_topic_wait_for_a_person_and_are_committed_when_it_is_there_again(
    job: KafkaJob, broker: EmbeddedKafka, topic: str
) -> None:
    committable = job.prepare(1, range(10))
    delete_topic(broker.bootstrap_servers, topic)
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, RetryLater)
    assert outcome.until_fixed, outcome
    assert "create it again" in outcome.reason
    broker.create_topic(topic, 2)
    assert settled(job.committer(), committable) == Committed()
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(10))


@pytest.mark.servers
def test_broker_killed_while_records_are_produced_has_each_once(
    job: KafkaJob, broker: EmbeddedKafka, topic: str
) -> None:
    committer = job.committer()
    assert committer.commit(job.prepare(1, [0])) == Committed()
    committable = job.prepare(2, range(1, _ROWS))
    outcomes: list[CommitOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(settled(committer, committable)))
    deadline = time.monotonic() + 90
    thread.start()
    while not open_transaction_blocks(broker.bootstrap_servers, topic):
        assert time.monotonic() < deadline
        assert outcomes == [], "it is done before the broker is killed"
    broker.kill()
    broker.start()
    thread.join(120)
    assert outcomes in ([Committed()], [AlreadyCommitted()])
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(_ROWS))


@pytest.mark.only_proof
def test_broker_killed_when_it_has_the_commit_has_each_record_once(
    job: KafkaJob, broker: EmbeddedKafka, topic: str, rig: Any
) -> None:
    """It dies with the transaction decided and its markers perhaps not written."""

    def kill(commit: Callable[[], None]) -> None:
        killing = threading.Timer(0.003, broker.kill)
        killing.start()
        try:
            commit()
        finally:
            killing.join()
            broker.start()

    rig(kill)
    committer = job.committer()
    assert settled(committer, job.prepare(1, range(500))) in (Committed(), AlreadyCommitted())
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(500))
    # The broker may fence the producer once more, for the epoch in which the broker died.
    assert settled(committer, job.prepare(2, range(500, 600))) in (Committed(), AlreadyCommitted())


@pytest.mark.only_proof
def test_transaction_that_the_broker_timed_out_is_produced_again(
    job: KafkaJob, broker: EmbeddedKafka, topic: str, rig: Any, tmp_path: Path
) -> None:
    """The broker aborts it behind our back: without a commit offset nothing counts as committed."""

    def dawdle(commit: Callable[[], None]) -> None:
        deadline = time.monotonic() + 40
        while open_transaction_blocks(broker.bootstrap_servers, topic):
            assert time.monotonic() < deadline, "the broker aborts no expired transaction"
            time.sleep(0.1)
        commit()

    rig(dawdle)
    sink = KafkaSink(broker.bootstrap_servers, topic=topic, transaction_timeout_s=1.5)
    with KafkaJob(sink, directory=tmp_path, sink_id=job.sink_id) as hasty:
        committable = hasty.prepare(1, rows(range(0, 70, 7)))
        assert settled(hasty.committer(), committable) == Committed()
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(0, 70, 7))


def test_staged_rows_older_than_the_broker_keeps_proofs_are_not_produced_blindly(
    job: KafkaJob,
    broker: EmbeddedKafka,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process died between commit and commit record, and for a month nobody started the job."""
    committable = job.prepare(1, range(5))
    committer = job.committer()
    monkeypatch.setattr(FileStagingArea, "discard", _die)
    assert committer.commit(committable) == Committed()
    monkeypatch.undo()
    job.area.discard(_record_of(committable))
    delete_group(broker.bootstrap_servers, f"onceflow/{job.sink_id}/0")
    _age(job, committable, days=30)
    outcome = job.committer(2).commit(committable)
    assert isinstance(outcome, Unknown)
    assert outcome.until_fixed
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(5))
    told = KafkaSink(broker.bootstrap_servers, topic=topic, stale_rows="produce")
    with KafkaJob(told, directory=tmp_path, sink_id=job.sink_id) as resigned:
        assert resigned.committer(3).commit(committable) == Committed()
    assert decided_ids_in(broker.bootstrap_servers, topic) == sorted([*range(5), *range(5)])


@pytest.mark.parametrize("died", ["before the commit", "after the commit"])
def test_stale_rows_are_there_once_when_the_error_is_followed_for_each_transaction(
    job: KafkaJob,
    broker: EmbeddedKafka,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    died: str,
) -> None:
    """Two checkpoints were decided when the process died, and for a month nobody started it."""
    first, second = job.prepare(1, range(5)), job.prepare(2, range(5, 8))
    if died == "after the commit":
        monkeypatch.setattr(FileStagingArea, "discard", _die)
        assert job.committer().commit(first) == Committed()
        monkeypatch.undo()
        job.area.discard(_record_of(first))
        delete_group(broker.bootstrap_servers, f"onceflow/{job.sink_id}/0")
    for one in (first, second):
        _age(job, one, days=30)
    outcome = job.committer(2).commit(first)
    assert isinstance(outcome, Unknown)
    produces, discards = re.findall(r"stale_rows='([^']+)'", outcome.reason)
    followed = discards if died == "after the commit" else produces
    told = KafkaSink(broker.bootstrap_servers, topic=topic, stale_rows=followed)
    with KafkaJob(told, directory=tmp_path, sink_id=job.sink_id) as resigned:
        assert resigned.committer(3).commit(first) in (Committed(), AlreadyCommitted())
    with KafkaJob(told, directory=tmp_path, sink_id=job.sink_id) as resigned:
        assert resigned.committer(4).commit(second) == Committed()
        assert resigned.committer(4).commit(first) == AlreadyCommitted()
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(8))
    assert job.staged() == []


def test_storage_that_fails_after_the_commit_doubles_nothing(
    job: KafkaJob, broker: EmbeddedKafka, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit record comes before the commit offset is overwritten, or nothing is committed."""
    job.sink = KafkaSink(broker.bootstrap_servers, topic=topic, deadline_s=2)
    first, second = job.prepare(1, range(5)), job.prepare(2, range(5, 10))
    committer = job.committer()
    monkeypatch.setattr(FileStagingArea, "discard", _die)
    assert settled(committer, first) == Committed()
    assert isinstance(committer.commit(second), RetryLater)
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(5))
    monkeypatch.undo()
    assert settled(committer, second) == Committed()
    assert settled(committer, first) == AlreadyCommitted()
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(10))
    assert job.staged() == []


def test_damaged_rows_are_named_and_may_be_aborted(job: KafkaJob, tmp_path: Path) -> None:
    committable = job.prepare(1, range(5))
    (path,) = tmp_path.rglob("*-0.arrow")
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(StateCorrupt, match="damaged"):
        job.committer().commit(committable)
    assert job.committer().abort(committable) == Aborted()
    assert job.staged() == []


def test_writer_says_that_storage_is_full_and_stages_nothing(
    job: KafkaJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = job.writer()
    writer.write(rows(range(5)))
    monkeypatch.setattr(FileStagingArea, "contains", _die)
    with pytest.raises(PreCommitFailed, match="checkpoint 1 was not pre-committed"):
        writer.pre_commit(CheckpointId(1))
    with pytest.raises(SinkError, match="has failed before"):
        writer.write(rows([1]))
    monkeypatch.undo()
    assert job.staged() == []


def test_at_least_once_says_that_the_broker_is_gone(broker: EmbeddedKafka, job: KafkaJob) -> None:
    """S43: the error of the producer's thread surfaces in write or at the barrier."""
    sink = KafkaSink(
        broker.bootstrap_servers,
        topic=str(job.sink.topic),
        delivery="at_least_once",
        transaction_timeout_s=1.5,
    )
    with KafkaJob(sink, directory=job.directory) as once:
        writer = once.writer()
        writer.write(rows(range(10)))
        assert writer.pre_commit(CheckpointId(1)) == ()
        broker.network.refuse()
        try:
            writer.write(rows(range(10)))
            with pytest.raises(PreCommitFailed, match="checkpoint 2"):
                writer.pre_commit(CheckpointId(2))
        finally:
            broker.network.heal()


def _age(job: KafkaJob, committable: Committable, *, days: int) -> None:
    """Stage the same rows anew, as if that had been `days` ago."""
    found = job.area.read(committable.transaction)
    assert found is not None
    job.area.discard(committable.transaction)
    staged = job.area.open()
    for part, batch in found:
        metadata = dict(batch.schema.metadata or {})
        metadata[b"onceflow.staged_at"] = repr(time.time() - days * 86_400).encode()
        staged.write(batch.replace_schema_metadata(metadata), part=part)
    staged.seal(committable.transaction)


def _die(self: FileStagingArea, transaction: TransactionId) -> bool:
    raise StorageError(f"no space left for {transaction}")


def _record_of(committable: Committable) -> TransactionId:
    one = committable.transaction
    return TransactionId(one.sink_id, one.attempt, one.checkpoint, one.subtask, 9000)


def test_a_loss_that_was_made_good_by_hand_lets_a_kafka_job_go_on(
    job: KafkaJob, broker: EmbeddedKafka, topic: str, tmp_path: Path
) -> None:
    """Somebody has deleted staged rows that were decided, and brings them into the topic."""
    lost, following = job.prepare(1, range(5)), job.prepare(2, range(5, 8))
    job.area.discard(lost.transaction)
    outcome = job.committer().commit(lost)
    assert isinstance(outcome, Lost)
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for number in range(5):
        producer.produce(topic, json.dumps({"id": number}).encode())
    assert producer.flush(60) == 0
    (followed,) = re.findall(r"stale_rows='([^']+)'", outcome.reason)
    told = KafkaSink(broker.bootstrap_servers, topic=topic, stale_rows=followed)
    with KafkaJob(told, directory=tmp_path, sink_id=job.sink_id) as resigned:
        assert resigned.committer(2).commit(lost) == AlreadyCommitted()
        assert resigned.committer(2).commit(following) == Committed()
    assert job.committer(3).commit(lost) == AlreadyCommitted(), "also without the setting"
    assert decided_ids_in(broker.bootstrap_servers, topic) == list(range(8))
